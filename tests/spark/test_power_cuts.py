"""Power cuts on a real file system: what a table's guard says is on the disk, so no segment goes too early. No JVM."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.model.function import Function
from penstock.model.level import Level
from penstock.tables import delta_log, parquet
from penstock.tables.port import SCHEMAS, open_tables
from tests.cut_disk import CutDisk
from tests.spark.engine import Engine, PowerCut, faults
from tests.spark.pipeline import Edge, assert_exact

FUNCTIONS = tuple(map(Function.parse, ("avg", "latest", "percentile")))
FORMS = {"delta": "", "parquet": "parquet:"}


class Place:
    """Segments and tables on a disk whose power is cut."""

    def __init__(self, disk: CutDisk, form: str) -> None:
        self._disk = disk
        self._form = form
        self.edge = Edge(disk.folder / "segments", functions=FUNCTIONS)
        self.begin()

    def begin(self) -> None:
        """As a process that was just started."""
        parquet._guard.cache_clear()
        parquet._table_file.cache_clear()
        self.tables = open_tables(FORMS[self._form] + str(self._disk.folder / "tables"))
        self.engine = Engine(self._disk.folder / "segments", self.tables)

    def cut_power(self) -> None:
        self._disk.cut()
        self._disk.come_back()
        self.begin()

    def fold(self) -> None:
        for name in SCHEMAS:
            self.tables.compact(name)

    def assert_exact(self) -> None:
        assert_exact(self.tables, self.edge)


@pytest.fixture(params=FORMS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with CutDisk(tmp_path / "disk.img", tmp_path / "disk", "128M") as disk:
        yield Place(disk, request.param)


def test_what_a_batch_has_added_survives_a_power_cut_without_its_segments(place: Place) -> None:
    for _ in range(3):
        for _ in range(2):
            place.edge.seal(points=20)
        place.engine.run(max_files=1, retain_segments=-1)
        segments = [path for path in place.edge.folder.iterdir() if path.suffix == ".arrow"]
        assert len(segments) == 1  # the newest of a writer always stays
        place.cut_power()
        place.engine.run()

        place.assert_exact()


def test_a_power_cut_around_any_commit_adds_everything_once(place: Place) -> None:
    with faults() as fault:
        for table, when in product(SCHEMAS, ("before", "after")):
            place.edge.seal(points=20)
            place.edge.seal("other", points=20)
            fault.armed = (table, when)
            with pytest.raises(PowerCut, match=f"{when} {table}"):
                place.engine.run()
            place.cut_power()
        place.engine.run(max_files=1)

    place.assert_exact()


def test_a_batch_that_was_committed_by_a_process_that_died_is_on_the_disk_before_its_segments_go(place: Place) -> None:
    place.edge.seal(points=20)
    place.edge.seal(points=20)
    with faults() as fault:
        fault.armed = ("minute", "after")
        with pytest.raises(PowerCut):
            place.engine.run(max_files=1)
    place.begin()  # the process has died, the machine goes on
    place.engine.run(max_files=1, retain_segments=-1)
    place.cut_power()
    place.engine.run()

    place.assert_exact()


def test_folded_tables_survive_a_power_cut_after_their_old_files_are_removed(place: Place) -> None:
    for _ in range(3):
        place.edge.seal(points=50)
        place.engine.run()
    place.fold()
    place.tables.vacuum(0)
    for segment in place.edge.folder.glob("*.arrow"):
        segment.unlink()
    place.cut_power()

    place.assert_exact()


def test_a_power_cut_in_the_middle_of_a_fold_leaves_the_tables_exact(place: Place) -> None:
    with faults() as fault:
        for level in Level:
            place.edge.seal(points=20)
            place.engine.run(retain_segments=-1)
            fault.armed = (level.value, "after")
            with pytest.raises(PowerCut):
                place.fold()
            place.cut_power()
            place.engine.run()

            place.assert_exact()


def test_checkpoints_of_the_log_survive_a_power_cut(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_log, "CHECKPOINT_EVERY", 4)
    for _ in range(10):
        place.edge.seal(points=1)
    place.engine.run(max_files=1, retain_segments=-1)
    place.cut_power()
    place.edge.seal(points=1)
    place.engine.run()

    place.assert_exact()
