"""Long campaign: parts of the job are killed again and again, at any moment, and the tables are exact in the end.

make soak PART=spark PENSTOCK_KILLS=30 by default
"""

import logging
import os
import random
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.spark.cluster import Cluster, Driver
from tests.spark.pipeline import Edge, Job, assert_exact
from tests.spark.test_cluster import conf, spark_run, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.spark, pytest.mark.timeout(7200)]
log = logging.getLogger(__name__)
KILLS = int(os.environ.get("PENSTOCK_KILLS", "30"))
PARTS = ("driver", "java", "python", "executor")


def commits(folder: Path) -> int:
    return len(list((folder / "tables").glob("*/_delta_log/*.json")))


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""  # it has ended since we listed it


def victims(part: str, driver: Driver, cluster: Cluster) -> list[psutil.Process]:
    """The processes of one part of the job. Executors, their Python too, are children of the workers."""
    started = psutil.Process(driver.process.pid).children(recursive=True)
    executors = cluster.executors()
    if part == "driver":
        return [psutil.Process(driver.process.pid)]
    if part == "java":
        return [one for one in started if name_of(one) == "java"]
    if part == "executor":
        return executors[:1]
    workers = [one for executor in executors for one in executor.children(recursive=True)]
    return [one for one in [*started, *workers] if name_of(one).startswith("python")]


def kill(processes: list[psutil.Process]) -> int:
    killed = 0
    for one in processes:
        try:
            one.kill()
            killed += 1
        except psutil.NoSuchProcess:
            pass
    return killed


def test_a_job_of_which_any_part_is_killed_at_any_moment_leaves_the_tables_exact(
    spark: SparkSession, tmp_path: Path
) -> None:
    rng = random.Random(17)
    edge = Edge(tmp_path / "segments", seed=17)
    counted = dict.fromkeys(PARTS, 0)
    with Cluster(tmp_path / "cluster") as cluster:
        for number in range(KILLS):
            part = PARTS[number % len(PARTS)]
            for _ in range(6):
                edge.seal(rng.choice(["edge", "other"]), points=50)
            with spark_run(cluster, tmp_path, "--max-files", "1", *conf({"spark.speculation": "true"})) as driver:
                # Four tables a batch: any place within one of the first four batches.
                wanted = commits(tmp_path) + rng.randrange(1, 16)
                wait_for(driver, lambda wanted=wanted: commits(tmp_path) >= wanted)  # type: ignore[misc]
                counted[part] += kill(victims(part, driver, cluster)) > 0
                if part in ("python", "executor"):  # the job goes on in the same process
                    further = commits(tmp_path) + 2
                    wait_for(driver, lambda further=further: commits(tmp_path) >= further)  # type: ignore[misc]
    log.info("killed: %s, %d points sealed", counted, len(edge.points))
    assert sum(counted.values()) == KILLS

    job = Job(spark, tmp_path)
    job.run()

    assert_exact(job.tables, edge)
