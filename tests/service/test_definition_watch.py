"""The warnings of definitions that do not fit: once, after a while, of all processes together."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.service.definition_watch import DefinitionWatch
from penstock.telemetry import Value
from penstock.testing import FakeClock

UNMATCHED = "Definitions have matched nothing so far"
UNSEEN = "No point has had this label of a definition's entity so far"


class Counted:
    """What two processes count of definitions."""

    def __init__(self, **points: tuple[int, int]) -> None:
        self.points = points
        self.labels: dict[tuple[str, str], tuple[int, int]] = {}

    def values(self) -> Iterator[Value]:
        for definition, counts in self.points.items():
            for process, count in enumerate(counts):
                labels = {"definition": definition, "process": str(process)}
                yield Value("penstock_l1_definition_points_total", "", labels, count)
        for (definition, label), counts in self.labels.items():
            for process, count in enumerate(counts):
                labels = {"definition": definition, "label": label, "process": str(process)}
                yield Value("penstock_l1_definition_label_seen", "", labels, count)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_it_warns_once_of_all_definitions_that_matched_nothing_in_any_process(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(idle=(0, 0), busy=(0, 5), silent=(0, 0))
    watch = DefinitionWatch(counted.values, 300.0, clock=clock)
    clock.advance(299)
    watch.look()
    assert caplog.messages == []

    clock.advance(1)
    watch.look()
    counted.points["silent"] = (7, 0)
    watch.look()

    (warning,) = caplog.messages
    assert warning.startswith(UNMATCHED)
    assert warning.endswith("seconds=300 definitions=idle, silent")


def test_it_warns_once_of_a_label_that_no_process_has_seen_some_minutes_after_the_first_points(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(made=(0, 1))
    counted.labels = {("made", "host"): (0, 1), ("made", "region"): (0, 0)}
    watch = DefinitionWatch(counted.values, 300.0, clock=clock)
    clock.advance(200)
    watch.look()
    clock.advance(299)
    watch.look()
    assert caplog.messages == []

    clock.advance(1)
    watch.look()
    counted.labels["made", "host"] = (0, 0)  # that process was started anew, and has no points yet
    watch.look()

    (warning,) = caplog.messages
    assert warning.startswith(UNSEEN)
    assert warning.endswith("definition=made label=region")


def test_a_reload_warns_anew_only_of_definitions_that_changed(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.yaml"
    path.write_text("metrics: []")
    watch = DefinitionWatch(Counted(made=(0, 0)).values, 300.0, path, clock=clock)
    clock.advance(300)
    watch.look()
    watch.on_reload(path)
    clock.advance(300)
    watch.look()
    assert len(caplog.messages) == 1

    path.write_text("metrics: [{name: made, source: other}]")
    watch.on_reload(path)
    watch.look()
    assert len(caplog.messages) == 1
    clock.advance(300)
    watch.look()
    assert len(caplog.messages) == 2
