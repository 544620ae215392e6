"""The batch queue against `queue.SimpleQueue` and `queue.Queue`, all in one run, so that ratios can be trusted.

S is the rate of `SimpleQueue.put` and `get` in one thread. Arms are interleaved; every figure is the median of its
rounds, and every run checks that what was accepted was consumed. Rates are given by the wall clock and, since the
machine may be busy with other things, by the CPU time of this process.

    python -m bench.batch_queue [--rounds 3] [--seconds 1.0] [--only latency]
"""

import argparse
import os
import queue
import statistics
from collections.abc import Callable, Iterator

from bench.batch_rigs import (
    TYPES,
    Counting,
    Empty,
    Flushing,
    Held,
    Rate,
    Rig,
    batch_handles,
    cpu_per_call,
    handles,
    idle_cpu,
    latencies,
    many,
    one_thread,
    run_rig,
    single,
    skewed_items,
    sleeping,
    standard_queue,
)
from penstock import DrainBalancer


def load() -> str:
    return "load " + " ".join(f"{value:.2f}" for value in os.getloadavg())


def row(name: str, value: str, ratio: str, target: str = "–", *reached: bool) -> None:
    """`reached` by every measure, by none, or not clearly: then the machine was too busy to tell."""
    verdict = "" if not reached else "yes" if all(reached) else "unclear" if any(reached) else "NO"
    print(f"| {name} | {value} | {ratio} | {target} | {verdict} |", flush=True)


def throughput(rounds: int, seconds: float) -> None:
    arms: dict[str, Callable[[], Rate]] = {
        "S": lambda: one_thread(queue.SimpleQueue(), seconds),
        "16p/4t single": lambda: run_rig(rig := Rig(4), 16, seconds, single(rig)),
        "16p/4t single, producer handles": lambda: run_rig(rig := Rig(4), 16, seconds, handles(rig)),
        "16p/4t many of one type": lambda: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=False)),
        "16p/4t many of one type, batch handles": lambda: run_rig(rig := Rig(4), 16, seconds, batch_handles(rig)),
        "16p/4t many of one type, buffers of 20 000": lambda: run_rig(
            rig := Rig(4, buffer_size=20_000), 16, seconds, many(rig, mixed=False)
        ),
        "16p/4t many of mixed types": lambda: run_rig(rig := Rig(4), 16, seconds, many(rig, mixed=True)),
        "1p/1t single": lambda: run_rig(rig := Rig(1), 1, seconds, single(rig)),
        "1p/1t single, one type": lambda: run_rig(rig := Rig(1, TYPES[:1]), 1, seconds, single(rig, one_type=True)),
        "1p/1t many of one type": lambda: run_rig(rig := Rig(1), 1, seconds, many(rig, mixed=False)),
        "1p/1t many of one type, batch handles": lambda: run_rig(rig := Rig(1), 1, seconds, batch_handles(rig)),
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
        ratio, by_cpu = rate / wall["S"], cpu[name] / cpu["S"]
        target = targets.get(name)
        reached = () if target is None else (ratio >= target, by_cpu >= target)
        wanted = "–" if target is None else f"≥ {target} S"
        row(name, f"{rate / 1e6:.2f} M/s", f"{ratio:.2f} S (CPU {by_cpu:.2f})", wanted, *reached)
    rival = max(wall["queue.Queue 16p/4t"], wall["queue.Queue, one thread"])
    against = wall["16p/4t single"] / rival
    row("16p/4t single against the better queue.Queue", "", f"{against:.1f} ×", "≥ 5 ×", against >= 5)


def balancing(rounds: int, seconds: float) -> None:
    static, moved, ratios, even = [], [], [], []
    for _ in range(rounds):
        rate, ratio = sleeping(seconds * 3, None)
        static.append(rate)
        ratios.append(ratio)
        rate, ratio = sleeping(seconds * 3, DrainBalancer.throughput_weighted())
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


def anatomy() -> None:
    """Where the time of a single `produce` goes, in CPU time: 4 000 items go in while the thread is held, then out."""
    items = skewed_items(1)
    simple = 1e9 / one_thread(queue.SimpleQueue(), 0.5).cpu
    empty = cpu_per_call([Empty().produce] * len(items), items)
    rig = Rig(1)
    hold = Held(rig.queue)
    emits: dict[type, Callable[[object], bool]] = {type_: rig.queue.producer(type_) for type_ in TYPES}
    produce, handle, drain = [], [], []
    for _ in range(50):
        with hold:
            produce.append(cpu_per_call([rig.queue.produce] * len(items), items))
        drain.append(hold.drained_in / len(items) * 1e9)
        with hold:
            handle.append(cpu_per_call([emits[type(item)] for item in items], items))
    rig.close(100 * len(items))
    row("anatomy: SimpleQueue put + get (1 / S)", f"{simple:.0f} ns", "")
    for name, value in (
        ("loop and call of an empty method", empty),
        ("produce", statistics.median(produce)),
        ("a producer handle", statistics.median(handle)),
        ("drain and dispatch, 40 items per batch", statistics.median(drain)),
    ):
        row(f"anatomy: {name}", f"{value:.0f} ns", f"{value / simple:.2f} / S")


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "throughput", lambda: throughput(options.rounds, options.seconds)
    yield "anatomy", anatomy
    yield "balancing", lambda: balancing(options.rounds, options.seconds)
    yield "latency", latency_table
    yield "idle", lambda: idle_table(options.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long one arm runs")
    parser.add_argument("--only", help="throughput, anatomy, balancing, latency or idle")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {load()}")
    print("| Scenario | Measured | Ratio | Target | Reached |\n|---|---|---|---|---|")
    for name, part in parts(options):
        if options.only in (None, name):
            part()
    print(f"Nothing was lost. {load()}")


if __name__ == "__main__":
    main()
