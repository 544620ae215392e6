"""aiohttp's server with what it lacks: a bound on connections, and no errors in the log for what is not HTTP."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from penstock.decode.outcome import PointRefusal

log = logging.getLogger(__name__)

SERVER = "penstock"  # and not the versions of what it is made of
_CUT = 0.01  # seconds that aiohttp waits for a handler before it cancels it; with 0 it would wait for ever


class HttpServer(web.Server):
    """Counts connections, and closes those beyond the limit at once. `on_refusal` is called for them and bad requests.

    Stopping: aiohttp reads nothing more from a connection that it is to close, and yet waits for the rest of a body on
    its way there. Here a request that has begun is read to its end, and its connection closed after the answer.
    """

    def __init__(self, handler: Any, max_connections: int, on_refusal: Callable[..., None], **options: Any) -> None:
        super().__init__(handler, **options)
        self._max_connections = max_connections
        self.on_refusal = on_refusal
        self.open = 0
        self.is_stopping = False
        self._generation = 0  # of connections: those of an earlier one are closed
        self._all_gone = asyncio.Event()

    def __call__(self) -> RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.generation = self._generation
        return connection

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.open += 1
        is_too_many = self.open > self._max_connections
        if is_too_many:
            client = (transport.get_extra_info("peername") or ("",))[0]
            self.on_refusal(
                PointRefusal.CONNECTIONS,
                sender=client,
                detail=f"more than {self._max_connections} connections at a time",
            )
        if is_too_many or self.is_stopping or handler.generation != self._generation:
            transport.abort()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self.open -= 1
        if not self.open:
            self._all_gone.set()
        super().connection_lost(handler, exc)

    def pre_shutdown(self) -> None:
        """Closes idle connections at once, and the others after their answers."""
        self.is_stopping = True
        self.close_connections()

    def close_connections(self) -> None:
        """Closes those that are open or being made: idle ones at once, the others after their answers."""
        self._generation += 1
        for connection in self.connections:
            if isinstance(connection, _Connection) and connection.is_idle:
                connection.force_close()
            else:
                connection.close()

    async def finish(self, grace: float) -> None:
        """After `pre_shutdown`: waits for the connections to end, for up to `grace` seconds, then cuts them off."""
        try:
            async with asyncio.timeout(grace):
                while self.open:
                    self._all_gone.clear()
                    await self._all_gone.wait()
        except TimeoutError:
            await self.shutdown(_CUT)


class _Connection(RequestHandler):
    __slots__ = ("generation",)

    generation: int

    @property
    def is_idle(self) -> bool:
        """Says whether every request whose headers have come is answered."""
        return not self._messages and (self._waiter is not None or not self._request_count)

    def data_received(self, data: bytes) -> None:
        """Reads on also if the connection is to be closed: the rest of a body is on its way."""
        is_closing, self._close = self._close, False
        super().data_received(data)
        self._close = self._close or is_closing

    async def start(self) -> None:
        """Serves, unless the connection was one too many and is closed already: aiohttp would fail then."""
        if self._manager is not None:
            await super().start()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answers what is not HTTP. Only a fault of this side is an error in the log: any client can send nonsense."""
        if status >= 500:
            log.error("A request failed. client=%s", request.remote, exc_info=exc)
            message = "something went wrong here; our log says what"
        elif isinstance(self._manager, HttpServer):
            self._manager.on_refusal(PointRefusal.MALFORMED, sender=request.remote or "", detail="not HTTP")
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer was sent already")
        text = (message or "not HTTP").partition("\n")[0] + "\n"
        response = web.Response(status=status, text=text, headers={"Server": SERVER})
        response.force_close()
        return response
