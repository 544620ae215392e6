"""Final values read with Spark are those that are read without a JVM."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from penstock.model.definition_file import load_definitions, parse_definitions
from penstock.model.finals import ORDER, with_finals
from penstock.model.level import Level
from penstock.model.partial import SERIES, merged
from penstock.model.point import chunk_type, entity_of
from penstock.model.segment import Segment, seal
from penstock.service.generator import Day, generate
from penstock.spark import read_segments, read_table, reading
from penstock.spark.rollup import top_n
from penstock.tables.port import read_level, read_top_n
from tests.model.worked_example import added_function, example_definitions
from tests.spark.pipeline import Job

pytestmark = pytest.mark.spark
GENERATED_DAY = Path(__file__).with_name("generated_day.yaml")


def test_every_function_reads_the_same_in_spark_and_without_a_jvm(spark: SparkSession, tmp_path: Path) -> None:
    definitions = load_definitions(GENERATED_DAY)
    (tmp_path / "segments").mkdir()
    partials = [
        definition.partials(chunk.points)
        for chunk in generate(Day(points=3000, minutes=180), end=1_800_000_000)
        for definition in definitions.of(chunk.metric)
    ]
    for n in range(3):
        seal(tmp_path / "segments", Segment("edge", n, n), merged(pa.concat_tables(partials[n::3])))
    job = Job(spark, tmp_path)
    job.run(not_at={level: definitions.not_at(level) for level in Level})

    for level in (Level.MINUTE, Level.DAY):
        expected = read_level(job.tables, level)
        assert_same(read_table(spark, tmp_path / "tables", level).toArrow(), expected)
        present = set(expected["metric"].to_pylist())
        assert "endpoint_percentile" in present if level is Level.MINUTE else "endpoint_percentile" not in present
    straight = read_segments(spark, tmp_path / "segments").toArrow()
    not_in_the_table = pa.array(definitions.not_at(Level.MINUTE), pa.string())
    straight = straight.filter(pc.invert(pc.is_in(straight["metric"], not_in_the_table)))
    assert_same(straight, read_level(job.tables, Level.MINUTE))
    records = [row for row in read_top_n(job.tables, 20).to_pylist() if row["metric"] == "slow_statements"]
    assert {row["function"] for row in records} == {"top_n(20)"}
    assert all(row["record"].startswith('{"statement":') for row in records)


def assert_same(found: pa.Table, expected: pa.Table) -> None:
    assert found.column_names == expected.column_names
    found = found.sort_by(ORDER)
    for name in expected.column_names:
        wanted = expected[name].to_pylist()
        assert found[name].to_pylist() == (wanted if name in SERIES else pytest.approx(wanted)), name


def test_a_function_that_is_only_defined_reads_the_same_in_spark(spark: SparkSession) -> None:
    with added_function():  # not in Spark's workers, so the partials come as a frame
        (definition,) = parse_definitions(example_definitions()).metrics
        entities = [entity_of({"service": name}) for name in ("a", "b")] * 50
        chunk = chunk_type(definition.source).of(entities, list(range(100)), [n / 100 for n in range(100)])
        partials = merged(definition.partials(chunk.points))
        frame = spark.createDataFrame(partials)

        expected = with_finals(partials, Level.MINUTE)

        assert len(expected) == 2
        assert None not in expected["value"].to_pylist()
        assert_same(reading.with_finals(frame, Level.MINUTE).toArrow(), expected)
        assert frame.transform(top_n).isEmpty()
