"""The batch queue against `queue.SimpleQueue` and `queue.Queue`, all in one run, so that ratios can be trusted.

S is the rate of `SimpleQueue.put` and `get` in one thread, measured just before and just after whatever is divided by
it. Arms are interleaved; every figure and every ratio is the median of its rounds, and every run checks that what was
accepted was consumed. Rates are given by the wall clock and, since the machine may be busy with other things, by the
CPU time of this process.

    python -m bench.batch_queue [--rounds 4] [--seconds 1.0] [--only latency]
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator

from bench.batch_arms import OURS, STANDARD, anatomy_of_produce, beside_s
from bench.batch_rigs import Counting, Flushing, Rate, idle_cpu, latencies, sleeping
from penstock import DrainBalancer

TARGETS = {
    "16p/4t single": 0.3, "16p/4t many of one type": 1.0, "16p/4t many of mixed types": 0.35,
    "1p/1t single": 0.3, "1p/1t many of one type": 1.0,
}  # fmt: skip


def load() -> str:
    return "load " + " ".join(f"{value:.2f}" for value in os.getloadavg())


def row(name: str, value: str, ratio: str, target: str = "–", *reached: bool) -> None:
    """`reached` by every measure, by none, or not clearly: then the machine was too busy to tell."""
    verdict = "" if not reached else "yes" if all(reached) else "unclear" if any(reached) else "NO"
    print(f"| {name} | {value} | {ratio} | {target} | {verdict} |", flush=True)


def throughput(rounds: int, seconds: float) -> None:
    rates: dict[str, list[tuple[Rate, Rate]]] = {}
    for _ in range(rounds):
        for arm in (*OURS, *STANDARD):
            rates.setdefault(arm, []).append(beside_s(arm, seconds))
    yardstick = statistics.median(beside.wall for values in rates.values() for _, beside in values)
    row("S", f"{yardstick / 1e6:.2f} M/s", "1.00 S")
    wall: dict[str, float] = {}
    for arm, values in rates.items():
        wall[arm] = statistics.median(rate.wall for rate, _ in values)
        ratio = statistics.median(rate.wall / beside.wall for rate, beside in values)
        by_cpu = statistics.median(rate.cpu / beside.cpu for rate, beside in values)
        target = TARGETS.get(arm)
        reached = () if target is None else (ratio >= target, by_cpu >= target)
        wanted = "–" if target is None else f"≥ {target} S"
        row(arm, f"{wall[arm] / 1e6:.2f} M/s", f"{ratio:.2f} S (CPU {by_cpu:.2f})", wanted, *reached)
    against = wall["16p/4t single"] / max(wall[arm] for arm in STANDARD)
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


def idle_table(rounds: int, seconds: float) -> None:
    arms: dict[str, tuple[type[Counting], float]] = {"with": (Flushing, 1.0), "without": (Counting, 0.05)}
    used: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (handler, _) in arms.items():
            used[name].append(idle_cpu(handler, seconds * 3))
    for name, (_, bound) in arms.items():
        median = statistics.median(used[name])
        spread = f"{median:.3f} % ({min(used[name]):.3f} to {max(used[name]):.3f})"
        row(f"idle CPU, 4 threads, 100 handlers {name} on_idle", spread, "", f"< {bound} %", median < bound)


def anatomy() -> None:
    """Where the time of a single `produce` goes."""
    figures = anatomy_of_produce()
    simple = next(iter(figures.values()))
    for name, value in figures.items():
        row(f"anatomy: {name}", f"{value:.0f} ns", f"{value / simple:.2f} / S")


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "throughput", lambda: throughput(options.rounds, options.seconds)
    yield "anatomy", anatomy
    yield "balancing", lambda: balancing(options.rounds, options.seconds)
    yield "latency", latency_table
    yield "idle", lambda: idle_table(options.rounds, options.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
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
