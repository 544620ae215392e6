"""Logs to standard error: readable lines in a terminal, one JSON object a line otherwise.

Our messages are `What happened. key=%s key=%s`: the JSON has the event and its fields by name.
"""

import json
import logging
import os
import re
import sys
import time
from typing import IO, Literal

from penstock.secret_text import redacted
from penstock.service.printable import printable

_FIELD = re.compile(r"(\w+)=(%[-+.\d]*[a-z])")
_OWN = {"time", "level", "logger", "message", "event", "exception"}  # of the line itself: no field passes for these
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31", logging.DEBUG: "2"}


class HumanFormatter(logging.Formatter):
    """`12:01:02 WARNING Queue started dropping. queue=/data/queue reason=newest`."""

    def __init__(self, *, has_colour: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._has_colour = has_colour

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        record.message = printable(record.message)  # what senders call things must not look like lines of ours
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = redacted(super().format(record))
        colour = _COLOURS.get(record.levelno)
        return f"\x1b[{colour}m{text}\x1b[0m" if self._has_colour and colour else text


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, event, the fields of the message, and where it broke.

    A field that is called like one of the others has a `_` behind its name.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        shown: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        shown |= _event(record)
        if record.exc_info:
            shown["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(shown, ensure_ascii=False, default=str)


def _event(record: logging.LogRecord) -> dict[str, object]:
    message = redacted(record.getMessage())
    arguments = record.args if isinstance(record.args, tuple) else ()
    template = str(record.msg)
    found = _FIELD.findall(template)
    if not arguments and template.endswith("."):
        return {"message": message, "event": template.rstrip(".")}
    # Only where every argument is a field: otherwise they cannot be matched.
    if not found or len(found) != len(arguments) or template.count("%") != len(arguments):
        return {"message": message}
    event = template[: template.index(f"{found[0][0]}={found[0][1]}")].strip().rstrip(".")
    fields = {f"{name}_" if name in _OWN else name: _plain(value) for (name, _), value in zip(found, arguments)}
    return {"message": message, "event": event, **fields}


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, bool, type(None))) else redacted(str(value))


def set_up_logs(level: int, style: Literal["auto", "human", "json"], stream: IO[str] | None = None) -> None:
    """Send what the whole process logs to `stream` (standard error). May be called again, with other settings."""
    stream = stream or sys.stderr
    is_human = style == "human" or (style == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    has_colour = stream.isatty() and not os.environ.get("NO_COLOR")  # as https://no-color.org says
    handler.setFormatter(HumanFormatter(has_colour=has_colour) if is_human else JsonFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "is_penstock", False):
            root.removeHandler(old)
    handler.is_penstock = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)  # others' libraries
    logging.getLogger("penstock").setLevel(level)
