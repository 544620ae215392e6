"""The job in the long run: started again when it fails, stopped between batches, days made anew."""

import shutil
import threading
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from penstock.errors import TableConflict
from penstock.model.level import Level
from penstock.spark import delta, supervisor
from penstock.spark.backfill import backfill
from penstock.spark.job import JobConfig
from penstock.spark.supervisor import Supervisor
from penstock.spark.tables import open_tables
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
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
    commit, failures = delta._commit, iter([("hour", "before"), ("day", "after")])
    failing = [next(failures)]

    def sometimes(opened: Any, name: str, *rest: Any) -> None:
        where, when = failing[0] if failing else ("", "")
        if name == where:
            failing[:] = [following] if (following := next(failures, None)) else []
            if when == "after":
                commit(opened, name, *rest)
            raise ConnectionError("the storage was away")
        commit(opened, name, *rest)

    monkeypatch.setattr(delta, "_commit", sometimes)
    job = Supervisor(spark, tables, config(tmp_path, available_now=True, max_files=1))
    telemetry = Telemetry()
    telemetry.watch(job.samples)
    job.run()

    assert_exact(tables, edge)
    scrape = telemetry.render().decode()
    assert "penstock_spark_restarts_total 2.0" in scrape
    assert "penstock_spark_lag_segments 0.0" in scrape

    # Days made anew are the same days.
    done = backfill(spark, tables, tmp_path / "segments", date(1970, 1, 1), date(1970, 1, 3))
    assert done.before == done.after > 0
    assert_exact(tables, edge)
    for path in (tmp_path / "segments").glob("*.arrow"):
        path.unlink()
        break
    with pytest.raises(TableConflict, match="a backfill would lose the difference"):
        backfill(spark, tables, tmp_path / "segments", date(1970, 1, 1), date(1970, 1, 3))


def test_what_no_restart_can_mend_ends_the_job_with_a_reason(spark: SparkSession, tmp_path: Path) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    edge.seal(points=50)
    Supervisor(spark, tables, config(tmp_path, available_now=True)).run()
    shutil.rmtree(tmp_path / "tables")
    edge.seal(points=50)

    with pytest.raises(StreamingQueryException, match="was never added"):
        Supervisor(spark, tables, config(tmp_path, available_now=True)).run()


def test_a_stop_lets_the_batch_that_runs_finish_and_the_next_run_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    for _ in range(3):
        edge.seal(points=50)
    commit, in_batch, go_on = delta._commit, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        in_batch.set()
        go_on.wait(60)
        commit(*arguments)

    monkeypatch.setattr(delta, "_commit", slow)
    job = Supervisor(spark, tables, config(tmp_path, max_files=1, trigger="0 seconds"))
    running = threading.Thread(target=job.run)
    running.start()
    assert in_batch.wait(60)
    job.stop()
    go_on.set()
    running.join(60)
    assert not running.is_alive()

    # Every table got the whole batch, and no table a second one.
    rows = [tables.describe(name).files for name in ("minute", "hour", "day", "top_n")]
    assert min(rows) >= 1
    held = {tuple(tables.held(level.value, [app]).values()) for level in Level for app in _applications(tmp_path)}
    assert len(held) == 1
    monkeypatch.undo()
    Supervisor(spark, tables, config(tmp_path, available_now=True)).run()
    assert_exact(tables, edge)
    wait_until(lambda: not spark.streams.active)


def _applications(folder: Path) -> list[str]:
    identity = (folder / "segments" / ".penstock-source").read_text()
    return [f"penstock/{identity}/edge"]
