"""Opening a folder: what the meta says, corrected by what lies in the chunks and the journals.

The cost depends on what came after the last meta, not on the backlog: one header per chunk, the frames behind the
meta's `writer_offset`, one journal. Only a folder without a believable meta is walked through, header by header.
"""

import logging
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.spool import frames, journal, meta
from penstock.spool.chunk_files import ChunkLog
from penstock.spool.files import SpoolFiles, read_spool_file
from penstock.spool.frame_reader import FrameReader
from penstock.spool.meta import DamagedSpoolMeta, SpoolMeta
from penstock.spool.quarantine import Quarantine
from penstock.spool.sequence_set import SpoolSequenceSet

log = logging.getLogger(__name__)

_OURS = re.compile(r"fastqueue\.(id|meta|meta\.tmp|lock)|acks-[0-9a-f]{8}|[0-9a-f]{16}|quarantine|dead-letters")
_AT_FIRST = ("fastqueue.lock", "fastqueue.meta.tmp")
_SEQUENCES_PER_SECOND = 1_000_000  # more than any queue gives, a kill a second included; until 2255 a double holds them


@dataclass(slots=True)
class RecoveredState:
    """The state in which a queue is opened."""

    chunks: ChunkLog
    quarantine: Quarantine
    acked: SpoolSequenceSet
    attempts: dict[int, int] = field(default_factory=dict)
    reader_offset: int = 0
    log_end: int = 0
    next_sequence: int = 0
    seen_below: int = 0  # no block from here on was handed out or acked
    count: int = 0
    bytes: int = 0
    journal_generation: int = 0
    unclean: bool = False


def recover_spool(
    files: SpoolFiles, folder: str, chunk_size: int, *, now: float = 0.0, repair: bool = True
) -> RecoveredState:
    """Read the folder's state. With `repair`, torn tails are cut; without, nothing is written but to the quarantine.

    If no meta says which sequences were given, they begin again at the microseconds of `now` (seconds since the epoch).
    """
    quarantine = Quarantine(files, folder)
    known = _load_meta(files, folder, quarantine, repair)
    is_ours = known is not None and known.version == meta.VERSION
    chunks = ChunkLog(files, folder, chunk_size, known.seed_end if known is not None and is_ours else None)
    quarantine.foreign_files = _foreign_files(files, folder)
    state = RecoveredState(chunks, quarantine, SpoolSequenceSet())
    if known is None:
        _start_without_meta(state)
        if not _is_new(files, folder):
            state.next_sequence = int(now * _SEQUENCES_PER_SECOND)
    elif known.version < meta.VERSION:
        _start_from_seed_meta(state, known)
    else:
        _start_from_meta(state, known)
    late = _replay_journals(files, folder, state, known)
    _count_tail(state, known, late, repair)
    if quarantine.lost_blocks:
        log.error("Blocks lost to damage. folder=%s blocks=%d", folder, quarantine.lost_blocks)
    state.next_sequence = max(state.next_sequence, state.log_end, state.acked.top, *(s + 1 for s in state.attempts), 0)
    state.seen_below = max([state.acked.top, *(sequence + 1 for sequence in state.attempts)])
    # What a crash has skipped is done. The next meta says so: no journal does, and a full disk may take the chunk
    # behind it before there is another.
    state.acked.add(state.log_end, state.next_sequence)
    if state.acked.low >= state.log_end and not chunks.overlaps:
        state.reader_offset = chunks.end  # there is nothing to read, and a chunk goes when the reader has passed it
    state.attempts = {s: count for s, count in state.attempts.items() if s not in state.acked}
    state.unclean = bool(chunks.chunks) if known is None else not known.clean
    if state.unclean and repair:
        chunks.mark_unsynced(known.writer_offset if known is not None else 0)
    return state


def _is_new(files: SpoolFiles, folder: str) -> bool:
    """Whether no queue was ever here: opening one leaves a lock, and writes its meta before it gives a sequence."""
    return not any(_OURS.fullmatch(name) and name not in _AT_FIRST for name in files.names(folder))


def _foreign_files(files: SpoolFiles, folder: str) -> int:
    foreign = sorted(name for name in files.names(folder) if not _OURS.fullmatch(name))
    if foreign:
        log.warning("Foreign files left alone. folder=%s files=%s", folder, ", ".join(foreign))
    return len(foreign)


def _load_meta(files: SpoolFiles, folder: str, quarantine: Quarantine, repair: bool) -> SpoolMeta | None:
    try:
        return meta.load_spool_meta(files, folder)
    except DamagedSpoolMeta as damage:
        if repair:
            with suppress(OSError):
                quarantine.keep_bytes(meta.META_NAME, read_spool_file(files, f"{folder}/{meta.META_NAME}"), str(damage))
        else:
            quarantine.regions += 1
        return None


def _start_without_meta(state: RecoveredState) -> None:
    chunks = state.chunks.chunks
    state.reader_offset = chunks[0].start if chunks else 0
    found = FrameReader(state.chunks, state.reader_offset, None).next_header()
    state.acked.low = found[1].first if found is not None else 0
    state.log_end = state.acked.low


def _start_from_seed_meta(state: RecoveredState, known: SpoolMeta) -> None:
    state.reader_offset = state.acked.low = _seed_reader_offset(state.chunks, known)  # an offset is a sequence here
    state.log_end = state.chunks.end
    state.count, state.bytes = known.entry_count or 0, known.total_bytes


def _seed_reader_offset(chunks: ChunkLog, known: SpoolMeta) -> int:
    """Where the seed's meta says that reading stands, if a frame begins there. Nothing else checks that meta."""
    offset = known.reader_offset
    first = chunks.chunks[0].start if chunks.chunks else 0
    if offset > chunks.end:
        log.warning("Meta points behind the chunks: all of them are delivered. offset=%d", offset)
        return first
    chunk = chunks.chunk_at(offset)
    if chunk is None or chunk.checked or offset <= chunk.start:
        return offset
    reader = FrameReader(chunks, chunk.start, None)
    while (found := reader.next_header()) is not None and found[0] < offset:
        reader.skip(found[1])
    if found is not None and found[0] == offset:
        return offset
    log.warning("Meta points between frames: the chunk is delivered from its beginning. offset=%d", offset)
    return chunk.start


def _start_from_meta(state: RecoveredState, known: SpoolMeta) -> None:
    # Where the last chunks have vanished the log goes on below the reader: it has to be there first.
    state.reader_offset = min(known.reader_offset, state.chunks.end)
    state.acked = SpoolSequenceSet(known.low, known.acked)
    state.attempts = {s: count for first, end, count in known.attempts for s in range(first, end)}
    state.log_end = known.log_end
    state.next_sequence = known.next_sequence
    state.count, state.bytes = known.entry_count or 0, known.total_bytes


def _is_believable(known: SpoolMeta, state: RecoveredState, end: int) -> bool:
    """Whether the counts of the seed's meta are those of the log as it is."""
    is_current = known.writer_offset == end and known.reader_offset == state.reader_offset
    return is_current and known.entry_count is not None


def _replay_journals(
    files: SpoolFiles, folder: str, state: RecoveredState, known: SpoolMeta | None
) -> list[journal.JournalRecord]:
    """Apply the journals. Returns the acks of blocks that came after the meta: those are not counted yet."""
    damaged = 0
    late: list[journal.JournalRecord] = []
    log_end = state.log_end
    # A journal of which a meta has a part is not begun again: what it says until the next meta would be passed over.
    state.journal_generation = known.journal + bool(known.journal_offset) if known is not None else 0
    for generation in journal.journal_generations(files, folder):
        state.journal_generation = max(state.journal_generation, generation + 1)
        if known is not None and generation < known.journal:
            continue
        offset = known.journal_offset if known is not None and generation == known.journal else 0
        for record in journal.replay_journal(files, folder, generation, offset):
            if record is None:
                damaged += 1
            elif record.kind == journal.ACKED:
                end = record.first + record.block_count
                middle = max(record.first, min(end, log_end))  # one ack may be of blocks on both sides of it
                new = state.acked.add(record.first, middle)
                state.count -= new
                state.bytes -= record.bytes * new // record.block_count
                if middle < end:
                    state.acked.add(middle, end)
                    rest = record.bytes - record.bytes * (middle - record.first) // record.block_count
                    late.append(record._replace(first=middle, block_count=end - middle, bytes=rest))
            elif record.kind == journal.LEASED:
                for sequence in range(record.first, record.first + record.block_count):
                    state.attempts[sequence] = record.attempts
    if damaged:
        state.quarantine.regions += 1
        log.warning(
            "Damaged journal records passed over: their blocks come again. folder=%s records=%d", folder, damaged
        )
    return late


def _count_tail(
    state: RecoveredState, known: SpoolMeta | None, late: list[journal.JournalRecord], repair: bool
) -> None:
    """Add what was written after the meta, or recount everything if the meta cannot be right. Cuts a torn end."""
    chunks = state.chunks
    end = chunks.end
    start = known.writer_offset if known is not None else 0
    seed_counts = known is not None and known.version < meta.VERSION and not _is_believable(known, state, end)
    # Bytes behind a log that was closed properly came there by damage: where its frames begin now is unknown.
    has_grown = known is not None and known.clean and start < end
    recounts = (
        known is None or start > end or seed_counts or has_grown or not _frame_follows_at(chunks, start, state.log_end)
    )
    expected = state.log_end
    if recounts:
        start, expected, state.count, state.bytes, late = state.reader_offset, state.acked.low, 0, 0, []
    reader = FrameReader(chunks, start, None)
    counted = SpoolSequenceSet()
    sizes: list[tuple[int, int, int]] = []  # (first, end, bytes) of the frames
    last_good = reader.offset
    while (found := reader.next_header()) is not None:
        offset, header = found
        # What came after the meta and was acked is subtracted below, with its exact bytes where they are known.
        done = state.acked.overlap(header.first, header.end) if recounts else 0
        live = header.block_count - header.holes
        if not header.checked:
            done = min(done, 1)
        if done < header.block_count:
            state.count += max(0, live - done)
            state.bytes += header.payload_bytes * (header.block_count - done) // header.block_count
        counted.add(header.first, header.end)
        if late:
            sizes.append((header.first, header.end, header.payload_bytes))
        _pass_missing(state, expected, header.follows, header.first)
        expected = max(expected, header.end)
        state.log_end = max(state.log_end, header.end)
        reader.skip(header)
        last_good = offset + header.size
    if recounts and known is not None and known.version == meta.VERSION and expected < state.log_end:
        _pass_missing(state, expected, state.log_end, state.log_end)
    for record in late:
        # A power cut may have spared the ack alone; a full disk may have taken the chunk and left no room for a meta.
        held = counted.overlap(record.first, record.first + record.block_count)
        state.count -= held
        state.bytes -= record.bytes if held == record.block_count else _bytes_still_held(record, held, sizes)
    torn = chunks.chunks[-1] if chunks.chunks else None
    last_good = max(last_good, torn.start) if torn else last_good
    if repair and torn is not None and start <= last_good < torn.end and torn.end > start:
        state.quarantine.keep(chunks, torn, last_good, torn.end, "torn tail")
        chunks.truncate_at(last_good)
    if torn is not None and not torn.size:
        torn.first = state.log_end  # it has no frame to say so, and the chunk before goes when this is known
    state.count, state.bytes = max(0, state.count), max(0, state.bytes)


def _pass_missing(state: RecoveredState, expected: int, follows: int, first: int) -> None:
    """Take sequences missing before a frame as done: they are not in the count and must not be subtracted later."""
    state.quarantine.lost_blocks += max(0, follows - expected - state.acked.overlap(expected, follows))
    state.acked.add(expected, first)


def _bytes_still_held(record: journal.JournalRecord, held: int, sizes: list[tuple[int, int, int]]) -> int:
    """Returns the bytes of the `held` blocks of an ack that are still in the log: by frames, or by the average."""
    end, total = record.first + record.block_count, 0
    for at in range(bisect_left(sizes, (record.first,)), len(sizes)):
        frame_first, frame_end, length = sizes[at]
        if frame_end > end:
            break
        held -= frame_end - frame_first
        total += length
    return total + record.bytes * held // record.block_count


def _frame_follows_at(chunks: ChunkLog, offset: int, log_end: int) -> bool:
    """Whether the frame behind the blocks before `log_end` lies at `offset`, or would: damage may have moved it."""
    if chunks.overlaps:
        return False
    around = next((chunk for chunk in reversed(chunks.chunks) if chunk.start <= offset), None)
    if around is None or offset in (around.start, around.end):
        return True
    # Torn or whole, it says what it follows.
    chunk = chunks.chunk_at(offset)
    data = chunks.read(chunk, max(offset, chunk.start), frames.HEADER_SIZE) if chunk is not None else b""
    return frames.frame_begins_behind(data, log_end)
