"""The oracle itself: a point that is missing, twice or changed does not pass."""

import pytest

from penstock.model.level import Level
from tests.campaigns.ledger import MINUTE_US, Key, Ledger, Point, Tally

FIRST: Key = ("m", "a", 0)
SECOND: Key = ("m", "a", MINUTE_US)
EXACT = {FIRST: Tally(2, 3.0), SECOND: Tally(1, 4.0)}


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    made.acknowledge([Point("m", "a", 5, 1.0), Point("m", "a", 6, 2.0), Point("m", "a", MINUTE_US, 4.0)])
    return made


def test_what_was_acknowledged_and_is_held_once_balances_at_every_level(ledger: Ledger) -> None:
    ledger.balance({**EXACT, ("of another", "a", 0): Tally(9, 9.0)})
    for level in (Level.HOUR, Level.DAY):
        ledger.balance({FIRST: Tally(3, 7.0)}, level)
    ledger.balance({FIRST: EXACT[FIRST]}, lost_and_counted=1)
    assert ledger.points == 3


@pytest.mark.parametrize(
    ("held", "counted", "said"),
    [
        ({FIRST: EXACT[FIRST]}, 0, "1 points missing, 0 counted"),
        (EXACT, 1, "0 points missing, 1 counted"),
        ({**EXACT, FIRST: Tally(3, 3.0)}, 0, "counted twice"),
        ({**EXACT, ("m", "b", 0): Tally(1, 1.0)}, 0, "counted twice"),
        ({FIRST: Tally(3, 3.0)}, 0, "counted twice"),  # one too many does not make up for one that is missing
        ({**EXACT, FIRST: Tally(2, 3.5)}, 0, "sums differ"),
    ],
)
def test_a_point_that_is_missing_or_twice_or_changed_does_not_balance(
    ledger: Ledger, held: dict[Key, Tally], counted: int, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        ledger.balance(held, lost_and_counted=counted)
