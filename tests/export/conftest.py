"""What every test of the export side gets: a queue, and idle workers that look up often, since each test ends them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.export import send_workers as workers
from penstock.spool import FastQueue


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_WAIT", 0.02)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FastQueue]:
    with FastQueue(tmp_path / "queue") as opened:
        yield opened
