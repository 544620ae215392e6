"""How often a message was tried, and when it is given up.

Two counts, because they mean different things:
- failures: our own header, raised each time a handler fails and the message is tried again. Bounded by `max_attempts`.
- deliveries: `x-delivery-count` of quorum queues, raised by the broker each time a delivery comes back unacknowledged,
  be it a crash, a lost connection or a shutdown. Bounded by the looser `max_deliveries`, and asked before the handler
  runs: only so does a message that kills the whole process come to an end.
"""

from collections.abc import Mapping
from typing import Any

ATTEMPTS = "x-penstock-attempts"
TRIED = "x-penstock-tried"
REASON = "x-penstock-reason"
QUEUE = "x-penstock-queue"
EXCHANGE = "x-penstock-exchange"
ROUTING_KEY = "x-penstock-routing-key"
MAX_REASON = 1000  # characters; headers share one frame with the other properties
DELIVERY_COUNT = "x-delivery-count"
# CC and BCC route copies: the other queues have theirs already. The broker counts the deliveries of what we publish
# from none, but would leave the old count standing until it has a count of its own.
NOT_REPEATED = ("CC", "BCC", DELIVERY_COUNT)


def _count(headers: Mapping[str, Any], name: str) -> int:
    value = headers.get(name, 0)
    # Headers come from outside: what is no count counts as none.
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def attempt_of(headers: Mapping[str, Any] | None) -> int:
    """Which attempt the handler is about to make, from 1."""
    return _count(headers or {}, ATTEMPTS) + 1


def origin_of_message(headers: Mapping[str, Any], exchange: str, routing_key: str) -> tuple[str, str]:
    """The exchange and routing key that the message first came with."""
    first, key = headers.get(EXCHANGE), headers.get(ROUTING_KEY)
    return first if isinstance(first, str) else exchange, key if isinstance(key, str) else routing_key


def returned_too_often(headers: Mapping[str, Any] | None, max_deliveries: int) -> bool:
    """Say whether the message came back unacknowledged so often that it must not be tried again."""
    return _count(headers or {}, DELIVERY_COUNT) >= max_deliveries


def retry_headers(headers: Mapping[str, Any] | None, attempt: int, exchange: str, routing_key: str) -> dict[str, Any]:
    """The headers of a message that goes back to its queue after `attempt` failed.

    It goes there directly, so the first one to send it back notes how it had come.
    """
    kept = {name: value for name, value in (headers or {}).items() if name not in NOT_REPEATED}
    kept.setdefault(EXCHANGE, exchange)
    kept.setdefault(ROUTING_KEY, routing_key)
    kept[ATTEMPTS] = attempt
    return kept


def dead_letter_headers(headers: Mapping[str, Any], queue: str, reason: str) -> dict[str, Any]:
    """The headers for another attempt, made those of a message that is given up: where it was, and why it failed.

    A message sent back to its queue is to be tried afresh, so the count of attempts changes its name.
    """
    kept = dict(headers)
    return {TRIED: kept.pop(ATTEMPTS), **kept, QUEUE: queue, REASON: reason[:MAX_REASON]}
