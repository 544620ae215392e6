"""Dead letters that come back: as many as there is room for, none lost, and no block is evicted for them."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock import Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.errors import DiskFull
from penstock.testing import FakeClock
from tests.spool.damage import drain
from tests.spool.fake_files import FakeFiles

LEVELS = pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))
LIMITS = pytest.mark.parametrize("limit", [{"max_size": 7}, {"max_bytes": 7500}], ids=["blocks", "bytes"])


def block(number: int, length: int = 1000) -> bytes:
    return b"%03d" % number + bytes(length - 3)


def bury(queue: FastQueue, count: int, length: int = 1000) -> list[bytes]:
    """So many dead letters."""
    given = [block(number, length) for number in range(count)]
    for data in given:
        queue.push(data)
        queue.reject(queue.lease()[0], "400")
    return given


@LEVELS
@LIMITS
@pytest.mark.parametrize("behavior", list(FullBehavior))
def test_letters_that_exceed_the_queue_come_back_as_room_allows(
    tmp_path: Path, durability: Durability, limit: dict[str, int], behavior: FullBehavior
) -> None:
    with FastQueue(tmp_path / "before", FastQueueConfig(dead_letter=tmp_path / "dead")) as queue:
        given = bury(queue, 20)
    config = FastQueueConfig(
        durability=durability,
        full_behavior=behavior,
        block_timeout=0,
        dead_letter=tmp_path / "dead",
        **limit,  # type: ignore[arg-type]
    )
    with FastQueue(tmp_path / "q", config) as queue:
        assert queue.replay_dead_letters() == (7, 13)
        assert queue.replay_dead_letters() == (0, 13)
        back = drain(queue)
        assert queue.replay_dead_letters("400") == (7, 6)
        back += drain(queue)
        assert queue.replay_dead_letters("500") == (0, 6)
        assert queue.replay_dead_letters() == (6, 0)
        assert back + drain(queue) == given
        assert queue.dropped == 0


@LEVELS
def test_no_live_block_goes_for_a_letter(tmp_path: Path, durability: Durability) -> None:
    with FastQueue(tmp_path, FastQueueConfig(durability=durability, max_size=3)) as queue:
        given = bury(queue, 3)
        queue.push(b"live")
        queue.push(b"more")
        assert queue.replay_dead_letters() == (1, 2)
        assert drain(queue) == [b"live", b"more", given[0]]
        assert queue.stats().dropped["oldest"] == 0


def test_a_letter_that_is_too_large_stays_and_those_behind_it_come_back(tmp_path: Path) -> None:
    with FastQueue(tmp_path) as queue:
        bury(queue, 1, 5000)
        bury(queue, 2)
    with FastQueue(tmp_path, FastQueueConfig(max_block_bytes=2000)) as queue:
        assert queue.replay_dead_letters() == (2, 1)
        assert drain(queue) == [block(0), block(1)]


def test_what_was_put_back_before_the_disk_was_full_does_not_come_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeFiles()
    config = FastQueueConfig(durability=Durability.DISK, max_size=4, compression="none", meta_sync_interval=3600)
    queue = FastQueue("q", config, clock=FakeClock(), files=files)
    given = bury(queue, 6)
    assert queue.replay_dead_letters() == (4, 2)
    queue.ack(queue.lease(2))
    put_back = queue._put_back

    def one_until_the_disk_is_full(blocks: Sequence[bytes]) -> int:
        taken = put_back(blocks[:1])
        files._fault = lambda call, number: errno.ENOSPC if call == "write" else None
        return taken

    monkeypatch.setattr(queue, "_put_back", one_until_the_disk_is_full)
    with pytest.raises(DiskFull):
        queue.replay_dead_letters()
    files.heal()
    files.kill()
    queue = FastQueue("q", config, files=files)
    assert drain(queue) == given[2:5]
    assert queue.replay_dead_letters() == (1, 0)
    assert drain(queue) == given[5:]
