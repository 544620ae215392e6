"""Records of top-n definitions: their levels and lifetimes hold from the definition file to the table."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa

from penstock.model.definition_file import parse_definitions
from penstock.model.level import Level
from penstock.model.partial import merged
from penstock.model.point import POINTS, entity_of
from penstock.model.segment import Segment, seal
from penstock.tables.maintenance import expire_tables
from penstock.tables.port import TOP_N, open_tables, read_top_n
from tests.spark.engine import Engine

DAY = 86400.0
KEEP = {"minute": 7 * DAY, "hour": 30 * DAY, "day": 365 * DAY, TOP_N: 3 * DAY}
MOMENT = datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_levels_and_lifetimes_of_records_hold_through_the_job(tmp_path: Path) -> None:
    slow = {"source": "statement", "function": "top_n", "n": 2, "entity": ["db"]}
    defined = parse_definitions(
        {
            "metrics": [
                {"name": "often", **slow, "levels": ["minute"], "ttl": "1d"},
                {"name": "long", **slow, "levels": ["hour", "day"], "ttl": {"hour": "10d", "day": "20d"}},
                {"name": "plain", **slow},
            ]
        }
    )
    rows = [(entity_of({"db": "a", "text": f"s{n}"}), MOMENT + timedelta(minutes=n), float(n)) for n in range(3)]
    points = pa.table(list(zip(*rows)), schema=POINTS)
    (tmp_path / "segments").mkdir()
    partials = merged(pa.concat_tables([one.partials(points) for one in defined.metrics]))
    seal(tmp_path / "segments", Segment("edge", 0, 0), partials, ("queue", 0))
    tables = open_tables(str(tmp_path / "tables"))
    engine = Engine(tmp_path / "segments", tables)
    engine.run(not_at={level: defined.not_at(level) for level in Level})

    def records() -> dict[tuple[str, str], list[float]]:
        found: dict[tuple[str, str], list[float]] = {}
        for level in Level:
            for row in read_top_n(tables, 5, level).to_pylist():
                if row["record"] is not None:
                    found.setdefault((row["metric"], level.value), []).append(row["max"])
        return found

    everywhere = {("often", "minute"): [0.0, 1.0, 2.0], ("long", "hour"): [2.0, 1.0], ("long", "day"): [2.0, 1.0]}
    everywhere |= {("plain", "minute"): [0.0, 1.0, 2.0], ("plain", "hour"): [2.0, 1.0], ("plain", "day"): [2.0, 1.0]}
    assert records() == everywhere
    tables.compact(TOP_N)
    assert records() == everywhere

    def after(days: float) -> set[tuple[str, str]]:
        assert all(gone >= 0 for _, gone in expire_tables(tables, KEEP, defined, MOMENT + timedelta(days=days)))
        return set(records())

    assert after(0.4) == everywhere.keys()
    assert after(2) == {("long", "hour"), ("long", "day"), ("plain", "minute"), ("plain", "hour"), ("plain", "day")}
    assert after(5) == {("long", "hour"), ("long", "day")}
    assert after(12) == {("long", "day")}
    assert after(22) == set()


def test_the_greatest_entities_are_no_rows_of_the_table_but_ranked_when_they_are_read(tmp_path: Path) -> None:
    defined = parse_definitions({"metrics": [{"name": "load", "source": "load", "function": "max"}]})
    rows = [(entity_of({"host": f"h{n}"}), MOMENT, float(n)) for n in range(4)]
    partials = merged(defined.metrics[0].partials(pa.table(list(zip(*rows)), schema=POINTS)))
    (tmp_path / "segments").mkdir()
    seal(tmp_path / "segments", Segment("edge", 0, 0), partials, ("queue", 0))
    tables = open_tables(str(tmp_path / "tables"))
    Engine(tmp_path / "segments", tables).run()

    assert tables.describe(TOP_N).rows == 0
    assert [row["entity"] for row in read_top_n(tables, 2).to_pylist()] == ['{"host":"h3"}', '{"host":"h2"}']
