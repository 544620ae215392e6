"""I/O queues: one queue per destination, and a few threads for all of them.

Each destination has one consumer that takes whole batches. The queues share the scheduler "IO_POOL", which is made on
first use: no thread per destination, and one that is slow does not hold up the others. The database has a queue with
threads of its own, since it can write several batches at once.

    python examples/io_queues.py
"""

import asyncio
import threading

import penstock
from penstock import BatchQueueConfig, BufferStrategy, PartitionPolicy, ThreadPolicy


class Peer:
    """Stands for a connection to another node."""

    def __init__(self, name: str) -> None:
        self.received = 0
        self.requests = 0
        self.queue = penstock.queues.create(
            f"RemoteClient.{name}",
            BatchQueueConfig(
                shared_scheduler=("IO_POOL", ThreadPolicy.cpu_cores(0.5)),
                buffer_size=1_000,
                buffer_bytes=64 * 1024,
                strategy=BufferStrategy.BLOCKING,
                consumer=self.send,
                max_batch=200,
            ),
        )

    def send(self, batch: list[bytes]) -> None:
        self.received += len(batch)
        self.requests += 1


class Database:
    """Stands for a database that takes several batches at once."""

    def __init__(self, writers: int) -> None:
        self._lock = threading.Lock()
        self.rows = 0
        self.queue = penstock.queues.create(
            "JDBC_BATCH_PERSISTENCE",
            BatchQueueConfig(
                threads=ThreadPolicy.io_bound(writers),
                partitions=PartitionPolicy.fixed(writers),  # the items take turns, so every writer gets some
                buffer_size=10_000,
                consumer=self.write,
                error_handler=lambda batch, error: print(f"{len(batch)} rows failed: {error}"),
            ),
        )

    def write(self, batch: list[str]) -> None:
        with self._lock:  # it runs on several threads at once
            self.rows += len(batch)


async def serve(peers: list[Peer], database: Database) -> None:
    """An event loop is never blocked, however slow the destinations are."""
    for number in range(2_000):
        await peers[number % len(peers)].queue.produce_async(b"x" * 100)
        await database.queue.produce_async(f"row {number}")


def main() -> None:
    peers = [Peer(name) for name in ("peer1", "peer2", "peer3")]
    database = Database(writers=4)
    asyncio.run(serve(peers, database))
    shared = sum(thread.name.startswith("penstock-IO_POOL") for thread in threading.enumerate())
    penstock.queues.shutdown_all()

    print(f"peers received: {sum(peer.received for peer in peers)}")
    print(f"rows written: {database.rows}")
    print(f"threads for all peers: {shared} (cores / 2)")


if __name__ == "__main__":
    main()
