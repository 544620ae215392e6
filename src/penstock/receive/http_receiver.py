"""The HTTP receiver: OTLP, Prometheus remote write and JSON events, on aiohttp's server and its C parser.

One event loop on a thread of its own reads requests and writes answers; it never decompresses or decodes, and it never
waits for a queue.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Hashable, Iterator
from typing import Any, Self

from aiohttp import web

from penstock.decode.outcome import DecodeAnswer, Format, PointRefusal
from penstock.errors import PenstockError
from penstock.receive.answers import HttpReply, error_reply, http_reply
from penstock.receive.bodies import Encoding
from penstock.receive.config import HttpReceiverConfig, is_authorized, sender_token_name
from penstock.receive.event_loop import ReceiverLoopThread
from penstock.receive.http_server import SERVER, HttpServer
from penstock.receive.intake import CLOSING, Intake
from penstock.receive.origins import AllowedRequestOrigins
from penstock.receive.request_group import ReceivedRequest
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
_JSON = (Format.OTLP_JSON, Format.EVENTS)
_LINGER = 1.0  # seconds to read on after an early answer, so that the client sees it and not a reset
_HANDSHAKE = 10.0  # seconds for TLS to begin: such connections are not counted yet
_START = 10.0  # seconds that binding a port may take
_BACKLOG = 1024  # connections that wait to be accepted


class _TooLong(Exception):
    pass


class _NoRoom(Exception):
    pass


class HttpReceiver:
    """Serves HTTP until `close`.

    Answers: a request is answered when the intake says that what it brought is safe, or that it is not taken.
    Threads: every method may be called from any thread.
    """

    def __init__(self, config: HttpReceiverConfig, intake: Intake) -> None:
        self.config = config
        self._intake = intake
        self._tokens, self._context = self.check_secrets()
        self._formats = {
            config.otlp_path: Format.OTLP,
            config.remote_write_path: Format.REMOTE_WRITE,
            config.events_path: Format.EVENTS,
        }
        self._origins = AllowedRequestOrigins(config.allowed_origins)
        self._thread = ReceiverLoopThread("penstock-http")
        self._server: HttpServer | None = None
        self._listeners: list[asyncio.Server] = []
        self.reading = 0  # bytes of bodies that are not whole yet
        self._being_read: set[asyncio.Timeout] = set()  # one for each of them
        self.port = 0

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listens; PenstockError if the port is not free."""
        self._thread.start()
        try:
            self._thread.run(self._open(), _START)
        except OSError as error:
            self.close(0.0)
            reason = os.strerror(error.errno) if error.errno else error
            raise PenstockError(
                f"receivers.http cannot listen on {self.config.listen}: {reason}; "
                "receivers.http.listen names another place"
            ) from error
        host, has_tls = self.config.address[0], self._context is not None
        log.info("HTTP receiver listens. host=%s port=%d tls=%s", host, self.port, has_tls)
        return self

    def stop_accepting(self) -> None:
        """Takes no new connections and no new requests; those that have begun go on."""
        if self._thread.is_alive:
            self._thread.run(self._stop_accepting(), _START)

    def close(self, timeout: float = 30.0) -> None:
        """Stops accepting, lets requests be answered for up to `timeout` seconds, then cuts their connections.

        If the intake is closed, bodies that are still being read are not waited for: their answer is 503.
        """
        if self._thread.is_alive:
            self._thread.run(self._shut(timeout), timeout + _START)
        self._thread.close()

    def check_secrets(self) -> tuple[tuple[bytes, ...], ssl.SSLContext | None]:
        """Returns the tokens and certificates as they are now; ConfigError if they cannot be read."""
        tokens = self.config.auth.tokens() if self.config.auth else ()
        return tokens, self.config.tls.context() if self.config.tls else None

    def reload(self) -> None:
        """Reads the tokens and certificates again; new connections use them, and no TLS session goes on.

        Where clients show certificates, connections end after the answer that they wait for: a removed authority lets
        no request in.
        """
        self._tokens, self._context = self.check_secrets()
        if self._context is not None and self._thread.is_alive:
            self._thread.run(self._listen_anew(), _START)

    async def _open(self) -> None:
        limits = self.config.limits
        self._server = HttpServer(
            self._handle,
            limits.max_connections,
            self._intake.refusals.add,
            keepalive_timeout=limits.idle_timeout,
            lingering_time=_LINGER,
            auto_decompress=False,
            access_log=None,
        )
        host, port = self.config.address
        place = {"host": host, "port": port, "reuse_port": self.config.reuse_port or None}
        self._listeners = [await self._listen(**place)]
        self.port = self._listeners[0].sockets[0].getsockname()[1]

    async def _listen(self, **place: Any) -> asyncio.Server:
        assert self._server is not None
        timeout = _HANDSHAKE if self._context else None
        return await self._thread.loop.create_server(
            self._server, ssl=self._context, ssl_handshake_timeout=timeout, backlog=_BACKLOG, **place
        )

    async def _listen_anew(self) -> None:
        """Listens on the same sockets with the new context. The keys of TLS sessions are the context's own."""
        if self._server is None or self._is_stopping:
            return
        before = self._listeners
        sockets = [listening.dup() for listener in before for listening in listener.sockets]
        self._listeners = [await self._listen(sock=listening) for listening in sockets]
        for listener in before:
            listener.close()
        if self._context is not None and self._context.verify_mode is ssl.CERT_REQUIRED:
            self._server.close_connections()

    @property
    def _is_stopping(self) -> bool:
        return self._server is not None and self._server.is_stopping

    async def _stop_accepting(self) -> None:
        if self._listeners and self._server is not None:
            for listener in self._listeners:
                listener.close()
            self._listeners = []
            self._server.pre_shutdown()

    async def _shut(self, grace: float) -> None:
        await self._stop_accepting()
        if self._intake.is_closing:
            for scope in self._being_read:
                if not scope.expired():
                    scope.reschedule(self._thread.loop.time())
        if self._server is not None:
            await self._server.finish(grace)

    # -- a request ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            reply = await self._reply(request)
        except (ConnectionError, web.RequestPayloadError) as error:  # the client may still read the answer
            self._refuse(request, PointRefusal.ABORTED, "the body broke off")
            reply = error_reply(None, 400, f"the body broke off: {error}")
        headers = {"Server": SERVER, **reply.headers}
        origin = request.headers.get("Origin")
        if not self._origins.is_refused(origin):
            headers.update(self._origins.headers(origin, is_preflight=request.method == "OPTIONS"))
        if reply.content_type:
            headers["Content-Type"] = reply.content_type
        response = web.Response(body=reply.body, status=reply.status, headers=headers)
        if reply.status in (401, 403, 413) or not request.content.is_eof() or self._is_stopping:
            response.force_close()  # the rest of what the client sends is not read
        await self._write(request, response)
        return response

    async def _write(self, request: web.BaseRequest, response: web.Response) -> None:
        """Writes the answer with a timeout, which aiohttp does not have: a client that does not read is cut off."""
        try:
            async with asyncio.timeout(float(self.config.limits.read_timeout)):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            self._refuse(request, PointRefusal.SLOW, "the answer is not read")
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the client has gone, which aiohttp finds out by itself

    async def _reply(self, request: web.BaseRequest) -> HttpReply:
        kind = self._formats.get(request.path)
        if kind is None:
            return error_reply(None, 404, f"nothing here; there are {', '.join(self._formats)}")
        content_type = request.content_type
        if kind is Format.OTLP and content_type == "application/json":
            kind = Format.OTLP_JSON
        origin = request.headers.get("Origin")
        if self._origins.is_refused(origin):
            self._refuse(request, PointRefusal.ORIGIN, f"a page of {origin!r}")
            return error_reply(
                kind, 403, f"pages of {origin!r} may not send; receivers.http.allowed_origins names some"
            )
        if origin is not None and request.method == "OPTIONS":
            return HttpReply(204, b"", "", {})
        if request.method != "POST":
            reply_as = kind if "Content-Type" in request.headers else None  # a browser gets plain text
            return error_reply(reply_as, 405, f"{request.method} is not taken here, POST is", {"Allow": "POST"})
        if self._tokens and not is_authorized(request.headers.getall("Authorization", ()), self._tokens):
            self._refuse(request, PointRefusal.UNAUTHORIZED, "no bearer token, or an unknown one")
            return error_reply(kind, 401, "a bearer token that we know is needed", {"WWW-Authenticate": "Bearer"})
        if kind is Format.REMOTE_WRITE and "Content-Type" not in request.headers:
            content_type = _PROTOBUF[0]  # some senders of 1.0 leave it out, and Prometheus takes what they send
        if "write.v2" in request.headers.get("Content-Type", ""):  # after 415 the sender goes on with 1.0
            content_type = "remote write 2.0"
        if content_type not in (("application/json",) if kind in _JSON else _PROTOBUF):
            self._refuse(request, PointRefusal.UNSUPPORTED, f"content type {content_type!r}")
            taken = _TAKEN[kind]
            return error_reply(kind, 415, f"content type {content_type!r} is not taken here, {taken} is")
        name = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
        if not name and kind is Format.REMOTE_WRITE:
            name = "snappy"  # as above
        encoding = _ENCODINGS.get(name)
        if encoding is None:
            self._refuse(request, PointRefusal.UNSUPPORTED, f"content encoding {name!r}")
            known = ", ".join(filter(None, _ENCODINGS))
            return error_reply(kind, 415, f"content encoding {name!r} is not taken; there are {known}")
        if self._intake.is_closing:
            self._refuse(request, PointRefusal.CLOSED, CLOSING.message)
            return http_reply(kind, CLOSING)
        return await self._body_reply(request, kind, encoding)

    async def _body_reply(self, request: web.BaseRequest, kind: Format, encoding: Encoding) -> HttpReply:
        limits = self.config.limits
        most = int(limits.max_body)
        if (request.content_length or 0) > most:
            detail = f"the body has {request.content_length} bytes, at most {most} are taken"
            self._refuse(request, PointRefusal.TOO_LARGE, detail)
            return error_reply(kind, 413, detail)
        try:
            async with asyncio.timeout(float(limits.read_timeout)) as scope:
                self._being_read.add(scope)
                try:
                    if request.headers.get("Expect", "").lower() == "100-continue":
                        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    body = await self._read(request, most)
                finally:
                    self._being_read.discard(scope)
        except TimeoutError:
            if self._intake.is_closing:
                self._refuse(request, PointRefusal.CLOSED, CLOSING.message)
                return http_reply(kind, CLOSING)
            self._refuse(request, PointRefusal.SLOW, "the body does not come")
            return error_reply(kind, 408, f"the body did not come within {limits.read_timeout:g} s")
        except _TooLong:
            self._refuse(request, PointRefusal.TOO_LARGE, f"the body has more than {most} bytes")
            return error_reply(kind, 413, f"the body has more than {most} bytes")
        except _NoRoom:
            self._refuse(request, PointRefusal.FULL, "bodies that are being read take more than intake.max_held")
            return error_reply(kind, 429, "too many bodies are on their way: send it again")
        waiting: asyncio.Future[DecodeAnswer] = self._thread.loop.create_future()
        largest = int(limits.max_json if kind in _JSON else limits.max_decompressed)
        sender, key = self._sender(request), request.headers.get("Idempotency-Key", "")
        # Several tokens tell several senders apart, also those with many connections.
        turns_of = sender if len(self._tokens) > 1 else _connection_of(request)
        self._intake.submit(
            ReceivedRequest(
                kind, body, encoding, largest, waiting, self._thread.deliver, sender, turns_of=turns_of, key=key
            )
        )
        return http_reply(kind, await waiting)

    def _sender(self, request: web.BaseRequest) -> str:
        """What a request's sender is called: by its token, else by its address."""
        return sender_token_name(request.headers["Authorization"]) if self._tokens else request.remote or ""

    def _refuse(self, request: web.BaseRequest, reason: PointRefusal, detail: str) -> None:
        """Counts a request that does not come as far as the intake."""
        self._intake.refusals.add(reason, sender=request.remote or "", detail=detail)

    async def _read(self, request: web.BaseRequest, most: int) -> bytes:
        """Returns the body; _TooLong beyond `most` bytes, _NoRoom if all bodies that are being read take too much."""
        pieces: list[bytes] = []
        size = 0
        room = int(self._intake.config.max_held)
        try:
            async for piece in request.content.iter_any():
                size += len(piece)
                self.reading += len(piece)
                if size > most:
                    raise _TooLong
                if self.reading > room:
                    raise _NoRoom
                pieces.append(piece)
        finally:
            self.reading -= size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def dead_threads(self) -> list[str]:
        """Returns the threads that have ended though they should not."""
        return self._thread.dead_threads()

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_receive_connections", self._server.open if self._server else 0, ("http",))


def _connection_of(request: web.BaseRequest) -> Hashable:
    """Returns the address and port that the client sends from."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    return peer if isinstance(peer, tuple) else None
