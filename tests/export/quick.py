"""What the tests of the send queue share: a configuration with short delays, batches, a failure, dead letters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.export import BreakerConfig, FailoverConfig, PipelineSplitConfig, SendQueue, SendQueueConfig
from penstock.export.send_gate import SendGate, SendPermit
from penstock.spool import FastQueue
from penstock.spool.dead_letters import unpack_dead_letter
from penstock.testing import FailingExporter, MemoryExporter


class Deaf(MemoryExporter):
    """One whose `close` cuts nothing off."""

    def close(self) -> None: ...


DOWN = ConnectionRefusedError("no server listens")
SPLIT = PipelineSplitConfig(enabled=True, preparer_count=1, sender_count=1)


def quick(**settings: Any) -> SendQueueConfig:
    """Delays short enough to wait for, in the order of their real ones."""
    defaults: dict[str, Any] = {
        "retry_interval": 0.01,
        "max_retry_delay": 0.04,
        "circuit_breaker": BreakerConfig(reset_timeout=0.05),
        "failover": FailoverConfig(drain_interval=0.02),
        "workers": 2,
    }
    return SendQueueConfig(**{**defaults, **settings})


def held() -> MemoryExporter:
    """One whose sends do not end before `release`."""
    exporter = MemoryExporter()
    exporter.hold()
    return exporter


def failing(error: Exception = DOWN) -> FailingExporter:
    """One whose sends fail until `recover`."""
    exporter = FailingExporter()
    exporter.fail_with(error)
    return exporter


def push_all(sender: SendQueue, batches: Iterable[bytes]) -> None:
    for batch in batches:
        sender.push(batch)


def begun(gate: SendGate) -> SendPermit:
    """A send that is under way from now on."""
    permit = gate.begin()
    assert permit is not None
    return permit


def numbered(count: int) -> list[bytes]:
    return [b"batch %06d" % number for number in range(count)]


def dead_letters(path: Path) -> list[tuple[bytes, str]]:
    with FastQueue(path / "queue" / "dead-letters") as letters:
        found = [unpack_dead_letter(lease.data) for lease in letters.lease(1000)]
    return [(letter.data, letter.reason) for letter in found]
