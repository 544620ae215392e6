"""The requests of late, by their digests: a table that the receiving processes share, and that outlives a kill.

    file    header: magic, capacity, the id of the machine's boot; then buckets
    bucket  16 digests of 16 bytes; 16 × (seconds since the boot u32, owner u32)
    owner   0: the place is free; else 2 × (process + 1), and 1 more while the request is not answered yet

The kernel keeps what is stored when a process dies. After another boot the file is begun anew: the disk may have kept
it and lost blocks that it tells of. Its times are of the monotonic clock, so that a clock that is set ages no request.
A full bucket forgets its oldest request.
"""

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

DIGEST = 16  # bytes: of a million requests two are mistaken for one with a chance of 1 in 10^26
_WAYS = 16
_DIGESTS = DIGEST * _WAYS
_FACTS = struct.Struct(f"<{2 * _WAYS}I")
_FACT = struct.Struct("<II")
_BUCKET = _DIGESTS + _FACTS.size
_HEADER = 64
_MAGIC = b"PNSTREQ2"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Claim(Enum):
    """What is known of a request that comes."""

    NEW = "new"
    REPEATED = "repeated"  # it is answered, with success
    UNDER_WAY = "under way"  # it is here, and not answered yet


class RecentRequests:
    """Remembers the requests of the last `window` seconds, at most `capacity` of them.

    Loss: a request that is forgotten too early is counted again when it comes again; `forgotten` counts those.
    Threads: every method may be called from any thread, of any process that has the file open.
    """

    def __init__(self, path: Path, capacity: int, window: float, process: int = 0) -> None:
        self._window = window
        self._owner = 2 * (process + 1)
        self._buckets = max(1, -(-capacity // _WAYS))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.forgotten = 0
        # _lock, and the file's for other processes, guard everything below.
        self._lock = threading.Lock()
        with self._locked():
            self._table = self._opened()

    def _opened(self) -> mmap.mmap:
        boot = _BOOT.read_bytes().strip() if _BOOT.exists() else b""
        header = (_MAGIC + struct.pack("<Q", self._buckets) + boot).ljust(_HEADER, b"\0")[:_HEADER]
        size = _HEADER + self._buckets * _BUCKET
        if os.pread(self._file, _HEADER, 0) != header or os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, 0)
            os.posix_fallocate(self._file, 0, size)  # a hole in the file would turn a full disk into a SIGBUS
            os.pwrite(self._file, header, 0)
        return mmap.mmap(self._file, size)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def claim(self, digests: Sequence[bytes], now: float) -> list[Claim]:
        """Says what is known of each request. A new one is under way from then on, until `settle`."""
        with self._locked():
            return [self._claim_locked(digest, int(now)) for digest in digests]

    def _claim_locked(self, digest: bytes, now: int) -> Claim:
        at = self._find_locked(digest)
        if at is not None:
            time, owner = _FACT.unpack_from(self._table, at)
            if owner & 1:
                return Claim.UNDER_WAY
            if owner and abs(now - time) <= self._window:
                return Claim.REPEATED
        self._put_locked(digest, now, self._owner | 1, at)
        return Claim.NEW

    def settle(self, digests: Sequence[bytes], *, is_taken: bool) -> None:
        """Records how requests were answered that were claimed. Those that were not taken may come again."""
        with self._locked():
            for digest in digests:
                at = self._find_locked(digest)
                if at is not None:
                    time, owner = _FACT.unpack_from(self._table, at)
                    _FACT.pack_into(self._table, at, time, owner & ~1 if is_taken else 0)

    def restore(self, digests: Sequence[bytes], time: float) -> None:
        """Remembers requests of an earlier run that are known to be taken."""
        with self._locked():
            for digest in digests:
                self._put_locked(digest, int(time), self._owner, self._find_locked(digest))

    def forget_own(self, *, unanswered_only: bool) -> None:
        """Forgets the requests that this process had when it died, at least those that it had not answered."""
        with self._locked():
            for base in range(_HEADER, len(self._table), _BUCKET):
                facts = _FACTS.unpack_from(self._table, base + _DIGESTS)
                for way, owner in enumerate(facts[1::2]):
                    if owner == self._owner | 1 or (owner == self._owner and not unanswered_only):
                        _FACT.pack_into(self._table, base + _DIGESTS + way * _FACT.size, 0, 0)

    def close(self) -> None:
        self._table.close()
        os.close(self._file)

    # -- the table -----------------------------------------------------------------------------------------------------

    def _base(self, digest: bytes) -> int:
        return _HEADER + int.from_bytes(digest[:8], "little") % self._buckets * _BUCKET

    def _find_locked(self, digest: bytes) -> int | None:
        """Returns where the facts of a digest are."""
        base = self._base(digest)
        at = self._table.find(digest, base, base + _DIGESTS)
        while at >= 0 and (at - base) % DIGEST:
            at = self._table.find(digest, at + 1, base + _DIGESTS)
        return None if at < 0 else base + _DIGESTS + (at - base) // DIGEST * _FACT.size

    def _put_locked(self, digest: bytes, time: int, owner: int, at: int | None) -> None:
        if at is None:
            base = self._base(digest)
            facts = _FACTS.unpack_from(self._table, base + _DIGESTS)
            ages = [fact if facts[2 * way + 1] else 0 for way, fact in enumerate(facts[::2])]
            way = ages.index(min(ages))
            if ages[way] and time - ages[way] <= self._window:
                self.forgotten += 1
            self._table[base + way * DIGEST : base + (way + 1) * DIGEST] = digest
            at = base + _DIGESTS + way * _FACT.size
        _FACT.pack_into(self._table, at, time, owner)
