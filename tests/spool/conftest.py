"""What the tests of the queue share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.spool import open_queues
from penstock.spool.files import OsSpoolFiles
from tests.spool.damage import Open


@pytest.fixture(autouse=True)
def quick_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the waiting for the real disk: what a sync is good for is tested on the fake one, which forgets."""
    monkeypatch.setattr(OsSpoolFiles, "sync", staticmethod(lambda handle: None))
    monkeypatch.setattr(OsSpoolFiles, "sync_folder", lambda self, path: None)


@pytest.fixture(autouse=True)
def killed_queues_stay_dead() -> Iterator[None]:
    """A queue whose process a test has killed must not be closed when the real one ends."""
    yield
    open_queues._open.clear()


@pytest.fixture(params=list(Durability), ids=lambda level: str(level.value))
def open_queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the queue in the test's folder; each durability level has to pass."""
    opened = []

    def open_it(**settings: object) -> FastQueue:
        clock = settings.pop("clock", None)
        given = {"durability": request.param, "inmemory_blocks": 8, "chunk_size": 4096, "write_buffer_size": 512}
        queue = FastQueue(tmp_path / "q", FastQueueConfig(**{**given, **settings}), clock=clock)  # type: ignore[arg-type]
        opened.append(queue)
        return queue

    yield open_it
    for queue in opened:
        queue.close()
