"""JSON events, for scripts that just POST.

    [{"metric": "orders", "value": 129.9, "labels": {"shop": "north"}, "time": "2026-11-16T04:40:00Z"}, …]

`time` is seconds since the epoch or an RFC 3339 text, now if it is left out; `labels` may be left out, too. An event
that is wrong is refused with its position and reason, the others are taken.
"""

import json
import math
import reprlib
from datetime import UTC, datetime
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from penstock.decode.decode_context import DecodeContext
from penstock.decode.otlp.attributes import otlp_attribute_text
from penstock.decode.otlp.json_request import refuse_many_otlp_json_values
from penstock.decode.outcome import PointRefusal, RefusedStreams, TooMany
from penstock.decode.rows import DecodedRows
from penstock.decode.series import NO_STREAM, SeriesNamespace
from penstock.decode.series_description import SeriesDescription
from penstock.model.name import is_encodable_name, metric_name_fault
from penstock.model.point import PointKind, entity_of

_MAX_EVENTS = 200_000  # of one request: each takes microseconds, also one that is refused
_MAX_VALUES = 1_000_000  # of one request, labels included
_KEYS = ("metric", "value", "labels", "time")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = 60
_SEPARATOR = "\x00"  # between the metric and its labels in a key


class EventReader:
    """Reads groups of bodies of events.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.namespaces = {"events": SeriesNamespace(_described)}

    def read(self, bodies: list[bytes], context: DecodeContext, now: float) -> DecodedRows:
        """Returns the points of all valid events; `now` in seconds since the epoch. TooMany beyond a bound."""
        requests: list[int] = []
        keys: list[bytes] = []
        times: list[int] = []
        values: list[float] = []
        for request, body in enumerate(bodies):
            refuse_many_otlp_json_values(body, _MAX_VALUES)
            try:
                events = json.loads(body)
            except (ValueError, RecursionError) as error:
                context.outcomes.fail(request, f"not JSON: {error}")
                continue
            if isinstance(events, dict):
                events = [events]
            if not isinstance(events, list):
                context.outcomes.fail(request, f"a list of events is expected, got {type(events).__name__}")
                continue
            if len(events) > _MAX_EVENTS:
                raise TooMany(f"more than {_MAX_EVENTS} events")
            for place, event in enumerate(events):
                try:
                    key, time, value = _checked(event, now, context.latest)
                except RefusedStreams as refused:
                    context.outcomes.reject_one(request, refused.reason, f"event {place}: {refused}")
                    continue
                if "time" not in event:
                    context.outcomes.untimed.add(request)
                requests.append(request)
                keys.append(key)
                times.append(time)
                values.append(value)
        of_request = np.array(requests, np.int64)
        namespaces, space = list(self.namespaces.values()), np.zeros(len(keys), np.int64)
        streams = context.resolve(namespaces, space, pa.array(keys, pa.binary()), of_request).streams
        rows = DecodedRows(of_request, streams, np.array(times, np.int64), np.array(values, np.float64))
        rows = rows.take(streams != NO_STREAM)
        context.outcomes.take(rows.requests)
        return rows


def _checked(event: Any, now: float, latest: int) -> tuple[bytes, int, float]:
    if not isinstance(event, dict):
        raise RefusedStreams(PointRefusal.MALFORMED, f"an object is expected, got {type(event).__name__}")
    unknown = [key for key in event if key not in _KEYS]
    if unknown:
        raise RefusedStreams(PointRefusal.MALFORMED, f"unknown key {_shown(unknown[0])}; there are {', '.join(_KEYS)}")
    metric, value, labels = event.get("metric"), event.get("value"), event.get("labels", {})
    if not isinstance(metric, str) or not metric:
        raise RefusedStreams(PointRefusal.MALFORMED, f"metric must be a text, got {_shown(metric)}")
    if _SEPARATOR in metric:
        raise RefusedStreams(PointRefusal.LABELS, metric_name_fault(metric))
    if not _is_number(value):
        raise RefusedStreams(PointRefusal.VALUE, f"value must be a number, got {_shown(value)}")
    if not isinstance(labels, dict) or any(isinstance(label, (dict, list)) for label in labels.values()):
        raise RefusedStreams(PointRefusal.LABELS, f"labels must be an object of texts, got {_shown(labels)}")
    texts = {name: otlp_attribute_text(label) for name, label in labels.items()}
    time = _nanoseconds(event.get("time", now))
    if not 0 < time <= latest:
        raise RefusedStreams(PointRefusal.TIME, f"time is far ahead or before 1970, got {_shown(event.get('time'))}")
    try:
        key = (metric + _SEPARATOR + entity_of(texts)).encode()
    except UnicodeEncodeError:  # JSON can say half a character, "\\ud800"
        raise RefusedStreams(PointRefusal.LABELS, f"{_halved(metric, texts)} has half a character") from None
    return key, time, float(value)


def _halved(metric: str, labels: dict[str, str]) -> str:
    """Names the text of an event that UTF-8 cannot write."""
    if not is_encodable_name(metric):
        return "metric"
    return f"label {_shown(next(name for name, text in labels.items() if not is_encodable_name(name + text)))}"


def _nanoseconds(time: Any) -> int:
    if isinstance(time, str):
        try:
            moment = datetime.fromisoformat(time)
        except ValueError:
            raise RefusedStreams(PointRefusal.TIME, f"time must be seconds or RFC 3339, got {_shown(time)}") from None
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000
    if not _is_number(time) or abs(time) > 1e11:
        raise RefusedStreams(PointRefusal.TIME, f"time must be seconds or RFC 3339, got {_shown(time)}")
    return round(time * 1e6) * 1000


def _is_number(value: Any) -> TypeGuard[float]:
    """Says whether a double can hold it: JSON's numbers have any size."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: Any) -> str:
    """Cuts the sent value short: an answer must not be as long as its request."""
    return _SHORT.repr(value)


def _described(key: bytes) -> SeriesDescription:
    metric, _, labels = key.decode().partition(_SEPARATOR)
    return SeriesDescription(metric, PointKind.EVENT, False, json.loads(labels))
