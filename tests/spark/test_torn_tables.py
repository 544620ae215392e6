"""Files that a power cut has torn: set aside at the next start, and the tables are exact by what segments hold."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.errors import SegmentVanished
from penstock.model.function import Function
from penstock.spark.segment_folder import IDENTITY_FILE
from penstock.tables import delta_log, parquet
from penstock.tables.port import SCHEMAS, open_tables
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, Job, assert_exact

FUNCTIONS = tuple(map(Function.parse, ("avg", "latest", "percentile")))
Tear = Callable[[Path], None]


def newest(paths: list[Path]) -> Path:
    return max(paths, key=lambda path: path.stat().st_mtime_ns)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


class Torn:
    """Segments and tables of some batches, of which a test tears a file."""

    def __init__(self, folder: Path, form: str = "") -> None:
        self.folder = folder
        self._location = form + str(folder / "tables")
        self.edge = Edge(folder / "segments", functions=FUNCTIONS)
        self.begin()
        for _ in range(3):
            self.edge.seal(points=20)
            self.engine.run()

    def begin(self) -> None:
        """As a process that was just started."""
        parquet._guard.cache_clear()
        parquet._table_file.cache_clear()
        self.tables = open_tables(self._location)
        self.engine = Engine(self.folder / "segments", self.tables)

    def files(self, pattern: str) -> list[Path]:
        return list((self.folder / "tables").glob(pattern))

    def assert_mended(self) -> None:
        """And that it goes on."""
        self.edge.seal(points=20)
        self.begin()
        self.engine.run()
        assert_exact(self.tables, self.edge)


@pytest.mark.parametrize("tear", [empty, halve, zero])
def test_an_entry_of_delta_s_log_that_is_torn_is_set_aside(
    tmp_path: Path, tear: Tear, caplog: pytest.LogCaptureFixture
) -> None:
    torn = Torn(tmp_path)
    for name in SCHEMAS:
        tear(newest(torn.files(f"{name}/_delta_log/*.json")))
    torn.assert_mended()
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == len(SCHEMAS)
    assert "set aside" in lines[0].getMessage()
    assert {path.name for path in torn.files("*/_torn/*")} == {"00000000000000000003.json"}


def test_entries_that_follow_on_a_torn_one_go_with_it(tmp_path: Path) -> None:
    torn = Torn(tmp_path)
    empty(torn.folder / "tables/minute/_delta_log/00000000000000000002.json")
    torn.assert_mended()
    assert {path.name for path in torn.files("minute/_torn/*")} == {f"{2:020}.json", f"{3:020}.json"}


def test_tables_of_which_nothing_is_left_are_made_anew(tmp_path: Path) -> None:
    torn = Torn(tmp_path)
    for path in torn.files("*/_delta_log/*.json"):
        empty(path)
    torn.assert_mended()


@pytest.mark.parametrize("form", ["", "parquet:"])
def test_a_data_file_that_is_torn_goes_with_its_commit(tmp_path: Path, form: str) -> None:
    torn = Torn(tmp_path, form)
    for name in ("minute", "day"):
        empty(newest(torn.files(f"{name}/**/*.parquet")))
    torn.assert_mended()
    assert torn.files("minute/_torn/*")


@pytest.mark.parametrize("form", ["", "parquet:"])
def test_a_torn_data_file_stays_if_no_segment_holds_its_points(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    torn = Torn(tmp_path, form)
    empty(newest(torn.files("minute/**/*.parquet")))
    for segment in torn.edge.folder.glob("*.arrow"):
        segment.unlink()
    torn.begin()
    torn.engine.run()
    assert "restore it" in caplog.text
    assert torn.files("minute/_torn/*") == []


def test_points_that_neither_tables_nor_segments_hold_stop_the_job(tmp_path: Path) -> None:
    torn = Torn(tmp_path)
    empty(newest(torn.files("minute/_delta_log/*.json")))
    for segment in torn.edge.folder.glob("*.arrow"):
        segment.unlink()
    torn.edge.seal(points=20)
    torn.begin()
    with pytest.raises(SegmentVanished, match="in no segment"):
        torn.engine.run()


@pytest.mark.parametrize("file", ["*.checkpoint.parquet", "_last_checkpoint"])
def test_a_torn_checkpoint_of_delta_s_log_is_set_aside(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_log, "CHECKPOINT_EVERY", 2)
    torn = Torn(tmp_path)
    empty(newest(torn.files(f"hour/_delta_log/{file}")))
    torn.assert_mended()
    assert torn.files("hour/_torn/*")


@pytest.mark.parametrize("tear", [empty, halve])
def test_a_parquet_folder_whose_guard_is_torn_is_set_aside(tmp_path: Path, tear: Tear) -> None:
    torn = Torn(tmp_path, "parquet:")
    tear(newest(torn.files("minute/*/_guard.json")))
    torn.assert_mended()


@pytest.mark.parametrize("form", ["", "parquet:"])
@pytest.mark.parametrize("tear", [empty, zero])
def test_a_torn_mark_of_the_segments_is_restored_by_what_the_tables_say(tmp_path: Path, form: str, tear: Tear) -> None:
    torn = Torn(tmp_path, form)
    before = (torn.edge.folder / IDENTITY_FILE).read_text()
    tear(torn.edge.folder / IDENTITY_FILE)
    torn.assert_mended()
    assert (torn.edge.folder / IDENTITY_FILE).read_text() == before


def test_a_torn_mark_of_segments_that_no_table_has_is_made_anew(tmp_path: Path) -> None:
    edge = Edge(tmp_path / "segments")
    edge.seal(points=20)
    empty_mark = tmp_path / "segments" / IDENTITY_FILE
    empty_mark.touch()
    tables = open_tables(str(tmp_path / "tables"))
    Engine(tmp_path / "segments", tables).run()
    assert_exact(tables, edge)
    assert empty_mark.read_text()


@pytest.mark.spark
@pytest.mark.parametrize("tear", [empty, halve])
def test_a_checkpoint_that_is_torn_is_done_without(
    spark: SparkSession, tmp_path: Path, tear: Tear, caplog: pytest.LogCaptureFixture
) -> None:
    edge = Edge(tmp_path / "segments")
    job = Job(spark, tmp_path)
    for _ in range(2):
        edge.seal(points=20)
        job.run()
        for path in (tmp_path / "checkpoint").rglob("*"):
            if path.is_file() and not path.name.endswith(".crc"):
                tear(path)
    edge.seal(points=20)
    job.run()
    assert "A note in the checkpoint is torn" in caplog.text
    assert_exact(job.tables, edge)
