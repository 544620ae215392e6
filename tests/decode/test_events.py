"""JSON events: the easy door."""

import json

import pytest

from penstock.receive.http_receiver import HttpReceiver
from tests.receive.support import KeepingSink, post

JSON = "application/json"


def test_events_are_taken_with_or_without_labels_and_time(http: HttpReceiver, sink: KeepingSink) -> None:
    events = [
        {"metric": "orders", "value": 12.5, "labels": {"shop": "north", "express": True}, "time": 1_700_000_000.5},
        {"metric": "orders", "value": 3, "time": "2023-11-14T22:13:20Z"},
        {"metric": "visits", "value": 1},
    ]

    answered = post(http.port, "/v1/events", json.dumps(events).encode(), Content_Type=JSON)

    assert (answered.status, json.loads(answered.body)) == (200, {"rejected": 0, "errors": []})
    first, second = sink.points("orders")
    assert (first["value"], first["labels"]) == (12.5, {"shop": "north", "express": "true"})
    assert first["time"].timestamp() == 1_700_000_000.5
    assert (second["value"], second["labels"], second["time"].timestamp()) == (3.0, {}, 1_700_000_000.0)
    assert sink.values("visits") == [1.0]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"value": 1}, "metric must be a text"),
        ({"metric": "m"}, "value must be a number, got None"),
        ({"metric": "m", "value": "1"}, "value must be a number, got '1'"),
        ({"metric": "m", "value": True}, "value must be a number"),
        ({"metric": "m", "value": 1, "labels": ["a"]}, "labels must be an object"),
        ({"metric": "m", "value": 1, "labels": {"a": {"b": 1}}}, "labels must be an object of texts"),
        ({"metric": "m", "value": 1, "time": "yesterday"}, "RFC 3339, got 'yesterday'"),
        ({"metric": "m", "value": 1, "time": 9e10}, "far ahead"),
        ({"metric": "m", "value": 1, "labels": {"a" * 300: "b"}}, "at most 256"),
        ({"metric": "m", "value": 1, "colour": 1}, "unknown key 'colour'"),
        ({"metric": "m", "value": 10**400}, "value must be a number, got 1000"),
        ({"metric": "m", "value": 1, "time": 10**400}, "RFC 3339, got 1000"),
        ({"metric": "m", "value": 1, "labels": {"a": "\ud800"}}, "label 'a' has half a character"),
        ({"metric": "m", "value": 1, "labels": {"\ud800": "a"}}, r"label '\ud800' has half a character"),
        ({"metric": "\ud800", "value": 1}, "metric has half a character"),
        ({"metric": "a\0b", "value": 1}, r"a metric's name must be printable, got 'a\x00b'"),
        ({"metric": "a" * 257, "value": 1}, "a metric's name must have 1 to 256 characters, got 257: 'aaaa"),
        (7, "an object is expected, got int"),
    ],
)
def test_a_wrong_event_is_refused_with_its_place_and_the_others_are_taken(
    http: HttpReceiver, sink: KeepingSink, event: object, message: str
) -> None:
    body = json.dumps([{"metric": "m", "value": 1}, event, {"metric": "m", "value": 2}]).encode()

    reply = json.loads(post(http.port, "/v1/events", body, Content_Type=JSON).body)

    assert reply["rejected"] == 1
    assert message in reply["errors"][0]
    assert sink.values("m") == [1.0, 2.0]


@pytest.mark.parametrize("key", ["metric", "value", "labels", "time", "k" * 100_000])
def test_an_answer_is_short_whatever_it_answers(http: HttpReceiver, key: str) -> None:
    events = [{"metric": "m", "value": 1, key: ["x" * 100_000] * 3}] * 20

    answered = post(http.port, "/v1/events", json.dumps(events).encode(), Content_Type=JSON)

    assert json.loads(answered.body)["rejected"] == 20
    assert len(answered.body) < 5000


@pytest.mark.parametrize("body", [b"", b"[", b'"text"', b"[" * 100_000, b'{"a":' * 5000])
def test_what_is_no_list_of_events_is_400(http: HttpReceiver, body: bytes) -> None:
    answered = post(http.port, "/v1/events", body, Content_Type=JSON)

    assert answered.status == 400
    assert json.loads(answered.body)["message"]
