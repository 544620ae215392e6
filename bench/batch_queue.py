"""The batch queue against `queue.SimpleQueue` and `queue.Queue`, all in one run, so that ratios can be trusted.

S is the rate of `SimpleQueue.put` and `get` in one thread. Arms are interleaved; every figure is the median of its
rounds, and every run checks that what was accepted was consumed. Rates are given by the wall clock and, since the
machine may be busy with other things, by the CPU time of this process.

    python -m bench.batch_queue [--rounds 3] [--seconds 1.0] [--only latency]
"""

import argparse
import os
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock import (
    BatchQueue,
    BatchQueueConfig,
    BufferStrategy,
    DrainBalancer,
    HandlerConsumer,
    PartitionPolicy,
    ThreadPolicy,
)

TYPES: list[type] = [type(f"Metric{index:02d}", (), {}) for index in range(100)]
SKEW = (24, 8, 4, 1)  # a quarter of the types each
PLACEMENT_SEED = 263  # an order of registration that leaves one of four threads half again the mean load


def weights() -> dict[type, int]:
    return {type_: SKEW[index % 4] for index, type_ in enumerate(TYPES)}


def registration_order() -> list[type]:
    return random.Random(PLACEMENT_SEED).sample(TYPES, len(TYPES))


def skewed_items(seed: int, count: int = 4_000) -> list[object]:
    chosen = random.Random(seed).choices(TYPES, [weights()[type_] for type_ in TYPES], k=count)
    return [type_() for type_ in chosen]


class Counting(HandlerConsumer[object]):
    """Counts; with `seconds_per_item`, sleeps for each."""

    def __init__(self, seconds_per_item: float = 0.0) -> None:
        self.count = 0
        self.seconds_per_item = seconds_per_item

    def consume(self, batch: list[object]) -> None:
        self.count += len(batch)
        if self.seconds_per_item:
            time.sleep(self.seconds_per_item * len(batch))


@dataclass
class Rig:
    """A queue with a handler per type, to be fed by producer threads for a while."""

    threads: int
    types: list[type] = field(default_factory=registration_order)
    seconds_per_item: float = 0.0
    balancer: DrainBalancer | None = None
    buffer_size: int = 2_000

    def __post_init__(self) -> None:
        self.queue = BatchQueue(
            "bench",
            BatchQueueConfig(
                threads=ThreadPolicy.fixed(self.threads),
                partitions=PartitionPolicy.adaptive(),
                buffer_size=self.buffer_size,
                strategy=BufferStrategy.BLOCKING,
                balancer=self.balancer,
                balance_interval=0.2 if self.balancer else None,
                shutdown_timeout=60.0,
            ),
        )
        self.handlers = [Counting(self.seconds_per_item) for _ in self.types]
        for type_, handler in zip(self.types, self.handlers):
            self.queue.add_handler(type_, handler)

    @property
    def consumed(self) -> int:
        return sum(handler.count for handler in self.handlers)

    def close(self, accepted: int) -> None:
        assert self.queue.close()
        assert self.consumed == accepted, f"{accepted} accepted, {self.consumed} consumed"


Feed = Callable[[int, threading.Event], int]  # (producer's number, stop) -> how many were accepted


@dataclass(frozen=True)
class Rate:
    """Items per second, of the wall clock and of CPU time."""

    wall: float
    cpu: float


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def rate_between(count: int, started: tuple[float, float], ended: tuple[float, float]) -> Rate:
    return Rate(count / (ended[0] - started[0]), count / (ended[1] - started[1]))


def feed_for(producers: int, seconds: float, feed: Feed, consumed: Callable[[], int]) -> tuple[Rate, int]:
    """Run the producers; the rate of consumption between a fifth of the time and its end, and all accepted."""
    stop = threading.Event()
    accepted = [0] * producers

    def run(number: int) -> None:
        accepted[number] = feed(number, stop)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(producers)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 5)
    before, started = consumed(), clocks()
    time.sleep(seconds * 4 / 5)
    after, ended = consumed(), clocks()
    stop.set()
    for thread in threads:
        thread.join()
    return rate_between(after - before, started, ended), sum(accepted)


def single(rig: Rig, one_type: bool = False) -> Feed:
    def feed(number: int, stop: threading.Event) -> int:
        items = [TYPES[0]()] * 4_000 if one_type else skewed_items(number)
        produce = rig.queue.produce
        accepted = 0
        while not stop.is_set():
            for item in items:
                produce(item)
            accepted += len(items)
        return accepted

    return feed


def handles(rig: Rig) -> Feed:
    def feed(number: int, stop: threading.Event) -> int:
        emits: dict[type, Callable[[object], bool]] = {type_: rig.queue.producer(type_) for type_ in TYPES}
        calls = [(emits[type(item)], item) for item in skewed_items(number)]
        accepted = 0
        while not stop.is_set():
            for emit, item in calls:
                emit(item)
            accepted += len(calls)
        return accepted

    return feed


def many(rig: Rig, mixed: bool) -> Feed:
    def feed(number: int, stop: threading.Event) -> int:
        items = skewed_items(number)
        chunks = [items[i : i + 100] for i in range(0, len(items), 100)]
        if not mixed:
            chunks = [[chunk[0]] * 100 for chunk in chunks]
        produce_many = rig.queue.produce_many
        accepted = 0
        while not stop.is_set():
            for chunk in chunks:
                accepted += produce_many(chunk)
        return accepted

    return feed


def run_rig(rig: Rig, producers: int, seconds: float, feed: Feed) -> Rate:
    rate, accepted = feed_for(producers, seconds, feed, lambda: rig.consumed)
    rig.close(accepted)
    return rate


def one_thread(simple: "queue.SimpleQueue[object] | queue.Queue[object]", seconds: float) -> Rate:
    """`put` and `get` of one item, in one thread."""
    put, get = simple.put, simple.get
    item, done = object(), 0
    started = clocks()
    while time.perf_counter() - started[0] < seconds:
        for _ in range(10_000):
            put(item)
            get()
        done += 10_000
    return rate_between(done, started, clocks())


def standard_queue(seconds: float) -> Rate:
    """16 producers, four threads that get one item at a time from one `queue.Queue` and give it to its handler."""
    standard: queue.Queue[object] = queue.Queue(200_000)
    handlers = {type_: [0] for type_ in TYPES}

    def drain() -> None:
        get = standard.get
        while (item := get()) is not None:
            handlers[type(item)][0] += 1

    def feed(number: int, stop: threading.Event) -> int:
        items = skewed_items(number)
        accepted = 0
        while not stop.is_set():
            for item in items[:200]:
                standard.put(item)
            accepted += 200
        return accepted

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    rate, _ = feed_for(16, seconds, feed, lambda: sum(count[0] for count in handlers.values()))
    for _ in threads:
        standard.put(None)
    for thread in threads:
        thread.join()
    return rate


def sleeping(seconds: float, balancer: DrainBalancer | None) -> tuple[float, float]:
    """Items per second of handlers that sleep 4 µs per item, and the ratio of the most to the least loaded thread."""
    rig = Rig(threads=4, seconds_per_item=4e-6, balancer=balancer)
    loads: list[tuple[int, ...]] = []

    def consumed() -> int:
        loads.append(rig.queue.stats().thread_items)
        return rig.consumed

    rate, accepted = feed_for(16, seconds, single(rig), consumed)
    rig.close(accepted)
    per_thread = [after - before for before, after in zip(loads[0], loads[1])]
    return rate.wall, max(per_thread) / min(per_thread)


def latencies(per_second: float, count: int) -> list[float]:
    """Seconds from `produce` to `consume` of single items at a steady rate."""
    seen: list[float] = []
    arrived = threading.Event()

    def consume(batch: list[float]) -> None:
        now = time.perf_counter()
        seen.extend(now - produced for produced in batch)
        if len(seen) == count:
            arrived.set()

    latency = BatchQueue("latency", BatchQueueConfig(threads=ThreadPolicy.fixed(1)))
    latency.add_handler(float, consume)
    due = time.perf_counter()
    for _ in range(count):
        due += 1 / per_second
        time.sleep(max(0.0, due - time.perf_counter()))
        latency.produce(time.perf_counter())
    assert arrived.wait(10)
    assert latency.close()
    return seen


class Flushing(Counting):
    def on_idle(self) -> None:
        pass


def idle_cpu(handler: type[Counting], seconds: float) -> float:
    """Percent of a core that 4 threads and 100 handlers use while nothing comes."""
    idle = BatchQueue("idle", BatchQueueConfig(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()))
    for type_ in TYPES:
        idle.add_handler(type_, handler())
    time.sleep(0.3)
    before, started = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    used = (time.process_time() - before) / (time.perf_counter() - started)
    idle.close()
    return 100 * used


def load() -> str:
    return "load " + " ".join(f"{value:.2f}" for value in os.getloadavg())


def row(name: str, value: str, ratio: str, target: str = "–", reached: bool | None = None) -> None:
    verdict = {True: "yes", False: "NO", None: ""}[reached]
    print(f"| {name} | {value} | {ratio} | {target} | {verdict} |", flush=True)


def throughput(rounds: int, seconds: float) -> None:
    arms: dict[str, Callable[[], Rate]] = {
        "S": lambda: one_thread(queue.SimpleQueue(), seconds),
        "16p/4t single": lambda: run_rig(rig := Rig(4), 16, seconds, single(rig)),
        "16p/4t single, producer handles": lambda: run_rig(rig := Rig(4), 16, seconds, handles(rig)),
        "16p/4t many of one type": lambda: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=False)),
        "16p/4t many of mixed types": lambda: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=True)),
        "1p/1t single": lambda: run_rig(rig := Rig(1), 1, seconds, single(rig)),
        "1p/1t single, one type": lambda: run_rig(rig := Rig(1, TYPES[:1]), 1, seconds, single(rig, one_type=True)),
        "1p/1t many of one type": lambda: run_rig(rig := Rig(1), 1, seconds, many(rig, mixed=False)),
        "queue.Queue, one thread": lambda: one_thread(queue.Queue(2_000), seconds),
        "queue.Queue 16p/4t": lambda: standard_queue(seconds),
    }
    targets = {
        "16p/4t single": 0.35, "16p/4t many of one type": 1.4, "16p/4t many of mixed types": 0.35,
        "1p/1t single": 0.4, "1p/1t many of one type": 1.4,
    }  # fmt: skip
    rates: dict[str, list[Rate]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            rates[name].append(arm())
    wall = {name: statistics.median(rate.wall for rate in values) for name, values in rates.items()}
    cpu = {name: statistics.median(rate.cpu for rate in values) for name, values in rates.items()}
    for name, rate in wall.items():
        ratio, target = rate / wall["S"], targets.get(name)
        measured = f"{rate / 1e6:.2f} M/s"
        ratios = f"{ratio:.2f} S (CPU {cpu[name] / cpu['S']:.2f})"
        row(name, measured, ratios, f"≥ {target} S" if target else "–", None if target is None else ratio >= target)
    rival = max(wall["queue.Queue 16p/4t"], wall["queue.Queue, one thread"])
    against = wall["16p/4t single"] / rival
    row("16p/4t single against the better queue.Queue", "", f"{against:.1f} ×", "≥ 5 ×", against >= 5)


def balancing(rounds: int, seconds: float) -> None:
    static, moved, ratios, even = [], [], [], []
    for _ in range(rounds):
        rate, ratio = sleeping(seconds * 2, None)
        static.append(rate)
        ratios.append(ratio)
        rate, ratio = sleeping(seconds * 2, DrainBalancer.throughput_weighted())
        moved.append(rate)
        even.append(ratio)
    gain = statistics.median(moved) / statistics.median(static)
    name = f"sleeping handler, static (load ratio {statistics.median(ratios):.2f})"
    row(name, f"{statistics.median(static) / 1e3:.0f} k/s", "")
    row(
        "sleeping handler, rebalanced",
        f"{statistics.median(moved) / 1e3:.0f} k/s",
        f"{gain:.2f} ×",
        "≥ 1.35 ×",
        gain >= 1.35,
    )
    left = statistics.median(even)
    row("its load ratio max/min", "", f"{left:.3f}", "≤ 1.05", left <= 1.05)


def latency_table() -> None:
    for per_second, count in ((2, 24), (20, 100), (200, 600), (2000, 4000)):
        seen = sorted(latencies(per_second, count))
        p50, p95 = seen[len(seen) // 2], seen[int(len(seen) * 0.95)]
        name = f"produce → consume at {per_second}/s, p50 / p95"
        row(name, f"{p50 * 1e3:.3f} / {p95 * 1e3:.3f} ms", "", "p95 < 1 ms", p95 < 0.001)


def idle_table(seconds: float) -> None:
    for name, handler in (("handlers without on_idle", Counting), ("handlers with on_idle", Flushing)):
        used = idle_cpu(handler, seconds * 4)
        row(f"idle CPU, 4 threads, 100 {name}", f"{used:.3f} %", "", "< 0.2 %", used < 0.2)


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "throughput", lambda: throughput(options.rounds, options.seconds)
    yield "balancing", lambda: balancing(options.rounds, options.seconds)
    yield "latency", latency_table
    yield "idle", lambda: idle_table(options.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long one arm runs")
    parser.add_argument("--only", help="throughput, balancing, latency or idle")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {load()}")
    print("| Scenario | Measured | Ratio | Target | Reached |\n|---|---|---|---|---|")
    for name, part in parts(options):
        if options.only in (None, name):
            part()
    print(f"Nothing was lost. {load()}")


if __name__ == "__main__":
    main()
