"""Consume RabbitMQ with a pool of workers (extra `[amqp]`): see docs/consumers.md.

declarations = Declarations()
declarations.queue("orders")
declarations.consumer(queue="orders", handler=handle)
ConsumerRegistry("amqp://localhost/", declarations).run()
"""

from penstock.receive.amqp.backoff import BackoffPolicy
from penstock.receive.amqp.broker import Tls
from penstock.receive.amqp.declarations import Binding, Declarations, Exchange, Queue
from penstock.receive.amqp.into_queue import TakesBlocks, TakesManyBlocks, batches_into_queue, into_queue
from penstock.receive.amqp.message import Message, Reject, Retry
from penstock.receive.amqp.options import ConsumerOptions, DeadLetters, Execution, PoolSize, pool_size
from penstock.receive.amqp.registry import ConsumerRegistry
from penstock.receive.amqp.stats import ConsumerStats, Health, RegistryStats, RouteStats

__all__ = [
    "BackoffPolicy",
    "Binding",
    "ConsumerOptions",
    "ConsumerRegistry",
    "ConsumerStats",
    "DeadLetters",
    "Declarations",
    "Exchange",
    "Execution",
    "Health",
    "Message",
    "PoolSize",
    "Queue",
    "RegistryStats",
    "Reject",
    "Retry",
    "RouteStats",
    "TakesBlocks",
    "TakesManyBlocks",
    "Tls",
    "batches_into_queue",
    "into_queue",
    "pool_size",
]
