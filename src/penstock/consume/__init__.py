"""MOVER: the AMQP consumer worker pool.

      broker ──► I/O thread (pika): one connection, a channel per consumer
                   │  deliveries: dispatch by event type, batches       ▲
                   ▼                                                    │ outcomes: acks by contiguous prefix,
                 jobs buffer ──► workers ───────────────────────────────┘ retries, dead letters (over a
                                 threads, coroutines or processes         connection of their own)

Only the I/O thread touches pika, and it never waits for a handler. What the broker may send ahead is bounded by the
prefetch.
"""

from importlib.util import find_spec

from penstock.errors import MissingRequirement
from penstock.machine import how_to_install

if find_spec("pika") is None:
    raise MissingRequirement(f"RabbitMQ needs the client library pika: {how_to_install('amqp')}")
