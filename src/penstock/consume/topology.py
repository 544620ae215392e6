"""The declarations, made at the broker one after the other."""

import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

from pika.channel import Channel
from pika.connection import Connection
from pika.exceptions import AMQPError, ChannelClosedByBroker

from penstock.broker import reason_of
from penstock.consume.declarations import Declarations

log = logging.getLogger(__name__)

# A step of a set-up: is given what to call when the broker has answered.
Step = Callable[[Callable[[Any], None]], object]
Steps = Generator[Step, Any, Any]


def advance_amqp_topology(steps: Steps) -> None:
    """Take a set-up from answer to answer. If its channel closes, no answer comes, and it is forgotten."""

    def answered(answer: Any = None) -> None:
        try:
            step = steps.send(answer)
            step(answered)
        except StopIteration:
            pass
        except AMQPError as error:  # the channel or connection closed between two steps
            log.debug("A set-up ended early. error=%r", error)

    answered()


class Topology:
    """Exchanges, queues and bindings. I/O thread only, but for what `health` reads."""

    def __init__(self, declarations: Declarations) -> None:
        self.refused: dict[str, str] = {}  # what the broker refused when it was last asked, and why
        self._declarations = declarations

    def declare(self, connection: Connection) -> Steps:
        """Declare everything. A refusal closes the channel it came over; the rest is declared over the next."""
        refused: dict[str, str] = {}
        channel: Channel | None = None
        for name, method, arguments in self._all():
            if channel is None or not channel.is_open:
                channel = yield lambda opened: connection.channel(on_open_callback=opened)
            answer = yield partial(_ask, channel, method, arguments)
            if isinstance(answer, ChannelClosedByBroker):
                refused[name] = reason_of(answer)
                if self.refused.get(name) != refused[name]:
                    log.error("The broker refuses a declaration. declaration=%s reason=%s", name, refused[name])
        if channel is not None and channel.is_open:
            channel.close()
        self.refused = refused

    def _all(self) -> Iterator[tuple[str, Callable[..., object], tuple[Any, ...]]]:
        for exchange in self._declarations.exchanges:
            yield f"exchange {exchange.name!r}", Channel.exchange_declare, (
                exchange.name, exchange.kind, exchange.passive, exchange.durable, exchange.auto_delete,
                exchange.internal, dict(exchange.args),
            )  # fmt: skip
        for queue in self._declarations.queues:
            yield f"queue {queue.name!r}", Channel.queue_declare, (
                queue.name, queue.passive, queue.durable, queue.exclusive, queue.auto_delete, queue.arguments,
            )  # fmt: skip
        for binding in self._declarations.bindings:
            yield f"binding of {binding.queue!r} to {binding.exchange!r}", Channel.queue_bind, (
                binding.queue, binding.exchange, binding.routing_key, dict(binding.args),
            )  # fmt: skip


def _ask(
    channel: Channel, method: Callable[..., object], arguments: tuple[Any, ...], answered: Callable[[Any], None]
) -> None:
    """Ask the broker; the end of the channel is an answer, too."""
    waiting = [answered]

    def reply(answer: Any) -> None:
        if waiting:
            waiting.pop()(answer)

    def on_closed(channel: Channel, error: Exception) -> None:
        if isinstance(error, ChannelClosedByBroker) and channel.connection.is_open:
            reply(error)

    channel.add_on_close_callback(on_closed)
    method(channel, *arguments, callback=reply)
