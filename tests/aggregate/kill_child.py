"""The process that `test_kill` kills: many senders submit as fast as they are answered, and write down the answers.

D id        the request was answered with None
"""

import os
import sys
import threading
from itertools import count

from penstock import Durability, FastQueue, FastQueueConfig
from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.model.point import Chunk, chunk_type
from tests.aggregate.support import DEFINED

METRICS = ("cpu", "rps", "disk")
POINTS = 4  # of each metric, in every request


def request_of(number: int) -> list[Chunk]:
    entity = f'{{"request":"{number}"}}'
    return [chunk_type(metric).of([entity] * POINTS, range(POINTS), [1.0] * POINTS) for metric in METRICS]


def config_of(durability: str) -> FastQueueConfig:
    return FastQueueConfig(durability=Durability(durability), max_size=1_000_000, chunk_size="256Ki")


def main(folder: str, durability: str, start: int) -> None:
    queue = FastQueue(folder, config_of(durability))
    config = L1Config(durability=Durability(durability))
    l1 = L1.with_own_queue("l1", queue.push_many, config, definitions=DEFINED)
    numbers = count(start)

    def send() -> None:
        answered = threading.Event()
        while True:
            number = next(numbers)

            def done(error: BaseException | None, number: int = number) -> None:
                if error is None:
                    os.write(1, b"D %d\n" % number)
                answered.set()

            answered.clear()
            if l1.submit(request_of(number), done):
                answered.wait()

    for _ in range(8):
        threading.Thread(target=send, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
