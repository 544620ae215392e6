"""Final values read with Spark are those that are read without a JVM."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from penstock.model.definition_file import load_definitions, parse_definitions
from penstock.model.finals import ORDER, with_finals
from penstock.model.function import FUNCTIONS, Function
from penstock.model.level import Level
from penstock.model.partial import SERIES, merged, partials_of_columns
from penstock.model.point import POINTS, chunk_type, entity_of
from penstock.model.segment import Segment, seal
from penstock.service.generator import DemoDay, generate_demo_points
from penstock.spark import read_segments, read_table, reading
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
        for chunk in generate_demo_points(DemoDay(points=3000, minutes=180), end=1_800_000_000)
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


def test_any_split_order_and_pre_merging_gives_the_same_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Of every function, in real Spark: one segment of everything merged, or many of any rows in any order."""
    rng = random.Random(11)
    times, entities = [rng.randrange(7200) * 1_000_000 for _ in range(400)], [f"e{n % 5}" for n in range(400)]
    moments = pa.array(times, pa.int64()).cast(POINTS.field("time").type)
    values = pa.array([rng.gauss(5, 9) for _ in times])
    texts = {"histogram": "histogram(-5,0,5)", "apdex": "apdex(3)", "top_n": "top_n(20)"}
    registers = {"parts": pa.array([n % 64 for n in range(400)], pa.int64())}
    more = {"top_n": {"records": pa.array([f"r{n}" for n in range(400)])}, "distinct": registers}
    made = []
    for name in FUNCTIONS:
        taken = pa.array([float(n % 20 + 1) for n in range(400)]) if name == "distinct" else values
        function = Function.parse(texts.get(name, name))
        made.append(partials_of_columns(name, function, pa.array(entities), moments, taken, **more.get(name, {})))
    points = pa.concat_tables(made)
    splits: dict[str, list[pa.Table]] = {"whole": [merged(points)], "split": []}
    order = list(range(points.num_rows))
    rng.shuffle(order)
    for n in range(7):
        rows = points.take(pa.array(order[n::7]))
        splits["split"].append(merged(rows) if n % 2 else rows)
    jobs = {name: Job(spark, tmp_path / name) for name in splits}
    for name, job in jobs.items():
        (tmp_path / name / "segments").mkdir(parents=True)
        for n, rows in enumerate(splits[name]):
            seal(tmp_path / name / "segments", Segment("edge", n, n), rows)
        job.run(max_files=3)

    for level in Level:
        whole, split = (read_level(jobs[name].tables, level) for name in ("whole", "split"))
        assert set(whole["metric"].to_pylist()) == set(FUNCTIONS) - {"top_n"}
        assert_same(split, whole)
    whole, split = (read_top_n(jobs[name].tables, 5) for name in ("whole", "split"))
    assert "top_n" in whole["metric"].to_pylist()
    assert split.to_pylist() == whole.to_pylist()


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
        assert_same(reading.spark_rows_with_finals(frame, Level.MINUTE).toArrow(), expected)
