"""Rules at the door: what they make of a series, and which texts are none."""

import re

import pytest

from penstock.decode.config import IntakeConfig
from penstock.decode.rules import RuleBook
from penstock.decode.series_description import SeriesDescription
from penstock.errors import ConfigError
from penstock.model.point import PointKind

CPU = SeriesDescription("cpu.load", PointKind.GAUGE, False, {"host": "a", "core": "1"})


@pytest.mark.parametrize(
    ("rules", "metric", "labels"),
    [
        (["drop_labels cpu.* core"], "cpu.load", {"host": "a"}),
        (["keep_labels * core"], "cpu.load", {"core": "1"}),
        (["rename cpu.load load", "drop_labels load host", "drop_labels cpu.load core"], "load", {"core": "1"}),
        (["drop other", "drop CPU.load"], "cpu.load", {"host": "a", "core": "1"}),
    ],
)
def test_rules_are_applied_one_after_the_other(rules: list[str], metric: str, labels: dict[str, str]) -> None:
    made = RuleBook(rules).apply(CPU)
    assert made is not None
    assert (made.metric, made.labels) == (metric, labels)


def test_a_digest_tells_values_apart_and_shows_none() -> None:
    book = RuleBook(["hash_labels * host"])
    made = [book.apply(SeriesDescription("m", PointKind.GAUGE, False, {"host": host})) for host in ("a", "b", "a")]
    first, second, third = (one.labels["host"] for one in made if one is not None)
    assert first == third != second
    assert len(first) == 16


def test_what_is_dropped_meets_no_further_rule() -> None:
    book = RuleBook(["drop cpu.*", "rename cpu.load load"])
    assert book.apply(CPU) is None
    assert [rule.applied for rule in book.rules] == [1, 0]


@pytest.mark.parametrize("text", ["", "drop", "drop a b", "rename a", "rename a b c", "keep_labels a", "forget a"])
def test_a_text_that_is_no_rule_is_refused_with_what_it_must_read(text: str) -> None:
    with pytest.raises(ConfigError, match=r"intake.rules must (each begin with|read) .*got ") as refused:
        IntakeConfig(rules=(text,))
    assert refused.value.field == "intake.rules"
    (shown,) = re.findall(r"(?:like|a rule is) '([^']+)'", str(refused.value))
    assert IntakeConfig(rules=(shown,)).rules == (shown,)  # an example that works
