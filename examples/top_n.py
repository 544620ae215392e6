"""Top-n: all ranked types share one thread, and each keeps the n slowest of its kind.

python examples/top_n.py
"""

import heapq
import random

import penstock
from penstock import BatchQueueConfig, BufferStrategy, HandlerConsumer, PartitionPolicy, ThreadPolicy


class Statement:
    """Something that took a while."""

    __slots__ = ("milliseconds", "text")

    def __init__(self, milliseconds: float, text: str) -> None:
        self.milliseconds = milliseconds
        self.text = text


class SlowSql(Statement):
    pass


class SlowCacheCommand(Statement):
    pass


class TopN(HandlerConsumer[Statement]):
    """The `n` slowest statements of one type, exact in whatever order they come."""

    def __init__(self, statement: type[Statement], n: int) -> None:
        self.slowest: list[Statement] = []
        self._n = n
        queue = penstock.queues.get_or_create(
            "TOPN_WORKER",
            BatchQueueConfig(
                threads=ThreadPolicy.fixed(1),
                partitions=PartitionPolicy.adaptive(),
                buffer_size=1_000,
                strategy=BufferStrategy.BLOCKING,
                min_idle=0.01,
                max_idle=0.1,
            ),
        )
        queue.add_handler(statement, self)

    def consume(self, batch: list[Statement]) -> None:
        self.slowest = heapq.nlargest(self._n, self.slowest + batch, key=lambda statement: statement.milliseconds)


def main() -> None:
    sql, cache = TopN(SlowSql, n=3), TopN(SlowCacheCommand, n=3)
    queue = penstock.queues.get("TOPN_WORKER")
    assert queue is not None
    durations = list(range(1, 10_001))
    random.shuffle(durations)
    for milliseconds in durations:
        queue.produce(SlowSql(milliseconds, f"SELECT {milliseconds}"))
        queue.produce(SlowCacheCommand(milliseconds / 10, f"GET {milliseconds}"))
    penstock.queues.shutdown_all()

    for name, ranking in (("sql", sql), ("cache", cache)):
        print(f"{name}: {', '.join(f'{statement.text} {statement.milliseconds} ms' for statement in ranking.slowest)}")


if __name__ == "__main__":
    main()
