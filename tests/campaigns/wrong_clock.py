"""The clock of a service, set by libfaketime: a file says by how many seconds it is ahead.

Times of files come from the kernel, whose clock stays: segments that were written under another clock are given its
time before the next start reads it.
"""

import os
from pathlib import Path

import pytest

from penstock.errors import MissingRequirement
from tests.conftest import missing
from tests.servers import provide
from tests.service.running import Running


def libfaketime() -> str:
    try:
        program = provide("faketime", "faketime")
    except MissingRequirement as error:
        missing(error)
    found = sorted(Path(program).parent.parent.glob("lib/**/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip(f"{program} has no libfaketimeMT.so.1 beside it")
    return str(found[0])


class WrongClock:
    """The clock of one service."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self._file = service.folder / "clock"
        self.offset = 0
        self._stamped: set[Path] = set()
        self.set(0)
        service.before = [
            "env",
            f"LD_PRELOAD={libfaketime()}",
            f"FAKETIME_TIMESTAMP_FILE={self._file}",
            "FAKETIME_CACHE_DURATION=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]

    def set(self, offset: int) -> None:
        self._stamp_files()
        self.offset = offset
        self._file.with_suffix(".new").write_text(f"{offset:+d}")
        self._file.with_suffix(".new").replace(self._file)

    def _stamp_files(self) -> None:
        for path in set((self._service.folder / "segments").glob("*.arrow")) - self._stamped:
            moment = path.stat().st_mtime + self.offset
            os.utime(path, (moment, moment))
            self._stamped.add(path)
