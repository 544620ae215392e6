"""What the tests of L1 share: points, a durable queue that may refuse, senders that wait."""

import threading

import pyarrow as pa

from penstock.batch import BatchQueue
from penstock.errors import QueueFull
from penstock.model.columns import chunk_columns_of
from penstock.model.definition_file import parse_definitions
from penstock.model.point import Chunk, chunk_type
from penstock.model.segment import decode_partials_block
from penstock.testing import wait_until

Cpu, Rps = chunk_type("cpu"), chunk_type("rps")
DEFINED = parse_definitions({"metrics": [{"name": "cpu", "source": "cpu"}]})  # rps goes the way without


def as_it_is(chunk: Chunk) -> Chunk:
    return chunk


def coded(chunk: Chunk) -> Chunk:
    """The same as receivers make it: with codes in place of texts."""
    return type(chunk)(chunk_columns_of(chunk.points))


class Downstream:
    """Takes blocks, refuses them while `refusal` is set, and lets pushes wait while `hold` is."""

    def __init__(self) -> None:
        self.pushes: list[list[bytes]] = []
        self.refusal: Exception | None = None
        self.refused = 0
        self.pushing = 0
        self._may_push = threading.Event()
        self._may_push.set()

    def full(self) -> None:
        self.refusal = QueueFull("no room")

    def hold(self) -> None:
        self._may_push.clear()

    def release(self) -> None:
        self._may_push.set()

    def push(self, blocks: list[bytes]) -> None:
        self.pushing += 1
        assert self._may_push.wait(20)
        self.pushing -= 1
        refusal = self.refusal  # the test may end it at any time
        if refusal is not None:
            self.refused += 1
            raise refusal
        self.pushes.append(list(blocks))

    def rows(self) -> pa.Table:
        return pa.concat_tables([decode_partials_block(block) for blocks in self.pushes for block in blocks])

    def counts(self) -> dict[str, int]:
        """Points by metric."""
        found = self.rows().group_by("metric").aggregate([("count", "sum")]).to_pydict()
        return dict(zip(found["metric"], found["count_sum"]))


class Sender:
    """One request, and every answer that it got."""

    def __init__(self) -> None:
        self.answers: list[BaseException | None] = []

    def done(self, error: BaseException | None) -> None:
        self.answers.append(error)

    def wait(self) -> BaseException | None:
        wait_until(lambda: self.answers)
        return self.answers[0]


class Blocker:
    """Another handler in the batch queue, which holds its partition from `hold` to `release`."""

    def __init__(self, queue: BatchQueue) -> None:
        self._queue = queue
        self._reached, self._released = threading.Event(), threading.Event()
        queue.add_handler(Blocker, self._consume)

    def _consume(self, batch: list["Blocker"]) -> None:
        self._reached.set()
        assert self._released.wait(20)

    def hold(self) -> None:
        self._queue.produce(self)
        assert self._reached.wait(10)

    def release(self) -> None:
        self._released.set()


def points(kind: type[Chunk], count: int, value: float = 1.0) -> Chunk:
    return kind.of([f'{{"host":"e{n % 3}"}}' for n in range(count)], [n * 1000 for n in range(count)], [value] * count)
