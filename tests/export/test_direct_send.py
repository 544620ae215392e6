"""Sending on the caller's thread: without `always_queue`, and without a queue at all."""

import pytest

from penstock.errors import CircuitOpen, PermanentExportError, TransientExportError
from penstock.export import (
    BreakerConfig,
    CircuitState,
    FailoverConfig,
    Prepared,
    SendQueue,
)
from penstock.spool import FastQueue
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, quick


def test_try_direct_sends_on_the_callers_thread_and_queues_what_failed(queue: FastQueue) -> None:
    exporter = FailingExporter([None, DOWN])
    sender = SendQueue(queue, exporter, quick(always_queue=False))
    sender.push(b"direct")
    assert exporter.batches == [b"direct"]
    assert not len(sender)
    sender.push(b"queued")
    assert len(sender) == 1
    sender.start()
    wait_until(lambda: not len(sender))
    sender.close()
    assert exporter.batches == [b"direct", b"queued"]


def test_without_a_queue_the_pusher_gets_the_error(queue: FastQueue) -> None:
    exporter = FailingExporter([None, DOWN, PermanentExportError("400")])
    breaker = BreakerConfig(threshold=1, reset_timeout=60.0)
    config = quick(enabled=False, circuit_breaker=breaker, failover=FailoverConfig(enabled=False))
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"one")
        with pytest.raises(TransientExportError, match="no server listens"):
            sender.push(b"two")
        with pytest.raises(CircuitOpen):
            sender.push(b"three")
    assert len(queue) == 0


def test_a_batch_that_cannot_be_prepared_says_nothing_about_the_destination(queue: FastQueue) -> None:
    class Picky(FailingExporter):
        def prepare(self, batch: bytes) -> Prepared:
            if batch == b"undecodable":
                raise ValueError("cannot be decoded")
            return super().prepare(batch)

    exporter = Picky([DOWN])
    breaker = BreakerConfig(threshold=1, reset_timeout=0.0)
    config = quick(enabled=False, circuit_breaker=breaker, failover=FailoverConfig(enabled=False))
    with SendQueue(queue, exporter, config) as sender:
        with pytest.raises(PermanentExportError, match="cannot be prepared: ValueError: cannot be decoded"):
            sender.push(b"undecodable")
        assert sender.stats().circuit is CircuitState.CLOSED
        with pytest.raises(TransientExportError, match="no server listens"):
            sender.push(b"one")
        with pytest.raises(PermanentExportError, match="cannot be prepared"):
            sender.push(b"undecodable")  # as the probe: another takes its place
        assert sender.stats().circuit is CircuitState.HALF_OPEN
        sender.push(b"one")
        assert sender.stats().circuit is CircuitState.CLOSED
        assert sender.stats().errors["unknown"] == 2
    assert exporter.batches == [b"one"]


def test_what_is_no_exception_gives_the_place_of_the_send_back(queue: FastQueue) -> None:
    class Interrupted(MemoryExporter):
        def take(self, prepared: Prepared) -> None:
            raise KeyboardInterrupt

    sender = SendQueue(queue, Interrupted(), quick(enabled=False))
    with pytest.raises(KeyboardInterrupt):
        sender.push(b"one")
    assert sender.stats().sends_inflight == 0


def test_what_waits_is_not_overtaken(queue: FastQueue) -> None:
    exporter = MemoryExporter()
    sender = SendQueue(queue, exporter, quick(always_queue=False))
    queue.push(b"first")
    sender.push(b"second")
    assert len(sender) == 2
    sender.start()
    assert sender.flush()
    sender.close()
    assert sorted(exporter.batches) == [b"first", b"second"]
