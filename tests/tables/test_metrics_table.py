"""The `metrics` table: what senders say of a metric reaches it with the points, in every place that keeps tables."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoder
from penstock.decode.outcome import Format
from penstock.errors import QueueFull
from penstock.export.exporters.remote_write_exporter import write_request
from penstock.export.exporters.segment_exporter import SegmentExporter
from penstock.model.definition import Definitions
from penstock.model.definition_file import parse_definitions
from penstock.protobuf import field_bytes, field_varint
from penstock.spool import Durability, Lease
from penstock.tables.maintenance import expire_metrics
from penstock.tables.metrics_table import METRIC_ROWS, METRICS
from penstock.tables.port import Tables, open_tables
from penstock.testing import FakeClock, wait_until
from tests.receive.support import NOW, counter, gauge, request
from tests.servers import PostgreSQL
from tests.spark.engine import Engine

MINUTE = timedelta(minutes=1)
MOMENT = datetime.fromtimestamp(NOW // 10**9 // 60 * 60, UTC)
Place = Callable[[], Tables]


@pytest.fixture(params=["delta", "parquet", pytest.param("postgres", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param != "postgres":
        location = str(tmp_path / "tables") if request.param == "delta" else f"parquet:{tmp_path / 'tables'}"
        yield lambda: open_tables(location)
        return
    server: PostgreSQL = request.getfixturevalue("postgres")
    yield lambda: open_tables(server.url)


class Pipeline:
    """From bodies to tables: the decoder, L1, the exporter of segments, and the job without a JVM."""

    def __init__(self, folder: Path, definitions: Definitions | None = None, **intake: object) -> None:
        self._folder = folder
        self._definitions = definitions
        self._intake = intake
        self._blocks: list[bytes] = []
        self._pushed = 0
        self.refuses = False
        self._exporter = SegmentExporter(folder)
        self._exporter.begin("queue")
        self.begin()

    def begin(self) -> None:
        """Begin anew, as after a restart."""
        self.decoder = Decoder(IntakeConfig(**self._intake), FakeClock(NOW / 1e9))  # type: ignore[arg-type]
        self.l1 = L1.with_own_queue(
            "l1", self._push, L1Config(durability=Durability.DISK), definitions=self._definitions
        )

    def _push(self, blocks: list[bytes]) -> None:
        if self.refuses:
            raise QueueFull("no room")
        self._blocks += blocks

    def send(self, kind: Format, *bodies: bytes) -> None:
        decoded = self.decoder.decode(kind, list(bodies))
        self.l1.describe(self.decoder.metric_news())
        if decoded.chunks:
            assert self.l1.submit(decoded.chunks, lambda error: None)

    def restart(self) -> None:
        self.l1.close()
        self.begin()

    def seal(self) -> None:
        """A segment of all that was sent."""
        self.restart()
        leases = [Lease(number, 1, block, 0.0) for number, block in enumerate(self._blocks) if number >= self._pushed]
        self._pushed = len(self._blocks)
        assert self._exporter.send_group(leases) == []


def said(tables: Tables) -> dict[str, tuple[str | None, str | None, str | None]]:
    return {row["metric"]: (row["type"], row["unit"], row["description"]) for row in tables.metrics().to_pylist()}


def described(metric: Metric, unit: str, description: str) -> Metric:
    metric.unit, metric.description = unit, description
    return metric


def otlp(*metrics: Metric) -> bytes:
    return bytes(request(*metrics).SerializeToString())


def metadata(family: str, kind: int, help_text: str, unit: str = "") -> bytes:
    fields = field_varint(1, kind) + field_bytes(2, family.encode()) + field_bytes(4, help_text.encode())
    return field_bytes(3, fields + (field_bytes(5, unit.encode()) if unit else b""))


def test_units_and_descriptions_reach_the_table_through_a_restart_and_the_newest_hold(
    place: Place, tmp_path: Path
) -> None:
    pipeline, tables = Pipeline(tmp_path / "segments"), place()
    engine = Engine(tmp_path / "segments", tables)
    pipeline.send(Format.OTLP, otlp(described(gauge("cpu", 1.0, host="a"), "1", "share of a core")))
    pipeline.send(Format.OTLP, otlp(counter("orders", (NOW, 1.0), temporality=1)))
    pipeline.seal()
    engine.run()

    assert said(tables) == {"cpu": ("gauge", "1", "share of a core"), "orders": ("counter", None, None)}

    late = NOW - 3 * 60 * 10**9
    pipeline.send(Format.OTLP, otlp(described(gauge("cpu", 1.0, host="b", time=late), "1", "busy cores")))
    pipeline.seal()
    engine = Engine(tmp_path / "segments", place())
    engine.run()

    assert said(tables)["cpu"] == ("gauge", "1", "busy cores")
    rows = {row["metric"]: (row["first_seen"], row["last_seen"]) for row in tables.metrics().to_pylist()}
    assert rows == {"cpu": (MOMENT - 3 * MINUTE, MOMENT), "orders": (MOMENT, MOMENT)}
    assert tables.metrics().schema.equals(METRIC_ROWS)


def test_metadata_of_prometheus_may_come_before_or_after_the_series(tmp_path: Path) -> None:
    pipeline, tables = Pipeline(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    engine = Engine(tmp_path / "segments", tables)
    millis = NOW // 10**6

    def write(name: str, value: float) -> bytes:
        return write_request([({"__name__": name}, [(millis + int(value), value)])])

    pipeline.send(Format.REMOTE_WRITE, metadata("requests", 1, "requests taken"))
    pipeline.send(Format.REMOTE_WRITE, write("requests_total", 1.0), write("temperature", 20.0))
    pipeline.send(Format.REMOTE_WRITE, write("requests_total", 4.0))
    pipeline.send(Format.REMOTE_WRITE, metadata("temperature", 2, "of the room", "celsius"))
    pipeline.send(Format.REMOTE_WRITE, write("temperature", 21.0))
    pipeline.seal()
    engine.run()

    assert said(tables) == {
        "requests_total": ("counter", None, "requests taken"),
        "temperature": ("gauge", "celsius", "of the room"),
    }


def test_a_metric_that_is_made_of_another_has_its_unit_where_that_makes_sense(tmp_path: Path) -> None:
    made = [
        {"name": "cpu_p", "source": "cpu", "function": "percentile"},
        {"name": "cpu_count", "source": "cpu", "function": "count"},
    ]
    pipeline = Pipeline(tmp_path / "segments", parse_definitions({"metrics": made}), rules=("rename load cpu",))
    tables = open_tables(str(tmp_path / "tables"))
    pipeline.send(Format.OTLP, otlp(described(gauge("load", 1.0), "cores", "load")))
    pipeline.seal()
    Engine(tmp_path / "segments", tables).run()

    assert said(tables) == {"cpu_p": ("gauge", "cores", "load"), "cpu_count": ("gauge", None, "load")}


def test_what_the_durable_queue_refuses_is_told_with_the_next_points(tmp_path: Path) -> None:
    pipeline, tables = Pipeline(tmp_path / "segments"), open_tables(str(tmp_path / "tables"))
    pipeline.refuses = True
    answers: list[BaseException | None] = []
    decoded = pipeline.decoder.decode(Format.OTLP, [otlp(described(gauge("cpu", 1.0), "1", ""))])
    pipeline.l1.describe(pipeline.decoder.metric_news())
    assert pipeline.l1.submit(decoded.chunks, answers.append)
    wait_until(lambda: bool(answers))
    pipeline.refuses = False
    pipeline.send(Format.OTLP, otlp(gauge("cpu", 2.0)))
    pipeline.seal()
    Engine(tmp_path / "segments", tables).run()

    assert isinstance(answers[0], QueueFull)
    assert said(tables) == {"cpu": ("gauge", "1", None)}


def row(metric: str, unit: str | None, first: int, last: int) -> pa.Table:
    made = {"metric": metric, "type": "gauge", "function": "avg", "unit": unit, "description": None}
    made |= {"first_seen": MOMENT + first * MINUTE, "last_seen": MOMENT + last * MINUTE}  # type: ignore[dict-item]
    return pa.Table.from_pylist([made], schema=METRIC_ROWS)


def test_rows_of_one_metric_merge_whatever_writer_they_are_of_and_twice_is_once(place: Place) -> None:
    one, other = place(), place()
    one.note_metrics(row("cpu", "1", 0, 5))
    other.note_metrics(row("cpu", None, -5, 2))
    one.note_metrics(row("cpu", None, -5, 2))
    one.note_metrics(row("rps", None, 0, 0))

    merged = pa.concat_tables([row("cpu", "1", -5, 5), row("rps", None, 0, 0)])
    assert one.metrics().equals(other.metrics())
    assert one.metrics().equals(merged)


def test_a_metric_is_forgotten_when_no_table_may_have_rows_of_it(place: Place) -> None:
    tables, keep = place(), {"minute": 60.0, "hour": 60.0, "day": 86400.0, "top_n": 60.0}
    tables.note_metrics(row("old", None, 0, 0))
    tables.note_metrics(row("young", None, 0, 3 * 24 * 60))

    assert expire_metrics(tables, keep, Definitions(), MOMENT + timedelta(days=1, hours=23)) == 0
    assert expire_metrics(tables, keep, Definitions(), MOMENT + timedelta(days=2, minutes=1)) == 1
    assert tables.metrics()["metric"].to_pylist() == ["young"]
    tables.vacuum(0)
    assert tables.metrics()["metric"].to_pylist() == ["young"]


def test_an_empty_place_has_no_metrics(place: Place) -> None:
    assert place().metrics().num_rows == 0
    assert place().forget_metrics(MOMENT) == 0
    assert METRICS == "metrics"
