"""From segments to tables: exact, whatever the batches, the order and the crashes."""

import os
import shutil
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from penstock.model.function import AVG, Function
from penstock.model.level import Level
from penstock.model.packed import PACKED
from penstock.model.partial import IDENTITY, PARTIALS, merged, partials_of_columns
from penstock.model.point import POINTS
from penstock.model.segment import Segment, seal
from penstock.spark import job as spark_job
from penstock.spark import table_sink
from penstock.spark.rollup import rolled_up
from penstock.spark.source import PACKED_SCHEMA, SCHEMA
from penstock.tables import delta_commits
from penstock.tables.port import open_tables, read_top_n
from tests.servers import PostgreSQL
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, Job, assert_exact

pytestmark = pytest.mark.spark


@pytest.fixture
def edge(tmp_path: Path) -> Edge:
    return Edge(tmp_path / "segments")


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


def test_the_source_declares_exactly_the_schema_of_partials(spark: SparkSession) -> None:
    for declared, schema in ((SCHEMA, PARTIALS), (PACKED_SCHEMA, PACKED)):
        empty = spark.createDataFrame([], declared).toArrow()
        assert empty.schema.names == schema.names
        assert [field.type for field in empty.schema] == [field.type for field in schema]


def test_the_settings_of_memory_reach_the_python_processes(spark: SparkSession) -> None:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MIMALLOC_PURGE_DELAY")
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: [os.environ.get(name) for name in names]).first()

    assert found == ["33554432", "1073741824", "10000"]


def test_tables_equal_one_merge_of_everything_over_batches_writers_and_restarts(job: Job, edge: Edge) -> None:
    edge.seal()
    edge.seal("other")
    job.run()
    edge.seal()
    edge.seal("third")
    edge.seal("other")
    job.run(max_files=1)

    assert_exact(job.tables, edge)


def test_functions_with_parts_are_exact_at_every_level(spark: SparkSession, tmp_path: Path) -> None:
    functions = tuple(map(Function.parse, ("latest", "percentile", "histogram(-5,0,5)")))
    edge, job = Edge(tmp_path / "segments", functions=functions), Job(spark, tmp_path)
    for _ in range(3):
        edge.seal(points=200)
    job.run(max_files=2)

    assert_exact(job.tables, edge)


def test_a_batch_is_one_job_of_two_stages_and_nothing_is_cached(job: Job, edge: Edge, spark: SparkSession) -> None:
    edge.seal()
    job.run()
    edge.seal()
    query = job.run()
    tracker, store = spark.sparkContext.statusTracker(), spark.sparkContext._jsc.sc().statusStore()
    (ran,) = tracker.getJobIdsForGroup(str(query.runId))
    found = tracker.getJobInfo(ran)
    assert found is not None
    read, wrote = (store.lastStageAttempt(number) for number in sorted(found.stageIds))

    assert read.shuffleWriteBytes() == wrote.shuffleReadBytes() > 0
    assert (read.numFailedTasks(), wrote.numFailedTasks()) == (0, 0)
    assert spark.sparkContext._jsc.getPersistentRDDs().isEmpty()


def test_parquet_is_written_by_the_same_plan(spark: SparkSession, tmp_path: Path, edge: Edge) -> None:
    for _ in range(3):
        edge.seal(points=200)
    job = Job(spark, tmp_path, f"parquet:{tmp_path / 'tables'}")
    job.run(max_files=2)

    assert_exact(job.tables, edge)


@pytest.mark.server
def test_executors_stage_rows_in_postgresql_and_one_transaction_takes_a_batch_of_any_size(
    spark: SparkSession, tmp_path: Path, edge: Edge
) -> None:
    edge.seal(points=200)
    with PostgreSQL(tmp_path / "postgres") as server:
        job = Job(spark, tmp_path, server.url)
        job.run()
        assert_exact(job.tables, edge)

        many = 120_000
        times = pa.repeat(pa.scalar(0, POINTS.field("time").type), many)
        entities = pa.array([f"e{n}" for n in range(many)])
        partials = partials_of_columns("many", AVG, entities, times, pa.array([1.0] * many))
        seal(edge.folder, Segment("other", 0, 0), merged(partials))
        job.run()

        for level in Level:
            rows = job.tables.partials(level, metric="many")
            assert (rows.num_rows, pc.sum(rows["count"]).as_py()) == (many, many)
        with psycopg.connect(server.url) as connection:
            left = connection.execute("select count(*) from pg_tables where tablename like 'penstock_staged%'")
            assert left.fetchone() == (0,)


def test_a_batch_of_which_spark_has_made_more_rows_than_its_tasks_report_is_refused(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.seal()
    monkeypatch.setattr(spark_job, "rolled_up", lambda rows: rolled_up(rows).where("place <> 1 or count % 3 > 0"))
    with pytest.raises(Exception, match=r"RowsMissing: of a batch that . tasks read, \d+ points were written .*'hour'"):
        job.run()
    assert not (job.folder / "tables" / "minute" / "_delta_log").exists()

    monkeypatch.undo()
    reported = table_sink._reports
    monkeypatch.setattr(table_sink, "_reports", lambda exchange: reported(exchange)[1:])
    with pytest.raises(Exception, match=r"RowsMissing: Spark has aggregated \d+ rows, its tasks report \d+"):
        job.run()
    monkeypatch.undo()
    job.run()

    assert_exact(job.tables, edge)


def test_spark_rolls_up_as_the_model_does_whatever_the_time_zone_of_the_session(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Points at the same time, before 1970, around midnight; in a zone whose hours begin at half past."""
    (tmp_path / "segments").mkdir()
    functions = tuple(map(Function.parse, ("avg", "latest", "percentile", "histogram(-5,0,5)", "top_n(2)")))
    times = pa.array([t + d for d in (-86_400, -1, 0, 86_399) for t in (0, 0, 1_799, 5_400)], pa.int64())
    moments = pc.multiply(times, 1_000_000).cast(POINTS.field("time").type)
    values = pa.array([float(n % 5 - 3) for n in range(len(times))])
    entities = pa.array(["a", "b"] * (len(times) // 2))
    for n, function in enumerate(functions * 2):
        records = entities if function.name == "top_n" else None
        partials = partials_of_columns("m", function, entities, moments, values, records=records)
        seal(tmp_path / "segments", Segment("edge", n, n), partials)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        Job(spark, tmp_path, str(tmp_path / "spark")).run()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    Engine(tmp_path / "segments", open_tables(str(tmp_path / "model"))).run()

    for level in Level:
        one, other = (open_tables(str(tmp_path / name)).partials(level) for name in ("spark", "model"))
        assert one.num_rows > 0
        assert _sorted(one) == _sorted(other)
        assert {row["bucket"].timestamp() % (60 * level.minutes) for row in one.to_pylist()} == {0.0}
    tops = [read_top_n(open_tables(str(tmp_path / name)), 2).to_pylist() for name in ("spark", "model")]
    assert tops[0] == tops[1]


def _sorted(partials: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = partials.to_pylist()
    return sorted(rows, key=lambda row: [str(row[name]) for name in IDENTITY])


def test_batches_that_crash_around_commits_add_everything_once(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = delta_commits.commit_actions
    for table, when in (("minute", "before"), ("minute", "after"), ("day", "before"), ("top_n", "after")):

        def crashing(opened: Any, name: str, *rest: Any, table: str = table, when: str = when) -> None:
            if name != table or when == "after":
                commit(opened, name, *rest)
            if name == table:
                raise RuntimeError("power cut")

        edge.seal(points=100)
        monkeypatch.setattr(delta_commits, "commit_actions", crashing)
        with pytest.raises(Exception, match="power cut"):
            job.run()
    monkeypatch.undo()
    edge.seal(points=100)
    job.run()

    assert_exact(job.tables, edge)


def test_with_its_checkpoint_deleted_a_job_goes_on_from_what_the_tables_hold(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.seal()
    job.run()
    commit = delta_commits.commit_actions

    def crash_at_day(opened: Any, name: str, *rest: Any) -> None:
        if name == "day":
            raise RuntimeError("power cut")
        commit(opened, name, *rest)

    edge.seal()
    monkeypatch.setattr(
        delta_commits, "commit_actions", crash_at_day
    )  # minute and hour are now a batch ahead of day and top-n
    with pytest.raises(Exception, match="power cut"):
        job.run()
    monkeypatch.undo()
    shutil.rmtree(job.folder / "checkpoint")
    edge.seal()
    edge.seal("other")
    job.run()

    assert_exact(job.tables, edge)


def test_a_query_that_another_has_overtaken_is_refused_and_nothing_is_added_twice(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.seal()
    job.run()
    edge.seal()
    other = Engine(edge.folder, open_tables(str(job.folder / "tables")))
    checked = table_sink.checked_spark_reports

    def overtaken(reports: Any) -> Any:
        """The other job adds the first of two segments while this one writes both."""
        monkeypatch.undo()
        kept = max(edge.folder.glob("*.arrow")).rename(job.folder / "kept")
        other.run()
        kept.rename(edge.folder / last.name)
        return checked(reports)

    last = edge.seal()
    monkeypatch.setattr(spark_job, "checked_spark_reports", overtaken)
    with pytest.raises(Exception, match=r"TableOvertaken.*another query has added some of it"):
        job.run()
    job.run()

    assert_exact(job.tables, edge)


def test_with_its_tables_deleted_a_job_says_so_rather_than_going_on_without_the_past(job: Job, edge: Edge) -> None:
    edge.seal()
    job.run()
    shutil.rmtree(job.folder / "tables")
    edge.seal()

    with pytest.raises(Exception, match="held something of writer 'edge' and hold nothing now"):
        job.run()


def test_new_segments_in_the_place_of_old_ones_are_not_taken_for_them(job: Job, edge: Edge) -> None:
    edge.seal()
    edge.seal()
    job.run()
    shutil.rmtree(job.folder / "segments")
    anew = Edge(job.folder / "segments", seed=4)
    anew.seal()
    job.run()
    anew.points += edge.points

    assert_exact(job.tables, anew)


def test_a_segment_that_disappears_stops_the_batch_that_needs_it(
    job: Job, edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.seal()
    lost = edge.seal()
    edge.seal()
    monkeypatch.setattr(delta_commits, "commit_actions", _raise)
    with pytest.raises(Exception, match="power cut"):
        job.run()
    monkeypatch.undo()
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(Exception, match="sequences 5 to 9 of writer 'edge' are in no segment"):
        job.run()
    lost.write_bytes(kept)
    job.run()

    assert_exact(job.tables, edge)


def _raise(*_: Any) -> None:
    raise RuntimeError("power cut")
