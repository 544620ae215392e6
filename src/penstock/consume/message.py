"""What a handler gets, and what it may raise to say what becomes of it."""

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pika import BasicProperties

from penstock.errors import ConfigError


@dataclass(slots=True, eq=False)  # not frozen: setting slots through object.__setattr__ would double the cost
class Message:
    """One message. Build one to call your handler in a test: `Message(b'{"id": 1}', "order.created")`."""

    body: bytes
    event_type: str = ""
    attempt: int = 1  # which attempt this is; more than 1 after a failure
    redelivered: bool = False  # the broker sent it before, and saw no acknowledgement
    exchange: str = ""
    routing_key: str = ""
    properties: BasicProperties = field(default_factory=BasicProperties)

    @property
    def headers(self) -> dict[str, Any]:
        return self.properties.headers or {}

    def json(self) -> Any:
        """The body as JSON; Reject if it is none, since it will be none at every attempt."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Reject(f"not JSON: {error}") from error


class Retry(Exception):
    """Raise it to have the message tried again after `delay` seconds (by default the consumer's own backoff).

    A counted retry is one of the consumer's `max_attempts`. An uncounted one is for troubles that are not the
    message's own (a full disk, a database that is away): it is repeated for as long as it takes.
    """

    def __init__(self, delay: float | None = None, reason: str = "", *, counted: bool = True) -> None:
        if delay is not None and not 0 <= delay <= MAX_RETRY_DELAY:
            raise ConfigError(f"Retry.delay must be within 0 and {MAX_RETRY_DELAY} s, got {delay}")
        super().__init__(reason or "the handler asked for a retry")
        self.delay = delay
        self.counted = counted

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Retry, counted=self.counted), (self.delay, str(self))


# A message in wait is unacknowledged, and the broker closes the channel of one that is so for 30 minutes.
MAX_RETRY_DELAY = 900.0


class Reject(Exception):
    """Raise it to dead-letter the message at once: no further attempt could succeed."""

    def __init__(self, reason: str = "the handler rejected it") -> None:
        super().__init__(reason)
