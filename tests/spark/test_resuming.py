"""Where a job goes on, without its checkpoint or over other segments: where the tables are, or not at all. No JVM."""

import logging
import shutil
from pathlib import Path

import pytest

from penstock.errors import SegmentVanished, TableConflict
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.tables.port import Tables, open_tables
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, assert_exact


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "segments")


@pytest.fixture(params=["", "parquet:"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return open_tables(f"{request.param}{tmp_path / 'tables'}")


@pytest.fixture
def engine(edge: Edge, tables: Tables) -> Engine:
    """That has added three segments."""
    engine = Engine(edge.folder, tables)
    for _ in range(3):
        edge.seal(points=20)
    engine.run()
    return engine


def lose(engine: Engine, table: str) -> None:
    """Delete one table and the checkpoint."""
    shutil.rmtree(Path(engine.tables.location.removeprefix("parquet:")) / table)
    engine.forget()


def test_a_table_that_was_deleted_is_refilled_while_its_segments_are_there(engine: Engine, edge: Edge) -> None:
    lose(engine, "hour")
    edge.seal(points=20)
    engine.run()

    assert_exact(engine.tables, edge)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_table_that_was_deleted_is_not_refilled_in_part(
    engine: Engine, edge: Edge, tables: Tables, missing: int
) -> None:
    (edge.folder / sorted(path.name for path in edge.folder.glob("*.arrow"))[missing]).unlink()
    lose(engine, "hour")
    first, last = 5 * missing, 5 * missing + 4
    with pytest.raises(
        SegmentVanished, match=rf"^a table lacks .* sequences {first} to {last} of writer 'edge' are in no segment of"
    ):
        engine.run()

    assert tables.describe("hour").rows == 0


def test_an_empty_file_stands_in_for_what_is_lost_for_good(engine: Engine, edge: Edge, tables: Tables) -> None:
    name = min(path.name for path in edge.folder.glob("*.arrow"))
    (edge.folder / name).unlink()
    lose(engine, "hour")
    (edge.folder / name).touch()
    engine.run()

    assert tables.describe("hour").rows > 0
    assert [segment.name for segment in SegmentSourceFolder(edge.folder).quarantined()] == [name]


def test_new_tables_over_segments_whose_first_are_gone_say_so(
    engine: Engine, edge: Edge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    min(edge.folder.glob("*.arrow")).unlink()
    with caplog.at_level(logging.WARNING):
        Engine(edge.folder, open_tables(str(tmp_path / "others"))).run()

    assert "writer=edge first=5" in caplog.text


def copied(edge: Edge, folder: Path) -> Path:
    """Copy the segments, but not what the folder is known by."""
    folder.mkdir()
    for path in edge.folder.glob("*.arrow"):
        shutil.copy(path, folder)
    return folder


def test_segments_that_were_copied_elsewhere_are_refused_rather_than_counted_twice(
    engine: Engine, edge: Edge, tables: Tables, tmp_path: Path
) -> None:
    copy = copied(edge, tmp_path / "copy")
    with pytest.raises(TableConflict, match=r"holds the queue of writer 'edge' up to sequence 14, .* from 0 on"):
        Engine(copy, tables).run()

    assert_exact(tables, edge)


def test_a_queue_whose_segments_go_to_another_folder_is_followed_there(
    engine: Engine, edge: Edge, tables: Tables, tmp_path: Path
) -> None:
    edge.seal(points=20, folder=tmp_path / "elsewhere")
    Engine(tmp_path / "elsewhere", tables).run()

    assert_exact(tables, edge)


def test_a_folder_that_is_copied_whole_is_known_again(
    engine: Engine, edge: Edge, tables: Tables, tmp_path: Path
) -> None:
    copy = shutil.copytree(edge.folder, tmp_path / "copy")
    edge.seal(points=20)
    shutil.copy(max(edge.folder.glob("*.arrow")), copy)
    Engine(copy, tables).run()

    assert_exact(tables, edge)


def test_a_new_queue_under_the_name_of_an_old_one_is_refused_rather_than_passed_over(
    engine: Engine, edge: Edge, tables: Tables
) -> None:
    for path in edge.folder.glob("*.arrow"):  # which leaves the mark of the folder
        path.unlink()
    edge.new_queue()
    edge.seal(points=20)
    with pytest.raises(TableConflict, match=r"is of another queue than what the tables hold of writer 'edge'"):
        engine.run()
