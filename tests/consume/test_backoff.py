import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consume.backoff_policy import BackoffPolicy, RetryDelay
from penstock.errors import ConfigError

chances = st.floats(0, 1, exclude_max=True)


@given(st.integers(1, 10_000), chances, chances)
def test_every_delay_lies_between_the_jitter_and_the_limit(failures: int, chance: float, jitter: float) -> None:
    policy = BackoffPolicy(first=0.2, limit=30.0, jitter=jitter)

    full = min(30.0, 0.2 * 2.0 ** min(failures - 1, 100))

    assert full * (1 - jitter) - 1e-9 <= policy.delay(failures, chance) <= full


def test_delays_double_up_to_the_limit_and_begin_again_after_a_success() -> None:
    backoff = RetryDelay(BackoffPolicy(first=1.0, limit=5.0), chance=lambda: 0.0)

    assert [backoff.failed() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    assert backoff.failed() == 1.0


def test_clients_that_fail_together_do_not_come_back_together() -> None:
    policy = BackoffPolicy(first=1.0, limit=30.0, jitter=0.5)

    assert len({policy.delay(3, chance / 100) for chance in range(100)}) == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": 0.0}, "got first=0.0"),
        ({"first": 2.0, "limit": 1.0}, "first=2.0 limit=1.0"),
        ({"jitter": 1.5}, "got 1.5"),
    ],
)
def test_a_policy_refuses_nonsense(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BackoffPolicy(**settings)
