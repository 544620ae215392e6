"""The eight tests that the worker pool's decision record names, in its words; the last four on a real broker."""

import threading

import pytest

from penstock.amqp import ConsumerOptions, Message, pool_size
from penstock.testing import wait_until
from tests.consume.conftest import Client, Consume


def options(**settings: object) -> ConsumerOptions:
    return ConsumerOptions(queue="orders", handler=lambda message: None, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cpus", "workers"), [(1, 4), (4, 16), (8, 32), (32, 128)])
def test_auto_scale_workers_default(cpus: int, workers: int) -> None:
    assert pool_size(options(), cpu_count=cpus).workers == workers


def test_explicit_workers_override() -> None:
    size = pool_size(options(workers=100, prefetch_count=500), cpu_count=8)

    assert (size.workers, size.prefetch, size.caps) == (100, 500, ())


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 10), (32, 320), (50, 500), (128, 500)])
def test_prefetch_auto_scaling(workers: int, prefetch: int) -> None:
    assert pool_size(options(workers=workers)).prefetch == prefetch
    assert pool_size(options(workers=workers, prefetch="latency")).prefetch == workers * 2


def test_prefetch_capping() -> None:
    size = pool_size(options(workers=10, prefetch_count=5000))

    assert size.prefetch == 1000
    assert size.caps == ("prefetch 5000 -> 1000",)


@pytest.mark.parametrize(("workers", "batch_size", "prefetch"), [(4, 50, 200), (4, 2, 40), (100, 50, 1000)])
def test_prefetch_has_a_batch_for_every_worker(workers: int, batch_size: int, prefetch: int) -> None:
    assert pool_size(options(workers=workers), batch_size).prefetch == prefetch


def test_worker_resource_caps() -> None:
    size = pool_size(options(workers=5000))

    assert (size.workers, size.prefetch) == (200, 500)
    assert size.caps == ("workers 5000 -> 200",)
    assert pool_size(options(), cpu_count=64).workers == 200


@pytest.mark.server
def test_sequential_processing(client: Client, queue: str, consume: Consume) -> None:
    seen: list[bytes] = []
    running = threading.Semaphore(1)
    overlaps: list[bytes] = []

    def handle(message: Message) -> None:
        if not running.acquire(blocking=False):
            overlaps.append(message.body)
        seen.append(message.body)
        running.release()

    consume(handler=handle, workers=1)
    bodies = [str(number).encode() for number in range(500)]
    client.publish_unconfirmed(queue, bodies)

    wait_until(lambda: len(seen) == 500)
    assert seen == bodies
    assert not overlaps


@pytest.mark.server
def test_worker_pool_concurrent_processing(client: Client, queue: str, consume: Consume) -> None:
    """A hundred handlers that share state, and every one must be inside before the first may leave."""
    all_inside = threading.Barrier(100, timeout=20)
    lock = threading.Lock()
    seen: set[bytes] = set()
    workers: set[str] = set()

    def handle(message: Message) -> None:
        all_inside.wait()
        with lock:
            seen.add(message.body)
            workers.add(threading.current_thread().name)

    registry = consume(handler=handle, workers=100)
    client.publish_unconfirmed(queue, [str(number).encode() for number in range(200)])

    wait_until(lambda: registry.stats().consumers[queue].total("acked") == 200)
    assert len(seen) == 200
    assert len(workers) == 100


@pytest.mark.server
def test_worker_pool_graceful_shutdown(client: Client, queue: str, consume: Consume) -> None:
    """What is in hand finishes and is acknowledged, what is not begun goes back, nothing is lost or dead-lettered."""
    inside = threading.Barrier(5, timeout=20)  # four workers and the test
    leave = threading.Event()
    finished: list[bytes] = []

    def handle(message: Message) -> None:
        if not leave.is_set():
            inside.wait()
            leave.wait()
        finished.append(message.body)

    registry = consume(handler=handle, workers=4)
    client.publish_unconfirmed(queue, [str(number).encode() for number in range(100)])
    inside.wait()

    results: list[list[str]] = []
    stopping = threading.Thread(target=lambda: results.append(registry.stop(20)))
    stopping.start()
    wait_until(lambda: not registry.stats().consumers[queue].consuming)
    leave.set()
    stopping.join()

    assert results == [[]]
    assert len(finished) == 4
    assert client.depth(queue) == 96
    assert sorted(finished + client.take_all(queue)) == sorted(str(number).encode() for number in range(100))
    assert registry.stats().consumers[queue].total("dead_lettered") == 0
