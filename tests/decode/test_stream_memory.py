"""Cumulative streams over a restart of ours: what is added up is what was counted, once."""

import random
import stat
from pathlib import Path
from typing import Any

import pytest

from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import DecodeStatus, Format
from penstock.errors import QueueFull
from penstock.protobuf import field_bytes, field_varint
from penstock.receive.intake import Intake
from penstock.testing import FakeClock, wait_until
from tests.decode.support import RandomStream, cumulative, decode, increments, sum_of
from tests.decode.test_remote_write import MILLIS, rows, write
from tests.receive.support import NOW, SECOND, KeepingSink, Sender, counter, request

KINDS = ("counter", "histogram", "exponential")


class Runs:
    """Decoders one after the other, each of which goes on where the one before ended."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.path = folder / "streams.arrow"
        self.config = config
        self.clock = FakeClock(NOW / SECOND)
        self.now = self._begun()

    def _begun(self) -> Decoder:
        return Decoder(IntakeConfig(**self.config), self.clock)

    def restart(self, *, after: float = 1.0, **config: Any) -> Decoder:
        """End in good order, and begin again so many seconds later."""
        self.now.save(self.path)
        self.clock.advance(after)
        self.config |= config
        self.now = self._begun()
        self.now.restore(self.path)
        return self.now

    def crash(self) -> Decoder:
        """Begin again with what is there."""
        self.now = self._begun()
        self.now.restore(self.path)
        return self.now


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_and_whenever_we_are_restarted_everything_is_counted_once(tmp_path: Path, kind: str) -> None:
    rng = random.Random(7)
    restarts = 0
    for life in range(15):
        (tmp_path / str(life)).mkdir()
        runs = Runs(tmp_path / str(life))
        stream, total = RandomStream(kind, rng), 0.0
        failing: list[tuple[Decoded, list[bytes]]] = []
        for _ in range(rng.randrange(40)):
            bodies = stream.reports()
            decoded = runs.now.decode(Format.OTLP, bodies)
            if rng.random() < 0.4:
                failing.append((decoded, bodies))
            else:
                total += sum_of(decoded)
            if rng.random() < 0.4:
                for failed, _ in failing:
                    failed.undo()
                if rng.random() < 0.7:
                    runs.restart()
                    restarts += 1
                total += sum(sum_of(runs.now.decode(Format.OTLP, again)) for _, again in failing)
                failing = []
        for failed, again in failing:
            failed.undo()
            total += sum_of(runs.now.decode(Format.OTLP, again))
        last = runs.now.decode(Format.OTLP, [stream.report()])
        assert total + sum_of(last) == pytest.approx(stream.counted)
    assert restarts > 25


def test_a_file_is_used_once_so_a_crash_counts_nothing_twice(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW))
    runs.restart()
    assert not runs.path.exists()
    assert increments(runs.now, counter("c", (NOW + 2 * SECOND, 8.0), start=NOW)) == [3.0]

    runs.crash()

    assert increments(runs.now, counter("c", (NOW + 3 * SECOND, 20.0), start=NOW)) == []
    assert increments(runs.now, counter("c", (NOW + 4 * SECOND, 21.0), start=NOW)) == [1.0]


def test_what_was_counted_before_the_restart_is_not_counted_again(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW))
    runs.restart()

    assert increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW)) == []
    assert increments(runs.now, counter("c", (NOW, 4.0), start=NOW)) == []
    assert increments(runs.now, counter("c", (NOW + 2 * SECOND, 5.0), start=NOW)) == [0.0]


def test_a_stream_that_is_silent_for_a_whole_run_is_known_in_the_next(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW, a="x"))
    increments(runs.now, counter("d", (NOW + SECOND, 5.0), start=NOW, a="y"))
    runs.restart()
    assert increments(runs.now, counter("d", (NOW + 2 * SECOND, 6.0), start=NOW, a="y")) == [1.0]
    runs.restart()
    runs.restart()

    assert increments(runs.now, counter("c", (NOW + 3 * SECOND, 8.0), start=NOW, a="x")) == [3.0]
    assert increments(runs.now, counter("d", (NOW + 3 * SECOND, 8.0), start=NOW, a="y")) == [2.0]


def test_labels_in_another_order_are_the_same_stream_over_restarts(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW, a="x", b="y"))
    increments(runs.now, counter("c", (NOW + 2 * SECOND, 6.0), start=NOW, b="y", a="x"))
    runs.restart()
    assert increments(runs.now, counter("c", (NOW + 3 * SECOND, 9.0), start=NOW, a="x", b="y")) == [3.0]
    runs.restart()

    assert increments(runs.now, counter("c", (NOW + 4 * SECOND, 10.0), start=NOW, b="y", a="x")) == [1.0]


def test_streams_of_two_instances_are_kept_apart(runs: Runs) -> None:
    for instance, value in (("one", 5.0), ("two", 50.0)):
        body = request(counter("c", (NOW + SECOND, value), start=NOW), resource={"service.instance.id": instance})
        runs.now.decode(Format.OTLP, [body.SerializeToString()])
    runs.restart()

    for instance, value in (("two", 51.0), ("one", 7.0)):
        body = request(counter("c", (NOW + 2 * SECOND, value), start=NOW), resource={"service.instance.id": instance})
        assert sum_of(runs.now.decode(Format.OTLP, [body.SerializeToString()])) == {"one": 2.0, "two": 1.0}[instance]


@pytest.mark.parametrize("began", [NOW + 5 * SECOND, NOW + 15 * SECOND])
def test_a_stream_that_we_hear_of_only_after_the_restart_counts_from_its_start(runs: Runs, began: int) -> None:
    """It began while the run before was there, or between the two: no run has counted it."""
    runs.clock.advance(10)
    runs.restart(after=10)

    assert increments(runs.now, counter("c", (NOW + 25 * SECOND, 5.0), start=began)) == [5.0]
    assert increments(runs.now, counter("d", (NOW + 25 * SECOND, 5.0), start=NOW - SECOND)) == []


def test_prometheus_counters_go_on_also_those_that_only_metadata_calls_so(runs: Runs) -> None:
    metadata = field_bytes(3, field_varint(1, 1) + field_bytes(2, b"requests"))

    def send(step: int, value: float, before: bytes = b"") -> list[float]:
        series = [({"__name__": name}, [(MILLIS + step, value)]) for name in ("requests", "hits_total")]
        return [value for *_, value in rows(runs.now.decode(Format.REMOTE_WRITE, [before + write(*series)]))]

    assert send(1, 100.0, metadata) == []
    runs.restart()

    assert send(2, 103.0) == [3.0, 3.0]


def test_what_is_owed_is_owed_after_the_restart(runs: Runs) -> None:
    for kind in KINDS:
        runs.now.decode(Format.OTLP, [request(cumulative(kind, NOW + SECOND, 5)).SerializeToString()])
        lost = runs.now.decode(Format.OTLP, [request(cumulative(kind, NOW + 2 * SECOND, 9)).SerializeToString()])
        runs.now.decode(Format.OTLP, [request(cumulative(kind, NOW + 3 * SECOND, 10)).SerializeToString()])
        lost.undo()
    runs.restart()

    for kind in KINDS:
        found = runs.now.decode(Format.OTLP, [request(cumulative(kind, NOW + 4 * SECOND, 12)).SerializeToString()])
        assert sum_of(found) == 4 + 2, kind


@pytest.mark.parametrize("restart", [{"after": 3601.0}, {"resource_attributes": ("host.name",)}])
def test_a_file_that_is_too_old_or_of_other_settings_is_not_used(runs: Runs, restart: dict[str, Any]) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW))
    runs.restart(**restart)

    assert not runs.path.exists()
    assert increments(runs.now, counter("c", (NOW + 2 * SECOND, 8.0), start=NOW)) == []


def test_a_stream_that_would_have_expired_meanwhile_is_not_taken_up_again(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW))
    runs.clock.advance(3000)
    increments(runs.now, counter("d", (NOW + SECOND, 5.0), start=NOW))
    runs.restart(after=1000)

    assert increments(runs.now, counter("c", (NOW + 4000 * SECOND, 8.0), start=NOW)) == []
    assert increments(runs.now, counter("d", (NOW + 4000 * SECOND, 8.0), start=NOW)) == [3.0]


def test_a_stream_that_comes_back_after_it_was_forgotten_is_not_counted_again(runs: Runs) -> None:
    assert increments(runs.now, counter("c", (NOW + SECOND, 100.0), start=NOW)) == [100.0]
    runs.clock.advance(3700)
    assert runs.now.expire() == 1

    assert increments(runs.now, counter("c", (NOW + 3700 * SECOND, 150.0), start=NOW)) == []
    assert increments(runs.now, counter("d", (NOW + 3700 * SECOND, 5.0), start=NOW + 3600 * SECOND)) == [5.0]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"ARROW1\0\0" + bytes(100)])
def test_a_damaged_file_is_set_aside_and_said(runs: Runs, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    runs.path.write_bytes(damage)
    assert runs.now.restore(runs.path) == 0

    assert not runs.path.exists()
    assert (runs.path.parent / "streams.arrow.damaged").read_bytes() == damage
    assert "cannot be read and is set aside" in caplog.text


def test_the_file_is_private(runs: Runs) -> None:
    increments(runs.now, counter("c", (NOW + SECOND, 5.0), start=NOW))
    runs.now.save(runs.path)

    assert stat.S_IMODE(runs.path.stat().st_mode) == 0o600
    assert [path.name for path in runs.path.parent.iterdir()] == ["streams.arrow"]


def started(path: Path, sink: KeepingSink) -> Sender:
    """A sender to an intake that keeps its streams there."""
    return Sender(Intake(sink, clock=FakeClock(NOW / SECOND), memory=path).start())


def report(second: int, value: float) -> bytes:
    return bytes(request(counter("c", (NOW + second * SECOND, value), start=NOW)).SerializeToString())


def test_an_intake_that_closes_keeps_what_it_answered_for_and_not_what_it_refused(
    tmp_path: Path, sink: KeepingSink
) -> None:
    first = started(tmp_path / "streams.arrow", sink)
    assert first.ask(report(1, 5.0)).status is DecodeStatus.TAKEN
    sink.refuses = True
    assert first.ask(report(2, 7.0)).status is DecodeStatus.BUSY
    sink.refuses, sink.fails = False, QueueFull("no room")
    assert first.ask(report(2, 7.0)).status is DecodeStatus.BROKEN
    assert first.intake.close(10.0)
    sink.fails = None

    second = started(tmp_path / "streams.arrow", sink)
    assert second.ask(report(2, 7.0)).status is DecodeStatus.TAKEN
    assert second.intake.close(10.0)

    assert sink.values("c") == [5.0, 2.0]


def test_an_intake_that_cannot_answer_all_requests_keeps_nothing(tmp_path: Path, sink: KeepingSink) -> None:
    one = started(tmp_path / "streams.arrow", sink)
    sink.hold()
    one.send(report(1, 5.0))
    wait_until(lambda: sink.held)

    assert not one.intake.close(0.2)

    assert not (tmp_path / "streams.arrow").exists()
    sink.release()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sender_ahead", "we_go_back"), [(300, 0.0), (0, 7200.0), (300, 7200.0), (-300, 0.0), (0, -7200.0)]
)
def test_after_a_kill_nothing_is_counted_twice_whatever_the_clocks_say(
    runs: Runs, kind: str, sender_ahead: int, we_go_back: float
) -> None:
    began = NOW + (sender_ahead + 1) * SECOND

    def count(after: int, value: int) -> float:
        point = cumulative(kind, began + after * SECOND, value, start=began)
        return sum_of(decode(request(point), using=runs.now))

    runs.crash()
    runs.clock.advance(10.0)
    assert count(5, 100) == (0 if sender_ahead < 0 else 100)  # one that is behind seems to have begun before us
    runs.clock = FakeClock(runs.clock.time() + 50.0 - we_go_back)
    runs.crash()
    assert count(60, 120) == 0
    assert count(61, 150) == 30


def test_a_stream_that_is_ahead_and_begins_after_a_kill_is_counted_whole(runs: Runs) -> None:
    ahead = NOW + 300 * SECOND
    runs.crash()
    decode(request(counter("c", (ahead + 2 * SECOND, 100), start=ahead + SECOND)), using=runs.now)
    runs.clock.advance(10.0)
    runs.crash()
    begun = ahead + 11 * SECOND
    assert sum_of(decode(request(counter("c", (begun + SECOND, 7), start=begun)), using=runs.now)) == 7


def test_a_stream_that_is_ahead_and_was_forgotten_is_not_counted_again(runs: Runs) -> None:
    began = NOW + 301 * SECOND
    runs.crash()
    decode(request(counter("c", (began + SECOND, 100), start=began)), using=runs.now)
    runs.clock.advance(3601.0)
    assert runs.now.expire() == 1
    late = began + 3620 * SECOND
    assert sum_of(decode(request(counter("c", (late, 120), start=began)), using=runs.now)) == 0
