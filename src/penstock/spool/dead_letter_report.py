"""Counts dead letters by reason from outside the queue, without leasing one or changing a byte."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from penstock.spool import dead_letters
from penstock.spool.examine import ANY_CHUNK_SIZE, look_at_spool_in_use
from penstock.spool.files import OsSpoolFiles, SpoolFiles
from penstock.spool.frame_reader import FrameReader
from penstock.spool.recovery import recover_spool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonCount:
    """Dead letters of one reason; None: blocks that are no dead letters, which a replay leaves where they are."""

    reason: str | None
    letters: int
    bytes: int  # of the blocks as they were pushed


def dead_letters_by_reason(folder: str, files: SpoolFiles | None = None) -> list[ReasonCount]:
    """The dead letters in `folder`, those of the most frequent reason first; none if there is no such folder.

    Every letter is read. For a queue in use it is a snapshot: letters that come during the read may be missing.
    """
    return look_at_spool_in_use(_by_reason, files or OsSpoolFiles(), folder)


def holds_dead_letters(folder: str, files: SpoolFiles | None = None) -> bool:
    """Whether the queue in `folder` is one of dead letters, by the first block that can be read."""
    return look_at_spool_in_use(_holds_letters, files or OsSpoolFiles(), folder)


def _by_reason(files: SpoolFiles, folder: str) -> list[ReasonCount]:
    found: dict[str | None, tuple[int, int]] = {}
    for block in _blocks(files, folder):
        reason, size = _read(block)
        letters, total = found.get(reason, (0, 0))
        found[reason] = letters + 1, total + size
    reasons = [ReasonCount(reason=reason, letters=count, bytes=size) for reason, (count, size) in found.items()]
    return sorted(reasons, key=lambda one: -one.letters)


def _holds_letters(files: SpoolFiles, folder: str) -> bool:
    with closing(_blocks(files, folder)) as blocks:
        first = next(blocks, None)
    return first is not None and _read(first)[0] is not None


def _read(block: bytes) -> tuple[str | None, int]:
    try:
        letter = dead_letters.unpack_dead_letter(block)
    except (ValueError, RecursionError):  # a block that is no letter may be JSON of any depth
        return None, len(block)
    return (letter.reason, len(letter.data)) if isinstance(letter.reason, str) else (None, len(block))


def _blocks(files: SpoolFiles, folder: str) -> Generator[bytes, None, None]:
    """Those that are not acked, in order; damaged ones are passed over."""
    state = recover_spool(files, folder, ANY_CHUNK_SIZE, repair=False)
    try:
        reader = FrameReader(state.chunks, state.reader_offset, None)
        while (found := reader.next_header()) is not None:
            header = found[1]
            if state.acked.covers(header.first, header.end):
                reader.skip(header)
                continue
            frame = reader.read(header)
            for sequence, block in enumerate(frame.blocks if frame is not None else (), header.first):
                if block is not None and sequence not in state.acked:
                    yield block
    finally:
        state.chunks.close()
