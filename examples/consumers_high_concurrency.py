"""A hundred workers: for handlers that do nothing but wait.

    python examples/consumers_high_concurrency.py [amqp://guest:guest@localhost/]

Publishes a thousand imports of 0.1 s each. One in 250 is broken: it is dead-lettered with the reason.
"""

import sys
import threading
import time

import pika

from penstock.amqp import ConsumerOptions, ConsumerRegistry, DeadLetters, Declarations, Message, Reject

IMPORTS = 1000
url = sys.argv[1] if len(sys.argv) > 1 else "amqp://guest:guest@localhost/"

lock = threading.Lock()
imported = 0


def import_file(message: Message) -> None:
    global imported
    if not message.body.isdigit():
        raise Reject(f"{message.body!r} is no file number")  # no further attempt could succeed
    time.sleep(0.1)  # waits for another service
    with lock:  # a hundred threads share this counter
        imported += 1


def declare() -> Declarations:
    declarations = Declarations()
    declarations.queue("batch.dead")
    declarations.queue("batch.processing", dead_letter=DeadLetters(exchange="", routing_key="batch.dead"))
    declarations.consumer(
        ConsumerOptions(
            queue="batch.processing",
            consumer="batch-worker",
            event_type="batch.import",
            workers=100,
            prefetch_count=500,
            handler=import_file,
        )
    )
    return declarations


def publish() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for number in range(IMPORTS):
        body = b"broken" if number % 250 == 249 else str(number).encode()
        channel.basic_publish("", "batch.processing", body, pika.BasicProperties(type="batch.import", delivery_mode=2))
    connection.close()


if __name__ == "__main__":
    with ConsumerRegistry(url, declare()) as registry:
        begun = time.monotonic()
        publish()
        while True:
            worker = registry.stats().consumers["batch-worker"]
            if worker.total("acked") + worker.total("dead_lettered") >= IMPORTS:
                break
            time.sleep(0.01)
    rate = IMPORTS / (time.monotonic() - begun)
    print(f"{imported} imported, {worker.total('dead_lettered')} dead-lettered, {rate:.0f}/s, {worker.ack_frames} acks")
