"""What one sender sends does not hold up the others."""

import gzip
import json
import random
import threading
import time

import pytest

from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import Format
from penstock.protobuf import field_bytes
from penstock.receive.bodies import Encoding
from penstock.receive.fair_turns import FairRequestTurns
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.receive.request_group import ReceivedRequest
from tests.receive.support import BODY, KeepingSink, post, running

MEGABYTE = 1 << 20
SECONDS = 20.0  # what took minutes; a busy machine takes a few


def waiting(sender: str, body: bytes = b"x" * 10) -> ReceivedRequest:
    return ReceivedRequest(Format.OTLP, body, Encoding.IDENTITY, 1000, None, lambda _: None, turns_of=sender)


def order(turns: FairRequestTurns) -> str:
    return "".join(str(turns.pop().turns_of) for _ in range(len(turns)))


def test_a_sender_with_many_requests_takes_turns_with_one_that_has_few() -> None:
    turns = FairRequestTurns()
    for sender in "aaaab":
        turns.add(waiting(sender))
    assert order(turns) == "abaaa"


def test_a_sender_whose_last_request_grew_large_waits_behind_the_others() -> None:
    turns = FairRequestTurns()
    bomb = waiting("a")
    turns.add(bomb)
    turns.pop()
    turns.add(waiting("b"))
    turns.charge([(bomb, MEGABYTE)])
    for sender in "abcb":
        turns.add(waiting(sender))
    assert order(turns) == "bbcba"


def test_new_senders_do_not_keep_one_waiting_that_was_there_before() -> None:
    turns = FairRequestTurns()
    turns.add(first := waiting("a"))
    assert turns.pop() is first
    turns.charge([(first, 100)])
    turns.add(waiting("a"))
    for place in range(5):
        turns.add(waiting(f"new{place}"))
    assert turns.next().turns_of == "a"


def test_what_is_remembered_of_senders_is_forgotten_when_they_are_even() -> None:
    turns = FairRequestTurns()
    choose = random.Random(7)
    for place in range(1000):
        turns.add(request := waiting(f"sender-{place}"))
        assert turns.pop() is request
        turns.charge([(request, choose.randrange(10, 1000))])
    assert len(turns._had) < 20


def empty_scopes() -> bytes:
    return field_bytes(1, b"\x12\x00" * (32 * MEGABYTE - 10))


def empty_resources() -> bytes:
    return b"\x0a\x00" * (32 * MEGABYTE)


def fields_of_a_metric() -> bytes:
    return field_bytes(1, field_bytes(2, field_bytes(2, b"\x2a\x00" * (31 * MEGABYTE))))


def buckets() -> bytes:
    point = field_bytes(8, field_bytes(2, b"\x01" * (60 * MEGABYTE)))
    return field_bytes(1, field_bytes(2, field_bytes(2, field_bytes(10, field_bytes(1, point)))))


def attributes_of_points() -> bytes:
    point = field_bytes(1, b"\x3a\x00" * 10_000)
    return field_bytes(1, field_bytes(2, field_bytes(2, field_bytes(5, point * 3_000))))


@pytest.mark.parametrize(
    "bomb", [empty_scopes, empty_resources, fields_of_a_metric, buckets, attributes_of_points], ids=lambda f: f.__name__
)
def test_whatever_repeats_in_a_body_is_bounded(http: HttpReceiver, bomb: object) -> None:
    assert callable(bomb)
    body = gzip.compress(bomb(), 1)
    began = time.monotonic()
    answered = post(http.port, "/v1/metrics", body, Content_Type="application/x-protobuf", Content_Encoding="gzip")
    assert answered.status == 413
    assert b"more than" in answered.body
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/events", b"[" + b",".join([b"{}"] * 5_000_000) + b"]"),
        ("/v1/events", json.dumps([{"metric": "m", "value": 1, "labels": dict.fromkeys(map(str, range(10**6)))}])),
        ("/v1/metrics", b'{"resourceMetrics":[' + b",".join([b"{}"] * 5_000_000) + b"]}"),
    ],
    ids=["events", "labels", "otlp"],
)
def test_whatever_repeats_in_json_is_bounded(http: HttpReceiver, path: str, body: bytes | str) -> None:
    sent = body.encode() if isinstance(body, str) else body
    began = time.monotonic()
    answered = post(http.port, path, sent, Content_Type="application/json")
    assert answered.status == 413
    assert b"more than" in answered.body
    assert time.monotonic() - began < SECONDS


def test_eight_bombs_do_not_keep_an_honest_request_waiting(sink: KeepingSink) -> None:
    bomb = gzip.compress(empty_scopes(), 1)
    intake = Intake(sink, config=IntakeConfig()).start()
    with running(intake) as receiver:
        headers = {"Content_Type": "application/x-protobuf", "Content_Encoding": "gzip"}
        statuses: list[int] = []
        attackers = [
            threading.Thread(target=lambda: statuses.append(post(receiver.port, "/v1/metrics", bomb, **headers).status))
            for _ in range(8)
        ]
        for attacker in attackers:
            attacker.start()
        began = time.monotonic()
        assert post(receiver.port, "/v1/metrics", BODY, Content_Type="application/x-protobuf").status == 200
        assert time.monotonic() - began < SECONDS
        for attacker in attackers:
            attacker.join()
    assert statuses == [413] * 8
    assert intake.close(10.0)
