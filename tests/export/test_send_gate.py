"""The gate: what one outcome means for the next sends, with a clock that only the test moves."""

import math
import subprocess
import sys
import threading

import pytest

from penstock.errors import ErrorClass, TransientExportError
from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig, CircuitBreaker, CircuitState
from penstock.export.send_gate import SendGate
from penstock.testing import FakeClock, wait_until
from tests.export.quick import begun

DOWN = TransientExportError("down", ErrorClass.NETWORK)
LATER = TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=60.0)
BROKEN = TransientExportError("500", ErrorClass.SERVER_ERROR)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def gate_of(clock: FakeClock, *, threshold: int = 5, limit: int = 8, in_order: bool = False) -> SendGate:
    breaker = CircuitBreaker(BreakerConfig(threshold=threshold, reset_timeout=30.0))
    return SendGate(breaker, Backoff(BackoffConfig(jitter=0.0)), limit, clock, in_order=in_order)


def test_the_first_failure_in_a_row_is_the_batchs_alone(clock: FakeClock) -> None:
    gate = gate_of(clock)
    assert gate.failed(begun(gate), DOWN, attempts=1) == 5.0
    assert gate.wait_open(0.0)
    assert gate.pause_left() == 0.0


def test_from_the_second_on_the_destination_is_left_alone(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.failed(begun(gate), DOWN, attempts=1)
    assert gate.failed(begun(gate), DOWN, attempts=1) == 0.0  # it keeps its place: the gate is what waits
    assert not gate.wait_open(0.0)
    assert gate.pause_left() == 10.0
    clock.advance(10.0)
    assert gate.wait_open(0.0)


def test_sends_that_were_under_way_together_are_one_failure(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=100)
    permits = [begun(gate) for _ in range(8)]
    for permit in permits:
        gate.failed(permit, DOWN, attempts=1)
    assert gate.pause_left() == 0.0


def test_a_success_ends_the_pause_and_the_count(clock: FakeClock) -> None:
    gate = gate_of(clock)
    slow = begun(gate)
    for _ in range(2):
        gate.failed(begun(gate), DOWN, attempts=1)
    assert not gate.wait_open(0.0)
    gate.succeeded(slow)
    assert gate.wait_open(0.0)
    assert gate.failed(begun(gate), DOWN, attempts=1) == 5.0


def test_once_the_circuit_is_open_its_rest_counts_and_not_the_backoff(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    for _ in range(12):
        assert gate.failed(begun(gate), DOWN, attempts=1) == 0.0
        assert gate.state is CircuitState.OPEN
        assert gate.pause_left() == 30.0
        clock.advance(30.0)
    assert gate.opened == 12


def test_a_batch_that_meets_server_errors_steps_aside_for_longer_each_time(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    delays = []
    for attempts in range(1, 9):
        delays.append(gate.failed(begun(gate), BROKEN, attempts))
        clock.advance(30.0)
    assert delays[1:] == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


def test_a_batch_that_failed_often_waits_for_longer_also_where_others_did_not_fail(clock: FakeClock) -> None:
    gate = gate_of(clock)
    assert gate.failed(begun(gate), BROKEN, attempts=4) == 40.0
    assert gate.pause_left() == 0.0


@pytest.mark.parametrize("error_class", ErrorClass)
def test_a_failure_that_any_other_would_have_met_is_not_held_against_a_batch(
    clock: FakeClock, error_class: ErrorClass
) -> None:
    may_be_its_own = {ErrorClass.SERVER_ERROR, ErrorClass.TIMEOUT, ErrorClass.UNKNOWN}
    blames = gate_of(clock).counts_as_attempt(TransientExportError("x", error_class))
    assert blames is (error_class in may_be_its_own)


def test_in_order_nothing_passes_a_batch_that_failed(clock: FakeClock) -> None:
    gate = gate_of(clock, in_order=True)
    assert gate.failed(begun(gate), BROKEN, attempts=3) == 0.0
    assert not gate.wait_open(0.0)
    assert gate.pause_left() == 5.0


def test_retry_after_holds_everything_and_settles_no_probe(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(begun(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = begun(gate)
    busy = TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=7.0)
    assert gate.failed(probe, busy, attempts=1) == 0.0
    assert gate.state.value == "half_open"
    assert not gate.wait_open(0.0)
    clock.advance(7.0)
    again = begun(gate)
    assert gate.begin() is None  # still one probe at a time
    gate.succeeded(again)
    assert gate.state is CircuitState.CLOSED


def test_nothing_that_was_under_way_cuts_retry_after_short(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=2)
    busy, fine, down, down_too = (begun(gate) for _ in range(4))
    gate.failed(busy, TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=60.0), attempts=1)
    gate.succeeded(fine)
    assert gate.pause_left() == 60.0
    assert not gate.wait_open(0.0)
    for permit in (down, down_too):
        gate.failed(permit, DOWN, attempts=1)
    assert gate.state is CircuitState.OPEN
    assert gate.pause_left() == 60.0
    clock.advance(60.0)
    assert gate.wait_open(0.0)


def test_a_circuit_that_opens_ends_a_longer_backoff(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=5)
    for pause in (0.0, 10.0, 20.0):
        gate.failed(begun(gate), DOWN, attempts=1)
        clock.advance(pause)
    first, second = begun(gate), begun(gate)
    gate.failed(first, DOWN, attempts=1)
    assert gate.pause_left() == 40.0
    gate.failed(second, DOWN, attempts=1)
    assert gate.state is CircuitState.OPEN
    assert gate.pause_left() == 30.0


def test_no_exporter_holds_everything_back_for_longer_than_an_hour(clock: FakeClock) -> None:
    gate = gate_of(clock)
    for never in (1e9, math.inf):
        gate.failed(begun(gate), TransientExportError("later", retry_after=never), attempts=1)
        assert gate.pause_left() == 3600.0
        clock.advance(3600.0)


def test_a_destination_that_says_at_once_each_time_is_not_hammered(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.failed(begun(gate), TransientExportError("503", retry_after=0.0), attempts=1)
    assert not gate.wait_open(0.0)
    clock.advance(0.1)
    assert gate.wait_open(0.0)


def test_a_probe_that_is_abandoned_makes_way_for_another(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(begun(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = begun(gate)
    assert not gate.wait_open(0.0)
    gate.abandoned(probe)
    assert gate.inflight == 0
    assert gate.begin() is not None


def test_to_ask_takes_no_probe(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(begun(gate), DOWN, attempts=1)
    clock.advance(30.0)
    assert gate.wait_open(0.0)
    assert gate.wait_open(0.0)
    assert gate.opened == 1
    assert gate.begin() is not None
    assert gate.state is CircuitState.HALF_OPEN


def in_begin(gate: SendGate, count: int) -> tuple[list[threading.Thread], list[object]]:
    """Threads that wait for room, and what `begin` has returned to them."""
    results: list[object] = []
    waiting = [threading.Thread(target=lambda: results.append(gate.begin()), daemon=True) for _ in range(count)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(gate._changed._waiters) == count)  # type: ignore[attr-defined]
    return waiting, results


def test_all_threads_that_wait_for_room_get_it_when_several_sends_end_at_once(clock: FakeClock) -> None:
    gate = gate_of(clock, limit=2)
    permits = [begun(gate) for _ in range(2)]
    waiting, results = in_begin(gate, 2)
    for permit in permits:
        gate.succeeded(permit)
    for thread in waiting:
        thread.join(5)
    assert None not in results
    assert gate.inflight == 2


@pytest.mark.parametrize("what", ["an open circuit", "a pause", "a stop"])
def test_no_thread_that_waited_for_room_begins_after(what: str, clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1, limit=1)
    permit = begun(gate)
    waiting, results = in_begin(gate, 3)
    if what == "a stop":
        gate.stop()
    else:
        gate.failed(permit, DOWN if what == "an open circuit" else LATER, attempts=1)
    for thread in waiting:
        thread.join(5)
    assert results == [None] * 3
    assert gate.inflight == (1 if what == "a stop" else 0)


def test_a_failure_from_before_the_circuit_opened_holds_up_no_probe(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=2)
    slow, *others = (begun(gate) for _ in range(3))
    for permit in others:
        gate.failed(permit, DOWN, attempts=1)
    for _ in range(5):
        clock.advance(30.0)
        gate.failed(begun(gate), DOWN, attempts=1)
    clock.advance(30.0)
    gate.abandoned(begun(gate))
    gate.failed(slow, DOWN, attempts=1)
    assert gate.pause_left() == 0.0
    assert gate.wait_open(0.0)


def test_a_success_from_before_the_circuit_opened_does_not_close_it(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    slow = begun(gate)
    gate.failed(begun(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = begun(gate)
    gate.succeeded(slow)
    assert gate.state.value == "half_open"
    gate.succeeded(probe)
    assert gate.state.value == "closed"


def test_a_success_from_before_the_circuit_opened_leaves_no_failures_behind(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=3)
    slow, *others = (begun(gate) for _ in range(4))
    for permit in others:
        gate.failed(permit, DOWN, attempts=1)
    clock.advance(30.0)
    gate.succeeded(begun(gate))
    together = [begun(gate) for _ in range(2)]
    for permit in together:
        gate.failed(permit, DOWN, attempts=1)
    gate.succeeded(slow)
    for _ in range(10):
        gate.succeeded(begun(gate))
    gate.failed(begun(gate), DOWN, attempts=1)
    assert gate.state is CircuitState.CLOSED


def test_the_next_part_of_a_batch_goes_out_only_where_the_destination_is_not_left_alone(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(begun(gate), DOWN, attempts=1)
    assert gate.begin(is_continued=True) is None
    clock.advance(30.0)
    assert gate.begin(is_continued=True) is not None  # as the probe
    assert gate.begin(is_continued=True) is None


def test_the_next_part_of_a_batch_goes_out_though_the_gate_has_stopped(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.stop()
    assert gate.begin() is None
    assert gate.begin(is_continued=True) is not None


def test_a_thread_that_waits_for_the_gate_returns_when_it_stops(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(begun(gate), DOWN, attempts=1)
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(gate.wait_open(60.0)))
    waiting.start()
    wait_until(lambda: gate.rejected > 0)
    gate.stop()
    waiting.join(5)
    assert results == [False]
    assert not gate.wait_open(0.0)


def test_exporters_are_public_and_load_what_they_need_only_when_asked_for() -> None:
    code = (
        "import sys, penstock\n"
        "penstock.OtlpHttpExporter, penstock.RemoteWriteExporter, penstock.ConsoleExporter\n"
        "assert not {'pika', 'pyarrow', 'pyspark'} & set(sys.modules)\n"
        "penstock.AmqpExporter, penstock.SegmentExporter\n"
        "assert {'pika', 'pyarrow'} <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
