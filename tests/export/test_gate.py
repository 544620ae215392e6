"""The gate: what one outcome means for the next sends, with a clock that moves only when told to."""

import math
import subprocess
import sys
import threading

import pytest

from penstock.errors import ErrorClass, TransientExportError
from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig, CircuitBreaker, CircuitState
from penstock.export.send_gate import Gate
from penstock.testing import FakeClock, wait_until
from tests.export.quick import entered

DOWN = TransientExportError("down", ErrorClass.NETWORK)
LATER = TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=60.0)
BROKEN = TransientExportError("500", ErrorClass.SERVER_ERROR)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def gate_of(clock: FakeClock, *, threshold: int = 5, limit: int = 8, in_order: bool = False) -> Gate:
    breaker = CircuitBreaker(BreakerConfig(threshold=threshold, reset_timeout=30.0))
    return Gate(breaker, Backoff(BackoffConfig(jitter=0.0)), limit, clock, in_order=in_order)


def test_the_first_failure_in_a_row_is_the_batchs_alone(clock: FakeClock) -> None:
    gate = gate_of(clock)
    assert gate.failed(entered(gate), DOWN, attempts=1) == 5.0
    assert gate.enter(0.0) is not None
    assert gate.rest() == 0.0


def test_from_the_second_on_the_destination_is_left_alone(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.failed(entered(gate), DOWN, attempts=1)
    assert gate.failed(entered(gate), DOWN, attempts=1) == 0.0  # it keeps its place: the gate is what waits
    assert gate.enter(0.0) is None
    assert gate.rest() == 10.0
    clock.advance(10.0)
    assert gate.enter(0.0) is not None


def test_sends_that_were_under_way_together_are_one_failure(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=100)
    permits = [entered(gate) for _ in range(8)]
    for permit in permits:
        gate.failed(permit, DOWN, attempts=1)
    assert gate.rest() == 0.0


def test_a_success_ends_the_pause_and_the_count(clock: FakeClock) -> None:
    gate = gate_of(clock)
    slow = entered(gate)
    for _ in range(2):
        gate.failed(entered(gate), DOWN, attempts=1)
    assert gate.enter(0.0) is None
    gate.succeeded(slow)
    assert gate.enter(0.0) is not None
    assert gate.failed(entered(gate), DOWN, attempts=1) == 5.0


def test_once_the_circuit_is_open_its_rest_counts_and_not_the_backoff(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    for _ in range(12):
        assert gate.failed(entered(gate), DOWN, attempts=1) == 0.0
        assert gate.state is CircuitState.OPEN
        assert gate.rest() == 30.0
        clock.advance(30.0)
    assert gate.opened == 12


def test_a_batch_that_meets_server_errors_steps_aside_for_longer_each_time(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    delays = []
    for attempts in range(1, 9):
        delays.append(gate.failed(entered(gate), BROKEN, attempts))
        clock.advance(30.0)
    assert delays[1:] == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


def test_a_batch_that_failed_often_waits_for_longer_also_where_others_did_not_fail(clock: FakeClock) -> None:
    gate = gate_of(clock)
    assert gate.failed(entered(gate), BROKEN, attempts=4) == 40.0
    assert gate.rest() == 0.0


@pytest.mark.parametrize("error_class", ErrorClass)
def test_a_failure_that_any_other_would_have_met_is_not_held_against_a_batch(
    clock: FakeClock, error_class: ErrorClass
) -> None:
    may_be_its_own = {ErrorClass.SERVER_ERROR, ErrorClass.TIMEOUT, ErrorClass.UNKNOWN}
    blames = gate_of(clock).blames_batch(TransientExportError("x", error_class))
    assert blames is (error_class in may_be_its_own)


def test_in_order_nothing_passes_a_batch_that_failed(clock: FakeClock) -> None:
    gate = gate_of(clock, in_order=True)
    assert gate.failed(entered(gate), BROKEN, attempts=3) == 0.0
    assert gate.enter(0.0) is None
    assert gate.rest() == 5.0


def test_retry_after_holds_everything_and_settles_no_probe(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(entered(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = entered(gate)
    busy = TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=7.0)
    assert gate.failed(probe, busy, attempts=1) == 0.0
    assert gate.state.value == "half_open"
    assert gate.enter(0.0) is None
    clock.advance(7.0)
    again = entered(gate)
    assert gate.enter(0.0) is None  # still one probe at a time
    gate.succeeded(again)
    assert gate.state is CircuitState.CLOSED


def test_nothing_that_was_under_way_cuts_retry_after_short(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=2)
    busy, fine, down, down_too = (entered(gate) for _ in range(4))
    gate.failed(busy, TransientExportError("429", ErrorClass.RATE_LIMIT, retry_after=60.0), attempts=1)
    gate.succeeded(fine)
    assert gate.rest() == 60.0
    assert gate.enter(0.0) is None
    for permit in (down, down_too):
        gate.failed(permit, DOWN, attempts=1)
    assert gate.state is CircuitState.OPEN
    assert gate.rest() == 60.0
    clock.advance(60.0)
    assert gate.enter(0.0) is not None


def test_a_circuit_that_opens_ends_a_longer_backoff(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=5)
    for pause in (0.0, 10.0, 20.0):
        gate.failed(entered(gate), DOWN, attempts=1)
        clock.advance(pause)
    first, second = entered(gate), entered(gate)
    gate.failed(first, DOWN, attempts=1)
    assert gate.rest() == 40.0
    gate.failed(second, DOWN, attempts=1)
    assert gate.state is CircuitState.OPEN
    assert gate.rest() == 30.0


def test_no_exporter_holds_everything_back_for_longer_than_an_hour(clock: FakeClock) -> None:
    gate = gate_of(clock)
    for never in (1e9, math.inf):
        gate.failed(entered(gate), TransientExportError("later", retry_after=never), attempts=1)
        assert gate.rest() == 3600.0
        clock.advance(3600.0)


def test_a_destination_that_says_at_once_each_time_is_not_hammered(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.failed(entered(gate), TransientExportError("503", retry_after=0.0), attempts=1)
    assert gate.enter(0.0) is None
    clock.advance(0.1)
    assert gate.enter(0.0) is not None


def test_a_permit_from_before_a_failure_is_not_current_any_more(clock: FakeClock) -> None:
    gate = gate_of(clock)
    early = gate.enter(0.0)
    assert early is not None
    assert gate.is_current(early)
    for _ in range(2):
        gate.failed(entered(gate), DOWN, attempts=1)
    assert not gate.is_current(early)


def test_a_probe_that_is_released_or_abandoned_makes_way_for_another(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(entered(gate), DOWN, attempts=1)
    clock.advance(30.0)
    first = gate.enter(0.0)
    assert first is not None
    gate.release(first)
    second = entered(gate)
    gate.abandoned(second)
    assert gate.inflight == 0
    assert gate.enter(0.0) is not None


def test_no_more_sends_are_under_way_than_allowed(clock: FakeClock) -> None:
    gate = gate_of(clock, limit=2)
    permits = [entered(gate) for _ in range(2)]
    third = threading.Thread(target=gate.begin, args=(permits[1],))
    third.start()
    gate.succeeded(permits[0])
    third.join(5)
    assert not third.is_alive()
    assert gate.inflight == 2


def test_everyone_who_waits_for_room_is_told_of_it_when_several_sends_end_at_once(clock: FakeClock) -> None:
    gate = gate_of(clock, limit=2)
    permits = [entered(gate) for _ in range(2)]
    waiting = [threading.Thread(target=gate.begin, args=(permits[0],), daemon=True) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: gate._waiting == 2)
    with gate._lock:  # before the first of them can look
        for _ in permits:
            gate._ended_locked()
    for thread in waiting:
        thread.join(5)
    assert gate.inflight == 2


@pytest.mark.parametrize("what", ["an open circuit", "a pause"])
def test_who_waited_for_a_place_does_not_take_it_into(what: str, clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1, limit=1)
    permit = entered(gate)
    results: list[bool] = []
    waiting = [threading.Thread(target=lambda: results.append(gate.begin(permit)), daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: gate._waiting == 3)
    gate.failed(permit, DOWN if what == "an open circuit" else LATER, attempts=1)
    for thread in waiting:
        thread.join(5)
    assert results == [False] * 3
    assert gate.inflight == gate._waiting == 0


def test_a_probe_that_waited_for_a_place_in_vain_makes_way_for_another(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1, limit=1)
    slow = entered(gate)
    early = gate.enter(0.0)
    assert early is not None
    gate._breaker.failed(clock.monotonic(), early.generation)  # of a send beyond the limit, as it was a moment ago
    clock.advance(30.0)
    probe = gate._enter(0.0)
    assert probe is not None
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(gate.begin(probe)), daemon=True)
    waiting.start()
    wait_until(lambda: gate._waiting)
    gate.failed(slow, LATER, attempts=1)
    waiting.join(5)
    assert results == [False]
    clock.advance(60.0)
    assert gate.enter(0.0) == probe


def test_a_failure_from_before_the_circuit_opened_holds_up_no_probe(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=2)
    slow, *others = (entered(gate) for _ in range(3))
    for permit in others:
        gate.failed(permit, DOWN, attempts=1)
    for _ in range(5):
        clock.advance(30.0)
        gate.failed(entered(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = gate.enter(0.0)
    assert probe is not None
    gate.release(probe)  # there was nothing to send
    gate.failed(slow, DOWN, attempts=1)
    assert gate.rest() == 0.0
    assert gate.enter(0.0) is not None


def test_a_success_from_before_the_circuit_opened_does_not_close_it(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    slow = entered(gate)
    gate.failed(entered(gate), DOWN, attempts=1)
    clock.advance(30.0)
    probe = entered(gate)
    gate.succeeded(slow)
    assert gate.state.value == "half_open"
    gate.succeeded(probe)
    assert gate.state.value == "closed"


def test_a_success_from_before_the_circuit_opened_leaves_no_failures_behind(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=3)
    slow, *others = (entered(gate) for _ in range(4))
    for permit in others:
        gate.failed(permit, DOWN, attempts=1)
    clock.advance(30.0)
    gate.succeeded(entered(gate))
    together = [entered(gate) for _ in range(2)]
    for permit in together:
        gate.failed(permit, DOWN, attempts=1)
    gate.succeeded(slow)
    for _ in range(10):
        gate.succeeded(entered(gate))
    gate.failed(entered(gate), DOWN, attempts=1)
    assert gate.state is CircuitState.CLOSED


def test_the_next_part_of_a_batch_goes_out_only_where_the_destination_is_not_left_alone(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    assert gate.enter_again() == gate.enter(0.0)
    gate.failed(entered(gate), DOWN, attempts=1)
    assert gate.enter_again() is None
    clock.advance(30.0)
    assert gate.enter_again() is not None  # as the probe
    assert gate.enter_again() is gate.enter(0.0) is None


def test_the_next_part_of_a_batch_goes_out_though_the_gate_has_stopped(clock: FakeClock) -> None:
    gate = gate_of(clock)
    gate.stop()
    assert gate.enter_again() is not None


def test_nothing_is_current_any_more_when_it_has_stopped(clock: FakeClock) -> None:
    gate = gate_of(clock)
    permit = gate.enter(0.0)
    assert permit is not None
    assert gate.is_current(permit)
    gate.stop()
    assert not gate.is_current(permit)


def test_who_waits_for_the_gate_is_told_when_it_stops(clock: FakeClock) -> None:
    gate = gate_of(clock, threshold=1)
    gate.failed(entered(gate), DOWN, attempts=1)
    results: list[object] = []
    waiting = [
        threading.Thread(target=lambda: results.append(gate.enter(60.0))),
        threading.Thread(target=lambda: results.append(gate.wait_open(60.0))),
    ]
    for thread in waiting:
        thread.start()
    wait_until(lambda: gate.rejected > 0)
    gate.stop()
    for thread in waiting:
        thread.join(5)
    assert sorted(map(bool, results)) == [False, False]
    assert gate.enter(0.0) is None


def test_exporters_are_public_and_load_what_they_need_only_when_asked_for() -> None:
    code = (
        "import sys, penstock\n"
        "penstock.OtlpHttpExporter, penstock.RemoteWriteExporter, penstock.ConsoleExporter\n"
        "assert not {'pika', 'pyarrow', 'pyspark'} & set(sys.modules)\n"
        "penstock.AmqpExporter, penstock.SegmentExporter\n"
        "assert {'pika', 'pyarrow'} <= set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
