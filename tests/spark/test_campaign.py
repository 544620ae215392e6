"""Long campaign: the job is killed again and again, at any moment, and the tables are exact in the end.

make soak PART=spark PENSTOCK_KILLS=30 by default
"""

import os
import random
from pathlib import Path
from subprocess import Popen

import psutil
import pytest
from pyspark.sql import SparkSession

from penstock.testing import wait_until
from tests.spark.pipeline import Edge, Job, assert_exact
from tests.spark.test_processes import run_job

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.timeout(7200)]
KILLS = int(os.environ.get("PENSTOCK_KILLS", "30"))


def commits(folder: Path) -> int:
    return len(list((folder / "tables").glob("*/_delta_log/*.json")))


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""  # it has ended since we listed it


def kill(victims: list[psutil.Process]) -> int:
    killed = 0
    for victim in victims:
        try:
            victim.kill()
            killed += 1
        except psutil.NoSuchProcess:
            pass
    return killed


def test_a_job_that_is_killed_at_any_moment_leaves_the_tables_exact(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(17)
    edge = Edge(tmp_path / "segments", seed=17)
    kills = 0
    for number in range(KILLS):
        for _ in range(6):
            edge.seal(rng.choice(["edge", "other"]), points=50)
        process = run_job(tmp_path, "--max-files", "1", "--trigger", "0s", "--master", "local[2]")

        def reached(wanted: int, process: Popen[bytes] = process) -> bool:
            return commits(tmp_path) >= wanted or process.poll() is not None

        # Four tables a batch: any place within one of the first four batches.
        wanted = commits(tmp_path) + rng.randrange(1, 16)
        wait_until(lambda wanted=wanted: reached(wanted), timeout=300)  # type: ignore[misc]
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        if number % 3 == 1:
            kills += kill([one for one in everyone if name_of(one) == "java"])
        elif number % 3 == 2:  # Spark or our supervisor begins anew, in the same process
            kills += kill([one for one in everyone[1:] if name_of(one).startswith("python")])
            further = commits(tmp_path) + 2
            wait_until(lambda further=further: reached(further), timeout=300)  # type: ignore[misc]
        kills += kill(everyone)
        process.wait()
    assert kills >= KILLS

    job = Job(spark, tmp_path)
    job.run()

    assert_exact(job.tables, edge)
