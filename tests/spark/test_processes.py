"""The job as a process: killed without warning, stopped by a signal, on another default file system."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.model.level import Level
from penstock.spark.java import find_java_for_spark
from penstock.spark.segment_folder import SegmentSourceFolder
from penstock.spark.session import spark_page_settings
from penstock.tables.port import SCHEMAS, TableBatch, open_tables
from penstock.testing import wait_until
from tests.spark.pipeline import Edge, Job, assert_exact

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def spawn(*command: str, log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """A process group of its own, so that it can be killed with everything that it started."""
    surroundings = {
        **os.environ,
        "JAVA_HOME": str(find_java_for_spark().home),
        "PYSPARK_PYTHON": sys.executable,
        **environ,
    }
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=surroundings, start_new_session=True
        )


def run_job(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    arguments = ["--segments", str(folder / "segments"), "--tables", str(folder / "tables")]
    arguments += ["--checkpoint", str(folder / "checkpoint"), *more]
    return spawn(sys.executable, "-m", "penstock", "spark", "run", *arguments, log=folder / "job.log")


def committed(folder: Path, table: str, version: int) -> bool:
    return (folder / "tables" / table / "_delta_log" / f"{version:020}.json").exists()


def test_a_job_killed_between_two_tables_leaves_them_exact_after_the_next_run(
    spark: SparkSession, tmp_path: Path
) -> None:
    edge = Edge(tmp_path / "segments")
    for _ in range(3):
        edge.seal(points=100)
    process = run_job(tmp_path, "--max-files", "1", "--trigger", "0s", "--master", "local[2]")
    try:
        # Version 0 creates the table, 1 is the first batch, 2 the second: minute and hour have it, day has not.
        wait_until(lambda: committed(tmp_path, "hour", 2) or process.poll() is not None, timeout=200)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the driver, its Java and their Python workers
        process.wait()
    assert committed(tmp_path, "hour", 2), (tmp_path / "job.log").read_text()

    Job(spark, tmp_path).run()

    assert_exact(open_tables(str(tmp_path / "tables")), edge)


def test_sigterm_ends_the_process_between_two_batches_and_the_next_start_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    edge, tables = Edge(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    for _ in range(12):
        edge.seal(points=50)
    process = run_job(tmp_path, "--max-files", "1", "--trigger", "0s", "--master", "local[2]")
    try:
        wait_until(lambda: committed(tmp_path, "minute", 2) or process.poll() is not None, timeout=200)
        process.terminate()
        assert process.wait(timeout=120) == 0, (tmp_path / "job.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    writer = TableBatch(SegmentSourceFolder(tmp_path / "segments").identity()).application("edge")
    assert "Traceback" not in (tmp_path / "job.log").read_text()
    held = {tables.held(name, [writer])[writer] for name in SCHEMAS}
    assert len(held) == 1  # no table is a batch ahead of another
    Job(spark, tmp_path).run()

    assert_exact(tables, edge)


def test_rows_are_where_they_belong_whatever_sparks_default_file_system_is_and_its_log_shows_one_plan_a_batch(
    tmp_path: Path,
) -> None:
    edge = Edge(tmp_path / "segments")
    for _ in range(2):
        edge.seal(points=100)
    # Nothing listens there: a path without a scheme would be looked for in vain, or written where no reader looks.
    elsewhere = ["--conf", "spark.hadoop.fs.defaultFS=hdfs://127.0.0.1:9"]
    shown = ["--ui", "--event-log", str(tmp_path / "events"), "--conf", "spark.eventLog.compress=false"]
    arguments = ["--segments", str(tmp_path / "segments"), "--tables", str(tmp_path / "tables"), "--available-now"]
    arguments += ["--max-files", "1", "--master", "local[2]"]
    log = tmp_path / "job.log"
    process = spawn(sys.executable, "-m", "penstock", "spark", "run", *arguments, *elsewhere, *shown, log=log)
    assert process.wait(timeout=240) == 0, log.read_text()

    assert_exact(open_tables(str(tmp_path / "tables")), edge)
    assert "Spark's own page: http://127.0.0.1:" in log.read_text()
    events = [json.loads(line) for path in (tmp_path / "events").rglob("events_*") for line in path.open()]
    jobs = [event for event in events if event["Event"] == "SparkListenerJobStart"]
    stages = [len(job["Stage IDs"]) for job in jobs]
    assert stages[:2] == [2, 2]
    assert set(stages[2:]) == {1}  # rows are made final at the end, by tasks that exchange nothing
    tasks = [event for event in events if event["Event"] == "SparkListenerTaskEnd"]
    assert sum(task["Task Metrics"]["Shuffle Write Metrics"]["Shuffle Bytes Written"] for task in tasks) > 0


def test_sparks_page_is_refused_where_it_would_listen_on_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    with pytest.raises(ConfigError, match="would listen on every address"):
        spark_page_settings("spark://host:7077", ui=True)
    assert spark_page_settings("local[*]", ui=True)["spark.ui.enabled"] == "true"
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.5")
    assert spark_page_settings("spark://host:7077", ui=True)["spark.ui.enabled"] == "true"


@pytest.mark.parametrize("command", ["tables", "compact", "expire"])
def test_a_misspelt_folder_is_said_rather_than_shown_as_empty_tables(command: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["spark", command, "--tables", str(tmp_path / "tabels")])
    assert ran.exit_code == 2
    assert "there is no folder" in ran.output


def test_the_commands_show_compact_and_expire_the_tables(spark: SparkSession, tmp_path: Path) -> None:
    edge = Edge(tmp_path / "segments")
    job = Job(spark, tmp_path)
    for _ in range(2):
        edge.seal(points=100)
    job.run(max_files=1)

    def command(*arguments: str) -> str:
        ran = CliRunner().invoke(main, ["spark", *arguments, "--tables", str(tmp_path / "tables")])
        assert ran.exit_code == 0, ran.output
        return ran.output

    before = command("tables")
    assert re.search(r"minute +\d+ +\d+ .*1970-01-01", before)
    assert "rows ->" in command("compact")
    assert_exact(job.tables, edge)
    days = set(job.tables.partials(Level.DAY)["bucket"].to_pylist())
    assert json.loads(command("tables", "--json"))["tables"]["day"]["files"] == len(days)
    assert re.search(r"minute +[1-9]\d* rows deleted", command("expire", "--now", "1970-01-09"))
    assert re.search(r"minute +0 rows deleted", command("expire", "--now", "1970-01-09"))
    refused = CliRunner().invoke(main, ["spark", "expire", "--tables", str(tmp_path), "--keep", "week=1d"])
    assert refused.exit_code == 2
    assert "--keep must be TABLE=AGE with one of minute, hour, day, top_n, got 'week=1d'" in refused.output
