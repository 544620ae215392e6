"""A service that feeds a durable queue, to be killed. `python -m tests.consume.feeder URL QUEUE FOLDER`."""

import sys

from penstock import Durability, FastQueue, FastQueueConfig, FullBehavior
from penstock.amqp import ConsumerRegistry, Declarations, batches_into_queue


def main(url: str, name: str, folder: str) -> None:
    # It has room for some of what the test publishes: there are messages left, however late the kill comes.
    config = FastQueueConfig(durability=Durability.DISK, full_behavior=FullBehavior.BLOCK, max_size=2000)
    declarations = Declarations()
    declarations.queue(name)
    with FastQueue(folder, config) as queue:
        declarations.consumer(
            queue=name, handler=batches_into_queue(queue), workers=2, prefetch=100, batch_size=20, batch_timeout=0.1
        )
        ConsumerRegistry(url, declarations).run(stop_timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
