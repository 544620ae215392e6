"""Prometheus and VictoriaMetrics as remote-write receivers, on one core each, from Debian's packages."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.scrapers import VictoriaMetrics
from tests.servers import Prometheus, Server

from penstock.errors import MissingRequirement

Running = AbstractContextManager[tuple[int, int, str]]
CORE = 0


def peers() -> Iterator[tuple[str, Callable[[], Running]]]:
    """Those that can be had."""
    for kind in (Prometheus, VictoriaMetrics):
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        try:
            server: Server = kind(folder)
        except MissingRequirement as error:
            print(f"| {kind.__name__}: {error} |")
            continue
        yield kind.__name__, lambda server=server: _running(server)  # type: ignore[misc]
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(server: Server) -> Iterator[tuple[int, int, str]]:
    with server:
        assert server._process is not None
        for thread in os.listdir(f"/proc/{server._process.pid}/task"):
            os.sched_setaffinity(int(thread), {CORE})
        yield server.port, server._process.pid, "/api/v1/write"
