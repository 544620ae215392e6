"""The process that `test_kill` kills: pushes and acks as fast as it can, and writes down what has returned.

P id        push has returned          L id attempts    a lease was handed out
B id        an ack is about to begin   A id             it has returned
"""

import hashlib
import os
import random
import sys

from penstock import Durability, FastQueue, FastQueueConfig


def block_of(number: int) -> bytes:
    """Number and content, so that any mix-up shows."""
    digest = hashlib.sha256(b"%d" % number).digest()
    return b"%d:" % number + digest * (number % 40)


def number_of(block: bytes) -> int:
    number = int(block.split(b":", 1)[0])
    assert block == block_of(number), f"block {number} has changed"
    return number


def config_of(durability: str) -> FastQueueConfig:
    return FastQueueConfig(
        durability=Durability(durability),
        max_size=1_000_000,
        chunk_size="64Ki",
        inmemory_blocks=50,
        meta_sync_interval=0.01,
        write_buffer_size="4Ki",
    )


def say(*lines: str) -> None:
    os.write(1, "".join(f"{line}\n" for line in lines).encode())


def main(folder: str, durability: str, start: int, seed: str) -> None:
    chance = random.Random(seed)
    queue = FastQueue(folder, config_of(durability))
    number = start
    while True:
        if chance.random() < 0.5:
            queue.push(block_of(number))
            say(f"P {number}")
            number += 1
        else:
            batch = range(number, number + chance.randint(1, 30))
            queue.push_many([block_of(i) for i in batch])
            say(*(f"P {i}" for i in batch))
            number = batch.stop
        leases = queue.lease(chance.randint(1, 30))
        numbers = [number_of(lease.data) for lease in leases]
        say(*(f"L {i} {lease.attempts}" for i, lease in zip(numbers, leases, strict=True)))
        chosen = [(i, lease) for i, lease in zip(numbers, leases, strict=True) if chance.random() < 0.8]
        chance.shuffle(chosen)
        say(*(f"B {i}" for i, _ in chosen))
        queue.ack([lease for _, lease in chosen])
        say(*(f"A {i}" for i, _ in chosen))
        following = queue.lease()[:1]
        for _ in range(chance.randint(0, 10)):
            if following:
                i = number_of(following[0].data)
                say(f"L {i} {following[0].attempts}", f"B {i}")
                queue.ack(following)
                following = queue.lease()
                say(f"A {i}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
