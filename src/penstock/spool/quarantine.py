"""The quarantine: bytes of a queue's folder that could not be read, set aside instead of wiped."""

import logging
from contextlib import suppress

from penstock.spool.chunk_files import ChunkFile, ChunkLog
from penstock.spool.files import SpoolFiles, write_all

log = logging.getLogger(__name__)

_PIECE = 1 << 20  # bytes that are in memory while they are copied


class Quarantine:
    """Keeps the bytes that could not be read, one file per damaged place, and counts them."""

    def __init__(self, files: SpoolFiles, folder: str) -> None:
        self._files = files
        self.folder = f"{folder}/quarantine"
        self.regions = 0
        self.bytes = 0
        self.lost_blocks = 0
        self.foreign_files = 0

    def keep(self, chunks: ChunkLog, chunk: ChunkFile, start: int, end: int, reason: str) -> None:
        """Copy [start, end) of the log aside. A disk too full for the copy does not stop the reading."""
        self.regions += 1
        self.bytes += end - start
        name = f"{self.folder}/{start:016x}-{end - start}"
        log.warning("Damaged bytes set aside. reason=%s file=%s bytes=%d", reason, name, end - start)
        with suppress(OSError):
            self._files.make_folder(self.folder)
            handle = self._files.open(name, create=True)
            try:
                for at in range(start, end, _PIECE):
                    write_all(self._files, handle, [chunks.read(chunk, at, min(_PIECE, end - at))], at - start)
            finally:
                self._files.close(handle)

    def keep_bytes(self, name: str, data: bytes, reason: str) -> None:
        """Keep a whole small file's content."""
        self.regions += 1
        self.bytes += len(data)
        log.warning("Damaged file set aside. reason=%s file=%s", reason, f"{self.folder}/{name}")
        with suppress(OSError):
            self._files.make_folder(self.folder)
            handle = self._files.open(f"{self.folder}/{name}", create=True)
            try:
                write_all(self._files, handle, [data], 0)
            finally:
                self._files.close(handle)
