"""The table of recent requests, and what the intake makes of it."""

import threading
from pathlib import Path

import pytest

from penstock.decode.outcome import DecodeStatus, Format
from penstock.receive.bodies import Encoding
from penstock.receive.intake import Intake
from penstock.receive.recent_requests import DIGEST, Claim, RecentRequests
from penstock.receive.repeats import digest_of_request
from penstock.receive.request_group import ReceivedRequest
from penstock.testing import wait_until
from tests.receive.support import BODY, KeepingSink, Sender, count, counter, request

NOW = 1_700_000_000.0


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST, "little")


def claimed(recent: RecentRequests, number: int, now: float = NOW) -> Claim:
    return recent.claim([digest(number)], now)[0]


@pytest.fixture
def recent(tmp_path: Path) -> RecentRequests:
    return RecentRequests(tmp_path / "table", 1000, 900.0)


def test_a_request_is_new_then_under_way_then_repeated_until_the_window_has_passed(recent: RecentRequests) -> None:
    assert [claimed(recent, 7), claimed(recent, 7)] == [Claim.NEW, Claim.UNDER_WAY]
    recent.settle([digest(7)], is_taken=True)
    assert [claimed(recent, 7), claimed(recent, 7, NOW + 900)] == [Claim.REPEATED, Claim.REPEATED]
    assert claimed(recent, 7, NOW + 901) is Claim.NEW


def test_a_request_that_was_refused_is_new_when_it_comes_again(recent: RecentRequests) -> None:
    claimed(recent, 7)
    recent.settle([digest(7)], is_taken=False)
    assert claimed(recent, 7) is Claim.NEW


def test_what_is_remembered_is_bounded_and_what_is_forgotten_too_early_is_counted(tmp_path: Path) -> None:
    recent = RecentRequests(tmp_path / "table", 160, 900.0)
    for number in range(1000):
        assert claimed(recent, number, NOW + number / 100) is Claim.NEW
        recent.settle([digest(number)], is_taken=True)
    assert recent.forgotten == 840
    assert claimed(recent, 999, NOW + 10) is Claim.REPEATED
    assert (tmp_path / "table").stat().st_size < 160 * 24 + 100


def test_another_process_knows_what_one_has_taken_and_a_dead_ones_open_requests_are_free(tmp_path: Path) -> None:
    one, other = (RecentRequests(tmp_path / "table", 1000, 900.0, process) for process in range(2))
    claimed(one, 1)
    claimed(one, 2)
    one.settle([digest(1)], is_taken=True)
    assert [claimed(other, 1), claimed(other, 2)] == [Claim.REPEATED, Claim.UNDER_WAY]

    again = RecentRequests(tmp_path / "table", 1000, 900.0, 0)
    again.forget_own(unanswered_only=True)
    assert [claimed(other, 1), claimed(other, 2)] == [Claim.REPEATED, Claim.NEW]
    again.forget_own(unanswered_only=False)
    assert claimed(other, 1) is Claim.NEW


def test_of_many_threads_that_claim_one_request_one_gets_it(recent: RecentRequests) -> None:
    claims: list[Claim] = []
    threads = [threading.Thread(target=lambda: claims.append(claimed(recent, 5))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claims.count(Claim.NEW) == 1


def test_a_table_of_another_size_is_begun_anew(tmp_path: Path, recent: RecentRequests) -> None:
    claimed(recent, 1)
    recent.settle([digest(1)], is_taken=True)
    recent.close()
    assert claimed(RecentRequests(tmp_path / "table", 1000, 900.0), 1) is Claim.REPEATED
    assert claimed(RecentRequests(tmp_path / "table", 2000, 900.0), 1) is Claim.NEW


def test_a_request_that_waits_is_not_answered_twice_and_one_that_failed_is_taken_again(
    sink: KeepingSink, recent: RecentRequests
) -> None:
    intake = Intake(sink, recent=recent).start()
    sender = Sender(intake)
    sink.hold()
    sender.send(BODY)
    wait_until(lambda: sink.held == 1)
    assert sender.ask(BODY).status is DecodeStatus.BUSY
    sink.fails = OSError("the disk is full")
    sink.release()
    assert sender.wait(2) == [DecodeStatus.BUSY, DecodeStatus.BROKEN]
    sink.fails, sink.chunks = None, []
    assert [sender.ask(BODY).status for _ in range(3)] == [DecodeStatus.TAKEN] * 3
    assert sink.values("cpu") == [0.5]
    assert count(intake, "penstock_receive_repeated_total") == 2
    assert intake.close(10.0)


@pytest.mark.parametrize("size", [100, 16 << 10, (16 << 10) + 1, 100_000])
def test_a_body_that_differs_anywhere_is_another_request(recent: RecentRequests, size: int) -> None:
    body = bytes(size)
    bodies = [body, body[:-1], body + b"\0", *(body[:at] + b"\1" + body[at + 1 :] for at in (0, size // 2, size - 1))]
    sent = [ReceivedRequest(Format.OTLP, one, Encoding.IDENTITY, size, None, print, "a") for one in bodies]
    assert len({digest_of_request(one, one.body) for one in sent}) == len(bodies)
    assert digest_of_request(sent[0], body) == digest_of_request(sent[0], bytes(size))
    other = ReceivedRequest(Format.OTLP, body, Encoding.IDENTITY, size, None, print, "b")
    assert digest_of_request(other, body) != digest_of_request(sent[0], body)


def test_the_relay_hears_a_repeated_request_once(recent: RecentRequests) -> None:
    relay = KeepingSink()
    intake = Intake(None, relay, recent=recent).start()
    body = bytes(request(counter("c", (1, 1.0), temporality=1)).SerializeToString())
    assert [Sender(intake).ask(body).status for _ in range(3)] == [DecodeStatus.TAKEN] * 3
    assert len(relay.raw) == 1
    assert intake.close(10.0)
