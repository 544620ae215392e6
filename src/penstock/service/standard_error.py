"""Standard error, redirected for a while: Java writes to it, and keeps the one that it started with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def process_stderr_to(path: Path) -> Iterator[None]:
    """Send this process's standard error, and that of what it starts, to a file for a while."""
    kept = os.dup(2)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
