"""Mistakes are found before anything is connected, and all at once."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from penstock.amqp import (
    BackoffPolicy,
    ConsumerOptions,
    DeadLetters,
    Declarations,
    Exchange,
    Execution,
    Message,
    Queue,
    Retry,
)
from penstock.errors import ConfigError


def handle(message: Message) -> None: ...


async def handle_async(message: Message) -> None: ...


class Handler:
    def handle(self, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"queue": ""}, "queue must be named"),
        ({"workers": -1}, "workers must be a whole number >= 0, got -1"),
        ({"prefetch_count": -5}, "prefetch_count must be a whole number >= 0, got -5"),
        ({"workers": "4"}, "workers must be a whole number >= 0, got '4'"),
        ({"retry": BackoffPolicy(limit=3600.0)}, "retry.limit must be <= 900.0 s, got 3600.0"),
        ({"prefetch": 0}, "prefetch must be"),
        ({"prefetch": "fast"}, "prefetch must be .*'fast'"),
        ({"prefetch": 5, "prefetch_count": 6}, "prefetch=5 and prefetch_count=6"),
        ({"prefetch": "latency", "prefetch_count": 6}, "prefetch=latency and prefetch_count=6"),
        ({"max_attempts": 0}, "max_attempts must be a whole number >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"batch_size": 1001}, "batch_size must be <= 1000"),
        ({"batch_timeout": 1.0}, "needs batch_size"),
        ({"execution": "fibre"}, "execution must be one of thread, async, process"),
        ({"execution": "thread", "handler": handle_async}, "execution and handler disagree"),
        ({"execution": "async"}, "execution and handler disagree"),
        ({"handler": 3}, "handler must be callable"),
        ({"handler": Handler}, "handler must be an instance, got the class Handler"),
        ({"handler": lambda channel, method, properties, body: None}, "handler must take one argument, the message"),
        ({"event_type": ""}, "event_type must not be"),
    ],
)
def test_options_refuse_what_makes_no_sense(settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError, match=mistake):
        ConsumerOptions(**{"queue": "orders", "handler": handle, **settings})


def test_options_name_every_mistake_at_once() -> None:
    with pytest.raises(ConfigError, match=r"workers must .*; max_attempts must .*; batch_size must "):
        ConsumerOptions(queue="orders", handler=handle, workers=-1, max_attempts=0, batch_size=0)


def test_a_handler_is_a_function_a_coroutine_function_or_an_object() -> None:
    assert ConsumerOptions(queue="q", handler=handle).runs_as is Execution.THREAD
    assert ConsumerOptions(queue="q", handler=handle_async).runs_as is Execution.ASYNC
    assert ConsumerOptions(queue="q", handler=Handler()).call.__name__ == "handle"


@pytest.mark.parametrize(
    ("declare", "kind", "named_before"),
    [
        (Declarations.consumer, ConsumerOptions, {"options"}),
        (Declarations.exchange, Exchange, set()),
        (Declarations.queue, Queue, set()),
    ],
    ids=["consumer", "exchange", "queue"],
)
def test_what_is_declared_has_the_same_fields_and_defaults_by_name(
    declare: Callable[..., Any], kind: type[Any], named_before: set[str]
) -> None:
    parameters = inspect.signature(declare).parameters.keys() - {"self"} - named_before
    assert parameters == {field.name for field in fields(kind)}

    made = declare(Declarations(), **({"queue": "q", "handler": handle} if kind is ConsumerOptions else {"name": "q"}))
    assert made == (kind(queue="q", handler=handle) if kind is ConsumerOptions else kind(name="q"))


def test_a_consumer_is_declared_by_options_or_by_fields_and_needs_a_handler() -> None:
    with pytest.raises(ConfigError, match="consumer 'q': handler must be set, got None"):
        Declarations().consumer(queue="q")
    with pytest.raises(ConfigError, match="give one of the two"):
        Declarations().consumer(ConsumerOptions(queue="q", handler=handle), queue="other")


def test_declarations_name_every_mistake_at_once() -> None:
    declarations = Declarations()
    declarations.exchange("amq.mine")
    declarations.exchange("typo", "topik")  # type: ignore[arg-type]
    declarations.queue("orders", dead_letter="nowhere")
    declarations.queue("orders")
    declarations.queue("log", "stream", durable=False)
    declarations.queue("odd", "lazy")  # type: ignore[arg-type]
    declarations.queue("twice", dead_letter="amq.topic", args={"x-dead-letter-exchange": "amq.direct"})
    declarations.bind("orders", "missing")
    declarations.bind("missing", "amq.topic")
    declarations.consumer(queue="absent", handler=handle)
    declarations.consumer(queue="orders", consumer="a", event_type="x", handler=handle, workers=2)
    declarations.consumer(queue="orders", consumer="b", event_type="x", handler=handle, workers=3)
    declarations.consumer(queue="log", handler=lambda message: None, execution="process")

    with pytest.raises(ConfigError) as error:
        declarations.validate()

    said = str(error.value)
    for mistake in (
        "exchange 'amq.mine': the name is the broker's own",
        "exchange 'typo': kind must be direct, fanout, topic, headers or a plugin's x-..., got 'topik'",
        "queue 'orders' is declared twice",
        "dead-letter exchange 'nowhere' is not declared",
        "a stream queue is durable",
        "kind must be classic, quorum or stream, got 'lazy'",
        "dead_letter and x-dead-letter-exchange in args say the same",
        "exchange 'missing' is not declared",
        "queue 'missing' is not declared",
        "queue 'absent' is not declared",
        "consumers 'a' and 'b' would take each other's messages",
        "differ in workers",
        "2 handlers for event type 'x'",
        "must be importable by name",
    ):
        assert mistake in said
    assert said.startswith("14 mistake(s)")


def test_sound_declarations_pass_and_make_one_consumer_per_queue() -> None:
    declarations = Declarations()
    declarations.exchange("events")
    declarations.exchange("dead", "fanout")
    declarations.queue("orders", "quorum", dead_letter=DeadLetters(exchange="dead", routing_key="orders"))
    declarations.bind("orders", "events", "order.*")
    declarations.consumer(queue="orders", event_type="order.created", handler=handle)
    declarations.consumer(ConsumerOptions(queue="orders", handler=handle))

    declarations.validate()

    (consumer,) = declarations.consumers()
    assert [options.event_type for options in consumer.options] == ["order.created", None]
    assert consumer.queue.arguments == {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "dead",
        "x-dead-letter-routing-key": "orders",
    }


def test_a_retry_cannot_wait_for_longer_than_the_broker_does() -> None:
    with pytest.raises(ConfigError, match="within 0 and 900"):
        Retry(3600)
