from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consume.attempts import (
    ATTEMPTS,
    DELIVERY_COUNT,
    EXCHANGE,
    NOT_REPEATED,
    QUEUE,
    REASON,
    ROUTING_KEY,
    TRIED,
    attempt_of,
    dead_letter_headers,
    origin_of_message,
    retry_headers,
    returned_too_often,
)

names = st.text(max_size=5).filter(lambda name: name not in NOT_REPEATED)
headers = st.dictionaries(names, st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=5)


@given(headers, st.integers(1, 50))
def test_every_attempt_is_counted(first: dict[str, Any], attempts: int) -> None:
    current: dict[str, Any] = first
    for attempt in range(1, attempts + 1):
        assert attempt_of(current) == attempt
        current = retry_headers(current, attempt, "events", "a.b")


@given(headers)
def test_a_retried_message_keeps_its_headers_and_where_it_first_came_from(first: dict[str, Any]) -> None:
    once = retry_headers(first, 1, "events", "a.b")
    twice = retry_headers(once, 2, "", "the.queue")

    assert first.items() <= twice.items()
    assert (twice[EXCHANGE], twice[ROUTING_KEY], twice[ATTEMPTS]) == ("events", "a.b", 2)


def test_a_dead_letter_says_why_and_can_be_sent_back_to_be_tried_afresh() -> None:
    dead = dead_letter_headers(retry_headers({"k": "v"}, 5, "events", "a.b"), "orders", "boom" * 1000)

    assert (dead["k"], dead[QUEUE], dead[TRIED]) == ("v", "orders", 5)
    assert dead[REASON].startswith("boom")
    assert len(dead[REASON]) == 1000
    assert attempt_of(dead) == 1


@pytest.mark.parametrize("header", ["CC", "BCC", DELIVERY_COUNT])
def test_copies_for_other_queues_and_the_brokers_count_are_not_repeated(header: str) -> None:
    assert header not in retry_headers({header: ["other"]}, 1, "", "")


def test_where_a_message_first_came_from_is_believed_if_it_can_be_true() -> None:
    assert origin_of_message({EXCHANGE: "events", ROUTING_KEY: "a.b"}, "", "queue") == ("events", "a.b")
    assert origin_of_message({EXCHANGE: 5, ROUTING_KEY: None}, "", "queue") == ("", "queue")


@pytest.mark.parametrize("nonsense", ["3", None, -4, True, 2.5, [1]])
def test_a_header_that_is_no_count_counts_as_none(nonsense: object) -> None:
    assert attempt_of({ATTEMPTS: nonsense}) == 1
    assert not returned_too_often({DELIVERY_COUNT: nonsense}, 1)


def test_a_message_that_came_back_too_often_is_known_before_it_is_tried() -> None:
    assert not returned_too_often(None, 20)
    assert not returned_too_often({DELIVERY_COUNT: 19}, 20)
    assert returned_too_often({DELIVERY_COUNT: 20}, 20)
