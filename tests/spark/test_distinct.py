"""Distinct counts through the whole Spark part: the sketches are Spark's own, the estimates those without a JVM."""

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from penstock.model.definition_file import parse_definitions
from penstock.model.level import Level
from penstock.model.partial import merged
from penstock.model.point import POINTS, entity_of
from penstock.model.segment import Segment, seal
from penstock.spark import read_segments, read_sketches, read_table
from penstock.tables.port import read_level
from tests.spark.pipeline import HOUR_US, Job

pytestmark = pytest.mark.spark
DEFINITION = {
    "name": "users", "source": "requests", "function": "distinct", "of": "user", "entity": ["service"],
    "relative_error": 0.05,
}  # fmt: skip
LG_K = 9  # that is


def test_sketches_and_estimates_are_those_of_sparks_own_functions(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(8)
    (definition,) = parse_definitions({"metrics": [DEFINITION]}).metrics
    (tmp_path / "segments").mkdir()
    raw: list[tuple[str, str, int]] = []
    for n in range(3):
        seen = [(rng.choice("ab"), f"ü{rng.randrange(900)}", rng.randrange(3) * 15 * HOUR_US) for _ in range(600)]
        seen += [("few", f"x{rng.randrange(5)}", 0) for _ in range(20)]
        entities = [entity_of({"service": service, "user": user}) for service, user, _ in seen]
        times = pa.array([time for *_, time in seen], pa.int64()).cast(POINTS.field("time").type)
        points = pa.table([pa.array(entities), times, pa.array([1.0] * len(seen))], schema=POINTS)
        seal(tmp_path / "segments", Segment("edge", n, n), merged(definition.partials(points)))
        raw += seen
    job = Job(spark, tmp_path)
    job.run(max_files=2)

    days = F.date_trunc("day", (F.col("time") / 1_000_000).cast("timestamp")).alias("bucket")
    plain = spark.createDataFrame(raw, "service string, user string, time bigint")
    parts = plain.groupBy("service", days, F.col("time") % 3).agg(F.hll_sketch_agg("user", LG_K).alias("part"))
    expected = parts.groupBy("service", "bucket").agg(F.hll_union_agg("part").alias("theirs"))
    ours = read_sketches(spark, tmp_path / "tables", "day").withColumn(
        "service", F.get_json_object("entity", "$.service")
    )
    both = expected.join(ours, ["service", "bucket"], "full").select(
        F.hll_sketch_estimate("theirs"), F.hll_sketch_estimate("sketch"), "theirs", "sketch", "service"
    )
    rows = both.collect()
    assert len(rows) == 5
    for theirs, found, their_image, image, service in rows:
        assert found == theirs
        if service != "few":  # theirs lists a few texts; ours has registers from the start
            assert bytes(image) == bytes(their_image)
    values = read_table(spark, tmp_path / "tables", "day").orderBy("entity", "bucket").toArrow()
    assert values["value"].to_pylist() == read_level(job.tables, Level.DAY)["value"].to_pylist()
    assert values["p50"].null_count == values.num_rows
    minutes = read_segments(spark, tmp_path / "segments").orderBy("entity", "bucket").toArrow()
    assert minutes["value"].to_pylist() == read_level(job.tables, Level.MINUTE)["value"].to_pylist()
