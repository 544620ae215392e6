"""A batch costs what is new: not what segments are kept, what writers there were or how long the tables' logs are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TableConflict
from penstock.model.segment import Segment, outline_of_segment
from penstock.spark import segment_folder
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.spark.source import LIMITS, SegmentSource
from penstock.tables import delta, delta_commits
from penstock.tables.delta import DeltaTables
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, assert_exact


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "segments")


def counted(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> list[Any]:
    """The first arguments of all calls of a function from now on."""
    calls: list[Any] = []
    function: Callable[..., Any] = getattr(holder, name)

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments[0])
        return function(*arguments, **named)

    monkeypatch.setattr(holder, name, counting)
    return calls


def test_a_batch_lists_the_folder_once_and_opens_only_new_segments(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30):
        edge.seal(points=5)
    engine = Engine(edge.folder, DeltaTables(tmp_path / "tables"))
    engine.run()
    new = [edge.seal(points=5) for _ in range(3)]
    folder = SegmentSourceFolder(edge.folder)
    taken = folder.admit({}, up_to={"edge": {"last": 5 * 30 - 1, "segments": 30}})
    listed, opened = counted(monkeypatch, os, "listdir"), counted(monkeypatch, segment_folder, "outline_of_segment")
    for n in range(3):
        end = folder.admit(taken, files=1)
        assert [segment.name for segment in folder.between(taken, end)] == [new[n].name]
        folder.reach()
        folder.clean(taken, 0.0)
        taken = end

    assert len(listed) == 3
    assert opened == new


def test_a_commit_guards_the_writers_that_moved_and_no_others(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        edge.seal(f"writer{number}", points=5)
    engine = Engine(edge.folder, DeltaTables(tmp_path / "tables"))
    engine.run()
    edge.seal("writer7", points=5)
    commit, guarded = delta_commits.commit_actions, list[int]()

    def counting(table: Any, name: str, actions: list[Any], guards: list[Any]) -> None:
        guarded.append(len(guards))
        commit(table, name, actions, guards)

    monkeypatch.setattr(delta_commits, "commit_actions", counting)
    engine.run()

    assert guarded == [2, 2, 2, 2]  # how far the folder goes, and how far the queue: in each table
    assert_exact(engine.tables, edge)


def test_tables_are_opened_once_for_a_run_of_batches_and_their_guards_asked_for_once(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(12):
        edge.seal(points=5)
    engine = Engine(edge.folder, DeltaTables(tmp_path / "tables"))
    engine.run(max_files=1)
    for _ in range(6):
        edge.seal(points=5)
    opened = counted(monkeypatch, delta, "DeltaTable")

    def opened_levels() -> int:
        return sum(not path.endswith("/metrics") for path in opened)  # that one is written where there is news

    engine.run(max_files=6)
    one_batch = opened_levels()
    for _ in range(6):
        edge.seal(points=5)
    opened.clear()
    engine.run(max_files=1)

    assert opened_levels() == one_batch
    assert_exact(engine.tables, edge)


def test_a_backlog_is_worked_off_in_batches_that_are_bounded_in_files_rows_and_bytes(tmp_path: Path) -> None:
    stream: Any = SegmentSource({"path": str(tmp_path)}).streamReader(None)  # type: ignore[arg-type]
    path = Edge(tmp_path / "one").seal(points=50)
    for number in range(300):
        os.link(path, tmp_path / Segment("edge", number, number).name)
    first = stream.latestOffset({}, stream.getDefaultReadLimit())
    assert first["edge"]["segments"] == LIMITS["files"]

    rows, size = outline_of_segment(path).rows, path.stat().st_size
    for limit, most in (("Rows", 10 * rows), ("Bytes", 10 * size)):
        options = {"path": str(tmp_path), f"max{limit}PerTrigger": str(most + 1)}
        bounded: Any = SegmentSource(options).streamReader(None)  # type: ignore[arg-type]
        assert bounded.latestOffset({}, bounded.getDefaultReadLimit())["edge"]["segments"] == 10
    assert {"files", "rows", "size_bytes"} == set(LIMITS)


@pytest.mark.parametrize("listed_between", [False, True])
def test_a_new_queue_under_an_old_name_is_noticed_while_the_job_runs(edge: Edge, listed_between: bool) -> None:
    """Also where all its sequences lie below those that were seen, so that a job would pass over them."""
    for _ in range(4):
        edge.seal(points=5)
    folder = SegmentSourceFolder(edge.folder)
    taken = folder.admit({})
    assert taken["edge"]["queue"]
    for path in edge.folder.glob("*.arrow"):
        path.unlink()
    if listed_between:
        assert folder.admit(taken) == taken
    edge.new_queue()
    for _ in range(2):
        edge.seal(points=5)
    with pytest.raises(TableConflict, match="is of another queue than what the tables hold"):
        folder.admit(taken)
