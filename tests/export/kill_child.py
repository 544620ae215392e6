"""The process that `test_kill` kills: pushes as fast as a few hundred batches wait, while workers send.

    python -m tests.export.kill_child <folder> <url> <durability> <first number>

It writes down the number of each batch whose push has returned.
"""

import os
import sys
import threading

from penstock.export import SendQueue
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.spool import Durability
from tests.export.quick import quick

WORKERS = 4
IN_MEMORY = 50  # batches
_WAITING = 300


def batch_of(number: int) -> bytes:
    return b"batch %09d" % number


def number_of(batch: bytes) -> int:
    return int(batch.split()[1])


def sender_of(folder: str, url: str, durability: str, life: int) -> SendQueue:
    """Its requests say which process they come from: what one had sent may be read when the next is there."""
    config = quick(
        path=folder,
        durability=Durability(durability),
        workers=WORKERS,
        inmemory_blocks=IN_MEMORY,
        meta_sync_interval=0.05,
        chunk_size="16Ki",
    )
    exporter = OtlpHttpExporter(OtlpHttpConfig(url=url, compression="none", headers={"X-Life": str(life)}))
    return SendQueue.open(exporter, config)


def main(folder: str, url: str, durability: str, first: int) -> None:
    sender = sender_of(folder, url, durability, first).start()
    pause = threading.Event()
    number = first
    while True:
        if len(sender) >= _WAITING:
            pause.wait(0.001)
            continue
        sender.push(batch_of(number))
        os.write(1, b"%d\n" % number)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
