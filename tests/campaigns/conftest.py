"""The seed and the length of a campaign."""

import random

import pytest

SHORT_SEED = 23  # of the short versions in `make test`, which are the same every time


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--seed")
    is_long = request.node.get_closest_marker("soak") is not None
    chosen = int(given if given is not None else random.randrange(1_000_000) if is_long else SHORT_SEED)
    print(f"\nseed {chosen}")  # noqa: T201 - to repeat it
    return chosen


@pytest.fixture
def seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--seconds") or 120.0)
