"""A service that is told to stop, or is not even told, under load."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.amqp import BackoffPolicy, Message, Retry
from penstock.consume.attempts import ATTEMPTS
from penstock.testing import wait_until
from tests.consume.conftest import Client, Consume, with_dead_letters
from tests.consume.proxy import Proxy
from tests.servers import RabbitMQ

pytestmark = pytest.mark.server
BODIES = [str(number).encode() for number in range(3000)]


@pytest.fixture
def service(shared_rabbitmq: RabbitMQ, client: Client, queue: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service that is busy with a full queue."""
    arguments = with_dead_letters(queue).queues[1].arguments
    client.channel.queue_declare(queue, durable=True, arguments=arguments)
    client.publish_unconfirmed(queue, BODIES)
    command = [sys.executable, "-m", "tests.consume.service", shared_rabbitmq.url, queue, str(tmp_path / "handled")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(handled(tmp_path)) > 200)
        yield process
        process.kill()


def handled(folder: Path) -> list[bytes]:
    path = folder / "handled"
    return path.read_bytes().split() if path.exists() else []


def test_sigterm_under_load_loses_nothing_and_repeats_nothing(
    service: subprocess.Popen[bytes], client: Client, queue: str, tmp_path: Path
) -> None:
    service.send_signal(signal.SIGTERM)
    _, log = service.communicate(timeout=20)

    assert service.returncode == 0, log.decode()
    assert "Stopping." in log.decode()
    left = client.take_all(queue)
    assert Counter(handled(tmp_path) + left) == Counter(BODIES)
    assert len(left) > 0
    assert client.depth(f"{queue}.dead") == 0


def test_kill_under_load_loses_nothing_and_repeats_at_most_the_prefetch(
    service: subprocess.Popen[bytes], client: Client, queue: str, tmp_path: Path
) -> None:
    service.kill()
    service.wait()

    done = handled(tmp_path)
    wait_until(lambda: client.depth(queue) >= len(BODIES) - len(done))
    left = client.take_all(queue)
    assert set(done + left) == set(BODIES)
    assert len(done) + len(left) - len(BODIES) <= 100
    assert client.depth(f"{queue}.dead") == 0


def test_a_handler_that_does_not_end_in_time_is_named_and_its_message_goes_back(
    client: Client, queue: str, consume: Consume
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        inside.set()
        leave.wait(30)

    registry = consume(handler=handle, workers=2)
    client.publish(queue, b"endless")
    assert inside.wait(10)

    (name,) = registry.stop(0.3)
    leave.set()

    assert name.startswith(f"penstock-amqp-{queue}-worker-")
    wait_until(lambda: client.take_all(queue) == [b"endless"])
    assert client.depth(f"{queue}.dead") == 0


def test_a_broker_that_does_not_answer_delays_no_stop_beyond_its_deadline(
    network: Proxy, client: Client, queue: str, consume: Consume
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        inside.set()
        leave.wait(10)

    declarations = with_dead_letters(queue)
    declarations.consumer(queue=queue, handler=handle, workers=2)
    registry = consume(declarations, url=network.url)
    client.publish(queue, b"1")
    assert inside.wait(10)
    network.swallow()
    leave.set()

    begun = time.monotonic()
    assert registry.stop(1.0) == []
    assert time.monotonic() - begun < 5.0  # what a busy machine adds to the second
    network.cut()
    wait_until(lambda: client.take_all(queue) == [b"1"])


def test_a_message_that_waits_for_its_retry_goes_back_with_its_attempts_counted(
    client: Client, queue: str, consume: Consume
) -> None:
    def handle(message: Message) -> None:
        raise ValueError("not now")

    registry = consume(handler=handle, workers=2, retry=BackoffPolicy(first=60.0, limit=60.0))
    client.publish(queue, b"later")
    wait_until(lambda: registry.stats().consumers[queue].total("retried") == 1)

    assert registry.stop(5) == []
    _, properties = client.take(queue) or (b"", None)
    assert properties is not None
    assert properties.headers[ATTEMPTS] == 1


def test_a_worker_that_waits_for_a_retry_in_order_does_not_delay_the_stop(
    client: Client, queue: str, consume: Consume
) -> None:
    def handle(message: Message) -> None:
        raise Retry(600.0)

    registry = consume(handler=handle, workers=1)
    client.publish(queue, b"1", b"2")
    wait_until(lambda: registry.stats().consumers[queue].in_flight == 2)

    assert registry.stop(5) == []
    assert client.take_all(queue) == [b"1", b"2"]
