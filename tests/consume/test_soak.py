"""The campaign behind `make soak PART=amqp`: broker, workers and services die at random; the ledger must balance.

    published = handled and acknowledged + dead-lettered

PENSTOCK_SOAK_SECONDS says for how long (600), PENSTOCK_SOAK_SEED repeats a run's choices.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pika.exceptions import AMQPError

from penstock.amqp import ConsumerRegistry
from penstock.testing import wait_until
from tests.consume.conftest import Client
from tests.consume.soak_handlers import DEAD, SOON, declare, is_poison
from tests.servers import RabbitMQ

pytestmark = [pytest.mark.soak, pytest.mark.server, pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("PENSTOCK_SOAK_SECONDS", "600"))
SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "0")) or random.randrange(1, 1 << 31)
QUEUES = ["soak.threads", "soak.processes", "soak.service"]


class Source:
    """Publishes numbers until told to stop; one that was not confirmed is published again."""

    def __init__(self, url: str, notes: Path) -> None:
        self._url = url
        self._notes = notes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-source")
        self.published = 0
        self._thread.start()

    def _run(self) -> None:
        client: Client | None = None
        while not self._stop.wait(0.001):
            try:
                client = client or Client(self._url)
                body = f"{self._notes}|{self.published}".encode()
                client.publish(QUEUES[self.published % len(QUEUES)], body)
                self.published += 1
            except (AMQPError, OSError):
                client = None
                self._stop.wait(0.2)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Service:
    """A whole consumer process, to be terminated and killed."""

    def __init__(self, url: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.consume.soak_handlers", url, "soak.service"]
        self._log = log.open("ab")
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stderr=self._log)

    def replace(self, number: int) -> None:
        self._process.send_signal(number)
        self._process.wait(30)
        self._process = self._start()

    def ensure(self) -> None:
        """Start it again where it found no broker at its start."""
        if self._process.poll() is not None:
            self._process = self._start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def test_the_ledger_balances_whatever_dies(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    notes = tmp_path / "handled"
    registries = [
        ConsumerRegistry(rabbitmq.url, declare(queue, kind), reconnect=SOON)
        for queue, kind in (("soak.threads", "thread"), ("soak.processes", "process"))
    ]
    for registry in registries:
        registry.start()
    Client(rabbitmq.url).channel.queue_declare("soak.service", durable=True, arguments=_arguments("soak.service"))
    service = Service(rabbitmq.url, tmp_path / "service.log")
    source = Source(rabbitmq.url, notes)
    deaths = {"broker": 0, "worker": 0, "service killed": 0, "service terminated": 0}
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.2, 2.0))
        service.ensure()
        draw = chance.random()
        if draw < 0.05:
            deaths["broker"] += 1
            chance.choice([rabbitmq.kill, rabbitmq.kill, rabbitmq.stop])()
            rabbitmq.start()
        elif draw < 0.6:
            deaths["worker"] += 1
            _kill_a_worker(chance)
        elif draw < 0.65:
            deaths["service killed"] += 1
            service.replace(signal.SIGKILL)
        elif draw < 0.70:
            deaths["service terminated"] += 1
            service.replace(signal.SIGTERM)
    source.close()
    service.ensure()

    client = Client(rabbitmq.url)
    published = set(range(source.published))
    expected_dead = {number for number in published if is_poison(number)}
    handled: set[int] = set()

    def settled() -> bool:
        service.ensure()
        handled.update(int(line) for line in notes.read_bytes().split())
        # What waits for its retry is in no queue, and a service that is told to stop then sends it back.
        done = published - expected_dead <= handled and client.depth(DEAD) >= len(expected_dead)
        return done and all(client.depth(queue) == 0 for queue in QUEUES)

    with contextlib.suppress(AssertionError):  # the ledger below says more
        wait_until(settled, timeout=120)
    wait_until(lambda: all(registry.stats().consumers[q].in_flight == 0 for registry, q in zip(registries, QUEUES)))
    service.close()
    unfinished = [name for registry in registries for name in registry.stop(20)]
    dead = {int(body.decode().split("|")[1]) for body in client.take_all(DEAD)}
    left = {queue: client.depth(queue) for queue in QUEUES}
    ledger = {
        "seed": SEED,
        "seconds": SECONDS,
        "published": len(published),
        "handled": len(handled),
        "dead-lettered": len(dead),
        "handled more than once": len(notes.read_bytes().split()) - len(handled),
        "reconnects": sum(registry.stats().reconnects for registry in registries),
        **{f"deaths of {what}": count for what, count in deaths.items()},
    }
    sys.stderr.write("\n" + json.dumps(ledger, indent=2) + "\n")
    assert left == dict.fromkeys(QUEUES, 0)
    assert dead == expected_dead
    assert handled == published - expected_dead
    assert unfinished == []


def _arguments(queue: str) -> dict[str, object]:
    return next(one for one in declare(queue, "thread").queues if one.name == queue).arguments


def _kill_a_worker(chance: random.Random) -> None:
    """End one of the worker processes, which are all the children that `multiprocessing` knows."""
    chance.choice(multiprocessing.active_children()).kill()
