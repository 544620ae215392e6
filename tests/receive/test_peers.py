"""Processes that hand each other what they own: answered once, counted once, and no request waits for ever."""

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from penstock.decode.config import IntakeConfig
from penstock.decode.otlp.walk import CUMULATIVE, SUM, OtlpFamily, walk_otlp_metrics
from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format
from penstock.decode.stream_owners import StreamOwners
from penstock.receive import peer_link, peer_wire
from penstock.receive import peers as peers_module
from penstock.receive.bodies import Encoding
from penstock.receive.intake import Intake
from penstock.receive.peers import Peers
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.receive.support import NOW, SECOND, KeepingSink, Sender, counter, gauge, request

BEGAN = NOW / SECOND - 10


class Process(Sender):
    """One of several: an intake with a sink and a relay that keep what they are given."""

    def __init__(self, folder: Path, own: int, count: int, config: IntakeConfig | None = None) -> None:
        self.sink = KeepingSink()
        self.relay = KeepingSink()
        self.peers = Peers(folder, StreamOwners(own, count), int((config or IntakeConfig()).max_held))
        super().__init__(Intake(self.sink, self.relay, config, began=BEGAN, peers=self.peers))


Make = Callable[..., list[Process]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Process] = []

    def start(count: int = 2, config: IntakeConfig | None = None) -> list[Process]:
        made.extend(Process(tmp_path, own, count, config) for own in range(count))
        together([process.intake.start for process in made])
        return made

    yield start
    for process in made:
        process.sink.release()
    together([lambda process=process: process.intake.close(10.0) for process in made])  # type: ignore[misc]


def together(acts: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def kept_by(owner: int, count: int = 2) -> str:
    """The name of a counter that lives there."""
    body = request(counter("c", (NOW, 1.0))).SerializeToString()
    (resource, scope, _), _, _ = next(walk_otlp_metrics(body))
    owners = StreamOwners(0, count)
    names = (f"c{number}" for number in range(1000))
    return next(
        name
        for name in names
        if owners.of_family(OtlpFamily(resource, scope, name.encode(), SUM, CUMULATIVE, 1)) == owner
    )


HERE, THERE = kept_by(0), kept_by(1)


def report(value: float, *names: str, second: int = 0) -> bytes:
    metrics = [counter(name, (NOW + second * SECOND, value), start=NOW - SECOND) for name in names]
    return bytes(request(*metrics, gauge("load", 0.5)).SerializeToString())


def total(sink: KeepingSink, name: str) -> float:
    return sum(sink.values(name))


def test_each_process_counts_what_it_keeps_and_the_relay_gets_the_whole_once(make: Make) -> None:
    here, there = make()

    for second, process in enumerate([here, there, there, here], 1):
        assert process.ask(report(5.0 * second, HERE, THERE, second=second)) == DecodeAnswer(DecodeStatus.TAKEN)

    assert (total(here.sink, HERE), total(there.sink, HERE)) == (20.0, 0.0)
    assert (total(here.sink, THERE), total(there.sink, THERE)) == (0.0, 20.0)
    assert [len(process.sink.values("load")) for process in (here, there)] == [2, 2]
    assert [len(process.relay.raw) for process in (here, there)] == [2, 2]


def test_what_came_as_json_is_handed_over_as_protobuf(make: Make) -> None:
    here, there = make()
    body = MessageToJson(ExportMetricsServiceRequest.FromString(report(5.0, HERE, THERE))).encode()

    assert here.ask(body, Format.OTLP_JSON) == DecodeAnswer(DecodeStatus.TAKEN)
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (5.0, 5.0)


def test_nothing_is_taken_here_before_the_others_have_their_part(make: Make) -> None:
    here, there = make()
    there.sink.hold()
    here.send(report(5.0, HERE, THERE))
    wait_until(lambda: there.sink.held)

    assert not here.sink.chunks
    assert not here.relay.raw
    assert not here.answers
    there.sink.release()
    wait_until(lambda: here.answers)
    assert total(here.sink, HERE) == 5.0


def test_if_a_part_is_refused_only_what_adds_nothing_again_is_taken_of_the_rest(make: Make) -> None:
    here, there = make()
    there.sink.refuses = True

    assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.BUSY
    assert not here.relay.raw
    assert not here.sink.values("load")
    there.sink.refuses = False
    assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.TAKEN
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (5.0, 5.0)
    assert len(here.sink.values("load")) == 1


def test_a_sender_that_turns_elsewhere_never_hears_of_something_safe_that_is_given_up(make: Make) -> None:
    here, there, other = make(3)
    mine, theirs = kept_by(0, 3), kept_by(1, 3)
    body = report(5.0, mine, theirs, second=1)
    there.sink.hold()
    here.send(body)
    wait_until(lambda: there.sink.held)
    other.send(body)
    wait_until(lambda: other.peers._links[0].answers[DecodeStatus.TAKEN])  # it is known here, and waits
    here.peers._thread.loop.call_soon_threadsafe(here.peers._links[1].on_lost)
    wait_until(lambda: here.answers)
    there.sink.release()
    wait_until(lambda: other.answers)

    assert (here.answers[0][1].status, other.answers[0][1].status) == (DecodeStatus.BROKEN, DecodeStatus.TAKEN)
    assert (total(here.sink, mine), total(there.sink, theirs)) == (5.0, 5.0)
    assert [len(process.sink.values("load")) for process in (here, other)] == [0, 1]


def test_a_rest_that_is_refused_comes_again_and_the_part_is_not_counted_twice(make: Make) -> None:
    here, there = make()
    here.sink.refuses = True

    assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.BUSY
    here.sink.refuses = False
    assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.TAKEN
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (5.0, 5.0)


def test_a_disk_that_fails_there_is_answered_here(make: Make) -> None:
    here, there = make()
    there.sink.fails = OSError("no space left")

    answer = here.ask(report(5.0, HERE, THERE, second=1))
    assert answer.status is DecodeStatus.BROKEN
    assert "no space left" in answer.message
    there.sink.fails = None
    assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.TAKEN
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (5.0, 5.0)


def test_requests_of_this_process_alone_are_taken_while_another_process_refuses(make: Make) -> None:
    here, there = make()
    here.sink.hold()
    here.send(request(gauge("first", 1.0)).SerializeToString())
    wait_until(lambda: here.sink.held)  # so that the next two are decoded together
    there.sink.refuses = True
    here.send(report(5.0, THERE), token="divided")
    here.send(request(gauge("alone", 1.0)).SerializeToString(), token="alone")
    here.sink.release()
    wait_until(lambda: len(here.answers) == 3)

    assert {token: answer.status for token, answer in here.answers if token} == {
        "divided": DecodeStatus.BUSY,
        "alone": DecodeStatus.TAKEN,
    }
    assert here.sink.values("alone") == [1.0]


def test_what_is_rejected_there_is_part_of_the_answer(make: Make) -> None:
    here, _ = make(config=IntakeConfig(max_labels=1))
    labelled = counter(THERE, (NOW, 1.0), start=NOW - SECOND, one="1", two="2")

    answer = here.ask(request(labelled, gauge("load", 0.5, one="1", two="2")).SerializeToString())

    assert (answer.status, answer.rejected) == (DecodeStatus.TAKEN, 2)
    assert answer.reasons == ("3 labels, at most 1 are taken",)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_a_request_is_useless_if_no_process_takes_anything_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_relayed: bool
) -> None:
    here, _ = make(config=IntakeConfig(max_labels=1))
    monkeypatch.setattr(here.relay, "takes", lambda kind: is_relayed)
    refused = [counter(name, (NOW, 1.0), start=NOW - SECOND, one="1", two="2") for name in (HERE, THERE)]
    taken = [counter(name, (NOW, 1.0), start=NOW - SECOND) for name in (HERE, THERE)]

    for metrics in (refused, refused[:1], refused[1:]):
        assert here.ask(request(*metrics).SerializeToString()).is_useless is not is_relayed
    for one in taken:
        for metrics in (refused, refused[:1], refused[1:]):
            answer = here.ask(request(*metrics, one).SerializeToString())
            assert (answer.rejected, answer.is_useless) == (len(metrics), False)


def test_a_part_that_cannot_be_read_is_answered_so(make: Make) -> None:
    here, _ = make()
    body = bytearray(report(5.0, THERE))
    at = body.index(THERE.encode()) + len(THERE) + 4  # the first byte of its point
    assert body[at] == 0x11
    body[at] = 0x0F  # a field of no kind that there is

    assert here.ask(bytes(body)).status is DecodeStatus.BAD


def test_a_request_that_fails_here_while_its_part_is_handed_over_is_not_resumed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make()
    with monkeypatch.context() as failing:
        failing.setattr(here.intake._decoder, "_otlp_rows", lambda *_: 1 / 0)
        assert here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.BAD
        wait_until(lambda: there.sink.chunks)

    assert here.ask(report(6.0, HERE, THERE, second=2)).status is DecodeStatus.TAKEN
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (6.0, 6.0)
    assert len(here.sink.values("load")) == 1


def test_what_was_handed_to_us_does_not_wait_for_what_we_hand_to_others(make: Make) -> None:
    here, there = make()
    submitting, go_on = threading.Event(), threading.Event()

    def wait_for_others() -> None:
        submitting.set()
        go_on.wait()

    here.sink.before_submit = wait_for_others
    here.send(request(gauge("first", 1.0)).SerializeToString())
    assert submitting.wait(30.0)  # the intake's thread is there: what comes now is taken together
    there.sink.hold()
    here.send(report(5.0, THERE, second=1), token="ours")
    there.send(request(counter(HERE, (NOW, 7.0), start=NOW - SECOND)).SerializeToString())
    wait_until(lambda: here.intake._queue._waiting_from_peers)
    go_on.set()

    wait_until(lambda: total(here.sink, HERE) == 7.0)  # though `there` has not answered for its part of "ours"
    assert "ours" not in dict(here.answers)
    there.sink.release()
    wait_until(lambda: there.answers and "ours" in dict(here.answers))


def test_a_part_that_is_larger_than_what_may_wait_is_taken_when_nothing_else_waits(make: Make) -> None:
    here, there = make(config=IntakeConfig(max_held=16 << 10, max_group=8 << 10))
    series = [counter(THERE, (NOW, 1.0), start=NOW - SECOND, place=f"{place}" * 1000) for place in range(10, 30)]
    body = gzip.compress(request(*series).SerializeToString())
    assert len(body) < 16 << 10

    here.send(body, encoding=Encoding.GZIP)
    assert here.wait(1) == [DecodeStatus.TAKEN]
    assert total(there.sink, THERE) == 20.0


def test_both_full_and_handing_each_other_their_parts_neither_waits_for_the_other(make: Make) -> None:
    body = report(1.0, HERE, THERE)
    here, there = make(config=IntakeConfig(max_held=40 * len(body), max_group=1024))

    def flood(process: Process) -> None:
        for number in range(600):
            process.send(report(float(number + 1), HERE, THERE, second=number + 1))

    together([lambda: flood(here), lambda: flood(there)])
    for process in (here, there):
        assert DecodeStatus.TAKEN in process.wait(600)
    assert here.ask(report(1000.0, HERE, THERE, second=1000)).status is DecodeStatus.TAKEN
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (1000.0, 1000.0)


def test_a_process_that_is_not_there_is_reported_at_once_and_found_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_FIRST_CONTACT", 0.0)
    here, there = (Process(tmp_path, own, 2) for own in range(2))
    here.intake.start()

    answer = here.ask(report(5.0, HERE, THERE, second=1))
    assert (answer.status, "process 1" in answer.message) == (DecodeStatus.BROKEN, True)
    assert not here.sink.chunks
    assert here.ask(report(5.0, HERE, second=1)).status is DecodeStatus.TAKEN
    there.intake.start()
    wait_until(lambda: here.ask(report(5.0, HERE, THERE, second=1)).status is DecodeStatus.TAKEN)
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (5.0, 5.0)
    together([lambda: here.intake.close(10.0), lambda: there.intake.close(10.0)])


@contextmanager
def beside_fake_peer(folder: Path) -> Iterator[tuple[Process, socket.socket]]:
    """A process, and its connection to another one that has greeted and is ours to drive."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "1"))
        listening.listen()
        here = Process(folder, 0, 2)
        starting = threading.Thread(target=here.intake.start)
        starting.start()
        connection, _ = listening.accept()
        connection.sendall(peer_wire.answer_message(0, {}))
        starting.join()
        yield here, connection
    assert here.intake.close(10.0)


def test_a_process_that_greets_and_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "PATIENCE", 0.1)
    with beside_fake_peer(tmp_path) as (here, connection):
        assert here.ask(report(5.0, HERE, THERE)).status is DecodeStatus.BROKEN
        assert not here.sink.values("load")
        connection.close()


def test_a_process_that_dies_with_a_part_is_reported(tmp_path: Path) -> None:
    with beside_fake_peer(tmp_path) as (here, connection):
        here.send(report(5.0, HERE, THERE))
        assert connection.recv(10)
        connection.close()

        wait_until(lambda: here.answers)
        assert here.answers[0][1].status is DecodeStatus.BROKEN
        assert not here.sink.values("load")


@pytest.mark.parametrize("nonsense", [bytes(8) + b"\xff" + bytes(4) + b"\x02\0\0\0[]", b"\xff" * 200])
def test_a_connection_that_sends_nonsense_is_closed_and_the_others_go_on(
    make: Make, tmp_path: Path, nonsense: bytes
) -> None:
    here, there = make()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "1"))
        stranger.sendall(nonsense)
        stranger.settimeout(10.0)
        while stranger.recv(100):
            pass

    assert here.ask(report(5.0, HERE, THERE)).status is DecodeStatus.TAKEN
    assert total(there.sink, THERE) == 5.0


def test_the_first_process_to_stop_takes_what_others_hand_over_until_they_stop(make: Make) -> None:
    here, there = make()
    there.sink.hold()
    here.send(report(5.0, HERE, THERE, second=1))
    wait_until(lambda: there.sink.held)
    stopping = threading.Thread(target=lambda: there.intake.close(10.0))
    stopping.start()
    wait_until(lambda: there.intake.is_closing)

    assert there.ask(report(9.0, HERE)).status is DecodeStatus.BROKEN
    there.sink.release()
    assert here.ask(report(6.0, HERE, THERE, second=2)).status is DecodeStatus.TAKEN
    assert here.intake.close(10.0)
    stopping.join()
    assert (total(here.sink, HERE), total(there.sink, THERE)) == (6.0, 6.0)


def test_a_process_that_stops_alone_does_so_without_an_error(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    _, there = make()

    assert there.intake.close(0.2)
    assert "have not disconnected in time" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_folder_with_a_long_name_will_do(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    here, there = (Process(folder, own, 2) for own in range(2))
    together([here.intake.start, there.intake.start])

    assert here.ask(report(5.0, THERE)).status is DecodeStatus.TAKEN
    together([lambda: here.intake.close(10.0), lambda: there.intake.close(10.0)])
    assert not list(folder.iterdir())


def test_what_is_handed_over_is_counted(make: Make) -> None:
    here, there = make()
    telemetry = Telemetry()
    telemetry.watch(here.intake.samples)
    here.ask(report(5.0, HERE, THERE, second=1))
    there.sink.refuses = True
    here.ask(report(6.0, HERE, THERE, second=2))

    text = telemetry.render().decode()
    assert 'penstock_handover_points_total{to="1"} 1.0' in text
    assert 'penstock_handover_requests_total{status="taken",to="1"} 1.0' in text
    assert 'penstock_handover_requests_total{status="busy",to="1"} 1.0' in text
    assert 'penstock_handover_up{to="1"} 1.0' in text
    assert 'penstock_receive_requests_total{format="otlp",status="busy"} 1.0' in text
