"""Coroutines, processes and batches on a real broker."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.amqp import ConsumerRegistry, Declarations, Message
from penstock.consume.attempts import REASON, TRIED
from penstock.testing import wait_until
from tests.consume import handlers
from tests.consume.conftest import SOON, Client, Consume, with_dead_letters

pytestmark = pytest.mark.server


def test_coroutines_overlap_up_to_the_number_of_workers(client: Client, queue: str, consume: Consume) -> None:
    running = peak = 0
    together = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 20:
            together.set()
        await together.wait()
        await asyncio.sleep(0)
        running -= 1

    registry = consume(handler=handle, workers=20)
    client.publish_unconfirmed(queue, [b""] * 100)

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 100)
    assert peak == 20


@pytest.mark.parametrize(
    ("handler", "execution"),
    [(handlers.refuse, "thread"), (handlers.refuse_async, "async"), (handlers.refuse, "process")],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_handlers_of_every_execution_retry_and_reject(
    client: Client, queue: str, consume: Consume, handler: Any, execution: str, workers: int
) -> None:
    registry = consume(handler=handler, workers=workers, execution=execution)
    client.publish(queue, b'"later"', b"never", b'"fine"')

    body, properties = client.dead_letter(queue)
    assert (body, properties.headers[TRIED]) == (b"never", 1)
    assert properties.headers[REASON].startswith("not JSON")
    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 2)
    assert registry.stats().consumers[queue].total("retried") == 2


def test_a_coroutine_that_does_not_end_in_time_is_cancelled_and_its_message_goes_back(
    client: Client, queue: str, consume: Consume
) -> None:
    inside = threading.Event()

    async def handle(message: Message) -> None:
        inside.set()
        await asyncio.Event().wait()

    registry = consume(handler=handle, workers=2)
    client.publish(queue, b"endless")
    assert inside.wait(10)

    assert registry.stop(0.3) == []
    wait_until(lambda: client.depth(queue) == 1)
    assert client.depth(f"{queue}.dead") == 0


def test_a_program_without_a_main_guard_is_told_so_at_the_start(shared_rabbitmq_url: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from penstock.amqp import ConsumerRegistry, Declarations\n"
        "from tests.consume.handlers import refuse\n"
        "declarations = Declarations()\n"
        "declarations.queue('unguarded')\n"
        "declarations.consumer(queue='unguarded', handler=refuse, execution='process', workers=1)\n"
        f"ConsumerRegistry('{shared_rabbitmq_url}', declarations).start()\n"
    )
    ran = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": "."}
    )

    assert ran.returncode == 1
    assert "do not start" in ran.stderr.splitlines()[-1]


def test_the_message_of_a_worker_process_that_dies_is_tried_again_by_a_new_one(
    client: Client, queue: str, consume: Consume, tmp_path: Path
) -> None:
    registry = consume(handler=handlers.die_at_first, workers=2, execution="process", retry=SOON)
    before = {child.pid for child in multiprocessing.active_children()}
    client.publish(queue, f"{tmp_path}|a".encode())

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1)
    assert len(list(tmp_path.glob("a.*"))) == 1
    wait_until(lambda: {child.pid for child in multiprocessing.active_children()} != before)


def test_a_message_that_kills_every_worker_process_is_dead_lettered(
    client: Client, queue: str, consume: Consume
) -> None:
    consume(handler=handlers.die_always, workers=1, execution="process", retry=SOON, max_attempts=2)
    client.publish(queue, b"")

    _, properties = client.dead_letter(queue)
    assert properties.headers[REASON] == "the worker process died (signal 9)"


def test_a_handler_that_computes_for_longer_than_the_heartbeat_keeps_the_connection(
    client: Client, queue: str, shared_rabbitmq_url: str
) -> None:
    declarations = with_dead_letters(queue)
    declarations.consumer(queue=queue, handler=handlers.spin, workers=2, execution="process")
    registry = ConsumerRegistry(shared_rabbitmq_url + "?heartbeat=1", declarations)
    registry.start()
    client.publish(queue, b"2.1")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 1, timeout=30)
    stats = registry.stats()
    registry.stop(5)
    assert stats.reconnects == 0
    assert stats.consumers[queue].total("redelivered") == 0


def test_a_worker_process_busy_past_the_deadline_is_killed_and_its_message_goes_back(
    client: Client, queue: str, consume: Consume, tmp_path: Path
) -> None:
    registry = consume(handler=handlers.spin, workers=1, execution="process")
    processes = multiprocessing.active_children()
    begun = tmp_path / "begun"
    client.publish(queue, f"60|{begun}".encode())
    wait_until(begun.exists)

    assert len(registry.stop(0.5)) == 1
    wait_until(lambda: client.depth(queue) == 1)
    assert not any(process.is_alive() for process in processes)
    assert client.depth(f"{queue}.dead") == 0


def test_batches_are_handed_over_full_or_when_the_first_has_waited(
    client: Client, queue: str, consume: Consume
) -> None:
    batches: list[list[bytes]] = []
    client.channel.queue_declare(queue, durable=True)
    client.publish_unconfirmed(queue, [str(number).encode() for number in range(25)])
    wait_until(lambda: client.depth(queue) == 25)  # all are there: no batch waits for us
    declarations = Declarations()
    declarations.queue(queue)
    declarations.consumer(
        queue=queue,
        handler=lambda messages: batches.append([message.body for message in messages]),
        workers=1,
        prefetch=1,  # below the size of a batch: raised, or no batch would ever be full
        batch_size=10,
        batch_timeout=1.0,
    )
    registry = consume(declarations)

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 25)
    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert [body for batch in batches for body in batch] == [str(number).encode() for number in range(25)]
    assert registry.stats().consumers[queue].prefetch == 10


@pytest.mark.parametrize("workers", [1, 3])
def test_a_poison_message_takes_no_other_message_of_its_batch_with_it(
    client: Client, queue: str, consume: Consume, workers: int
) -> None:
    def handle(messages: Sequence[Message]) -> None:
        if any(message.body == b"poison" for message in messages):
            raise ValueError("bad batch")

    registry = consume(handler=handle, workers=workers, batch_size=5, batch_timeout=0.1, max_attempts=2, retry=SOON)
    client.publish(queue, b"1", b"2", b"poison", b"3", b"4")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 4)
    wait_until(lambda: client.take_all(f"{queue}.dead") == [b"poison"])


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_batch_handler_may_answer_for_each_message(
    client: Client, queue: str, consume: Consume, execution: str
) -> None:
    registry = consume(
        handler=handlers.refuse_in_batches, workers=2, batch_size=4, batch_timeout=0.1, execution=execution
    )
    client.publish(queue, b"0", b"1", b"2", b"3")

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 2)
    wait_until(lambda: client.depth(f"{queue}.dead") == 2)
    assert sorted(client.take_all(f"{queue}.dead")) == [b"1", b"3"]


def test_a_batch_answer_of_the_wrong_length_is_a_failure(client: Client, queue: str, consume: Consume) -> None:
    consume(handler=lambda messages: [None], batch_size=2, max_attempts=1)
    client.publish(queue, b"1", b"2")

    wait_until(lambda: client.depth(f"{queue}.dead") == 2)


def test_a_coroutine_that_something_else_cancelled_has_failed(client: Client, queue: str, consume: Consume) -> None:
    """Only a cancellation by our own deadline gives the message back; any other would come around for ever."""

    async def handle(message: Message) -> None:
        raise asyncio.CancelledError("a task that the handler awaited")

    consume(handler=handle, workers=2, max_attempts=2, retry=SOON)
    client.publish(queue, b"")

    wait_until(lambda: client.depth(f"{queue}.dead") == 1)
