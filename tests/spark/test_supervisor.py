"""The job in the long run: started again when it fails, stopped between batches, days made anew."""

import logging
import re
import shutil
import threading
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession

from penstock.errors import MissingRequirement, TableBusy, TableConflict
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.model.segment import read_segment
from penstock.spark import backfill as backfilling
from penstock.spark import job as spark_job
from penstock.spark import supervisor, table_sink
from penstock.spark.backfill import backfill
from penstock.spark.job import JobConfig
from penstock.spark.supervisor import JobSupervisor
from penstock.tables import delta_commits
from penstock.tables.port import SCHEMAS, open_tables
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.spark.engine import Engine
from tests.spark.pipeline import Edge, assert_exact

pytestmark = pytest.mark.spark


def config(folder: Path, **changes: Any) -> JobConfig:
    return JobConfig(segments=folder / "segments", checkpoint=folder / "checkpoint", **changes)


def test_a_failed_query_is_started_again_and_the_tables_are_exact(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    edge.seal()
    edge.seal()
    commit, failures = delta_commits.commit_actions, iter([("hour", "before"), ("day", "after")])
    failing = [next(failures)]

    def sometimes(opened: Any, name: str, *rest: Any) -> None:
        where, when = failing[0] if failing else ("", "")
        if name == where:
            failing[:] = [following] if (following := next(failures, None)) else []
            if when == "after":
                commit(opened, name, *rest)
            raise ConnectionError("the storage was away")
        commit(opened, name, *rest)

    monkeypatch.setattr(delta_commits, "commit_actions", sometimes)
    job = JobSupervisor(spark, tables, config(tmp_path, available_now=True, max_files=1))
    telemetry = Telemetry()
    telemetry.watch(job.samples)
    job.run()

    assert_exact(tables, edge)
    scrape = telemetry.render().decode()
    # Of its own Spark fails, too, where a Python worker needs more than ten seconds to start.
    assert job.progress.restarts >= 2
    assert f"penstock_spark_restarts_total {job.progress.restarts}.0" in scrape
    assert "penstock_spark_lag_segments 0.0" in scrape
    assert "penstock_spark_lag_seconds 0.0" in scrape
    assert {"list", "plan", "write", "commit"} <= set(
        re.findall(r'penstock_spark_phase_seconds{phase="(\w+)"}', scrape)
    )
    assert job.progress.rows_written > 0
    assert job.progress.files >= 8  # two batches for four tables, by each task that has some of them

    # Days made anew are the same days.
    done = backfill(spark, tables, tmp_path / "segments", date(1970, 1, 1), date(1970, 1, 3))
    assert done.before == done.after > 0
    assert_exact(tables, edge)
    # A batch that the job adds at the same time would be lost, so the backfill is refused.
    edge.seal(points=50)
    count = backfilling._points

    def overtaken(*arguments: Any) -> dict[str, int]:
        found = count(*arguments)
        Engine(tmp_path / "segments", tables).run()
        return found

    monkeypatch.setattr(backfilling, "_points", overtaken)
    with pytest.raises(TableConflict, match="the job has added a batch during the backfill"):
        backfill(spark, tables, tmp_path / "segments", date(1970, 1, 1), date(1970, 1, 3))
    monkeypatch.setattr(backfilling, "_points", count)
    assert_exact(tables, edge)
    for path in (tmp_path / "segments").glob("*.arrow"):
        path.unlink()
        break
    with pytest.raises(TableConflict, match="a backfill would lose the difference"):
        backfill(spark, tables, tmp_path / "segments", date(1970, 1, 1), date(1970, 1, 3))


def test_a_backfill_minds_what_each_metric_would_lose_and_not_how_often_the_latest_was_replaced(
    spark: SparkSession, tmp_path: Path
) -> None:
    edge = Edge(tmp_path / "segments", seed=8, functions=tuple(map(Function.parse, ("avg", "latest"))))
    tables = open_tables(f"parquet:{tmp_path / 'tables'}")
    paths = [edge.seal(points=300) for _ in range(4)]
    days = (date(1970, 1, 1), date(1970, 1, 4))
    Engine(tmp_path / "segments", tables).run(max_files=1)

    backfill(spark, tables, tmp_path / "segments", *days)
    assert_exact(tables, edge)
    # What the expiry of one metric makes up for must not hide what another has lost.
    metrics = {path: read_segment(path)["metric"][0].as_py() for path in paths}
    lost, other = metrics[paths[0]], {"cpu": "rps", "rps": "cpu"}[metrics[paths[0]]]
    assert other in metrics.values()
    paths[0].unlink()
    tables.expire("hour", datetime(1970, 1, 4, tzinfo=UTC), (other,))
    tables.expire("day", datetime(1970, 1, 4, tzinfo=UTC))
    with pytest.raises(TableConflict, match=f"of metric '{lost}' the segments hold .* table 'minute' "):
        backfill(spark, tables, tmp_path / "segments", *days)


class Query:
    """A query that fails, or ends."""

    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def awaitTermination(self, _: float) -> bool:  # noqa: N802 - Spark's name
        if self._failure:
            raise self._failure
        return True

    def stop(self) -> None:
        pass


def test_what_is_away_or_has_died_ends_a_first_start_but_not_a_job_that_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    away, died = MissingRequirement("PostgreSQL cannot be reached"), AnalysisException("a Python process has died")
    streams: Any = SimpleNamespace(addListener=lambda _: None, removeListener=lambda _: None)
    session: Any = SimpleNamespace(streams=streams)

    def running(*outcomes: Any) -> JobSupervisor:
        remaining = iter(outcomes)

        def start(*_: Any) -> Query:
            found = next(remaining)
            if isinstance(found, Exception):
                raise found
            assert isinstance(found, Query)
            return found

        monkeypatch.setattr(supervisor, "start_job", start)
        return JobSupervisor(session, open_tables(str(tmp_path)), config(tmp_path))

    for first in (away, died):
        with pytest.raises(type(first)):
            running(first).run()
    job = running(Query(StreamingQueryException("lost the connection")), away, died, Query())
    job.run()
    assert job.progress.restarts == 3


def test_what_no_restart_can_mend_ends_the_job_with_a_reason(spark: SparkSession, tmp_path: Path) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    edge.seal(points=50)
    JobSupervisor(spark, tables, config(tmp_path, available_now=True)).run()
    shutil.rmtree(tmp_path / "tables")
    edge.seal(points=50)

    with pytest.raises(TableConflict, match="held something of writer 'edge' and hold nothing now"):
        JobSupervisor(spark, tables, config(tmp_path, available_now=True)).run()


def test_the_loser_of_two_jobs_waits_and_takes_over_when_the_other_is_gone(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(supervisor, "QUIET", 0.05)
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    other = Engine(edge.folder, open_tables(str(tmp_path / "tables")))
    last = [edge.seal(points=50) for _ in range(2)][-1]
    checked, turns = table_sink.checked_spark_reports, iter([True])

    def overtaken(reports: Any) -> Any:
        """The other job adds the first of two segments while this one writes both, and ends."""
        if next(turns, False):
            kept = last.rename(tmp_path / "kept")
            other.run()
            kept.rename(last)
        return checked(reports)

    resume_point, is_away = spark_job.job_resume_point, iter([False, True, True])

    def away_now_and_then(*arguments: Any) -> Any:
        if next(is_away, False):
            raise MissingRequirement("the database is away")
        return resume_point(*arguments)

    monkeypatch.setattr(spark_job, "checked_spark_reports", overtaken)
    monkeypatch.setattr(supervisor, "job_resume_point", away_now_and_then)
    job = JobSupervisor(spark, tables, config(tmp_path, available_now=True))
    job.run()
    assert next(is_away, None) is None

    assert_exact(tables, edge)
    said = [message for message in caplog.messages if "nother job" in message or "o other job" in message]
    assert [message.partition(",")[0] for message in said] == [
        "Another job adds to these tables",
        "No other job adds to the tables any more",
    ]


def test_a_new_queue_under_an_old_name_ends_the_job_that_runs_and_under_its_own_name_nothing_is_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    for _ in range(3):
        edge.seal(points=50)
    job = JobSupervisor(spark, tables, config(tmp_path, trigger="100 milliseconds"))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job.run()
        except TableConflict as error:
            failed.append(error)

    running = threading.Thread(target=run)
    running.start()
    wait_until(lambda: job.progress.batches > 0, 60)
    for path in edge.folder.glob("*.arrow"):
        path.unlink()
    edge.new_queue()
    anew = [edge.seal(points=50) for _ in range(2)]  # their sequences are below those that the tables hold
    running.join(60)
    assert [("is of another queue" in str(error), "segments.writer" in str(error)) for error in failed] == [
        (True, True)
    ]

    for path in anew:
        path.rename(path.with_name(path.name.replace("edge-", "edge2-")))
    JobSupervisor(spark, tables, config(tmp_path, available_now=True)).run()
    assert_exact(tables, edge)


def test_a_stop_lets_the_batch_that_runs_finish_and_the_next_run_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    for _ in range(3):
        edge.seal(points=50)
    commit, in_batch, go_on = delta_commits.commit_actions, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        in_batch.set()
        go_on.wait(60)
        commit(*arguments)

    monkeypatch.setattr(delta_commits, "commit_actions", slow)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    checked, busy = table_sink.checked_spark_reports, iter([TableBusy("ten other commits came first")])

    def busy_once(reports: Any) -> Any:
        for error in busy:
            raise error
        return checked(reports)

    monkeypatch.setattr(spark_job, "checked_spark_reports", busy_once)
    job = JobSupervisor(spark, tables, config(tmp_path, max_files=1, trigger="0 seconds"))
    running = threading.Thread(target=job.run)
    running.start()
    assert in_batch.wait(60)
    assert job.progress.restarts == 1  # the tables were busy; to stop a query that was started again is no failure
    caplog.clear()
    job.stop()
    go_on.set()
    running.join(60)
    assert not running.is_alive()
    assert job.progress.restarts == 1
    assert "Segments wait for the next start: they are not in the tables yet. segments=2" in caplog.messages
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    # Every table got the whole batch, and no table a second one. There are no records for the top-n table.
    assert min(tables.describe(level.value).files for level in Level) >= 1
    held = {tuple(tables.held(name, [app]).values()) for name in SCHEMAS for app in _applications(tmp_path)}
    assert [len(versions) for versions in held] == [1]
    monkeypatch.undo()
    JobSupervisor(spark, tables, config(tmp_path, available_now=True)).run()
    assert_exact(tables, edge)
    wait_until(lambda: not spark.streams.active)


def _applications(folder: Path) -> list[str]:
    identity = (folder / "segments" / ".penstock-source").read_text()
    return [f"penstock/{identity}/edge"]
