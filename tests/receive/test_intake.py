"""The intake: one answer for each request, and only when what it brought is safe."""

import threading
from collections.abc import Iterator

import pytest

from penstock.decode.config import IntakeConfig
from penstock.decode.outcome import DecodeStatus, Format
from penstock.errors import BlockTooLarge, PayloadTooLarge, PermanentExportError
from penstock.receive.intake import Intake
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.receive.support import BODY, NOW, SECOND, KeepingSink, Sender, counter, gauge, request


@pytest.fixture
def relay() -> KeepingSink:
    return KeepingSink()


@pytest.fixture
def both(sink: KeepingSink, relay: KeepingSink) -> Iterator[Intake]:
    intake = Intake(sink, relay).start()
    yield intake
    sink.release()
    relay.release()
    assert intake.close(10.0)


def test_a_request_is_not_answered_before_the_sink_says_that_it_is_safe(intake: Intake, sink: KeepingSink) -> None:
    sink.hold()
    sender = Sender(intake)
    sender.send(BODY, 1)
    wait_until(lambda: sink.held)

    assert not sender.answers
    sink.release()
    assert sender.wait(1) == [DecodeStatus.TAKEN]


def test_the_answer_waits_for_the_relay_and_for_the_points(both: Intake, sink: KeepingSink, relay: KeepingSink) -> None:
    relay.hold()
    sender = Sender(both)
    sender.send(BODY, 1)
    wait_until(lambda: relay.held and sink.chunks)

    assert not sender.answers
    relay.release()
    assert sender.wait(1) == [DecodeStatus.TAKEN]
    assert relay.raw == [(Format.OTLP, BODY)]


def test_a_full_relay_keeps_the_points_out_so_that_they_are_not_counted_twice(
    both: Intake, sink: KeepingSink, relay: KeepingSink
) -> None:
    relay.refuses = True
    sender = Sender(both)
    sender.send(BODY, 1)

    assert sender.wait(1) == [DecodeStatus.BUSY]
    assert not sink.chunks


NEVER = PermanentExportError("400 Bad Request: no such tenant")


def test_a_request_that_can_never_be_handed_on_is_answered_so_and_those_beside_it_are_not(
    both: Intake, sink: KeepingSink, relay: KeepingSink
) -> None:
    submitting, gathered = threading.Event(), threading.Event()

    def wait_for_others() -> None:
        submitting.set()
        gathered.wait(10.0)

    relay.before_submit = wait_for_others
    relay.failing = {1: NEVER, 2: BlockTooLarge("9 bytes"), 3: PayloadTooLarge("413"), 4: ConnectionError("down")}
    sender = Sender(both)
    sender.send(BODY, "first")
    assert submitting.wait(10.0)
    for token in ("good", "bad", "large", "too large", "unlucky"):
        sender.send(BODY, token)
    gathered.set()
    sender.wait(6)

    answers = dict(sender.answers)
    assert {token: answer.status for token, answer in answers.items()} == {
        "first": DecodeStatus.TAKEN,
        "good": DecodeStatus.TAKEN,
        "bad": DecodeStatus.BAD,
        "large": DecodeStatus.TOO_LARGE,
        "too large": DecodeStatus.TOO_LARGE,
        "unlucky": DecodeStatus.BROKEN,
    }
    assert answers["bad"].message == "the destination will never take it: 400 Bad Request: no such tenant"


def test_what_can_never_be_handed_on_comes_again_where_its_points_found_no_room(
    both: Intake, sink: KeepingSink, relay: KeepingSink
) -> None:
    relay.failing = {0: NEVER}
    sink.refuses = True
    sender = Sender(both)
    sender.send(BODY, 1)
    assert sender.wait(1) == [DecodeStatus.BUSY]
    sink.refuses, sink.fails = False, OSError("no space")
    sender.send(BODY, 2)
    assert sender.wait(2)[1] is DecodeStatus.BROKEN


def test_a_sink_that_breaks_its_promise_costs_one_answer_and_not_all_to_come(
    intake: Intake, sink: KeepingSink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    sender = Sender(intake)
    points = [request(counter("c", (NOW + step * SECOND, 5.0 * step))).SerializeToString() for step in (1, 2)]
    sender.send(points[0], "first")
    sender.wait(1)
    with monkeypatch.context() as broken:
        broken.setattr(sink, "submit", breaks)
        sender.send(points[1], "second")
        assert sender.wait(2)[1] is DecodeStatus.BROKEN
    sender.send(points[1], "again")
    assert sender.wait(3)[2] is DecodeStatus.TAKEN
    assert sink.values("c") == [5.0]
    assert "a mistake of ours" in caplog.text


def test_a_body_for_which_there_is_no_memory_is_answered_so(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise MemoryError

    sender = Sender(intake)
    with monkeypatch.context() as full:
        full.setattr("penstock.receive.request_group.decompress_body", fails)
        sender.send(BODY, "first")
        assert sender.wait(1) == [DecodeStatus.BROKEN]
    sender.send(BODY, "again")
    assert sender.wait(2)[1] is DecodeStatus.TAKEN


def test_a_failing_disk_is_answered_and_cumulative_values_come_again(intake: Intake, sink: KeepingSink) -> None:
    sender = Sender(intake)
    bodies = [
        request(counter("c", (NOW + step * SECOND, value), start=1)).SerializeToString()
        for step, value in enumerate([1.0, 5.0], 1)
    ]
    sender.send(bodies[0], 1)
    sender.wait(1)
    sink.fails = OSError("no space")
    sender.send(bodies[1], 2)
    assert sender.wait(2)[1] is DecodeStatus.BROKEN
    assert "no space" in sender.answers[1][1].message

    sink.fails = None
    sender.send(bodies[1], 3)

    assert sender.wait(3)[2] is DecodeStatus.TAKEN
    assert sink.values("c") == [4.0]


def test_requests_that_gather_while_one_is_decoded_are_decoded_together(intake: Intake, sink: KeepingSink) -> None:
    submitting, may_go = threading.Event(), threading.Event()

    def wait_for_others() -> None:
        submitting.set()
        may_go.wait(10)

    sink.before_submit = wait_for_others
    sender = Sender(intake)
    sender.send(BODY, 0)
    assert submitting.wait(10)
    for token in range(1, 6):
        sender.send(BODY, token)
    may_go.set()

    assert sender.wait(6) == [DecodeStatus.TAKEN] * 6
    assert [token for token, _ in sender.answers] == list(range(6))
    assert [len(chunk) for chunk in sink.chunks] == [1, 5]


def test_only_the_bad_request_of_a_group_is_refused(sink: KeepingSink) -> None:
    intake = Intake(sink)
    sender = Sender(intake)
    for token, body in enumerate([BODY, b"nonsense", BODY]):
        sender.send(body, token)
    intake.start()

    sender.wait(3)
    assert {token: answer.status for token, answer in sender.answers} == {
        0: DecodeStatus.TAKEN,
        1: DecodeStatus.BAD,
        2: DecodeStatus.TAKEN,
    }
    assert intake.close(10.0)


def test_what_waits_is_bounded_in_bytes(sink: KeepingSink) -> None:
    intake = Intake(sink, config=IntakeConfig(max_held=1024))
    sender = Sender(intake)
    room = 1024 // len(BODY)
    for _ in range(room + 1):
        sender.send(BODY)

    assert sender.wait(1) == [DecodeStatus.BUSY]
    intake.start()
    assert sender.wait(1 + room) == [DecodeStatus.BUSY] + [DecodeStatus.TAKEN] * room
    wait_until(lambda: sender.ask(BODY).status is DecodeStatus.TAKEN)  # its room is free soon after the answer
    assert intake.close(10.0)


def test_closing_answers_what_waits_and_takes_nothing_more(sink: KeepingSink) -> None:
    intake = Intake(sink).start()
    sender = Sender(intake)
    sender.send(BODY, 1)

    assert intake.close(10.0)
    assert sender.wait(1) == [DecodeStatus.TAKEN]
    assert sender.ask(BODY).status is DecodeStatus.BROKEN


def test_everything_is_counted(intake: Intake, sink: KeepingSink) -> None:
    sender = Sender(intake)
    sender.send(BODY, 1)
    sender.send(b"nonsense", 2)
    sender.send(request(gauge("cpu", 1.0, time=0)).SerializeToString(), 3)
    sender.wait(3)
    telemetry = Telemetry()
    telemetry.watch(intake.samples)

    rendered = telemetry.render().decode()  # what was answered is counted

    assert 'penstock_receive_requests_total{format="otlp",status="taken"} 1.0' in rendered
    assert 'penstock_receive_requests_total{format="otlp",status="rejected"} 1.0' in rendered
    assert 'penstock_receive_requests_total{format="otlp",status="bad"} 1.0' in rendered
    assert 'penstock_receive_points_total{format="otlp"} 1.0' in rendered
    assert 'penstock_receive_refused_total{reason="malformed"} 1.0' in rendered
    assert 'penstock_receive_refused_total{reason="time"} 1.0' in rendered
    assert "penstock_receive_streams 1.0" in rendered
    wait_until(lambda: b"penstock_receive_held_bytes 0.0" in telemetry.render())


def test_a_sweep_that_fails_does_not_end_the_thread_that_answers(
    intake: Intake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("penstock.receive.intake._SWEEP", 0.0)
    monkeypatch.setattr(intake._decoder, "expire", fail)
    sender = Sender(intake)
    for token in range(3):
        sender.send(BODY, token)
        assert sender.wait(token + 1)[token] is DecodeStatus.TAKEN
    assert "could not be forgotten" in caplog.text
