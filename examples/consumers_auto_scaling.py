"""The default: CPU × 4 workers, ten messages prefetched for each. For handlers that wait for a database or an API.

    python examples/consumers_auto_scaling.py [amqp://guest:guest@localhost/]

Publishes a hundred orders, handles them and stops.
"""

import sys
import threading
import time

import pika

from penstock.amqp import ConsumerOptions, ConsumerRegistry, DeadLetters, Declarations, Message

ORDERS = 100
url = sys.argv[1] if len(sys.argv) > 1 else "amqp://guest:guest@localhost/"

handled = threading.Semaphore(0)


def create_order(message: Message) -> None:
    """Runs on many threads at once, so whatever it shares must be thread-safe."""
    order = message.json()
    time.sleep(0.05)  # a database query
    if order["id"] % 25 == 0:
        print(f"order {order['id']} created by {threading.current_thread().name}")
    handled.release()


def declare() -> Declarations:
    declarations = Declarations()
    declarations.exchange("shop", "topic")
    declarations.queue("orders.dead")
    declarations.queue("orders", dead_letter=DeadLetters(exchange="", routing_key="orders.dead"))
    declarations.bind("orders", "shop", "order.*")
    declarations.consumer(
        ConsumerOptions(queue="orders", consumer="processor", event_type="order.created", handler=create_order)
    )
    return declarations


def publish() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    for number in range(ORDERS):
        properties = pika.BasicProperties(type="order.created", delivery_mode=2)
        channel.basic_publish("shop", "order.created", f'{{"id": {number}}}'.encode(), properties)
    connection.close()


if __name__ == "__main__":
    # A service would call ConsumerRegistry(url, declare()).run(): it stops on SIGTERM.
    with ConsumerRegistry(url, declare()) as registry:
        begun = time.monotonic()
        publish()
        for _ in range(ORDERS):
            handled.acquire()
        processor = registry.stats().consumers["processor"]
        seconds = time.monotonic() - begun
        print(f"{ORDERS} orders by {processor.workers} workers in {seconds:.1f} s, {ORDERS * 0.05:.0f} s one by one")
