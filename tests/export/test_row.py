"""Several sends under way from one worker: nothing lost, nothing twice, places and leases given back, in order."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DiskFailed, PayloadTooLarge, PermanentExportError, QueueClosed, TransientExportError
from penstock.export import Backoff, BackoffConfig, BreakerConfig, CircuitBreaker, PartialSuccess, Prepared
from penstock.export.batch_delivery import Delivery, Job, _Progress
from penstock.export.breaker import CircuitState
from penstock.export.exporter import Finish
from penstock.export.lease_source import LeasedMemory
from penstock.export.row import Row
from penstock.export.send_gate import Gate
from penstock.export.stats import Sent, Tally
from penstock.spool import FastQueue, MemoryQueue
from penstock.testing import FakeClock, wait_until
from tests.export.quick import entered

Outcome = Exception | PartialSuccess | None


@dataclass
class Overlapping:
    """An exporter whose sends end as told, by batch and in turn, and with success when nothing is told any more.

    `cannot_begin`: those fail before they are under way. `prepare` refuses what begins with "bad".
    """

    outcomes: dict[bytes, deque[Outcome]] = field(default_factory=dict)
    cannot_begin: set[bytes] = field(default_factory=set)
    in_order: bool = False
    begun: list[bytes] = field(default_factory=list)
    finished: list[bytes] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    noted: list[bytes] = field(default_factory=list)
    most_under_way: int = 0
    on_begin: Callable[[bytes], None] = lambda body: None
    on_finish: Callable[[bytes], None] = lambda body: None

    def prepare(self, batch: bytes) -> Prepared:
        if batch.startswith(b"bad"):
            raise ValueError("no batch")
        return Prepared(batch)

    def begin_send(self, prepared: Prepared) -> Finish:
        body = prepared.body
        if body in self.cannot_begin:
            self.cannot_begin.remove(body)
            raise ConnectionRefusedError("nobody listens")
        self.begun.append(body)
        self.on_begin(body)
        self.most_under_way = max(self.most_under_way, len(self.begun) - len(self.finished))

        def finish() -> PartialSuccess | None:
            self.finished.append(body)
            self.on_finish(body)
            outcome = self.outcomes[body].popleft() if self.outcomes.get(body) else None
            if isinstance(outcome, Exception):
                raise outcome
            self.taken.append(body)
            return outcome

        return finish

    def send(self, prepared: Prepared) -> PartialSuccess | None:
        return self.begin_send(prepared)()

    def split(self, batch: bytes) -> list[bytes] | None:
        middle = len(batch) // 2
        return [batch[:middle], batch[middle:]] if middle else None

    def close(self) -> None: ...


class Bench:
    """A row and all that it works with."""

    def __init__(self, exporter: Overlapping, *, limit: int = 8, widths: Iterator[int] | None = None) -> None:
        self.clock = FakeClock()
        self.exporter = exporter
        self.tally = Tally()
        self.source = LeasedMemory(MemoryQueue(), clock=self.clock)
        breaker = CircuitBreaker(BreakerConfig(threshold=5, reset_timeout=30.0))
        self.gate = Gate(breaker, Backoff(BackoffConfig(jitter=0.0)), limit, self.clock)
        self.delivery = Delivery(self.source, exporter, self.gate, self.tally, self.clock)
        self.sent = Sent()
        widths = widths or cycle([3])
        self.row = Row(self.source, self.delivery, self.gate, self.sent, lambda now: next(widths), self.clock)

    def use(self, queue: FastQueue) -> None:
        """Have this one instead of a queue in memory."""
        self.source = queue  # type: ignore[assignment]
        self.delivery = Delivery(queue, self.exporter, self.gate, self.tally, self.clock)
        self.row = Row(queue, self.delivery, self.gate, self.sent, lambda now: 3, self.clock)

    def push(self, count: int) -> list[bytes]:
        batches = [b"batch %04d" % number for number in range(count)]
        for batch in batches:
            self.source.push(batch)
        return batches

    def send(self) -> None:
        """What a worker does, once."""
        permit = self.gate.enter(0.0)
        if permit is None:
            self.clock.advance(max(self.gate.rest(), 0.1))
            return
        try:
            leases = self.source.lease(1)
        except DiskFailed:
            self.gate.release(permit)
            raise
        job = self.delivery.prepare(leases[0]) if leases else None
        if job is None:
            self.gate.release(permit)
            self.clock.advance(0.1)  # until one that failed may go out again
            return
        self.row.send(job, permit)

    def check_at_rest(self) -> None:
        assert self.gate.inflight == 0
        assert self.source.stats().leased == 0

    def drain(self) -> None:
        for _ in range(10_000):
            if not len(self.source):
                return
            self.send()
            self.check_at_rest()
        raise AssertionError(f"{len(self.source)} batches never came to an end")


def down() -> Exception:
    return TransientExportError("503")


def test_as_many_are_under_way_as_are_wanted_and_they_keep_their_order() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(50)
    bench.send()
    bench.check_at_rest()
    assert exporter.taken == exporter.begun == batches
    assert exporter.most_under_way == 3
    assert (bench.sent.batches, bench.sent.bytes) == (50, sum(map(len, batches)))


def test_it_never_exceeds_the_limit_of_all_sends() -> None:
    exporter = Overlapping()
    bench = Bench(exporter, limit=2)
    bench.push(20)
    bench.send()
    bench.check_at_rest()
    assert exporter.most_under_way == 2


def test_what_others_have_under_way_counts_against_as_many_as_are_wanted() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(20)
    permit = entered(bench.gate)
    exporter.on_finish = lambda body: bench.gate.succeeded(permit) if body == batches[9] else None
    under_way: list[int] = []
    exporter.on_begin = lambda body: under_way.append(bench.gate.inflight)
    bench.send()
    bench.check_at_rest()
    assert max(under_way) == exporter.most_under_way == 3
    assert exporter.taken == batches


def test_one_that_is_not_wanted_any_more_finishes_what_is_under_way_and_begins_nothing() -> None:
    exporter = Overlapping()
    bench = Bench(exporter, widths=iter([3, 3, 0, 0, 0]))
    batches = bench.push(20)
    bench.send()
    bench.check_at_rest()
    assert exporter.taken == batches[:5]
    assert len(bench.source) == 15


def test_fewer_are_under_way_when_fewer_are_wanted() -> None:
    widths = iter([4, 4, 4] + [1] * 100)
    exporter = Overlapping()
    under_way: list[int] = []
    exporter.on_finish = lambda body: under_way.append(len(exporter.begun) - len(exporter.finished) + 1)
    bench = Bench(exporter, widths=widths)
    bench.push(20)
    bench.send()
    assert max(under_way) == 4
    assert under_way[-10:] == [1] * 10


def test_after_a_failure_nothing_is_begun_and_what_was_under_way_is_settled() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    exporter.outcomes[batches[4]] = deque([down()])
    bench.send()
    bench.check_at_rest()
    assert exporter.begun == batches[:7]  # two more were under way
    assert exporter.taken == [batch for batch in batches[:7] if batch != batches[4]]
    assert len(bench.source) == 4
    bench.drain()
    assert sorted(exporter.taken) == batches


@pytest.mark.parametrize("attempts", [1, 2])
def test_what_waits_for_a_place_when_the_gate_is_stopped_is_given_back_as_it_was(attempts: int) -> None:
    bench = Bench(Overlapping(), limit=1)
    bench.push(1)
    for _ in range(attempts - 1):
        bench.source.nack(bench.source.lease(1)[0])
    entered(bench.gate)
    sending = threading.Thread(target=bench.send, daemon=True)
    sending.start()
    wait_until(lambda: bench.gate._waiting)
    bench.gate.stop()
    sending.join(5)
    assert bench.exporter.begun == []
    assert [lease.attempts for lease in bench.source.lease(1)] == [attempts]


def test_parts_that_were_taken_are_not_sent_again_even_where_every_attempt_is_the_first() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    bench.source.max_attempts = 1
    bench.push(1)
    exporter.outcomes = {b"batch 0000": deque([PayloadTooLarge("413")]), b" 0000": deque([ConnectionResetError()])}
    bench.send()
    assert exporter.taken == [b"batch"]
    bench.drain()
    assert exporter.taken == [b"batch", b" 0000"]


class Noting(Overlapping):
    def send(self, prepared: Prepared) -> PartialSuccess | None:
        self.noted.append(prepared.body)
        return super().send(prepared)


class NotingBoth(Noting):
    def begin_send(self, prepared: Prepared) -> Finish:
        self.noted.append(prepared.body)
        return super().begin_send(prepared)


def test_a_send_that_a_subclass_overrides_is_not_passed_over() -> None:
    bench = Bench(Noting())
    batches = bench.push(5)
    bench.drain()
    assert not bench.delivery.overlaps
    assert bench.exporter.noted == bench.exporter.taken == batches


def test_a_send_that_an_object_has_of_its_own_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Overlapping()
    monkeypatch.setattr(exporter, "send", lambda prepared: exporter.noted.append(prepared.body))
    bench = Bench(exporter)
    batches = bench.push(5)
    bench.drain()
    assert exporter.noted == batches


def test_a_subclass_that_overrides_both_has_several_under_way() -> None:
    bench = Bench(NotingBoth())
    batches = bench.push(5)
    bench.drain()
    assert bench.delivery.overlaps
    assert bench.exporter.noted == bench.exporter.taken == batches


def test_it_has_several_under_way_again_after_it_has_ended() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(20)
    exporter.outcomes[batches[4]] = deque([PermanentExportError("400")])
    bench.send()
    assert exporter.begun == batches[:7]
    exporter.most_under_way = 0
    bench.send()
    assert exporter.most_under_way == 3
    assert len(bench.source) == 0


def test_it_ends_where_another_waits_for_a_place() -> None:
    exporter = Overlapping()
    bench = Bench(exporter, limit=3)
    batches = bench.push(20)
    permit = bench.gate.enter(0.0)
    assert permit is not None
    wait = partial(bench.gate.begin, permit)
    others = [threading.Thread(target=wait, daemon=True) for _ in range(3)]  # one for each that ends

    def have_others_wait(body: bytes) -> None:
        if body == batches[4]:
            for other in others:
                other.start()
            wait_until(lambda: bench.gate._waiting == 3)

    exporter.on_finish = have_others_wait
    bench.send()
    for other in others:
        other.join(20)
    assert exporter.begun == batches[:7]
    assert bench.gate.inflight == 3


def test_it_ends_where_another_has_failed() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(20)
    permit = entered(bench.gate)

    def fail(body: bytes) -> None:
        if body == batches[4]:
            bench.gate.failed(permit, TransientExportError("429", retry_after=60.0), 1)

    exporter.on_finish = fail
    bench.send()
    bench.check_at_rest()
    assert exporter.taken == exporter.begun == batches[:6]


def test_it_tells_how_long_they_took_and_what_was_refused_of_them() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(3)
    exporter.outcomes[batches[1]] = deque([PartialSuccess(7, "too old")])
    exporter.on_finish = lambda body: bench.clock.advance(0.25)
    bench.send()
    assert bench.tally["partial_rejected"] == 7
    assert bench.delivery.latency.value == pytest.approx(0.25 + 0.2 * 0.25)  # the last one waited behind another


def test_what_it_sends_alone_is_told_of_as_well() -> None:
    widths = iter([3, 3])
    bench = Bench(Overlapping(), widths=widths)
    bench.push(1)
    bench.source.nack(bench.source.lease(1)[0])
    bench.send()
    assert len(list(widths)) == 1


def test_one_that_cannot_even_be_sent_fails_when_its_turn_comes() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    exporter.cannot_begin = {batches[3]}
    bench.send()
    bench.check_at_rest()
    assert exporter.taken == [batches[number] for number in (0, 1, 2, 4, 5)]
    bench.drain()
    assert sorted(exporter.taken) == batches


def test_a_batch_that_comes_again_goes_alone_after_the_others_are_settled() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(6)
    first = bench.source.lease(1)[0]
    under_way_then: list[int] = []

    def look(body: bytes) -> None:
        if body == batches[2]:
            bench.source.nack(first)  # it is the next one to be leased
        if body == batches[0]:
            under_way_then.append(len(exporter.begun) - len(exporter.finished))

    exporter.on_finish = look
    bench.send()
    bench.check_at_rest()
    assert under_way_then == [0]
    bench.drain()
    assert sorted(exporter.taken) == batches


def test_two_that_come_again_go_out_one_after_the_other() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    again = bench.source.lease(2)

    def let_both_come_again(body: bytes) -> None:
        for lease in again if body == batches[4] else ():
            bench.source.nack(lease)

    exporter.on_finish = let_both_come_again
    bench.send()
    bench.check_at_rest()
    bench.drain()
    assert sorted(exporter.taken) == batches


def test_a_batch_that_waits_for_its_time_holds_up_no_others(tmp_path: Path) -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    with FastQueue(tmp_path, clock=bench.clock) as queue:
        bench.use(queue)
        batches = bench.push(10)
        queue.nack(queue.lease(1)[0], delay=60.0)
        bench.send()
        assert exporter.taken == batches[1:]
        assert queue.stats().leased == bench.gate.inflight == 0


def test_a_batch_that_comes_again_is_given_back_if_the_destination_failed_meanwhile() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(6)
    first = bench.source.lease(1)[0]
    exporter.outcomes = {batch: deque([TransientExportError("429", retry_after=60.0)]) for batch in batches[3:]}
    exporter.on_finish = lambda body: bench.source.nack(first) if body == batches[2] else None
    bench.send()
    bench.check_at_rest()
    assert batches[0] not in exporter.begun


def test_a_queue_that_is_closed_meanwhile_ends_it_quietly(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)

    def close(*_: object) -> None:
        raise QueueClosed("closed")

    def close_at(body: bytes) -> None:
        if body == batches[2]:
            bench.source.exchange = close  # type: ignore[method-assign,assignment]
            bench.source.lease = bench.source.ack = close  # type: ignore[method-assign,assignment]

    exporter.on_finish = close_at
    bench.send()
    assert bench.gate.inflight == 0
    assert exporter.begun == exporter.finished
    assert caplog.text.count("Queue was closed before a send was acknowledged") == 3


def test_a_queue_that_is_closed_before_the_next_is_leased_ends_it_as_quietly(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    exporter.on_begin = lambda body: bench.source.close() if body == batches[1] else None
    bench.send()
    bench.check_at_rest()
    assert exporter.taken == exporter.begun == batches[:2]
    assert caplog.text == ""


def test_what_nobody_foresaw_is_raised_after_what_is_under_way_is_settled() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    exchange = bench.source.exchange

    def fail_at(body: bytes) -> None:
        def fail(lease: object) -> None:
            bench.source.exchange = exchange  # type: ignore[method-assign]
            raise ZeroDivisionError("a mistake of ours")

        if body == batches[3]:
            bench.source.exchange = fail  # type: ignore[method-assign]

    exporter.on_finish = fail_at
    with pytest.raises(ZeroDivisionError):
        bench.send()
    bench.check_at_rest()
    assert exporter.finished == exporter.begun == batches[:6]
    assert len(bench.source) == 5  # the one that it happened to comes again: nobody knows whether it was acked
    bench.drain()
    assert set(exporter.taken) == set(batches)


class Cancelled(BaseException):
    """As what asyncio raises: no Exception, and the thread does not go on."""


@pytest.mark.parametrize("when", ["prepare", "begin", "finish", "exchange", "alone"])
def test_what_is_no_exception_ends_it_as_well_with_everything_settled(when: str) -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)

    def cancel(*_: object) -> NoReturn:
        vars(bench.source).pop("exchange", None)
        vars(exporter).pop("prepare", None)
        raise Cancelled

    def cancel_at(number: int) -> Callable[[bytes], None]:
        return lambda body: cancel() if body == batches[number] else None

    def from_there_on(body: bytes) -> None:
        if body == batches[3]:
            if when == "exchange":
                bench.source.exchange = cancel  # type: ignore[method-assign,assignment]
            if when == "prepare":
                exporter.prepare = cancel  # type: ignore[method-assign,assignment]

    exporter.on_finish = {"finish": cancel_at(3), "alone": cancel_at(0)}.get(when, from_there_on)
    if when == "alone":
        bench.source.nack(bench.source.lease(1)[0])
    if when == "begin":
        exporter.on_begin = cancel_at(6)
    with pytest.raises(Cancelled):
        bench.send()
    bench.check_at_rest()
    exporter.on_begin = exporter.on_finish = lambda body: None
    bench.drain()
    assert set(exporter.taken) == set(batches)


def test_what_was_sent_last_is_let_go_of() -> None:
    bench = Bench(Overlapping())
    bench.push(4)
    first = bench.source.lease(1)[0]
    bench.exporter.on_begin = lambda body: bench.source.nack(first) if body == b"batch 0002" else None
    bench.send()
    assert len(bench.source) < 3
    assert bench.row._last is None


def test_the_first_that_nobody_foresaw_is_the_one_that_is_raised() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    errors = iter([ZeroDivisionError("first"), LookupError("second")])

    def fail(lease: object) -> NoReturn:
        raise next(errors)

    def fail_from(body: bytes) -> None:
        if body == batches[3]:
            bench.source.exchange = bench.source.ack = fail  # type: ignore[method-assign,assignment]

    exporter.on_finish = fail_from
    with pytest.raises(ZeroDivisionError):
        bench.send()
    bench.check_at_rest()


def test_one_that_can_neither_be_prepared_nor_be_a_dead_letter_rests() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    bench.push(3)
    bench.source.push(b"bad")

    def fail(lease: object, reason: str) -> NoReturn:
        raise ZeroDivisionError("a mistake of ours")

    bench.source.reject = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        bench.send()
    bench.check_at_rest()
    assert bench.source.lease(1) == []
    bench.clock.advance(1.0)
    assert [lease.data for lease in bench.source.lease(9)] == [b"bad"]


def test_a_probe_that_succeeds_closes_the_circuit() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    for permit in [entered(bench.gate) for _ in range(5)]:
        bench.gate.failed(permit, TransientExportError("503"), 1)
    assert bench.gate.opened == 1
    bench.clock.advance(30.0)
    batches = bench.push(10)
    bench.send()
    assert exporter.taken == batches[:1]
    assert bench.gate.state is CircuitState.CLOSED


def test_parts_of_what_was_too_large_before_the_circuit_opened_wait_with_the_others() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    bench.source.push(b"AAAABBBB")
    exporter.outcomes[b"AAAABBBB"] = deque([PayloadTooLarge("413")])
    others = [entered(bench.gate) for _ in range(5)]

    def open_circuit(body: bytes) -> None:
        while others:
            bench.gate.failed(others.pop(), TransientExportError("503"), 1)

    exporter.on_finish = open_circuit
    bench.send()
    assert exporter.begun == [b"AAAABBBB"]
    bench.check_at_rest()
    bench.clock.advance(30.0)
    bench.send()
    assert exporter.taken == [b"AAAA", b"BBBB"]
    assert bench.gate.state is CircuitState.CLOSED


def test_a_part_that_cannot_be_prepared_takes_the_probe_from_nobody() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    bench.source.push(b"bad-good")
    lease = bench.source.lease(1)[0]
    bench.delivery._progress[lease.sequence] = _Progress(deque([b"bad-", b"good"]))
    bench.source.nack(lease)
    for permit in [entered(bench.gate) for _ in range(5)]:
        bench.gate.failed(permit, TransientExportError("503"), 1)
    bench.clock.advance(30.0)
    exporter.on_begin = lambda body: second.append(bench.gate.enter(0.0))
    second: list[object] = []
    probe = bench.gate.enter(0.0)
    assert probe is not None
    bench.row.send(Job(bench.source.lease(1)[0], Prepared(b"bad-good")), probe)
    assert exporter.taken == [b"good"]
    assert second == [None]  # nobody else may probe meanwhile
    assert [letter.data for letter in bench.source.dead_letters] == [b"bad-"]
    bench.check_at_rest()


def test_a_probe_is_alone() -> None:
    exporter = Overlapping()
    bench = Bench(exporter)
    batches = bench.push(10)
    for batch in batches:
        exporter.outcomes[batch] = deque([ConnectionResetError("reset")] * 100)
    while bench.gate.opened == 0:
        bench.send()
    bench.clock.advance(30.0)
    before = len(exporter.begun)
    exporter.on_finish = lambda body: under_way.append(len(exporter.begun) - len(exporter.finished) + 1)
    under_way: list[int] = []
    bench.send()
    assert len(exporter.begun) == before + 1
    assert under_way == [1]


outcomes = st.sampled_from(
    ["ok", "ok", "ok", "partial", "down", "timeout", "later", "refused", "server error", "too large", "cannot begin"]
)


def outcome_of(kind: str) -> Outcome:
    made: dict[str, Outcome] = {
        "partial": PartialSuccess(1, "one was too old"),
        "down": ConnectionResetError("reset"),
        "timeout": TimeoutError("late"),
        "later": TransientExportError("429", retry_after=5.0),
        "refused": PermanentExportError("400"),
        "server error": TransientExportError("503"),
        "too large": PayloadTooLarge("413"),
    }
    return made.get(kind)


@given(
    plans=st.lists(st.lists(outcomes, max_size=3), min_size=1, max_size=30),
    widths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    limit=st.integers(1, 4),
    bad=st.sets(st.integers(0, 29), max_size=3),
)
def test_whatever_happens_every_batch_arrives_once_or_is_a_dead_letter(
    plans: list[list[str]], widths: list[int], limit: int, bad: set[int]
) -> None:
    exporter = Overlapping()
    bench = Bench(exporter, limit=limit, widths=cycle(widths))
    batches = []
    refused = set()
    for number, plan in enumerate(plans):
        batch = b"bad %04d" % number if number in bad else b"%04d-%04d" % (number, number)
        batches.append(batch)
        bench.source.push(batch)
        exporter.outcomes[batch] = deque(outcome_of(kind) for kind in plan if kind != "cannot begin")
        if "cannot begin" in plan:
            exporter.cannot_begin.add(batch)
        decisive = next((kind for kind in plan if kind in ("ok", "partial", "refused", "too large")), "ok")
        if number in bad or decisive == "refused":
            refused.add(batch)
    bench.drain()
    whole = sorted(set(batches) - refused)
    arrived = sorted(body for body in exporter.taken if body in batches)
    halves = [body for body in exporter.taken if body not in batches]
    joined = sorted(first + second for first in halves for second in halves if first + second in batches)
    assert sorted(arrived + joined) == whole
    assert len(halves) == 2 * len(joined)
    assert {letter.data for letter in bench.source.dead_letters} == refused
    assert [body for body in exporter.finished if body in batches] == [
        body for body in exporter.begun if body in batches
    ]
    assert exporter.most_under_way <= max(1, min(limit, max(widths)))


@given(
    count=st.integers(1, 30),
    widths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    faults=st.lists(st.tuples(st.sampled_from(["lease", "exchange", "ack"]), st.integers(1, 20)), max_size=6),
    failing=st.sets(st.integers(0, 29), max_size=4),
)
def test_whatever_the_queue_raises_every_batch_arrives_and_what_was_leased_is_settled(
    count: int, widths: list[int], faults: list[tuple[str, int]], failing: set[int]
) -> None:
    exporter = Overlapping()
    bench = Bench(exporter, widths=cycle(widths))
    batches = bench.push(count)
    exporter.outcomes = {batches[number]: deque([down()]) for number in failing if number < count}
    calls: Counter[str] = Counter()

    def broken(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls[name] += 1
            if (name, calls[name]) in faults:
                raise DiskFailed("it cannot be read")
            return method(*arguments)

        return call

    for name in ("lease", "exchange", "ack"):
        setattr(bench.source, name, broken(name, getattr(bench.source, name)))
    for _ in range(1000):
        if not len(bench.source):
            break
        with suppress(DiskFailed):
            bench.send()
        bench.check_at_rest()
    assert set(exporter.taken) == set(batches)
    assert len(exporter.taken) <= count + sum(name != "lease" for name, _ in faults)
