"""What the benchmark of the batch queue drives: queues with handlers, producers to feed them, clocks to read."""

import queue
import random
import threading
import time
from collections.abc import Callable
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
    emits: dict[type, Callable[[object], bool]] = {type_: rig.queue.producer(type_) for type_ in TYPES}

    def feed(number: int, stop: threading.Event) -> int:
        calls = [(emits[type(item)], item) for item in skewed_items(number)]
        accepted = 0
        while not stop.is_set():
            for emit, item in calls:
                emit(item)
            accepted += len(calls)
        return accepted

    return feed


def batch_handles(rig: Rig) -> Feed:
    emits: dict[type, Callable[[list[object]], int]] = {type_: rig.queue.batch_producer(type_) for type_ in TYPES}

    def feed(number: int, stop: threading.Event) -> int:
        calls = [(emits[type(item)], [item] * 100) for item in skewed_items(number)[::100]]
        accepted = 0
        while not stop.is_set():
            for emit, chunk in calls:
                accepted += emit(chunk)
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


def cpu_while_asleep(seconds: float) -> float:
    """Percent of a core that the other threads use while this one sleeps, once they have settled."""
    time.sleep(0.3)
    before, started = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return 100 * (time.process_time() - before) / (time.perf_counter() - started)


def idle_cpu(handler: type[Counting], seconds: float) -> float:
    """Percent of a core that 4 threads and 100 handlers use while nothing comes."""
    handlers = [handler() for _ in TYPES]
    idle = BatchQueue("idle", BatchQueueConfig(threads=ThreadPolicy.fixed(4), partitions=PartitionPolicy.adaptive()))
    for type_, each in zip(TYPES, handlers):
        idle.add_handler(type_, each)
    used = cpu_while_asleep(seconds)
    idle.close()
    return used


class Empty:
    def produce(self, item: object, timeout: float | None = None) -> bool:
        return True


def cpu_per_call(calls: list[Callable[[object], bool]], items: list[object]) -> float:
    """Nanoseconds of CPU time of one call, its loop included."""
    started = time.process_time()
    for call, item in zip(calls, items):
        call(item)
    return (time.process_time() - started) / len(items) * 1e9


class First:
    pass


class Last:
    pass


class Held:
    """Keeps the only thread of a queue in a handler for the time of a `with`, then lets it drain all that came."""

    def __init__(self, held: BatchQueue) -> None:
        self.drained_in = 0.0
        self._queue = held
        self._entered, self._release, self._drained = threading.Event(), threading.Event(), threading.Event()
        held.add_handler(First, self._hold)
        held.add_handler(Last, lambda batch: self._drained.set())

    def _hold(self, batch: list[First]) -> None:
        self._entered.set()
        self._release.wait()

    def __enter__(self) -> None:
        for event in (self._entered, self._release, self._drained):
            event.clear()
        self._queue.produce(First())
        self._entered.wait()

    def __exit__(self, *error: object) -> None:
        self._queue.produce(Last())  # the thread comes to it after everything else
        started = time.process_time()
        self._release.set()
        self._drained.wait()
        self.drained_in = time.process_time() - started
