"""L1: merges before it hands over, loses nothing at the end, keeps what the queue refuses, stays within its bounds."""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from penstock import Durability
from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.aggregate.point_counts import OTHERS
from penstock.batch import BatchQueue, BatchQueueConfig, ThreadPolicy
from penstock.errors import ConfigError, QueueClosed, QueueFull
from penstock.model import point
from penstock.model.definition import Definitions
from penstock.model.definition_file import parse_definitions
from penstock.model.point import Chunk, chunk_type
from penstock.model.segment import decode_partials_block
from penstock.telemetry import Telemetry
from penstock.testing import wait_until
from tests.aggregate.support import DEFINED, Blocker, Cpu, Downstream, Rps, Sender, as_it_is, coded, points

ONE_THREAD = ThreadPolicy.fixed(1)
NEVER = L1Config(flush_interval=3600.0)


def test_points_of_all_metrics_leave_merged_in_one_block_every_half_a_second() -> None:
    downstream = Downstream()
    l1 = L1.with_own_queue("l1-time", downstream.push, L1Config(flush_interval=0.05), threads=ONE_THREAD)
    for _ in range(3):
        assert l1.produce(points(Cpu, 30))
        assert l1.produce(points(Rps, 30))
    wait_until(lambda: downstream.pushes and sum(downstream.counts().values()) == 180)
    l1.close()

    assert all(len(blocks) == 1 for blocks in downstream.pushes)
    assert downstream.counts() == {"cpu": 90, "rps": 90}
    for (block,) in downstream.pushes:
        series = [(row["metric"], row["entity"]) for row in decode_partials_block(block).to_pylist()]
        assert len(series) == len(set(series))
    assert len(series) == 6 or len(downstream.pushes) > 1  # a busy machine may let an interval end before we are done


def test_many_rows_leave_in_blocks_of_bounded_size() -> None:
    downstream = Downstream()
    config = L1Config(flush_interval=0.01, flush_rows=10)
    l1 = L1.with_own_queue("l1-rows", downstream.push, config, threads=ONE_THREAD)
    l1.produce(Cpu.of([f"e{n}" for n in range(25)], range(25), [1.0] * 25))
    wait_until(lambda: len(downstream.pushes) == 3)
    assert downstream.rows().num_rows == 25
    l1.close()


def test_points_leave_at_once_when_they_take_half_of_the_room() -> None:
    downstream = Downstream()
    config = L1Config(flush_interval=3600.0, max_bytes=3 * points(Cpu, 90).nbytes)
    l1 = L1.with_own_queue("l1-half", downstream.push, config, threads=ONE_THREAD)
    l1.produce(points(Cpu, 90))
    assert l1.produce(points(Rps, 90))
    wait_until(lambda: downstream.pushes)
    l1.close()
    assert downstream.counts() == {"cpu": 90, "rps": 90}


def test_what_the_queue_refuses_stays_and_is_handed_over_merged_once_there_is_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    downstream = Downstream()
    downstream.full()
    l1 = L1.with_own_queue("l1-full", downstream.push, L1Config(flush_interval=0.01), threads=ONE_THREAD)
    for _ in range(3):
        l1.produce(points(Cpu, 30))
        wait_until(partial(_refused_more_than, downstream, downstream.refused + 1))  # with it: one may be under way
    downstream.refusal = None
    wait_until(lambda: downstream.pushes)
    l1.close()

    assert downstream.counts() == {"cpu": 90}
    assert downstream.rows().num_rows == 3
    said = [record.message for record in caplog.records if record.name.startswith("penstock.aggregate")]
    assert said == [
        "L1 keeps what the queue refuses. queue=l1-full reason=no room",
        "L1 hands over again. queue=l1-full",
    ]


def test_what_the_queue_refuses_is_bounded_and_then_nothing_more_is_let_in() -> None:
    downstream = Downstream()
    downstream.full()
    chunk = Cpu.of([f"e{n}" for n in range(100)], range(100), [1.0] * 100)
    config = L1Config(flush_interval=0.01, max_bytes=10 * chunk.nbytes)
    l1 = L1.with_own_queue("l1-bound", downstream.push, config, threads=ONE_THREAD)
    accepted = 0
    for number in range(200):  # new series each time, so that merging makes nothing smaller
        other = Cpu.of([f"{number}-{n}" for n in range(100)], range(100), [1.0] * 100)
        accepted += l1.produce(other)
    assert 0 < accepted <= 10
    assert not l1.produce(chunk, timeout=0.01)

    downstream.refusal = None
    assert l1.produce(chunk, timeout=10.0), "room comes back"
    l1.close()
    assert downstream.counts() == {"cpu": 100 * (accepted + 1)}
    assert _value(l1, "penstock_l1_held_bytes") == 0
    assert _value(l1, "penstock_l1_turned_away_total") == 201 - accepted


def test_a_request_larger_than_the_limit_is_let_in_alone() -> None:
    downstream = Downstream()
    l1 = L1.with_own_queue("l1-large", downstream.push, L1Config(max_bytes=10), threads=ONE_THREAD)
    assert l1.produce(points(Cpu, 1000))
    assert l1.produce(points(Cpu, 1000), timeout=10.0)
    l1.close()
    assert downstream.counts() == {"cpu": 2000}


def test_producers_that_race_with_close_lose_nothing_that_was_accepted() -> None:
    downstream = Downstream()
    l1 = L1.with_own_queue("l1-race", downstream.push, NEVER, definitions=DEFINED, threads=ThreadPolicy.fixed(2))
    accepted, started = [0] * 4, threading.Barrier(5)

    def produce(index: int) -> None:
        started.wait()
        while l1.produce(points((Cpu, Rps)[index % 2], 1), timeout=10.0):
            accepted[index] += 1

    producers = [threading.Thread(target=produce, args=(index,)) for index in range(4)]
    for producer in producers:
        producer.start()
    started.wait()
    wait_until(lambda: min(accepted) > 10)
    l1.close()
    for producer in producers:
        producer.join(10)
    assert downstream.counts() == {"cpu": accepted[0] + accepted[2], "rps": accepted[1] + accepted[3]}


def test_a_close_that_is_refused_says_so_and_may_be_tried_again() -> None:
    downstream = Downstream()
    downstream.full()
    l1 = L1.with_own_queue("l1-again", downstream.push, NEVER, threads=ONE_THREAD)
    l1.produce(points(Cpu, 30))
    with pytest.raises(QueueFull, match="no room"):
        l1.close()

    downstream.refusal = None
    l1.close()
    assert downstream.counts() == {"cpu": 30}


@pytest.mark.parametrize(
    ("durability", "reason"),
    [
        (Durability.MEMORY, r"not everything was merged within 0\.05 s"),
        (Durability.DISK, "closed before all of the request was merged"),
    ],
)
def test_a_close_without_time_for_the_handlers_hands_over_what_is_merged_and_says_that_it_is_not_all(
    durability: Durability, reason: str
) -> None:
    downstream, sender = Downstream(), Sender()
    queue = BatchQueue("l1-late", BatchQueueConfig(threads=ThreadPolicy.fixed(2)))
    blocker = Blocker(queue)  # in the one partition, so that the handler of cpu waits
    l1 = L1(queue, downstream.push, replace(NEVER, durability=durability), definitions=DEFINED)
    l1.produce(points(Cpu, 30))
    wait_until(lambda: any(counts.consumed for counts in queue.stats().types.values()))
    blocker.hold()
    l1.submit([points(Cpu, 5)], sender.done)
    with pytest.raises(QueueClosed, match=reason) as raised:
        l1.close(timeout=0.05)
    blocker.release()
    assert sender.answers == [None if durability is Durability.MEMORY else raised.value]
    assert downstream.counts() == {"cpu": 30}


def test_a_scrape_shows_points_in_and_rows_out() -> None:
    downstream = Downstream()
    l1 = L1.with_own_queue("l1-scrape", downstream.push, NEVER, threads=ONE_THREAD)
    telemetry = Telemetry()
    telemetry.watch(l1.samples)
    l1.produce(points(Cpu, 30))
    l1.close()

    scrape = telemetry.render().decode()
    assert 'penstock_points_received_total{metric="cpu"} 30.0' in scrape
    assert "penstock_l1_partials_total 3.0" in scrape
    assert "penstock_l1_blocks_total 1.0" in scrape


def test_new_definitions_hold_for_what_comes_from_then_on_and_every_point_counts_once() -> None:
    downstream = Downstream()
    old, new = (parse_definitions({"metrics": [{"name": name, "source": "cpu"}]}) for name in ("old", "new"))
    l1 = L1.with_own_queue("l1-redefined", downstream.push, definitions=old, threads=ONE_THREAD)
    for definitions in (old, new, Definitions()):
        l1.redefine(definitions)
        l1.produce(points(Cpu, 30))
    l1.close()

    assert downstream.counts() == {"old": 30, "new": 30, "cpu": 30}


@pytest.mark.parametrize("made", [as_it_is, coded])
def test_definitions_make_several_metrics_of_one_source_and_drop_what_is_not_defined(
    made: Callable[[Chunk], Chunk],
) -> None:
    downstream = Downstream()
    definitions = parse_definitions(
        {
            "metrics": [
                {"name": "all_cpu", "source": "cpu", "entity": []},
                {"name": "host_cpu", "source": "cpu", "filter": {"host": ["e0", "e1"]}, "function": "max"},
            ],
            "undefined": "drop",
        }
    )
    l1 = L1.with_own_queue("l1-definitions", downstream.push, definitions=definitions, threads=ONE_THREAD)
    l1.produce(made(points(Cpu, 30)))
    l1.produce(made(points(Rps, 30)))
    l1.close()

    rows = sorted((row["metric"], row["entity"], row["count"]) for row in downstream.rows().to_pylist())
    assert rows == [("all_cpu", "{}", 30), ("host_cpu", '{"host":"e0"}', 10), ("host_cpu", '{"host":"e1"}', 10)]


@pytest.mark.parametrize("made", [as_it_is, coded])
def test_points_that_are_no_numbers_are_left_out_and_counted(made: Callable[[Chunk], Chunk]) -> None:
    downstream = Downstream()
    l1 = L1.with_own_queue("l1-nan", downstream.push, NEVER, threads=ONE_THREAD)
    l1.produce(made(Cpu.of(["{}"] * 4, [0, 1, 2, 3], [1.0, float("nan"), float("inf"), 2.0])))
    l1.produce(made(Rps.of(["{}"], [0], [float("nan")])))
    l1.close()

    assert downstream.rows()["sum"].to_pylist() == [3.0]
    assert _value(l1, "penstock_points_not_numbers_total") == 3


def test_a_source_that_is_kept_is_merged_by_its_definition_and_by_its_own_labels() -> None:
    downstream = Downstream()
    entries = [{"name": "load", "source": "cpu", "entity": [], "function": "max", "keep_source": True}]
    definitions = parse_definitions({"metrics": entries})
    l1 = L1.with_own_queue("l1-kept", downstream.push, NEVER, definitions=definitions, threads=ONE_THREAD)
    assert l1.submit([points(Cpu, 30)], lambda error: None)
    l1.close()

    series = {(row["metric"], row["entity"]): row["count"] for row in downstream.rows().to_pylist()}
    own = {("cpu", f'{{"host":"e{n}"}}'): 10 for n in range(3)}
    assert series == {("load", "{}"): 30, **own}


def test_a_scrape_shows_what_each_definition_took_and_which_labels_of_its_entity_came() -> None:
    entries = [
        {"name": "fits", "source": "cpu", "entity": ["host", "region"]},
        {"name": "misses", "source": "cpus"},
    ]
    l1 = L1.with_own_queue("l1-fit", Downstream().push, NEVER, threads=ONE_THREAD)
    l1.redefine(parse_definitions({"metrics": entries}))
    l1.submit([points(Cpu, 30)], lambda error: None)
    l1.close()

    telemetry = Telemetry()
    telemetry.watch(l1.samples)
    text = telemetry.render().decode()
    assert 'penstock_l1_definition_points_total{definition="fits"} 30.0' in text
    assert 'penstock_l1_definition_points_total{definition="misses"} 0.0' in text
    assert 'penstock_l1_definition_label_seen{definition="fits",label="host"} 1.0' in text
    assert 'penstock_l1_definition_label_seen{definition="fits",label="region"} 0.0' in text


def test_defined_metrics_grow_the_partitions_and_meters_hardly_do() -> None:
    sources = [f"defined{n}" for n in range(30)]
    definitions = parse_definitions({"metrics": [{"name": f"{name}_max", "source": name} for name in sources]})
    defined = L1.with_own_queue("l1-defined", Downstream().push, definitions=definitions, threads=ThreadPolicy.fixed(2))
    meters = L1.with_own_queue("l1-meters", Downstream().push, threads=ThreadPolicy.fixed(2))
    for name in sources:
        defined.produce(points(chunk_type(name), 1))
        meters.produce(points(chunk_type(name), 1))
    assert len(defined.queue.stats().partitions) == 30
    assert len(meters.queue.stats().partitions) == 2
    defined.close()
    meters.close()


@pytest.mark.parametrize("is_defined", [False, True])
def test_thousands_of_metrics_cost_a_bounded_number_of_handlers_and_no_threads(is_defined: bool) -> None:
    downstream = Downstream()
    config = L1Config(max_metrics=20, flush_interval=3600.0)
    names = [f"metric{number}" for number in range(4_000)]
    defined = parse_definitions({"metrics": [{"name": name, "source": name} for name in names] if is_defined else []})
    l1 = L1.with_own_queue("l1-many", downstream.push, config, definitions=defined, threads=ThreadPolicy.fixed(2))
    threads = threading.active_count()
    for name in names:
        assert l1.produce(points(chunk_type(name), 1), timeout=10.0)
    assert threading.active_count() <= threads
    assert len(l1.queue.stats().types) == (21 if is_defined else 0)
    l1.close()

    received = {sample.labels[0] for sample in l1.samples() if sample.name == "penstock_points_received_total"}
    assert len(received) == 21
    assert OTHERS in received
    counts = downstream.counts()
    assert len(counts) == 4_000
    assert set(counts.values()) == {1}
    gc.collect()
    assert len(point._types) < 1_000, "the classes of metrics without chunks are let go"


def test_settings_without_sense_are_refused_by_name() -> None:
    for field in ("flush_rows", "max_metrics", "max_bytes", "flush_interval"):
        settings: dict[str, Any] = {field: 0}
        with pytest.raises(ConfigError, match=rf"l1\.{field} must be .*, got 0"):
            L1Config(**settings)


def _refused_more_than(downstream: Downstream, times: int) -> bool:
    return downstream.refused > times


def _value(l1: L1, name: str) -> float:
    return sum(sample.value for sample in l1.samples() if sample.name == name)
