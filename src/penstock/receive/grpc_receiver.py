"""The gRPC receiver: OTLP metrics, on grpcio's asyncio server. Requests stay bytes; nothing here decodes them."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import grpc
import grpc.aio

from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format, PointRefusal
from penstock.errors import PenstockError
from penstock.receive.answers import GRPC, RETRY_AFTER, grpc_error_answer, otlp_answer
from penstock.receive.bodies import Encoding
from penstock.receive.config import GrpcReceiverConfig, ServerTlsConfig, is_authorized, sender_token_name
from penstock.receive.event_loop import ReceiverLoopThread
from penstock.receive.intake import Intake
from penstock.receive.request_group import ReceivedRequest
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

_SERVICE = "opentelemetry.proto.collector.metrics.v1.MetricsService"
_KEY = "idempotency-key"  # of the metadata
_START = 10.0  # seconds that binding a port may take
_FLUSH = 1.0  # seconds for answers to be written
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcReceiver:
    """Serves `MetricsService/Export` until `close`.

    Answers: a call is answered when the intake says that what it brought is safe, or that it is not taken.
    Threads: every method may be called from any thread.
    """

    def __init__(self, config: GrpcReceiverConfig, intake: Intake) -> None:
        self.config = config
        self._intake = intake
        self._tokens, self._certificates = self.check_secrets()
        self._renewed: grpc.ServerCertificateConfiguration | None = None  # certificates that gRPC does not have yet
        self._thread = ReceiverLoopThread("penstock-grpc")
        self._server: grpc.aio.Server | None = None
        self._open_calls = 0
        self.port = 0

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listens; PenstockError if the port is not free."""
        self._thread.start()
        try:
            self._thread.run(self._open(), _START)
        except (OSError, RuntimeError) as error:
            self.close(0.0)
            raise PenstockError(
                f"receivers.grpc cannot listen on {self.config.listen}: {self._port_error(error)}; "
                "receivers.grpc.listen names another place"
            ) from error
        log.info(
            "gRPC receiver listens. host=%s port=%d tls=%s",
            self.config.address[0],
            self.port,
            self.config.tls is not None,
        )
        return self

    def _port_error(self, error: Exception) -> str:
        """Returns the system's reason, which gRPC does not pass on."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                *self.config.address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
        except OSError as reason:
            return reason.strerror or str(reason)
        return str(error)

    def stop_accepting(self) -> None:
        """Takes no new calls; those that have begun go on."""
        if self._server is not None and self._thread.is_alive:
            # It returns when all calls have ended; new ones are refused at once.
            asyncio.run_coroutine_threadsafe(self._server.stop(None), self._thread.loop)

    def close(self, timeout: float = 30.0) -> None:
        """Stops accepting, lets calls be answered for up to `timeout` seconds, then cuts them off.

        If the intake is closed, only calls that have not come as a whole are left.
        """
        if self._intake.is_closing:
            timeout = min(timeout, _FLUSH)
        if self._server is not None and self._thread.is_alive:
            self._thread.run(self._server.stop(timeout), timeout + _START)
        self._thread.close()

    def check_secrets(self) -> tuple[tuple[bytes, ...], grpc.ServerCertificateConfiguration | None]:
        """Returns the tokens and certificates as they are now; ConfigError if they cannot be read."""
        tokens = self.config.auth.tokens() if self.config.auth else ()
        return tokens, _certificates(self.config.tls) if self.config.tls else None

    def reload(self) -> None:
        """Reads the tokens and certificates again; new connections use them."""
        self._tokens, self._renewed = self.check_secrets()

    def _next_certificates(self) -> grpc.ServerCertificateConfiguration | None:
        """Called in every handshake, on threads of gRPC; None keeps the certificates that it has."""
        renewed, self._renewed = self._renewed, None
        return renewed

    async def _open(self) -> None:
        limits = self.config.limits
        options = [
            ("grpc.max_receive_message_length", int(limits.max_body)),
            ("grpc.max_connection_idle_ms", int(float(limits.idle_timeout) * 1000)),
            ("grpc.so_reuseport", int(self.config.reuse_port)),  # on by default: two servers would share without asking
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.max_connections)
        export = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {"Export": export})])
        address = self.config.listen
        if self._certificates is None:
            self.port = self._server.add_insecure_port(address)
        else:
            wants_clients = self.config.tls is not None and self.config.tls.client_ca_file is not None
            credentials = grpc.dynamic_ssl_server_credentials(
                self._certificates, self._next_certificates, wants_clients
            )
            self.port = self._server.add_secure_port(address, credentials)
        await self._server.start()

    # -- a call ------------------------------------------------------------------------------------------------------

    async def _export(self, body: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        sender = _address(context.peer())
        if self._tokens:
            headers = [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
            if not is_authorized(headers, self._tokens):
                self._intake.refusals.add(
                    PointRefusal.UNAUTHORIZED, sender=sender, detail="no bearer token, or an unknown one"
                )
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token that we know is needed")
            sender = sender_token_name(headers[0])
        waiting: asyncio.Future[DecodeAnswer] = self._thread.loop.create_future()
        most = int(self.config.limits.max_decompressed)
        self._open_calls += 1
        try:
            deliver = self._thread.deliver
            key = next((str(value) for name, value in context.invocation_metadata() or () if name == _KEY), "")
            turns_of = sender if len(self._tokens) > 1 else context.peer()
            self._intake.submit(
                ReceivedRequest(
                    Format.OTLP, body, Encoding.IDENTITY, most, waiting, deliver, sender, turns_of=turns_of, key=key
                )
            )
            answer = await waiting
        finally:
            self._open_calls -= 1
        if answer.status is DecodeStatus.TAKEN:
            return otlp_answer(answer)
        code = GRPC[answer.status]
        retry = RETRY_AFTER if answer.status in (DecodeStatus.BUSY, DecodeStatus.BROKEN) else 0
        details = ("grpc-status-details-bin", grpc_error_answer(code, answer.message, retry_after=retry))
        await context.abort(_CODES[code], answer.message, trailing_metadata=(details,))
        raise AssertionError("abort raises")

    def dead_threads(self) -> list[str]:
        """Returns the threads that have ended though they should not."""
        return self._thread.dead_threads()

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`. gRPC tells of open calls, not of connections."""
        yield Sample("penstock_receive_connections", self._open_calls, ("grpc",))


def _address(peer: str) -> str:
    """The address in what gRPC calls a peer: `ipv4:10.0.0.1:4711`, `ipv6:%5B::1%5D:4711`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _certificates(tls: ServerTlsConfig) -> grpc.ServerCertificateConfiguration:
    tls.context()  # raises if they are wrong; gRPC would only fail the handshakes of its clients
    pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
    roots = Path(tls.client_ca_file).read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_certificate_configuration([pair], roots)
