"""Messages that feed the pipeline are acknowledged only when the durable queue has them."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.amqp import Message, Reject, Retry, batches_into_queue, into_queue
from penstock.consume import into_queue as module
from penstock.errors import BlockTooLarge, DiskFull, QueueFull
from penstock.testing import wait_until
from tests.consume.conftest import Client, Consume, with_dead_letters
from tests.servers import RabbitMQ


class FakeQueue:
    """Takes blocks of up to 10 bytes, unless it is told to have no room."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.trouble: Exception | None = None
        self.refused = threading.Event()

    def push(self, block: bytes) -> int:
        trouble = self.trouble  # another thread may end it
        if trouble:
            self.refused.set()
            raise trouble
        if len(block) > 10:
            raise BlockTooLarge("11 bytes, and 10 is the limit")
        self.blocks.append(block)
        return len(self.blocks)

    def push_many(self, blocks: Sequence[bytes]) -> range:
        if self.trouble or any(len(block) > 10 for block in blocks):
            raise self.trouble or BlockTooLarge("one of them")
        self.blocks += blocks
        return range(len(self.blocks) - len(blocks), len(self.blocks))


@pytest.mark.parametrize("trouble", [QueueFull("full"), DiskFull("full"), OSError(5, "broken disk")])
def test_a_queue_in_trouble_is_not_the_messages_fault(trouble: Exception) -> None:
    queue = FakeQueue()
    queue.trouble = trouble

    with pytest.raises(Retry) as retry:
        into_queue(queue)(Message(b"data"))
    assert not retry.value.counted
    answers = batches_into_queue(queue)([Message(b"1"), Message(b"2")])
    assert answers is not None
    assert [isinstance(answer, Retry) and not answer.counted for answer in answers] == [True, True]


def test_a_block_that_can_never_fit_is_rejected_alone() -> None:
    queue = FakeQueue()

    with pytest.raises(Reject, match="10 is the limit"):
        into_queue(queue)(Message(b"x" * 11))
    answers = batches_into_queue(queue)([Message(b"fits"), Message(b"x" * 11), Message(b"too")])
    assert answers is not None
    assert [type(answer).__name__ for answer in answers] == ["NoneType", "Reject", "NoneType"]
    assert queue.blocks == [b"fits", b"too"]


def test_what_is_pushed_may_be_more_than_the_body() -> None:
    queue = FakeQueue()

    into_queue(queue, encode=lambda message: message.event_type.encode() + b":" + message.body)(Message(b"1", "a"))

    assert queue.blocks == [b"a:1"]


@pytest.mark.server
@pytest.mark.parametrize("batched", [False, True])
def test_nothing_is_acknowledged_while_the_queue_refuses(
    client: Client,
    queue: str,
    consume: Consume,
    monkeypatch: pytest.MonkeyPatch,
    batched: bool,
) -> None:
    monkeypatch.setattr(module, "RETRY_DELAY", 0.01)
    durable = FakeQueue()
    durable.trouble = QueueFull("no room")
    declarations = with_dead_letters(queue)
    handler = batches_into_queue(durable) if batched else into_queue(durable)
    batches: dict[str, Any] = {"batch_size": 5, "batch_timeout": 0.05} if batched else {}
    declarations.consumer(queue=queue, handler=handler, workers=2, max_attempts=1, **batches)
    registry = consume(declarations)
    bodies = [str(number).encode() for number in range(20)]
    client.publish(queue, *bodies, b"far too long a block")
    assert durable.refused.wait(10)
    wait_until(lambda: registry.stats().consumers[queue].total("retried") > 40)

    assert registry.stats().consumers[queue].total("acked") == 0
    assert registry.stats().consumers[queue].total("dead_lettered") == 0

    durable.trouble = None
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 20)
    assert sorted(durable.blocks) == sorted(bodies)
    wait_until(lambda: client.take_all(f"{queue}.dead") == [b"far too long a block"])


@pytest.mark.server
def test_a_killed_service_has_acknowledged_only_what_its_durable_queue_holds(
    shared_rabbitmq: RabbitMQ, client: Client, queue: str, tmp_path: Path
) -> None:
    bodies = [b"event %d" % number for number in range(5000)]
    client.channel.queue_declare(queue, durable=True)
    client.publish_unconfirmed(queue, bodies)
    command = [sys.executable, "-m", "tests.consume.feeder", shared_rabbitmq.url, queue, str(tmp_path / "spool")]
    with subprocess.Popen(command) as service:
        wait_until(lambda: client.depth(queue) < 4500)
        service.kill()
    wait_until(lambda: client.consumers(queue) == 0)

    left = client.take_all(queue)
    held = []
    with FastQueue(tmp_path / "spool", FastQueueConfig(durability=Durability.DISK)) as durable:
        while (block := durable.pop()) is not None:
            held.append(block)

    assert len(left) > 0
    assert set(held) | set(left) == set(bodies)
    assert len(held) + len(left) - len(bodies) <= 100
