"""Handlers that hand messages to the durable queue: acknowledged only when it has accepted them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.consume.consumer_options import Answer
from penstock.consume.message import Message, Reject, Retry
from penstock.errors import BlockTooLarge, QueueError


class TakesBlocks(Protocol):
    """What accepts blocks of bytes: when `push` returns, the block is as safe as the queue promises."""

    def push(self, block: bytes) -> int: ...


class TakesManyBlocks(TakesBlocks, Protocol):
    """The same for many blocks at once: all of them or, with an exception, none."""

    def push_many(self, blocks: Sequence[bytes]) -> object: ...


RETRY_DELAY = 1.0  # seconds until a queue that had no room is asked again


def body_of_message(message: Message) -> bytes:
    return message.body


def into_queue(queue: TakesBlocks, encode: Callable[[Message], bytes] = body_of_message) -> Callable[[Message], None]:
    """A handler that pushes each message.

    No room, no disk or a queue that closes is not the message's fault: it is tried again for as long as it takes, and
    until then the broker keeps the backlog. Only a block that could never fit is dead-lettered.
    """

    def handle(message: Message) -> None:
        try:
            queue.push(encode(message))
        except BlockTooLarge as error:
            raise Reject(str(error)) from error
        except (QueueError, OSError) as error:
            raise Retry(RETRY_DELAY, f"{type(error).__name__}: {error}", counted=False) from error

    return handle


def batches_into_queue(
    queue: TakesManyBlocks, encode: Callable[[Message], bytes] = body_of_message
) -> Callable[[Sequence[Message]], Answer]:
    """A batch handler that pushes its messages at once: one fsync for all of them.

    Where the queue refuses a batch, the messages are pushed one by one, so that each is answered for itself.
    """
    push_one = into_queue(queue, encode)

    def outcome(message: Message) -> Retry | Reject | None:
        try:
            push_one(message)
        except (Retry, Reject) as error:
            return error
        return None

    def handle(messages: Sequence[Message]) -> Answer:
        try:
            queue.push_many([encode(message) for message in messages])
        except (QueueError, OSError):
            return [outcome(message) for message in messages]
        return None

    return handle
