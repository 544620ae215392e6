"""L1: merges before it hands over, loses nothing at the end, keeps what the queue refuses."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.aggregate.l1 import L1, _Merger
from penstock.batch import BatchQueue, BatchQueueConfig, ThreadPolicy
from penstock.errors import QueueFull
from penstock.model.definition import Definitions
from penstock.model.definition_file import parse_definitions
from penstock.model.point import Chunk, chunk_type
from penstock.model.segment import decode
from penstock.telemetry import Telemetry
from penstock.testing import FakeClock

Cpu, Rps = chunk_type("cpu"), chunk_type("rps")


class Downstream:
    """Takes blocks, or refuses them while `full`."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.full = False

    def push(self, block: bytes) -> int:
        if self.full:
            raise QueueFull("no room")
        self.blocks.append(block)
        return len(self.blocks)

    def rows(self) -> pa.Table:
        return pa.concat_tables([decode(block) for block in self.blocks])


def points(kind: type[Chunk], count: int, value: float = 1.0) -> Chunk:
    return kind.of([f'{{"host":"e{n % 3}"}}' for n in range(count)], [n * 1000 for n in range(count)], [value] * count)


def merger(downstream: Downstream, clock: FakeClock, rows: int = 1000) -> _Merger:
    return _Merger("cpu", Definitions().of("cpu"), downstream.push, 0.5, rows, clock)


def test_points_of_one_series_and_minute_leave_as_one_row_after_half_a_second() -> None:
    downstream, clock = Downstream(), FakeClock()
    handler = merger(downstream, clock)

    handler.consume([points(Cpu, 30), points(Cpu, 30)])
    handler.consume([points(Cpu, 30)])
    handler.on_idle()
    assert downstream.blocks == []

    clock.advance(0.5)
    handler.on_idle()
    assert len(downstream.blocks) == 1
    assert sorted(zip(*(downstream.rows()[c].to_pylist() for c in ("entity", "count")))) == [
        ('{"host":"e0"}', 30), ('{"host":"e1"}', 30), ('{"host":"e2"}', 30),
    ]  # fmt: skip


def test_many_rows_leave_at_once() -> None:
    downstream = Downstream()
    handler = merger(downstream, FakeClock(), rows=3)
    handler.consume([points(Cpu, 3)])
    assert downstream.rows().num_rows == 3


def test_what_the_queue_refuses_stays_and_is_handed_over_merged_once_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    downstream, clock = Downstream(), FakeClock()
    downstream.full = True
    handler = merger(downstream, clock)

    for _ in range(3):
        handler.consume([points(Cpu, 30)])
        clock.advance(0.5)
        handler.on_idle()
    assert [record.message for record in caplog.records] == [
        "L1 keeps what the queue refuses. metric=cpu reason=no room"
    ]

    downstream.full = False
    clock.advance(0.5)
    handler.on_idle()
    assert pc.sum(downstream.rows()["count"]).as_py() == 90
    assert downstream.rows().num_rows == 3


def test_closing_hands_over_everything_that_was_accepted_of_every_metric() -> None:
    downstream = Downstream()
    queue = BatchQueue("l1-close", BatchQueueConfig(threads=ThreadPolicy.fixed(2)))
    l1 = L1(queue, downstream.push, flush_interval=3600.0)
    for _ in range(100):
        assert l1.produce(points(Cpu, 7))
        assert l1.produce(points(Rps, 11))
    l1.close()

    counts = downstream.rows().group_by("metric").aggregate([("count", "sum")]).to_pydict()
    assert dict(zip(counts["metric"], counts["count_sum"])) == {"cpu": 700, "rps": 1100}
    assert not l1.produce(points(Cpu, 1))


def test_a_scrape_shows_points_in_and_rows_out_by_metric() -> None:
    downstream = Downstream()
    queue = BatchQueue("l1-scrape", BatchQueueConfig(threads=ThreadPolicy.fixed(1)))
    l1 = L1(queue, downstream.push)
    telemetry = Telemetry()
    telemetry.watch(l1.samples)
    l1.produce(points(Cpu, 30))
    l1.close()

    scrape = telemetry.render().decode()
    assert 'penstock_points_received_total{metric="cpu"} 30.0' in scrape
    assert 'penstock_l1_partials_total{metric="cpu"} 3.0' in scrape


def test_definitions_make_several_metrics_of_one_source_and_drop_what_is_not_defined() -> None:
    downstream = Downstream()
    queue = BatchQueue("l1-definitions", BatchQueueConfig(threads=ThreadPolicy.fixed(1)))
    definitions = parse_definitions(
        {
            "metrics": [
                {"name": "all_cpu", "source": "cpu", "entity": []},
                {"name": "host_cpu", "source": "cpu", "filter": {"host": ["e0", "e1"]}, "function": "max"},
            ],
            "undefined": "drop",
        }
    )
    l1 = L1(queue, downstream.push, definitions=definitions)
    l1.produce(points(Cpu, 30))
    l1.produce(points(Rps, 30))
    l1.close()

    rows = sorted((row["metric"], row["entity"], row["count"]) for row in downstream.rows().to_pylist())
    assert rows == [("all_cpu", "{}", 30), ("host_cpu", '{"host":"e0"}', 10), ("host_cpu", '{"host":"e1"}', 10)]


def test_points_that_are_no_numbers_are_left_out_and_counted() -> None:
    downstream, clock = Downstream(), FakeClock()
    handler = merger(downstream, clock)
    handler.consume([Cpu.of(["{}"] * 4, [0, 1, 2, 3], [1.0, float("nan"), float("inf"), 2.0])])
    handler.flush()

    assert downstream.rows()["sum"].to_pylist() == [3.0]
    assert handler.not_numbers == 2
