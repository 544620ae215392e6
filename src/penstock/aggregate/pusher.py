"""The thread that merges push rounds and pushes them to the durable queue."""

import logging
import threading
from collections.abc import Callable, Sequence

import pyarrow as pa

from penstock.aggregate.merger import PointCounts, plain_partials
from penstock.aggregate.pending import PendingPoints, PushRound
from penstock.errors import QueueClosed
from penstock.model.partial import merged_encoded
from penstock.model.point import Chunk
from penstock.model.segment import encode

log = logging.getLogger(__name__)

CLOSE_GRACE = 0.5  # a close whose time the handlers used up still pushes what is merged: that takes milliseconds

Push = Callable[[list[bytes]], object]


class Pusher:
    """Pushes one round at a time, and ends it: its requests are answered, or its points are kept.

    Threads: one of its own, from the constructor to `close`.
    """

    def __init__(self, name: str, pending: PendingPoints, counts: PointCounts, push: Push, flush_rows: int) -> None:
        self._name = name
        self._pending = pending
        self._counts = counts
        self._push = push
        self._flush_rows = flush_rows
        self.blocks = 0
        self.partials = 0
        self._thread = threading.Thread(target=self._push_rounds, name=f"penstock-{name}-push", daemon=True)
        self._thread.start()

    def _push_rounds(self) -> None:
        while (round_ := self._pending.next_round()) is not None:
            self._hand_over(round_)

    def _hand_over(self, round_: PushRound) -> BaseException | None:
        """Merge and push a round, and end it; the error, if there was one."""
        partials = self._partials_of(round_)
        try:
            blocks = self._blocks_of(partials)
            if not round_.is_awaited:
                return self._push_unawaited(round_, blocks)
            if round_.waiting:
                self._push_blocks(blocks)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests are answered and the thread goes on
            return self._give_up(round_, partials, error)
        self._pending.end_round(round_)
        return None

    def _partials_of(self, round_: PushRound) -> list[pa.Table]:
        """The partials of a round, those of its plain chunks included."""
        if not round_.chunks:
            return round_.partials
        try:
            return [*round_.partials, plain_partials(round_.chunks, self._counts)]
        except Exception:  # noqa: BLE001 - one of the chunks cannot be merged, the others go on
            return [*round_.partials, *(table for chunk in round_.chunks for table in self._alone(round_, chunk))]

    def _alone(self, round_: PushRound, chunk: Chunk) -> list[pa.Table]:
        try:
            return [plain_partials([chunk], self._counts)]
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, its request is answered with that
            self._counts.add_failed(chunk, error)
            self._pending.fail_plain(round_, chunk, error)
            return []

    def _blocks_of(self, partials: list[pa.Table]) -> list[pa.Table]:
        """Partials as one row per identity, cut into blocks."""
        if not partials:
            return []
        table = partials[0] if len(partials) == 1 else merged_encoded(pa.concat_tables(partials))
        return [table.slice(start, self._flush_rows) for start in range(0, table.num_rows, self._flush_rows)]

    def _push_blocks(self, blocks: Sequence[pa.Table]) -> None:
        if blocks:
            self._push([encode(block) for block in blocks])
            self.blocks += len(blocks)
            self.partials += sum(block.num_rows for block in blocks)

    def _push_unawaited(self, round_: PushRound, blocks: Sequence[pa.Table]) -> BaseException | None:
        """Push block by block, because no answer depends on all of it, and keep the rest."""
        for index, block in enumerate(blocks):
            try:
                self._push_blocks([block])
            except Exception as error:  # noqa: BLE001 - whatever it is, the points are kept
                return self._give_up(round_, blocks[index:], error)
        if self._pending.end_round(round_):
            log.info("L1 hands over again. queue=%s", self._name)
        return None

    def _give_up(self, round_: PushRound, partials: Sequence[pa.Table], error: BaseException) -> BaseException:
        if round_.is_awaited:
            self._pending.end_round(round_, error)
        elif self._pending.keep(round_, partials):
            log.warning("L1 keeps what the queue refuses. queue=%s reason=%s", self._name, error)
        return error

    def close(self, timeout: float) -> list[BaseException]:
        """End the thread and hand over what is left, merged or not; the errors. May be called again."""
        self._pending.stop()
        self._thread.join(max(CLOSE_GRACE, timeout))
        return [error for round_ in self._pending.last_rounds() if (error := self._end(round_)) is not None]

    def _end(self, round_: PushRound) -> BaseException | None:
        if self._thread.is_alive():
            reason = "the durable queue has not taken the block before this one"
        elif round_.unmerged:
            reason = "closed before all of the request was merged"
        else:
            return self._hand_over(round_)
        partials = () if round_.is_awaited else self._partials_of(round_)
        return self._give_up(round_, partials, QueueClosed(f"L1 {self._name!r}: {reason}"))
