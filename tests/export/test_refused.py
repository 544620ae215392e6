"""What the destination will not have: cut in two, kept as a dead letter, brought back."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.errors import (
    DiskFull,
    ErrorClass,
    PermanentExportError,
    TransientExportError,
)
from penstock.export import (
    BreakerConfig,
    CircuitState,
    FailoverConfig,
    PartialSuccess,
    Prepared,
    SendQueue,
)
from penstock.export.batch_delivery import _Unfinished
from penstock.spool import FastQueue, FastQueueConfig, Lease, MemoryQueue
from penstock.testing import FailingExporter, MemoryExporter, wait_until
from tests.export.quick import DOWN, SPLIT, dead_letters, failing, numbered, push_all, quick


class Thirds(FailingExporter):
    """Splits into parts of eight bytes."""

    def split(self, batch: bytes) -> list[bytes]:
        return [batch[begin : begin + 8] for begin in range(0, len(batch), 8)]


def test_bad_data_is_a_dead_letter_and_does_not_open_the_circuit(queue: FastQueue, tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400 Bad Request: no such field")))
    with SendQueue(queue, exporter, quick(circuit_breaker=BreakerConfig(threshold=1))) as sender:
        for number in range(20):
            sender.push(b"bad %d" % number)
        sender.push(b"good")
        wait_until(lambda: not len(sender))
        stats = sender.stats()
    queue.close()
    assert stats.circuit_opened == 0
    assert stats.errors["client_error"] == 20
    assert stats.queue.dead_lettered == 20
    assert exporter.batches == [b"good"]
    letters = dead_letters(tmp_path)
    assert len(letters) == 20
    assert {reason for _, reason in letters} == {"400 Bad Request: no such field"}


def test_what_is_too_large_is_sent_in_halves(queue: FastQueue) -> None:
    exporter = MemoryExporter(max_bytes=3)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"0123456789")
        wait_until(lambda: not len(sender))
        assert sender.stats().splits == 3
        assert sender.stats().exported_batches == 1
    assert b"".join(exporter.batches) == b"0123456789"


def test_parts_that_were_taken_are_not_sent_again_when_a_later_one_fails(queue: FastQueue) -> None:
    exporter = FailingExporter([None, None, DOWN, DOWN], max_bytes=5)
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        sender.push(b"0123456789")
        wait_until(lambda: not len(sender))
    assert exporter.batches == [b"01234", b"56789"]
    assert exporter.attempts.count(b"01234") == 1


def test_a_refused_part_alone_is_the_dead_letter(queue: FastQueue, tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")), max_bytes=8)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"good....bad.....")
        wait_until(lambda: not len(sender))
    queue.close()
    assert exporter.batches == [b"good...."]
    assert dead_letters(tmp_path) == [(b"bad.....", "400")]


def test_a_destination_that_breaks_over_everything_does_not_turn_the_queue_into_dead_letters(
    queue: FastQueue, tmp_path: Path
) -> None:
    exporter = failing(PermanentExportError("500", ErrorClass.SERVER_ERROR))
    breaker = BreakerConfig(threshold=3, reset_timeout=60.0)
    with SendQueue(queue, exporter, quick(workers=1, retry_interval=0.001, circuit_breaker=breaker)) as sender:
        push_all(sender, numbered(20))
        wait_until(lambda: sender.stats().circuit is CircuitState.OPEN)
        wait_until(lambda: len(sender) == 17)
        assert exporter.attempts == numbered(3)
    queue.close()
    assert dead_letters(tmp_path) == [(batch, "500") for batch in numbered(3)]


def test_after_max_attempts_a_batch_is_a_dead_letter(tmp_path: Path) -> None:
    exporter = FailingExporter(poison=(b"bad", TransientExportError("500", ErrorClass.SERVER_ERROR)))
    with SendQueue.open(exporter, quick(path=tmp_path / "queue", max_attempts=3)) as sender:
        sender.push(b"bad")
        wait_until(lambda: not len(sender))
    assert exporter.attempts == [b"bad"] * 3
    assert dead_letters(tmp_path) == [(b"bad", "too many attempts, the last: 500")]


@pytest.mark.parametrize(
    "batch", [b"good....bad.....fine....", b"bad.....good....fine....", b"good....fine....bad....."]
)
def test_after_max_attempts_only_the_part_that_fails_is_a_dead_letter(tmp_path: Path, batch: bytes) -> None:
    exporter = Thirds(poison=(b"bad", TransientExportError("500", ErrorClass.SERVER_ERROR)), max_bytes=8)
    with SendQueue.open(exporter, quick(path=tmp_path / "queue", max_attempts=3)) as sender:
        sender.push(batch)
        assert sender.flush()
    assert exporter.batches == [b"good....", b"fine...."]
    assert exporter.attempts.count(b"bad.....") == 3
    assert dead_letters(tmp_path) == [(b"bad.....", "too many attempts, the last: 500")]


def test_parts_behind_one_that_had_all_attempts_have_as_many_again(tmp_path: Path) -> None:
    broken = TransientExportError("500", ErrorClass.SERVER_ERROR)
    exporter = Thirds([None, broken, broken, broken, None, broken, broken], max_bytes=8)
    with SendQueue.open(exporter, quick(path=tmp_path / "queue", max_attempts=3, workers=1)) as sender:
        sender.push(b"bad.....good....fine....")
        assert sender.flush()
    assert exporter.batches == [b"good....", b"fine...."]
    assert dead_letters(tmp_path) == [(b"bad.....", "too many attempts, the last: 500")]


def test_a_batch_of_which_no_part_was_taken_is_a_dead_letter_whole(tmp_path: Path) -> None:
    broken = TransientExportError("500", ErrorClass.SERVER_ERROR)
    breaker = BreakerConfig(threshold=100)  # nothing else succeeds in between
    config = quick(path=tmp_path / "queue", max_attempts=2, circuit_breaker=breaker)
    with SendQueue.open(Thirds(poison=(b"bad", broken), max_bytes=8), config) as sender:
        sender.push(b"bad one.bad two.bad 3...")
        assert sender.flush()
    assert dead_letters(tmp_path) == [(b"bad one.bad two.bad 3...", "too many attempts, the last: 500")]


def test_parts_that_repeat_what_they_share_are_dead_letters_without_those_that_were_taken(
    queue: FastQueue, tmp_path: Path
) -> None:
    class Repeating(FailingExporter):
        def split(self, batch: bytes) -> list[bytes]:
            head, *rest = batch.split(b",")
            return [head + b"," + part for part in rest]

    exporter = Repeating(poison=(b"bad", PermanentExportError("400")), max_bytes=20)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"resource-of-it,bad 1,good,bad 2")
        assert sender.flush()
    queue.close()
    assert exporter.batches == [b"resource-of-it,good"]
    assert dead_letters(tmp_path) == [(b"resource-of-it,bad 1", "400"), (b"resource-of-it,bad 2", "400")]


@pytest.mark.parametrize(
    "outage",
    [DOWN, TransientExportError("503", ErrorClass.SERVER_ERROR), TransientExportError("429", retry_after=0.01)],
)
def test_an_outage_makes_no_batch_a_dead_letter_however_long_it_lasts(tmp_path: Path, outage: Exception) -> None:
    exporter = failing(outage)
    breaker = BreakerConfig(threshold=2, reset_timeout=0.002)
    config = quick(path=tmp_path / "queue", max_attempts=3, workers=1, retry_interval=0.001, circuit_breaker=breaker)
    with SendQueue.open(exporter, config) as sender:
        sender.push(b"one")
        wait_until(lambda: len(exporter.attempts) > 10)
        exporter.recover()
        assert sender.flush()
    assert exporter.batches == [b"one"]


def test_dead_letters_are_replayed_while_it_runs(queue: FastQueue) -> None:
    exporter = FailingExporter([PermanentExportError("400 no such field"), PermanentExportError("422 too old")])
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        push_all(sender, numbered(2))
        assert sender.flush()
        assert sender.replay_dead_letters(reason="field") == 1
        assert sender.flush()
        assert exporter.batches == numbered(1)
        assert sender.replay_dead_letters() == 1
        assert sender.flush()
    assert exporter.batches == numbered(2)


def test_a_refused_part_that_cannot_be_kept_comes_again_alone(
    queue: FastQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.export.batch_delivery.ERROR_PAUSE", 0.01)
    bury, refusals = queue.bury, iter([DiskFull("no room"), DiskFull("no room")])

    def refuse_twice(block: bytes, reason: str) -> None:
        error = next(refusals, None)
        if error is not None:
            raise error
        bury(block, reason)

    monkeypatch.setattr(queue, "bury", refuse_twice)
    exporter = FailingExporter(poison=(b"bad", PermanentExportError("400")), max_bytes=8)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"good....bad.....")
        assert sender.flush()
    queue.close()
    assert exporter.batches == [b"good...."]
    assert dead_letters(tmp_path) == [(b"bad.....", "400")]


def test_how_far_batches_are_that_go_in_parts_is_not_remembered_for_ever(queue: FastQueue) -> None:
    exporter = FailingExporter(max_bytes=1)
    sender = SendQueue(queue, exporter, quick())
    delivery = sender._delivery
    assert delivery is not None
    for number in range(200):
        lease = Lease(number, 1, b"ab", 0.0)
        delivery._remember(lease, _Unfinished(deque([b"a", b"b"]), is_split=True))
    assert sorted(delivery._unfinished) == list(range(100, 200))


def _raise(batch: bytes) -> None:
    raise RuntimeError("split failed")


@pytest.mark.parametrize(
    "split", [_raise, lambda batch: [batch, b"."], lambda _: None, lambda _: [], lambda _: [None, None]]
)
def test_what_is_too_large_and_cannot_be_split_is_a_dead_letter(
    queue: FastQueue, tmp_path: Path, split: Callable[[bytes], Any]
) -> None:
    class Surprising(MemoryExporter):
        def split(self, batch: bytes) -> Any:
            return split(batch)

    exporter = Surprising(max_bytes=4)
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"too large")
        sender.push(b"fine")
        wait_until(lambda: not len(sender))
    queue.close()
    assert exporter.batches == [b"fine"]
    assert [letter[0] for letter in dead_letters(tmp_path)] == [b"too large"]


def test_dead_letters_are_replayed_once_the_destination_takes_them(queue: FastQueue, tmp_path: Path) -> None:
    exporter = FailingExporter([PermanentExportError("404 Not Found")] * 3)
    with SendQueue(queue, exporter, quick()) as sender:
        push_all(sender, numbered(3))
        wait_until(lambda: not len(sender))
    queue.close()
    ran = CliRunner().invoke(main, ["queue", "replay", str(tmp_path / "queue"), "--dead-letters"])
    assert ran.exit_code == 0, ran.output
    mended = MemoryExporter()
    with FastQueue(tmp_path / "queue") as again, SendQueue(again, mended, quick()) as sender:
        wait_until(lambda: not len(sender))
    assert exporter.batches == []
    assert sorted(mended.batches) == numbered(3)


def test_a_destination_that_refuses_everything_is_one_line_and_a_count(
    queue: FastQueue, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = FailingExporter([PermanentExportError("400 no")] * 20 + [PermanentExportError("422 old")])
    with SendQueue(queue, exporter, quick(workers=1)) as sender:
        push_all(sender, numbered(21))
        assert sender.flush()
        assert sender.stats().queue.dead_lettered == 21
    lines = [record.getMessage() for record in caplog.records if "dead letter" in record.msg]
    assert lines == [
        f"Batch became a dead letter. queue={queue.path} sequence={number} attempts=1 bytes=12 reason={reason}"
        for number, reason in ((0, "400 no"), (20, "422 old"))
    ]


@pytest.mark.parametrize("enabled", [True, False])
def test_what_was_refused_of_a_batch_is_counted_and_a_line_when_the_reason_is_a_new_one(
    queue: FastQueue, caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    class Partial(MemoryExporter):
        def take(self, prepared: Prepared) -> PartialSuccess | None:
            super().take(prepared)
            return PartialSuccess(2, prepared.body.decode())

    with SendQueue(queue, Partial(), quick(workers=1, enabled=enabled)) as sender:
        for message in (b"too old", b"too old", b"too new"):
            sender.push(message)
        assert sender.flush()
        stats = sender.stats()
    assert stats.partial_rejected == 6
    assert stats.latency_ewma > 0
    assert [record.getMessage() for record in caplog.records] == [
        f"Destination refused part of a batch. queue={queue.path} rejected=2 reason={message}"
        for message in ("too old", "too new")
    ]


def test_an_outage_is_a_line_when_it_begins_when_the_circuit_opens_and_when_it_ends(
    queue: FastQueue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    exporter = failing()
    config = quick(workers=1, retry_interval=0.001, circuit_breaker=BreakerConfig(threshold=2, reset_timeout=0.002))
    with SendQueue(queue, exporter, config) as sender:
        sender.push(b"one")
        wait_until(lambda: sender.stats().circuit_opened > 5)
        exporter.recover()
        assert sender.flush()
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.export.send_gate"]
    names = f"queue={queue.path} destination=FailingExporter"
    error = "error_type=network error=ConnectionRefusedError: no server listens"
    assert lines == [
        f"Export started failing. {names} {error}",
        f"Circuit opened. {names} {error}",
        f"Export recovered. {names}",
    ]


def test_an_exporter_is_called_in_the_log_what_it_says_it_is(
    queue: FastQueue, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = FailingExporter([DOWN])
    exporter.destination = "http://127.0.0.1:4318/v1/metrics"  # type: ignore[attr-defined]
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"one")
        assert sender.flush()
    assert " destination=http://127.0.0.1:4318/v1/metrics " in caplog.text


def test_a_destination_that_takes_a_batch_and_warns_is_a_line(
    queue: FastQueue, caplog: pytest.LogCaptureFixture
) -> None:
    class Friendly(MemoryExporter):
        def take(self, prepared: Prepared) -> PartialSuccess | None:
            super().take(prepared)
            return PartialSuccess(0, "old names")

    with SendQueue(queue, Friendly(), quick()) as sender:
        sender.push(b"one")
        assert sender.flush()
    text = f"Destination took a batch and warns. queue={queue.path} rejected=0 reason=old names"
    assert [record.getMessage() for record in caplog.records] == [text]


@pytest.mark.parametrize("odd", [True, False, b"OK", 200])
def test_a_result_that_send_cannot_have_meant_is_a_failure_like_any_other(
    queue: FastQueue, odd: object, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(MemoryExporter):
        def send(self, prepared: Prepared) -> Any:
            super().send(prepared)
            return odd if self.batches.count(prepared.body) < 3 else None

    exporter = Odd()
    with SendQueue(queue, exporter, quick()) as sender:
        sender.push(b"one")
        assert sender.flush()
        assert sender.stats().errors["unknown"] == 2
        assert sender.stats().sends_inflight == 0
    assert exporter.batches == [b"one"] * 3
    assert f"send must return None or a PartialSuccess, or raise; it returned {type(odd).__name__}" in caplog.text


class Flaky(MemoryExporter):
    """Its first `prepare`s meet something that passes."""

    fails = 7

    def prepare(self, batch: bytes) -> Prepared:
        if self.fails:
            self.fails -= 1
            raise TransientExportError("the vault sleeps", ErrorClass.AUTH)
        return super().prepare(batch)


@pytest.mark.parametrize("settings", [{"workers": 1}, {"pipeline_split": SPLIT}, {"enabled": False}])
def test_what_prepare_itself_calls_transient_is_met_by_the_send(queue: FastQueue, settings: dict[str, Any]) -> None:
    exporter = Flaky()
    with SendQueue(queue, exporter, quick(**settings, failover=FailoverConfig(enabled=False))) as sender:
        if settings.get("enabled") is False:
            for _ in range(2):
                with pytest.raises(TransientExportError, match="the vault sleeps"):
                    sender.push(b"one")
            assert sender.stats().errors["auth"] == 2
        else:
            sender.push(b"one")
            assert sender.flush()
            assert exporter.batches == [b"one"]
            # Of the split some are given back, as the circuit has opened since they were prepared.
            assert sender.stats().errors["auth"] == 7 or "pipeline_split" in settings
            assert sender.stats().errors["auth"] >= 2
        assert sender.stats().queue.dead_lettered == 0
        assert sender.stats().sends_inflight == 0


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    "outage",
    [DOWN, TransientExportError("401", ErrorClass.AUTH), TransientExportError("429", ErrorClass.RATE_LIMIT)],
    ids=["network", "auth", "rate_limit"],
)
def test_what_an_outage_has_cost_is_not_held_against_a_batch_after_it(
    tmp_path: Path, outage: Exception, in_memory: bool
) -> None:
    broken = TransientExportError("503", ErrorClass.SERVER_ERROR)
    exporter = FailingExporter([*[outage] * 7, broken, outage, broken])
    config = quick(workers=1, max_attempts=3, retry_interval=0.001, circuit_breaker=BreakerConfig(enabled=False))
    source: FastQueue | MemoryQueue = (
        MemoryQueue() if in_memory else FastQueue(tmp_path / "queue", FastQueueConfig(max_attempts=3))
    )
    with SendQueue(source, exporter, config, owns_queue=True) as sender:
        sender.push(b"one")
        assert sender.flush()
        stats = sender.stats()
    assert exporter.batches == [b"one"]
    assert stats.queue.dead_lettered == 0
    assert (stats.retries, stats.retry_successes, sum(stats.retry_failures.values())) == (10, 1, 9)


def test_attempts_that_were_its_own_count_whatever_lies_between_them(tmp_path: Path) -> None:
    broken = TransientExportError("503", ErrorClass.SERVER_ERROR)
    exporter = FailingExporter([broken, DOWN, DOWN, broken, DOWN, broken])
    config = quick(workers=1, retry_interval=0.001, circuit_breaker=BreakerConfig(enabled=False))
    with FastQueue(tmp_path / "queue", FastQueueConfig(max_attempts=3)) as queue:
        with SendQueue(queue, exporter, config) as sender:
            sender.push(b"one")
            assert sender.flush()
        assert exporter.batches == []
    assert dead_letters(tmp_path) == [(b"one", "too many attempts, the last: 503")]
