"""L1 and its answers: `make bench PART=l1`.

Requests of 20 metrics × 50 points, from senders that wait for each answer, into a durable queue on this disk. Arms take
turns; the load is printed, since on a busy machine only core-seconds mean much.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence

from bench.processes import cpu_seconds
from penstock import Durability, FastQueue, FastQueueConfig
from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.model.point import Chunk, chunk_type

METRICS, POINTS = 20, 50
ARMS = (("memory", 8), ("disk", 1), ("disk", 8), ("disk", 32), ("fsync", 32))


def request(number: int) -> list[Chunk]:
    entities = [f'{{"endpoint":"GET /{n}","pod":"{number % 200}"}}' for n in range(POINTS)]
    times = [1_700_000_000_000_000 + n * 1000 for n in range(POINTS)]
    return [chunk_type(f"metric{n}").of(entities, times, [1.0] * POINTS) for n in range(METRICS)]


def run(durability: Durability, senders: int, requests: Sequence[list[Chunk]], count: int) -> dict[str, float]:
    """Points a second and a core-second, pushes, and the median time to an answer."""
    waits: list[float] = []

    def send(l1: L1, first: int) -> None:
        for number in range(first, count, senders):
            answered, errors, began = threading.Event(), list[BaseException | None](), time.perf_counter()

            def done(
                error: BaseException | None,
                answered: threading.Event = answered,
                errors: list[BaseException | None] = errors,
            ) -> None:
                errors.append(error)
                answered.set()

            while not l1.submit(requests[number % len(requests)], done):
                time.sleep(0.005)  # as a sender does that is told to come again
            answered.wait()
            waits.append(time.perf_counter() - began)
            assert errors == [None], errors

    with tempfile.TemporaryDirectory() as folder:
        queue = FastQueue(folder, FastQueueConfig(durability=durability, max_size=1_000_000))
        l1 = L1.with_own_queue("l1", queue.push_many, L1Config(durability=durability))
        threads = [threading.Thread(target=send, args=(l1, first)) for first in range(senders)]
        began, worked = time.perf_counter(), cpu_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        l1.close()
        wall, cores = time.perf_counter() - began, cpu_seconds() - worked
        pushes = next(sample.value for sample in l1.samples() if sample.name == "penstock_l1_blocks_total")
        queue.close()
    points = count * METRICS * POINTS
    return {"wall": points / wall, "core": points / cores, "pushes": pushes, "wait": statistics.median(waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    requests = [request(number) for number in range(50)]
    found: dict[tuple[str, int], list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for number in range(arguments.rounds + 1):
        for durability, senders in ARMS:
            result = run(Durability(durability), senders, requests, arguments.requests)
            if number:
                found[durability, senders].append(result)
    print(f"{arguments.requests} requests of {METRICS} × {POINTS} points, load {os.getloadavg()[0]:.1f}")
    for (durability, senders), results in found.items():
        median = {key: statistics.median(result[key] for result in results) for key in results[0]}
        print(
            f"  {durability:<7} {senders:>3} senders  {median['wall'] / 1e6:5.2f} M points/s  "
            f"{median['core'] / 1e6:5.2f} M a core-second  {median['pushes']:4.0f} pushes  "
            f"answered in {median['wait'] * 1000:6.1f} ms"
        )


if __name__ == "__main__":
    main()
