"""The thread that merges push rounds and pushes them to the durable queue."""

import logging
import threading
from collections.abc import Callable, Sequence

import pyarrow as pa

from penstock.aggregate.pending import PendingPoints, PushRound
from penstock.errors import QueueClosed
from penstock.model.chunk_partials import Kept, newest_of_chunks, partials_of_chunks
from penstock.model.partial import merged_encoded
from penstock.model.segment import encode_partials_block

log = logging.getLogger(__name__)

CLOSE_GRACE = 0.5  # a close whose time the handlers used up still pushes what is merged: that takes milliseconds

Push = Callable[[list[bytes]], object]


class Pusher:
    """Pushes one round at a time, and ends it: its submissions are answered, or its points are kept.

    Threads: one of its own, from the constructor to `close`.
    """

    def __init__(
        self, name: str, pending: PendingPoints, push: Push, flush_rows: int, kept: Callable[[], Kept]
    ) -> None:
        self._name = name
        self._pending = pending
        self._push = push
        self._flush_rows = flush_rows
        self._kept = kept  # of metrics without a definition
        self.blocks = 0
        self.partials = 0
        self._thread = threading.Thread(target=self._push_rounds, name=f"penstock-{name}-push", daemon=True)
        self._thread.start()

    def dead_threads(self) -> list[str]:
        return [] if self._thread.is_alive() else [self._thread.name]

    def _push_rounds(self) -> None:
        while (round_ := self._pending.next_round()) is not None:
            self._push_round(round_)

    def _push_round(self, round_: PushRound) -> BaseException | None:
        """Merge and push a round, and end it; the error, if there was one."""
        try:
            round_.chunks, round_.partials = [], self._blocks_of(round_)
            if not round_.is_awaited:
                while round_.partials:  # block by block: no answer depends on all of them
                    self._push_blocks(round_.partials[:1])
                    del round_.partials[0]
            elif round_.waiting:
                requests = b"".join(submission.requests for submission in round_.waiting)
                self._push_blocks(round_.partials, requests)
        except Exception as error:  # noqa: BLE001 - whatever it is, submissions are answered and the thread goes on
            return self._give_up(round_, error)
        if self._pending.end_round(round_):
            log.info("L1 hands over again. queue=%s", self._name)
        return None

    def _blocks_of(self, round_: PushRound) -> list[pa.Table]:
        """All points of a round as one row per identity, cut into blocks."""
        kept = self._kept()
        table = merged_encoded(pa.concat_tables([partials_of_chunks(round_.chunks, kept), *round_.partials]))
        table = pa.concat_tables([table, newest_of_chunks(round_.chunks, kept)])
        return [table.slice(start, self._flush_rows) for start in range(0, table.num_rows, self._flush_rows)]

    def _push_blocks(self, blocks: Sequence[pa.Table], requests: bytes = b"") -> None:
        """Push all of them or none. The last has the digests of the requests."""
        if blocks:
            self._push([*map(encode_partials_block, blocks[:-1]), encode_partials_block(blocks[-1], requests)])
            self.blocks += len(blocks)
            self.partials += sum(block.num_rows for block in blocks)

    def _give_up(self, round_: PushRound, error: BaseException) -> BaseException:
        if round_.is_awaited:
            self._pending.end_round(round_, error)
        elif self._pending.keep(round_):
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
            return self._push_round(round_)
        return self._give_up(round_, QueueClosed(f"L1 {self._name!r}: {reason}"))
