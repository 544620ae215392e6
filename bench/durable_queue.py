"""The durable queue against its targets, its peers and the limit: `make bench PART=spool`.

Arms are interleaved and the median of the rounds counts, so that a busy machine hits all of them alike. The limit is
a plain loop that compresses, checksums, writes, reads, checks and decompresses the same blocks, with no queue at all.
"""

import argparse
import asyncio
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import cramjam
import google_crc32c
import psutil
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from bench import queue_peers
from penstock import Durability, FastQueue, FastQueueConfig
from penstock.spool.config import Compression
from penstock.spool.files import OsSpoolFiles

MB = 1e6


def otlp_block(size: int, chance: random.Random) -> bytes:
    """A serialised OTLP request of about `size` bytes, as a service with a dozen endpoints sends it."""
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add()
    for key, value in (("service.name", "checkout"), ("host.name", f"node-{chance.randrange(40)}"), ("env", "prod")):
        attribute = resource.resource.attributes.add()
        attribute.key, attribute.value.string_value = key, value
    scope = resource.scope_metrics.add()
    at = 1_700_000_000_000_000_000 + chance.randrange(10**9)
    while request.ByteSize() < size:
        metric = scope.metrics.add()
        metric.name = chance.choice(["http.server.duration", "http.server.requests", "db.client.calls", "queue.depth"])
        metric.unit = "ms"
        for _ in range(8):
            point = metric.gauge.data_points.add()
            point.time_unix_nano = at
            point.as_double = round(chance.expovariate(0.01), 2)
            for key, value in (
                ("http.route", f"/api/v1/{chance.choice(['cart', 'order', 'pay', 'user'])}"),
                ("http.status_code", chance.choice(["200", "200", "200", "404", "500"])),
                ("http.method", chance.choice(["GET", "POST"])),
            ):
                attribute = point.attributes.add()
                attribute.key, attribute.value.string_value = key, value
    return bytes(request.SerializeToString()[:size])


def config(durability: Durability, compression: Compression = "none", **more: object) -> FastQueueConfig:
    return FastQueueConfig(durability=durability, compression=compression, max_size=10**9, max_bytes="1Ti", **more)  # type: ignore[arg-type]


class Taken(NamedTuple):
    """Seconds by the clock, and of processor time (kernel included): the two differ where others have the machine."""

    wall: float
    cpu: float


def in_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(work: Callable[[], object]) -> Taken:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


class Bench:
    """Runs every scenario in a folder of its own and prints one table."""

    def __init__(self, folder: Path, rounds: int, ten_gigabytes: bool) -> None:
        self._folder = folder
        self._rounds = rounds
        self._backlog_bytes = 10 * 10**9 if ten_gigabytes else 10**9
        self._count = 0
        self._chance = random.Random(1)

    @contextmanager
    def fresh(self) -> Iterator[str]:
        self._count += 1
        path = self._folder / str(self._count)
        path.mkdir()
        yield str(path)
        shutil.rmtree(path)

    def medians(self, arms: dict[str, Callable[[], Taken]]) -> dict[str, Taken]:
        """The median seconds of each arm, all arms in turn."""
        taken: dict[str, list[Taken]] = {name: [] for name in arms}
        for _ in range(self._rounds):
            for name, arm in arms.items():
                taken[name].append(arm())
        return {
            name: Taken(statistics.median(one.wall for one in all_), statistics.median(one.cpu for one in all_))
            for name, all_ in taken.items()
        }

    # -- scenarios -------------------------------------------------------------------------------------------------

    def memory_layer(self) -> None:
        block, count = self._chance.randbytes(1024), 20_000

        def arm() -> Taken:
            with self.fresh() as path, FastQueue(path, FastQueueConfig()) as queue:

                def work() -> None:
                    for _ in range(count):
                        queue.push(block)
                        queue.ack(queue.lease())

                return timed(work)

        wall, cpu = (seconds / count * 1e6 for seconds in self.medians({"": arm})[""])
        row("memory layer, push+lease+ack, 1 KB", f"{wall:.2f} µs", "≤ 3 µs", wall <= 3, f"{cpu:.2f} µs of processor")

    def disk_uncompressed(self) -> None:
        for size, total, target in ((1_000, 200, 280), (10_000, 400, 690), (1_000_000, 600, 700)):
            blocks = [self._chance.randbytes(size) for _ in range(min(1000, int(total * MB) // size))]
            rates = self._batched(blocks, total, "none")
            wall, cpu = rates["queue"]
            name = f"disk, uncompressed, push_many then lease+ack, {size // 1000} KB"
            detail = (
                f"limit {rates['limit'].wall:.0f} MB/s; by processor time {cpu:.0f}, limit {rates['limit'].cpu:.0f}"
            )
            row(name, f"{wall:.0f} MB/s", f"≥ {target} MB/s", wall >= target, detail)

    def disk_snappy(self) -> None:
        for size, total, target in ((1_000, 150, 0.7), (50_000, 300, 0.85)):
            blocks = [otlp_block(size, self._chance) for _ in range(500)]
            rates = self._batched(blocks, total, "snappy")
            ratio = rates["queue"].wall / rates["limit"].wall
            name = f"disk, snappy, OTLP, {size // 1000} KB: part of the limit"
            by_cpu = rates["queue"].cpu / rates["limit"].cpu
            detail = f"{rates['queue'].wall:.0f} of {rates['limit'].wall:.0f} MB/s; by processor time {by_cpu:.2f}"
            row(name, f"{ratio:.2f}", f"≥ {target}", ratio >= target, detail)

    def _batched(self, blocks: list[bytes], total_mb: int, compression: Compression) -> dict[str, Taken]:
        """MB/s of the queue and of the limit over the same blocks, by the clock and by processor time."""
        size = len(blocks[0])
        passes = max(1, int(total_mb * MB) // (size * len(blocks)))
        batch = max(1, min(1000, (1 << 20) // size))

        def queue_arm() -> Taken:
            with self.fresh() as path, FastQueue(path, config(Durability.DISK, compression)) as queue:

                def work() -> None:
                    for _ in range(passes):
                        for at in range(0, len(blocks), batch):
                            queue.push_many(blocks[at : at + batch])
                    while leases := queue.lease(batch):
                        queue.ack(leases)

                return timed(work)

        def limit_arm() -> Taken:
            with self.fresh() as path:
                return timed(lambda: plain_loop(path, blocks, passes, compression))

        megabytes = passes * len(blocks) * size / MB
        taken = self.medians({"queue": queue_arm, "limit": limit_arm})
        return {name: Taken(megabytes / wall, megabytes / cpu) for name, (wall, cpu) in taken.items()}

    def group_commit(self) -> None:
        for name, files in (
            ("", OsSpoolFiles()),
            (", a disk of 2 ms per sync", SlowSync(0.002)),
            (", a disk of 5 ms per sync", SlowSync(0.005)),
        ):
            arms: dict[str, Callable[[], Taken]] = {
                "a thread": partial(self._pushing_threads, 1, 60, files),
                "threads": partial(self._pushing_threads, 64, 40, files),
                "a coroutine": partial(self._pushing_coroutines, 1, 60, files),
                "coroutines": partial(self._pushing_coroutines, 64, 40, files),
            }
            if not name:
                arms["bare threads"] = self._bare_threads
            medians = self.medians(arms)
            for kind in ("thread", "coroutine"):
                one, many = 60 / medians[f"a {kind}"].wall, 64 * 40 / medians[f"{kind}s"].wall
                detail = f"{one:.0f} and {many:.0f} pushes/s"
                if not name and kind == "thread":
                    detail += f"; threads without a queue {64 * 40 / medians['bare threads'].wall:.0f}"
                label = f"fsync, 64 pushing {kind}s against one{name}"
                row(label, f"{many / one:.1f} ×", "≥ 20 ×", many / one >= 20, detail)

    def _pushing_threads(self, count: int, each: int, files: OsSpoolFiles) -> Taken:
        block = self._chance.randbytes(1000)
        with self.fresh() as path, FastQueue(path, config(Durability.FSYNC), files=files) as queue:

            def push() -> None:
                for _ in range(each):
                    queue.push(block)

            taken = timed(lambda: in_threads(count, push))
            assert len(queue) == count * each
            return taken

    def _pushing_coroutines(self, count: int, each: int, files: OsSpoolFiles) -> Taken:
        block = self._chance.randbytes(1000)
        with self.fresh() as path, FastQueue(path, config(Durability.FSYNC), files=files) as queue:

            async def push() -> None:
                for _ in range(each):
                    await queue.push_async(block)

            async def work() -> None:
                await asyncio.gather(*(push() for _ in range(count)))

            taken = timed(lambda: asyncio.run(work()))
            assert len(queue) == count * each
            return taken

    def _bare_threads(self) -> Taken:
        """The limit: 64 threads that hand blocks to whoever writes and syncs next, and no queue at all."""
        block = self._chance.randbytes(1000)
        lock = threading.Lock()
        staged: list[tuple[threading.Lock, list[bool]]] = []
        leading = False
        written = 0

        def push() -> None:
            nonlocal leading, written
            mine = threading.Lock()
            mine.acquire()
            for _ in range(40):
                is_done = [False]
                with lock:
                    staged.append((mine, is_done))
                    leads, leading = not leading, True
                if not leads:
                    mine.acquire()
                if is_done[0]:
                    continue
                with lock:
                    group = staged[:]
                    staged.clear()
                written += os.writev(handle, [block] * len(group))
                os.fdatasync(handle)
                with lock:
                    heir = staged[0][0] if staged else None
                    leading = heir is not None
                if heir is not None:
                    heir.release()
                for waiting, done in group:
                    done[0] = True
                    if waiting is not mine:
                        waiting.release()

        with self.fresh() as path:
            handle = os.open(f"{path}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            try:
                taken = timed(lambda: in_threads(64, push))
            finally:
                os.close(handle)
        assert written == 64 * 40 * len(block)
        return taken

    def peers(self) -> None:
        for size, count, target in ((1_000, 1000, 10), (50_000, 300, 5)):
            blocks = [otlp_block(size, self._chance) for _ in range(count)]
            arms: dict[str, Callable[[], Taken]] = {
                "penstock, batches": partial(self._ours, blocks, 100),
                "penstock, one by one": partial(self._ours, blocks, 1),
            }
            for peer in queue_peers.PEERS:
                arms[peer.name] = partial(self._peer, peer, blocks)
            medians = self.medians(arms)
            survivors = [medians[peer.name] for peer in queue_peers.PEERS if peer.survives_kill]
            best = Taken(min(taken.wall for taken in survivors), min(taken.cpu for taken in survivors))
            for name, taken in medians.items():
                survives = next((peer.survives_kill for peer in queue_peers.PEERS if peer.name == name), True)
                note = "" if survives else "does not survive kill -9"
                ours = name.startswith("penstock")
                ratio, by_cpu = best.wall / taken.wall, best.cpu / taken.cpu
                row(
                    f"{size // 1000} KB put+get+done, {name}",
                    f"{taken.wall / count * 1e6:.1f} µs",
                    f"≥ {target} × the best peer" if ours else "",
                    ratio >= target if ours else None,
                    f"{ratio:.1f} ×; by processor time {by_cpu:.1f} ×" if ours else note,
                )

    def _ours(self, blocks: list[bytes], batch: int) -> Taken:
        with self.fresh() as path, FastQueue(path, config(Durability.DISK, "snappy")) as queue:

            def work() -> None:
                for at in range(0, len(blocks), batch):
                    if batch == 1:
                        queue.push(blocks[at])
                    else:
                        queue.push_many(blocks[at : at + batch])
                while leases := queue.lease(batch):
                    queue.ack(leases)

            return timed(work)

    def _peer(self, peer: queue_peers.Peer, blocks: list[bytes]) -> Taken:
        with self.fresh() as path:
            opened = peer.open(path)
            try:
                return timed(lambda: peer.run(opened, blocks))
            finally:
                peer.close(opened)

    def size_on_disk(self) -> None:
        blocks = [otlp_block(1_000, self._chance) for _ in range(4000)]
        targets: list[tuple[Compression, int]] = [("snappy", 40), ("zstd", 25)]
        for compression, target in targets:
            with self.fresh() as path, FastQueue(path, config(Durability.DISK, compression)) as queue:
                queue.push_many(blocks)
                percent = 100 * queue.stats().disk_bytes / queue.size_bytes
            row(f"size on disk, OTLP, 1 KB, {compression}", f"{percent:.0f} %", f"≤ {target} %", percent <= target)

    def backlog(self) -> None:
        block = self._chance.randbytes(1_000_000)
        seconds: dict[int, float] = {}
        for total in (10**7, self._backlog_bytes):
            with self.fresh() as path:
                with FastQueue(path, config(Durability.DISK)) as queue:
                    for _ in range(total // len(block) // 10):
                        queue.push_many([block] * 10)

                def reopen(path: str = path) -> None:
                    FastQueue(path, config(Durability.DISK)).close()

                seconds[total] = statistics.median(timed(reopen).wall for _ in range(5))
        small, large = seconds[10**7] * 1e3, seconds[self._backlog_bytes] * 1e3
        name = f"open with {self._backlog_bytes / 1e9:.0f} GB against 10 MB"
        row(name, f"{large:.1f} ms", "as long", large < small + 20, f"{small:.1f} ms with 10 MB")

    def memory(self) -> None:
        """Two fresh processes push the same; one keeps it all on disk, the other empties its queue as it goes."""
        used = {}
        for keeps in (False, True):
            with self.fresh() as path, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                used[keeps] = process.submit(memory_used, path, self._backlog_bytes, keeps).result() / MB
        grown = used[True] - used[False]
        detail = f"{used[True]:.0f} MB resident, {used[False]:.0f} MB with an empty queue after the same pushes"
        row(f"memory with {self._backlog_bytes / 1e9:.0f} GB on disk", f"{grown:.0f} MB", "< 50 MB", grown < 50, detail)


def memory_used(path: str, total: int, keeps: bool) -> int:
    """Bytes that this process has resident after pushing `total`; all of it, or next to none, is in the queue then."""
    batch = [random.Random(1).randbytes(1_000_000)] * 10
    with FastQueue(path, config(Durability.DISK)) as queue:
        for _ in range(total // sum(map(len, batch))):
            queue.push_many(batch)
            if not keeps:
                queue.ack(queue.lease(len(batch)))
        queue.flush()
        for _ in range(100):
            queue.push(batch[0])
            queue.ack(queue.lease())
        return int(psutil.Process().memory_info().rss)


class SlowSync(OsSpoolFiles):
    """A disk whose cache is honest: so many seconds until a sync returns. The machine's own may lie."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def sync(self, handle: int, /) -> None:  # type: ignore[override]
        os.fdatasync(handle)
        time.sleep(self._seconds)


def plain_loop(folder: str, blocks: list[bytes], passes: int, compression: Compression) -> None:
    """The limit: no queue, the same work on the same blocks, one at a time, and nobody keeps them."""
    handle = os.open(f"{folder}/plain", os.O_RDWR | os.O_CREAT)
    lengths, offset = [], 0
    for _ in range(passes):
        for block in blocks:
            body = bytes(cramjam.snappy.compress_raw(block)) if compression == "snappy" else block
            crc = google_crc32c.value(body)
            offset += os.pwrite(handle, body, offset)
            lengths.append((len(body), crc))
    offset = 0
    for length, crc in lengths:
        body = os.pread(handle, length, offset)
        offset += length
        if google_crc32c.value(body) != crc:
            raise AssertionError("damaged")
        if compression == "snappy":
            bytes(cramjam.snappy.decompress_raw(body))
    os.close(handle)


def row(name: str, value: str, target: str, is_met: bool | None, detail: str = "") -> None:
    verdict = {True: "met", False: "MISSED", None: ""}[is_met]
    print(f"| {name} | {value} | {target} | {verdict} | {detail} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the scenarios whose name contains this")
    parser.add_argument("--ten-gigabytes", action="store_true", help="the backlog scenario with 10 GB instead of 1 GB")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-spool-", dir="."))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{os.cpu_count()} cores, load {load}, Python {sys.version.split()[0]}, median of {arguments.rounds} rounds\n"
    )
    print("| Scenario | Measured | Target | | Beside it |\n|---|---|---|---|---|")
    try:
        bench = Bench(folder, arguments.rounds, arguments.ten_gigabytes)
        for scenario in (
            bench.memory_layer,
            bench.disk_uncompressed,
            bench.disk_snappy,
            bench.group_commit,
            bench.peers,
            bench.size_on_disk,
            bench.backlog,
            bench.memory,
        ):
            if arguments.only in scenario.__name__:
                scenario()
    finally:
        shutil.rmtree(folder)
    print(f"\nload at the end {', '.join(f'{value:.1f}' for value in os.getloadavg())}")


if __name__ == "__main__":
    main()
