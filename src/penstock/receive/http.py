"""The HTTP receiver: OTLP, Prometheus remote write and JSON events, on aiohttp's server and its C parser.

One event loop on a thread of its own reads requests and writes answers; it never decompresses or decodes, and it never
waits for a queue.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Iterator
from typing import Any, Self

from aiohttp import web

from penstock.errors import PenstockError
from penstock.receive.answers import Reply, error_reply, http_reply
from penstock.receive.auth import is_authorized
from penstock.receive.bodies import Encoding
from penstock.receive.config import HttpReceiverConfig
from penstock.receive.intake import Intake, Request
from penstock.receive.loop import LoopThread
from penstock.receive.sink import Answer, Format, Refusal
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

_ENCODINGS = {encoding.value: encoding for encoding in Encoding} | {
    "": Encoding.IDENTITY,
    "x-snappy-framed": Encoding.SNAPPY,
}
_PROTOBUF = ("application/x-protobuf", "application/protobuf", "application/vnd.google.protobuf")
_TAKEN = {
    Format.OTLP: "application/x-protobuf or application/json",
    Format.REMOTE_WRITE: "application/x-protobuf (remote write 1.0)",
    Format.EVENTS: "application/json",
}
_LINGER = 1.0  # seconds to read on after an early answer, so that the client sees it and not a reset
_START = 10.0  # seconds that binding a port may take


class HttpReceiver:
    """Serves HTTP until `close`.

    Answers: a request is answered when the intake says that what it brought is safe, or that it is not taken.
    Threads: every method may be called from any thread.
    """

    def __init__(self, config: HttpReceiverConfig, intake: Intake) -> None:
        self.config = config
        self._intake = intake
        self._tokens, self._context = self.check_secrets()
        self._listening = config.tls.context() if config.tls else None
        if self._listening is not None:
            self._listening.sni_callback = self._choose_context
        self._formats = {
            config.otlp_path: Format.OTLP,
            config.remote_write_path: Format.REMOTE_WRITE,
            config.events_path: Format.EVENTS,
        }
        self._thread = LoopThread("penstock-http")
        self._server: _Server | None = None
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = 0

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen; PenstockError if the port cannot be had."""
        self._thread.start()
        try:
            self._thread.run(self._open(), _START)
        except OSError as error:
            self.close(0.0)
            reason = os.strerror(error.errno) if error.errno else error
            raise PenstockError(
                f"receivers.http cannot listen on {self.config.host}:{self.config.port}: {reason}; "
                "receivers.http.host and receivers.http.port name another place"
            ) from error
        log.info(
            "HTTP receiver listens. host=%s port=%d tls=%s", self.config.host, self.port, self._context is not None
        )
        return self

    def stop_accepting(self) -> None:
        """Take no new connections and no new requests; what is under way goes on."""
        if self._thread.is_alive:
            self._thread.run(self._stop_accepting(), _START)

    def close(self, timeout: float = 30.0) -> None:
        """Stop accepting, let what is under way be answered for up to `timeout` seconds, then cut it off."""
        if self._thread.is_alive:
            self._thread.run(self._shut(timeout), timeout + _START)
        self._thread.close()

    def check_secrets(self) -> tuple[tuple[bytes, ...], ssl.SSLContext | None]:
        """Tokens and certificates as they are now; ConfigError if they cannot be had."""
        tokens = self.config.auth.tokens() if self.config.auth else ()
        return tokens, self.config.tls.context() if self.config.tls else None

    def reload(self) -> None:
        """Read the tokens and certificates again; new connections use them."""
        self._tokens, self._context = self.check_secrets()

    def _choose_context(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in every handshake: the context that a server listens with can only be added to, not exchanged."""
        if self._context is not None:
            connection.context = self._context

    async def _open(self) -> None:
        limits = self.config.limits
        self._server = _Server(
            self._handle,
            limits.max_connections,
            keepalive_timeout=limits.idle_timeout,
            lingering_time=_LINGER,
            auto_decompress=False,
            access_log=None,
        )
        self._runner = web.ServerRunner(self._server)
        await self._runner.setup()
        self._site = web.TCPSite(
            self._runner,
            self.config.host,
            self.config.port,
            ssl_context=self._listening,
            reuse_port=self.config.reuse_port or None,
            backlog=1024,
        )
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop_accepting(self) -> None:
        if self._site is not None and self._server is not None:
            await self._site.stop()
            self._site = None
            self._server.pre_shutdown()

    async def _shut(self, grace: float) -> None:
        await self._stop_accepting()
        if self._server is not None and self._runner is not None:
            await self._server.shutdown(grace)
            await self._runner.cleanup()

    # -- a request ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = await self._reply(request)
        headers = {"Server": "penstock", **reply.headers}  # not the versions of what it is made of
        if reply.content_type:
            headers["Content-Type"] = reply.content_type
        response = web.Response(body=reply.body, status=reply.status, headers=headers)
        if reply.status in (401, 413) or not request.content.is_eof():
            response.force_close()  # nobody reads the rest of what it sends
        return response

    async def _reply(self, request: web.BaseRequest) -> Reply:
        kind = self._formats.get(request.path)
        if kind is None:
            return error_reply(None, 404, f"nothing here; there are {', '.join(self._formats)}")
        if request.method != "POST":
            return error_reply(kind, 405, f"{request.method} is not taken here, POST is", {"Allow": "POST"})
        if self._tokens and not is_authorized(request.headers.get("Authorization", ""), self._tokens):
            self._intake.refuse(Refusal.UNAUTHORIZED)
            return error_reply(kind, 401, "a bearer token that we know is needed", {"WWW-Authenticate": "Bearer"})
        content_type = request.content_type
        if "write.v2" in request.headers.get("Content-Type", ""):  # a sender that hears 415 goes on with 1.0
            content_type = "remote write 2.0"
        if kind is Format.OTLP and content_type == "application/json":
            kind = Format.OTLP_JSON
        elif content_type not in (("application/json",) if kind is Format.EVENTS else _PROTOBUF):
            self._intake.refuse(Refusal.UNSUPPORTED)
            taken = _TAKEN[kind]
            return error_reply(kind, 415, f"content type {content_type!r} is not taken here, {taken} is")
        name = request.headers.get("Content-Encoding", "").strip().lower()
        encoding = _ENCODINGS.get(name)
        if encoding is None:
            self._intake.refuse(Refusal.UNSUPPORTED)
            return error_reply(kind, 415, f"content encoding {name!r} is not taken; there are {', '.join(_ENCODINGS)}")
        return await self._body_reply(request, kind, encoding)

    async def _body_reply(self, request: web.BaseRequest, kind: Format, encoding: Encoding) -> Reply:
        limits = self.config.limits
        most = int(limits.max_body)
        if (request.content_length or 0) > most:
            self._intake.refuse(Refusal.TOO_LARGE)
            return error_reply(kind, 413, f"the body has {request.content_length} bytes, at most {most} are taken")
        try:
            async with asyncio.timeout(float(limits.read_timeout)):
                if request.headers.get("Expect", "").lower() == "100-continue":
                    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await _read(request, most)
        except TimeoutError:
            self._intake.refuse(Refusal.SLOW)
            return error_reply(kind, 408, f"the body did not come within {limits.read_timeout:g} s")
        if body is None:
            self._intake.refuse(Refusal.TOO_LARGE)
            return error_reply(kind, 413, f"the body has more than {most} bytes")
        waiting: asyncio.Future[Answer] = self._thread.loop.create_future()
        if not self._intake.submit(
            Request(kind, body, encoding, int(limits.max_decompressed), waiting, self._thread.deliver)
        ):
            if self._intake.is_closing:
                return error_reply(kind, 503, "shutting down: send it again")
            return error_reply(kind, 429, "too many requests wait for their answer: send it again")
        return http_reply(kind, await waiting)

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_receive_connections", self._server.open if self._server else 0, ("http",))


class _Server(web.Server):
    """Counts connections, and closes those beyond the limit at once."""

    def __init__(self, handler: Any, max_connections: int, **options: Any) -> None:
        super().__init__(handler, **options)
        self._max_connections = max_connections
        self.open = 0

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.open += 1
        if self.open > self._max_connections:
            transport.abort()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self.open -= 1
        super().connection_lost(handler, exc)


async def _read(request: web.BaseRequest, most: int) -> bytes | None:
    """The body; None if it is longer than that."""
    pieces = []
    size = 0
    async for piece in request.content.iter_any():
        size += len(piece)
        if size > most:
            return None
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
