"""The options of `format("penstock-amqp")`, checked; `source` says what each means."""

import json
import os
from collections.abc import Mapping

from penstock.broker import Broker, Tls
from penstock.errors import ConfigError
from penstock.spark.amqp.stream_client import StreamClient
from penstock.units import parse_duration

MAX_OFFSETS = 1_000_000  # a minute or two of work: a backlog is worked off in batches that are soon done
_OPTIONS = (
    "url", "usernameFile", "passwordFile", "caFile", "certFile", "keyFile", "serverName", "streams", "startingOffsets",
    "endingOffsets", "maxOffsetsPerTrigger", "failOnDataLoss", "timeout", "tasks",
)  # fmt: skip


class StreamSettings:
    """The options of a query, checked."""

    def __init__(self, options: Mapping[str, str]) -> None:
        known = {name.lower(): name for name in _OPTIONS}
        for name in options:
            if name.lower() not in known:
                raise ConfigError(f"option {name!r} is unknown to penstock-amqp; known are {', '.join(_OPTIONS)}")
        self.broker = _broker(options)
        self.streams = tuple(filter(None, (name.strip() for name in (options.get("streams") or "").split(","))))
        if not self.streams:
            raise ConfigError("the penstock-amqp source needs option('streams'): names, separated by commas")
        self.starting = _places("startingOffsets", options, self.streams, ("earliest", "latest")) or "earliest"
        self.ending = _places("endingOffsets", options, self.streams, ("latest",))
        self.limit = _count("maxOffsetsPerTrigger", options, MAX_OFFSETS)
        self.tasks = _count("tasks", options, os.cpu_count() or 2)
        self.fail_on_loss = _flag("failOnDataLoss", options)
        self.timeout = parse_duration(options.get("timeout", "60s"), "timeout")

    def client(self) -> StreamClient:
        return StreamClient(self.broker, timeout=self.timeout, fail_on_loss=self.fail_on_loss)


def _broker(options: Mapping[str, str]) -> Broker:
    url = options.get("url")
    if not url:
        raise ConfigError("the penstock-amqp source needs option('url'): amqp://host:port/vhost or amqps://...")
    files = {"ca_file": "caFile", "cert_file": "certFile", "key_file": "keyFile", "server_name": "serverName"}
    given = {field: options.get(option) for field, option in files.items()}
    tls = Tls(**given) if any(given.values()) else None
    return Broker(url, options.get("usernameFile"), options.get("passwordFile"), tls)


def _places(
    option: str, options: Mapping[str, str], streams: tuple[str, ...], words: tuple[str, ...]
) -> str | dict[str, int] | None:
    text = options.get(option)
    if text is None or text in words:
        return text
    complaint = f"{option} must be {', '.join(words)} or JSON with an offset for each stream, got {text!r}"
    try:
        found = json.loads(text)
    except ValueError:
        raise ConfigError(complaint) from None
    if not isinstance(found, dict) or not all(type(place) is int and place >= 0 for place in found.values()):
        raise ConfigError(complaint)
    if found.keys() != set(streams):
        raise ConfigError(f"{option} must name exactly the streams {', '.join(streams)}, got {text!r}")
    return found


def _count(option: str, options: Mapping[str, str], default: int) -> int:
    text = options.get(option)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{option} must be a whole number >= 1, got {text!r}")
    return int(text)


def _flag(option: str, options: Mapping[str, str]) -> bool:
    text = options.get(option, "true").lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{option} must be true or false, got {text!r}")
    return text == "true"
