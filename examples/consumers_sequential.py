"""One worker: messages are handled one after the other in the queue's order, also when one has to be retried.

    python examples/consumers_sequential.py [amqp://guest:guest@localhost/]

Publishes twenty changes of an account. The balance is right only if none overtakes another.
"""

import sys
import threading

import pika

from penstock.amqp import ConsumerOptions, ConsumerRegistry, DeadLetters, Declarations, Message, Retry

CHANGES = 20
url = sys.argv[1] if len(sys.argv) > 1 else "amqp://guest:guest@localhost/"

finished = threading.Event()
versions: list[int] = []


def apply_change(message: Message) -> None:
    change = message.json()
    if change["version"] == 7 and message.attempt == 1:
        print("version 7: the database is busy, try again")
        raise Retry(0.2, "the database is busy")
    versions.append(change["version"])
    if len(versions) == CHANGES:
        finished.set()


def declare() -> Declarations:
    declarations = Declarations()
    declarations.queue("account.dead")
    declarations.queue("account.events", dead_letter=DeadLetters(exchange="", routing_key="account.dead"))
    declarations.consumer(
        ConsumerOptions(
            queue="account.events",
            consumer="sequencer",
            event_type="account.updated",
            workers=1,  # order needs one worker, and one service
            exclusive=True,  # a second service is refused instead of taking every other message
            handler=apply_change,
        )
    )
    return declarations


def publish() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for version in range(CHANGES):
        properties = pika.BasicProperties(type="account.updated", delivery_mode=2)
        channel.basic_publish("", "account.events", f'{{"version": {version}}}'.encode(), properties)
    connection.close()


if __name__ == "__main__":
    with ConsumerRegistry(url, declare()):
        publish()
        finished.wait()
    print("in order:", versions == list(range(CHANGES)))
