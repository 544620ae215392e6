"""A destination that is down, comes back and refuses one batch: nothing is lost, and what was refused is kept.

python examples/resilient_export.py
"""

import tempfile
import time

from penstock import (
    BreakerConfig,
    CircuitState,
    PermanentExportError,
    Prepared,
    SendQueue,
    SendQueueConfig,
    TransientExportError,
)


class Flaky:
    """An exporter of our own: fails while it is down, and never takes what it calls bad."""

    in_order = True
    is_down = True

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def prepare(self, batch: bytes) -> Prepared:
        return Prepared(batch)

    def send(self, prepared: Prepared) -> None:
        if self.is_down:
            raise TransientExportError("connection refused")
        if prepared.body == b"bad":
            raise PermanentExportError("this will never do")
        self.taken.append(prepared.body)

    def split(self, batch: bytes) -> list[bytes] | None:
        return None

    def close(self) -> None: ...


def main() -> None:
    destination = Flaky()
    with tempfile.TemporaryDirectory() as folder:
        config = SendQueueConfig(
            path=folder, retry_interval=0.05, circuit_breaker=BreakerConfig(threshold=2, reset_timeout=0.2)
        )
        with SendQueue.open(destination, config) as sender:
            for batch in (b"one", b"two", b"bad", b"three"):
                sender.push(batch)  # returns at once, although the destination is down
            while sender.stats().circuit is not CircuitState.OPEN:
                time.sleep(0.01)
            print(f"circuit open, {len(sender)} batches wait")
            destination.is_down = False
            sender.flush()
            print(f"taken: {destination.taken}, dead letters: {sender.stats().queue.dead_lettered}")


if __name__ == "__main__":
    main()
