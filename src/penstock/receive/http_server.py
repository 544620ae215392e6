"""aiohttp's server with what it lacks: a bound on connections, and calm about clients that send what is not HTTP."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)

SERVER = "penstock"  # and not the versions of what it is made of


class HttpServer(web.Server):
    """Counts connections, and closes those beyond the limit at once. `on_malformed` hears of requests that are none."""

    def __init__(self, handler: Any, max_connections: int, on_malformed: Callable[[], None], **options: Any) -> None:
        super().__init__(handler, **options)
        self._max_connections = max_connections
        self.on_malformed = on_malformed
        self.open = 0

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.open += 1
        if self.open > self._max_connections:
            transport.abort()

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self.open -= 1
        super().connection_lost(handler, exc)


class _Connection(RequestHandler):
    __slots__ = ()

    async def start(self) -> None:
        """Serve, unless the connection was one too many: aiohttp would stumble over its end."""
        if self._manager is not None:
            await super().start()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Anybody can send nonsense, and often: only what is our own fault is an error in the log."""
        if status >= 500:
            log.error("A request failed. client=%s", request.remote, exc_info=exc)
            message = "something went wrong here; our log says what"
        elif isinstance(self._manager, HttpServer):
            self._manager.on_malformed()
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer was sent already")
        text = (message or "not HTTP").partition("\n")[0] + "\n"
        response = web.Response(status=status, text=text, headers={"Server": SERVER})
        response.force_close()
        return response
