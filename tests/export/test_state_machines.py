"""Breaker, backoff and scaler: pure state machines, so every transition is a test and none of them waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.export.backoff import Backoff, BackoffConfig
from penstock.export.breaker import BreakerConfig, CircuitBreaker, CircuitState
from penstock.export.scaler import IDLE_AFTER, AdaptiveWorkersConfig, Ewma, WorkerScaler

STEADY = BackoffConfig(jitter=0.0)


def opened(at: float = 100.0) -> CircuitBreaker:
    breaker = CircuitBreaker(BreakerConfig(threshold=1, reset_timeout="30s"))
    assert breaker.allow(at)
    breaker.failed(at)
    return breaker


def test_the_circuit_opens_at_the_fifth_failure_in_a_row() -> None:
    breaker = CircuitBreaker()
    for _ in range(4):
        breaker.failed(now=0.0)
    assert breaker.allow(now=0.0)
    breaker.failed(now=0.0)
    assert breaker.state is CircuitState.OPEN
    assert breaker.opened == 1


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = CircuitBreaker()
    for _ in range(100):
        breaker.failed(now=0.0)
        breaker.succeeded()
    assert breaker.state is CircuitState.CLOSED


def test_an_open_circuit_lets_one_probe_through_after_its_rest() -> None:
    breaker = opened()
    assert not breaker.allow(now=129.9)
    assert breaker.wait(now=129.0) == pytest.approx(1.0)
    assert breaker.allow(now=130.0)
    assert not breaker.allow(now=130.0)
    assert breaker.state is CircuitState.HALF_OPEN
    assert breaker.rejected == 2


def test_the_probe_decides() -> None:
    closes, opens = opened(), opened()
    assert closes.allow(130.0)
    closes.succeeded(closes.generation)
    assert closes.state is CircuitState.CLOSED
    assert opens.allow(130.0)
    opens.failed(135.0, opens.generation)
    assert opens.state is CircuitState.OPEN
    assert not opens.allow(164.9)
    assert opens.allow(165.0)


def test_a_probe_that_sent_nothing_gives_its_place_to_another() -> None:
    breaker = opened()
    assert breaker.allow(130.0)
    breaker.released(breaker.generation)
    assert breaker.allow(130.0)
    assert not breaker.allow(130.0)


def test_what_was_sent_before_the_circuit_opened_does_not_settle_the_probe() -> None:
    breaker = CircuitBreaker(BreakerConfig(threshold=1))
    before = breaker.generation
    assert breaker.allow(0.0)
    assert breaker.allow(0.0)
    breaker.failed(0.0, before)
    assert breaker.allow(30.0)
    breaker.succeeded(before)
    breaker.failed(30.0, before)
    breaker.released(before)
    assert breaker.state is CircuitState.HALF_OPEN
    assert not breaker.allow(30.0)


def test_a_breaker_that_is_not_enabled_never_opens() -> None:
    breaker = CircuitBreaker(BreakerConfig(enabled=False, threshold=1))
    for _ in range(10):
        breaker.failed(0.0)
    assert breaker.allow(0.0)


@given(st.lists(st.sampled_from(["allow", "succeeded", "failed", "released", "rest"]), max_size=60))
def test_whatever_happens_at_most_one_probe_is_out_and_it_is_never_stuck(acts: list[str]) -> None:
    breaker = CircuitBreaker(BreakerConfig(threshold=2, reset_timeout=10.0))
    now = 0.0
    out: list[int] = []
    for act in acts:
        if act == "rest":
            now += 10.0
        elif act == "allow":
            if breaker.allow(now):
                out.append(breaker.generation)
        elif out:
            generation = out.pop(0)
            if act == "failed":
                breaker.failed(now, generation)
            elif act == "succeeded":
                breaker.succeeded(generation)
            else:
                breaker.released(generation)
        if breaker.state is CircuitState.HALF_OPEN:
            assert out.count(breaker.generation) <= 1
    for generation in out:
        breaker.released(generation)
    assert breaker.allow(now + 10.0)


def test_delays_double_up_to_their_cap() -> None:
    backoff = Backoff(STEADY)
    delays = [backoff.failed(backoff.step) for _ in range(8)]
    assert delays == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert backoff.delay_after(10_000) == 300.0


def test_a_success_ends_the_backoff() -> None:
    backoff = Backoff(STEADY)
    backoff.failed(backoff.step)
    backoff.succeeded()
    assert backoff.delay == 0.0
    assert backoff.failed(backoff.step) == 5.0


def test_sends_that_fail_together_are_one_failure() -> None:
    backoff = Backoff(STEADY)
    began = backoff.step
    assert [backoff.failed(began) for _ in range(16)] == [5.0] * 16
    assert backoff.failed(backoff.step) == 10.0


def test_without_backoff_every_delay_is_the_retry_interval() -> None:
    backoff = Backoff(BackoffConfig(enabled=False, jitter=0.0), retry_interval=2.0)
    assert [backoff.failed(backoff.step) for _ in range(3)] == [2.0, 2.0, 2.0]


@given(st.integers(1, 500), st.floats(0.0, 1.0, exclude_max=True), st.floats(1.0, 10.0))
def test_a_delay_is_never_above_its_cap_nor_below_the_jitter(failures: int, chance: float, multiplier: float) -> None:
    backoff = Backoff(BackoffConfig(multiplier=multiplier), chance=lambda: chance)
    delay = backoff.delay_after(failures)
    assert 2.5 <= delay <= 300.0


@pytest.mark.parametrize(("chance", "delay"), [(0.0, 5.0), (0.5, 3.75), (1.0, 2.5)])
def test_chance_takes_off_up_to_the_jitter(chance: float, delay: float) -> None:
    assert Backoff(chance=lambda: chance).delay_after(1) == delay


def test_delays_grow_by_the_multiplier() -> None:
    backoff = Backoff(BackoffConfig(multiplier=3.0, jitter=0.0))
    assert [backoff.delay_after(failures) for failures in (1, 2, 3, 4, 5)] == [5.0, 15.0, 45.0, 135.0, 300.0]


def test_delays_are_up_to_chance_by_default() -> None:
    delays = {Backoff().delay_after(1) for _ in range(20)}
    assert len(delays) > 1
    assert all(2.5 <= delay <= 5.0 for delay in delays)


def test_deep_and_fast_adds_one_worker() -> None:
    scaler = WorkerScaler(1, 4)
    workers = 1
    for second in range(10):
        workers = scaler.decide(float(second), workers=workers, depth=1000, latency=0.02)
    assert workers == 4


def test_deep_but_slow_holds() -> None:
    scaler = WorkerScaler(1, 8)
    assert scaler.decide(0.0, workers=2, depth=1000, latency=0.1) == 3
    assert scaler.decide(1.0, workers=3, depth=1000, latency=0.4) == 3


def test_a_backlog_that_is_gone_in_a_moment_is_not_deep() -> None:
    assert WorkerScaler(1, 8).decide(0.0, workers=4, depth=20, latency=0.01) == 4


def test_idle_halves_down_to_the_minimum() -> None:
    scaler = WorkerScaler(1, 16)
    workers, seen = 16, []
    for turn in range(6):
        workers = scaler.decide(turn * IDLE_AFTER, workers=workers, depth=0, latency=0.02)
        seen.append(workers)
    assert seen == [16, 8, 4, 2, 1, 1]


def test_a_destination_that_became_slower_for_good_counts_as_fast_again() -> None:
    scaler = WorkerScaler(1, 100)
    scaler.decide(0.0, workers=1, depth=1000, latency=0.1)
    held = scaler.decide(1.0, workers=2, depth=1000, latency=0.3)
    for second in range(2, 200):
        held = scaler.decide(float(second), workers=held, depth=100_000, latency=0.3)
    assert held > 10


def test_an_average_follows_its_samples() -> None:
    average = Ewma()
    average.add(1.0)
    assert average.value == 1.0
    for _ in range(50):
        average.add(3.0)
    assert average.value == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BreakerConfig(threshold=0), r"circuit_breaker.threshold must be a whole number >= 1, got 0"),
        (lambda: BreakerConfig(reset_timeout="soon"), r"circuit_breaker.reset_timeout must be a duration.*'soon'"),
        (lambda: BackoffConfig(multiplier=0.5), r"backoff.multiplier must be a number >= 1, got 0.5"),
        (lambda: Backoff(max_retry_delay=1.0), r"max_retry_delay must be >= retry_interval = 5.0, got 1.0"),
        (lambda: BackoffConfig(jitter=2.0), r"backoff.jitter must be a number within 0 and 1, got 2.0"),
        (lambda: AdaptiveWorkersConfig(min_workers=0), r"min_workers must be a whole number >= 1, got 0"),
        (lambda: AdaptiveWorkersConfig(min_workers=4, max_workers=2), r"max_workers must be 0 or >= min_workers = 4"),
        (lambda: WorkerScaler(3, 2), r"1 <= least <= most, got 3 and 2"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_name(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
