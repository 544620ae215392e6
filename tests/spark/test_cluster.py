"""The job on a standalone cluster: whatever dies, stalls or does not see a folder, the tables are exact."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.cli import spark_command
from penstock.model.function import AVG
from penstock.model.level import Level
from penstock.model.partial import partials_of_columns
from penstock.model.segment import Segment, seal
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.tables.port import SCHEMAS, TableBatch, Tables, open_tables, read_level
from penstock.testing import wait_until
from tests.service.running import Running
from tests.spark.cluster import EXECUTOR_MEMORY, SPARK_HOME, Cluster, Driver, can_hide, standing_still, tasks_given
from tests.spark.pipeline import Edge, assert_exact

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
SETTINGS = {"spark.driver.host": "127.0.0.1", "spark.executor.memory": EXECUTOR_MEMORY}
ELSEWHERE = {"spark.hadoop.fs.defaultFS": "hdfs://127.0.0.1:9"}  # nothing listens there


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def conf(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def places(folder: Path) -> list[str]:
    return ["--segments", str(folder / "segments"), "--tables", str(folder / "tables")]


def spark_run(cluster: Cluster, folder: Path, *more: str) -> Driver:
    """`penstock spark run` on the cluster."""
    command = [sys.executable, "-m", "penstock", "spark", "run", "--master", cluster.url, "--trigger", "0s"]
    return Driver(folder, *command, *conf(SETTINGS), *places(folder), *more)


def holds_all(tables: Tables, segments: Path) -> bool:
    """Whether every table holds everything that is sealed."""
    batch, reach = TableBatch(SegmentSourceFolder(segments).identity()), SegmentSourceFolder(segments).reach()
    wanted = {batch.application(writer): position["last"] for writer, position in reach.items()}
    return all(tables.held(name, wanted) == wanted for name in SCHEMAS)


def wait_for(driver: Driver, condition: Callable[[], bool]) -> None:
    """Look now and then only: the cluster needs the cores."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the driver has ended with {driver.wait(0.2)}:\n{driver.log()}")


@contextmanager
def paused(driver: Driver) -> Iterator[None]:
    os.killpg(driver.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(driver.process.pid, signal.SIGCONT)


def task_ends(log: Path) -> list[dict[str, Any]]:
    """How tasks ended, as Spark's event log tells it."""
    events = [json.loads(line) for path in log.rglob("events_*") for line in path.open()]
    return [event for event in events if event["Event"] == "SparkListenerTaskEnd"]


def test_stalled_and_killed_executors_and_a_killed_driver_leave_the_tables_exact(
    cluster: Cluster, tmp_path: Path
) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))

    def seal_one_batch() -> None:
        with paused(driver):  # the job sees both at once, so each executor gets a task of each stage
            edge.seal("edge", points=200)
            edge.seal("other", points=200)

    def wait_until_all_is_held() -> None:
        wait_for(driver, lambda: holds_all(tables, edge.folder))

    shown = ["--event-log", str(tmp_path / "events"), "--conf", "spark.eventLog.compress=false"]
    with spark_run(cluster, tmp_path, *shown, *conf({"spark.speculation": "true"})) as driver:
        seal_one_batch()
        wait_until_all_is_held()

        stalled, other = cluster.executors()
        with standing_still(stalled):  # its tasks are overtaken by speculative ones of the other executor
            seal_one_batch()
            wait_until_all_is_held()

        with standing_still(stalled, other):  # nothing gets done, so nothing can be overtaken
            given = tasks_given(other)
            seal_one_batch()
            wait_for(driver, lambda: tasks_given(other) > given)
            other.kill()
        wait_until_all_is_held()
        assert_exact(tables, edge)

        with standing_still(*cluster.executors()):
            given = tasks_given(stalled)
            seal_one_batch()
            wait_for(driver, lambda: tasks_given(stalled) > given)
            driver.kill()
        assert not holds_all(tables, edge.folder)

    ends = [(end["Task Info"]["Speculative"], end["Task End Reason"]["Reason"]) for end in task_ends(tmp_path)]
    assert {(True, "Success"), (False, "ExecutorLostFailure")} <= set(ends)

    with submitted(cluster, tmp_path) as driver:
        assert driver.wait() == 0, driver.log()
    assert_exact(tables, edge)


def submitted(cluster: Cluster, folder: Path) -> Driver:
    """The job as `spark-submit` runs it on machines that do not have Penstock, with a default file system elsewhere."""
    with Driver(folder, sys.executable, "-c", snippet(r"python -c '(import shutil.*)'")) as making:
        assert making.wait() == 0, making.log()
    submit = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.url, "--py-files", "penstock.zip"]
    submit += [*conf({**SETTINGS, **ELSEWHERE}), spark_command.__file__, "run", *places(folder), "--available-now"]
    return Driver(folder, *submit, PYSPARK_PYTHON=str(without_penstock(folder)))


def snippet(pattern: str) -> str:
    """A line of the page that says how to run on a cluster."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"
    found = re.search(rf"(?m)^{pattern}$", page.read_text())
    assert found
    return found[1]


def without_penstock(folder: Path) -> Path:
    """A Python with everything that is installed beside this one, but not Penstock."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{packages}" exec "{sys.executable}" -S "$@"\n'
    )
    program.chmod(0o755)
    return program


def test_penstock_run_with_a_master_adds_two_million_rows_in_one_batch(cluster: Cluster, tmp_path: Path) -> None:
    tables, segments = open_tables(str(tmp_path / "tables")), tmp_path / "segments"
    segments.mkdir()
    points = pa.concat_tables([seal_many(segments, number, 550_000) for number in range(4)])
    settings = {
        "data_dir": str(tmp_path),
        "receivers": {"http": {"enabled": False}, "grpc": {"enabled": False}},
        "segments": {"path": str(segments), "writer": "driver"},
        "spark": {"master": cluster.url, "conf": {**SETTINGS, **ELSEWHERE}},
        "tables": {"location": str(tmp_path / "tables")},
        "logging": {"format": "json"},
    }
    service = Running(tmp_path, json.dumps(settings))
    service.start()
    try:
        wait_until(lambda: holds_all(tables, segments), timeout=240)
        service.signal(signal.SIGTERM)
        assert service.wait() == 0, service.text()
    finally:
        service.kill()

    assert len(list((tmp_path / "tables" / "minute" / "_delta_log").glob("*.json"))) == 2  # its making and one batch
    for level in Level:
        found = read_level(tables, level).select(["entity", "bucket", "count", "sum", "min", "max"])
        buckets = pc.floor_temporal(points["time"].cast(pa.timestamp("us")), unit=level.value)
        groups = points.append_column("bucket", buckets.cast(points["time"].type)).group_by(["entity", "bucket"])
        expected = groups.aggregate([("value", one) for one in ("count", "sum", "min", "max")])
        order = [("entity", "ascending"), ("bucket", "ascending")]
        one, other = (rows.sort_by(order).to_pydict() for rows in (found, expected.rename_columns(found.column_names)))
        assert one == other


def seal_many(segments: Path, number: int, rows: int) -> pa.Table:
    """A segment of points that no L1 has merged, with whole numbers: their sums are exact in any order."""
    numbers = np.arange(number * rows, (number + 1) * rows)
    entities = pa.array([f"e{n}" for n in range(5_000)]).take(pa.array(numbers * 7919 % 5_000))
    times = pa.array(numbers * 1_300).cast(pa.timestamp("us", tz="UTC"))  # three quarters of an hour in all
    values = pa.array((numbers % 1_009).astype(float))
    seal(segments, Segment("edge", number, number), partials_of_columns("many", AVG, entities, times, values))
    return pa.table({"entity": entities, "time": times, "value": values})


@pytest.mark.skipif(not can_hide(), reason="this machine lets no process mount something of its own")
@pytest.mark.parametrize("hidden", ["tables", pytest.param("segments", marks=pytest.mark.soak)])
def test_where_a_worker_does_not_see_a_folder_the_job_refuses_or_is_exact(
    hidden: str, cluster: Cluster, tmp_path: Path
) -> None:
    places = {"segments": tmp_path / "segments", "tables": tmp_path / "tables", hidden: cluster.hidden / hidden}
    edge, tables = Edge(places["segments"]), open_tables(str(places["tables"]))
    for _ in range(6):
        edge.seal(points=200)
    flags = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    with spark_run(cluster, tmp_path, "--available-now", *flags) as driver:  # the last of two flags counts
        refused = driver.wait()

    if not refused:
        assert_exact(tables, edge)
        return
    assert "must be mounted under the same path on the driver and on every worker" in driver.log()
    assert all(tables.describe(name).rows == 0 for name in SCHEMAS)
