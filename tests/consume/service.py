"""A consumer service to be killed: notes what it handled in a file. `python -m tests.consume.service URL QUEUE F`."""

import logging
import os
import sys
import time

from penstock.amqp import ConsumerRegistry, DeadLetters, Declarations, Message


def main(url: str, queue: str, path: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(message: Message) -> None:
        time.sleep(0.005)  # long enough that a signal finds handlers at work
        os.write(notes, message.body + b"\n")

    declarations = Declarations()
    declarations.queue(f"{queue}.dead")
    declarations.queue(queue, dead_letter=DeadLetters(exchange="", routing_key=f"{queue}.dead"))
    declarations.consumer(queue=queue, handler=handle, workers=8, prefetch=100)
    sys.exit(len(ConsumerRegistry(url, declarations).run(stop_timeout=10)))


if __name__ == "__main__":
    main(*sys.argv[1:])
