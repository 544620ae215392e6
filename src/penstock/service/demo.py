"""`penstock demo`: the whole pipeline on this machine, with every point accounted for at the end.

generator ─► batch queue (L1) ─► durable queue ─► segments ─► Spark ─► minute, hour, day, top-n tables
"""

import fcntl
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.aggregate.l1 import L1
from penstock.errors import ConfigError
from penstock.export.exporters.segment_exporter import SegmentExporter
from penstock.export.send_queue import SendQueue
from penstock.model.definition import Definition, Definitions
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.service.generator import DURATION, DemoDay, generate_demo_points
from penstock.service.standard_error import process_stderr_to
from penstock.spool import Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.tables.delta import DeltaTables
from penstock.tables.port import SCHEMAS, Tables, read_level, read_top_n

MARK = ".penstock-demo"  # what makes a folder ours to empty
TOP = 10
PERCENTILE = "service_percentile"
# Every metric by its own labels, and one more made of the durations.
DEFINITIONS = Definitions(
    (
        Definition(name=DURATION, source=DURATION),
        Definition(name=PERCENTILE, source=DURATION, entity=("service",), function=Function.parse("percentile")),
    )
)


@dataclass(slots=True)
class DemoProgress:
    """How far each stage is, for the screen."""

    generated: int = 0
    partials: int = 0
    segments: int = 0
    fed: bool = False  # everything generated is sealed
    spark: str = "starting"


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What went in, what the tables say, and whether the two agree."""

    folder: Path
    tables: DeltaTables
    generated: dict[str, int]
    partials: int
    segments: int
    seconds: float
    spark_seconds: float  # of those, until Spark's session was up
    problems: list[str]


@contextmanager
def claim_demo_folder(folder: Path) -> Iterator[None]:
    """Empty the folder and lock it for one demo; one that holds anything but an earlier, finished demo is refused."""
    try:
        if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
            raise ConfigError(f"--dir {folder} holds something that is not a demo: name an empty or new folder")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(folder / MARK, "w") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry in folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != MARK:
                    entry.unlink()
            yield
    except BlockingIOError:
        raise ConfigError(f"--dir {folder} is in use by a demo that is running: name another folder") from None


def run_demo(folder: Path, day: DemoDay, show: Callable[[DemoProgress], None]) -> DemoOutcome:
    """Run everything in a folder that is claimed; `show` is called about ten times a second until it ends."""
    # Not at the top: pyspark takes its time, and `penstock --help` must not wait for it.
    from penstock.spark.job import JobConfig, start_job
    from penstock.spark.session import start_session

    began = time.monotonic()
    tables = DeltaTables(folder / "tables")
    progress = DemoProgress()
    generated: Counter[str] = Counter()
    queue = FastQueue(folder / "queue", FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK))
    l1 = L1.with_own_queue("l1", queue.push_many, definitions=DEFINITIONS)
    segments = SegmentExporter(folder / "segments")
    sender = SendQueue(queue, segments).start()

    def feed() -> None:
        for chunk in generate_demo_points(day, end=time.time()):
            if not l1.produce(chunk, timeout=60.0):
                raise RuntimeError("the batch queue refused a chunk")
            generated[chunk.metric] += len(chunk)
            progress.generated += len(chunk)
        l1.close()
        if not sender.flush():
            raise TimeoutError(f"{len(sender)} blocks could not be sealed: {sender.stats().errors}")
        sender.close()
        queue.close()
        progress.fed = True

    def start_spark() -> tuple[Any, float]:
        return start_session(), time.monotonic() - began

    def draw() -> None:
        progress.partials, progress.segments = segments.rows, segments.segments
        show(progress)

    with ThreadPoolExecutor(2, "penstock-demo") as pool:

        def watch(*tasks: Future[Any]) -> None:
            while (waited := wait(tasks, timeout=0.1, return_when=FIRST_EXCEPTION)).not_done:
                draw()
                for task in waited.done:
                    task.result()  # raises what went wrong in it, though another may still be at work
            for task in tasks:
                task.result()

        with process_stderr_to(folder / "spark.log"):  # Java inherits it, and keeps it
            starting = pool.submit(start_spark)
            try:
                watch(pool.submit(feed), starting)
                spark, spark_seconds = starting.result()
                progress.spark = "working"
                job = JobConfig(segments=folder / "segments", checkpoint=folder / "checkpoint")
                query = start_job(spark, tables, job)
                watch(pool.submit(query.processAllAvailable))
                query.stop()
                progress.spark = "folding"
                watch(pool.submit(lambda: [tables.compact(name) for name in SCHEMAS]))
            finally:
                starting.result()[0].stop()
    progress.spark = "done"
    draw()
    seconds = time.monotonic() - began
    problems = demo_differences(tables, {**generated, PERCENTILE: generated[DURATION]})
    return DemoOutcome(
        folder, tables, dict(generated), segments.rows, segments.segments, seconds, spark_seconds, problems
    )


def demo_counts_of(tables: Tables) -> dict[str, dict[str, int]]:
    """How many points each table holds, by level and metric."""
    counts = {}
    for level in Level:
        rows = read_level(tables, level).group_by("metric").aggregate([("count", "sum")])
        counts[level.value] = dict(zip(rows["metric"].to_pylist(), rows["count_sum"].to_pylist()))
    return counts


def demo_differences(tables: Tables, generated: Mapping[str, int]) -> list[str]:
    """Everything in which the tables differ from what was generated; empty if every point is accounted for."""
    problems = [
        f"{level} table: {metric} has {counts.get(metric, 0)} points, generated {generated.get(metric, 0)}"
        for level, counts in demo_counts_of(tables).items()
        for metric in sorted(generated.keys() | counts.keys())
        if counts.get(metric, 0) != generated.get(metric, 0)
    ]
    if _top_n_of_minutes(tables) != read_top_n(tables, TOP).select(["metric", "bucket", "entity"]).to_pylist():
        problems.append("top_n table: not the top entities of the minute table")
    return problems


def _top_n_of_minutes(tables: Tables) -> list[dict[str, object]]:
    """The top n worked out again, the slow and obvious way."""
    groups: dict[tuple[str, object], list[tuple[float, str]]] = {}
    minutes = read_level(tables, Level.MINUTE)
    for row in minutes.select(["metric", "bucket", "entity", "max"]).to_pylist():
        groups.setdefault((row["metric"], row["bucket"]), []).append((-row["max"], row["entity"]))
    return [
        {"metric": metric, "bucket": bucket, "entity": entity}
        for (metric, bucket), members in sorted(groups.items(), key=lambda group: (group[0][0], str(group[0][1])))
        for _, entity in sorted(members)[:TOP]
    ]
