"""What users set about points, whichever receiver they come through. Sizes are bytes or strings like `16Mi`."""

from dataclasses import dataclass
from typing import Literal

from penstock.decode.rules import parse_rule
from penstock.errors import ConfigError
from penstock.model.name import LONGEST_NAME
from penstock.units import check_count, parse_bytes, parse_duration

Initial = Literal["auto", "keep", "drop"]
_INITIALS = ("auto", "keep", "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeConfig:
    """`intake` in the configuration file: what becomes of points, whichever receiver they come through."""

    resource_attributes: tuple[str, ...] = (
        "service.namespace",
        "service.name",
        "deployment.environment.name",
        "host.name",
    )
    """Resource attributes of OTLP that become labels; the others are left out of the tables."""
    initial_value: Initial = "auto"
    """First value of a cumulative stream: `keep` counts it, `drop` only measures from it, `auto` counts it if the
    stream began after this process did, and not longer ago than `expiry`."""
    expiry: float | str = "1h"
    """A series that is silent for so long is forgotten; a cumulative one is measured anew when it comes back."""
    max_held: int | str = "256Mi"
    """Bytes of all requests that wait for their answer; beyond it new ones are turned away (429)."""
    max_group: int | str = "8Mi"
    """Bytes of the requests that are decoded together: more is faster under load, and answers later."""
    max_nesting: int = 16
    """Depth of an attribute's value (an array of maps of …); deeper is refused."""
    max_labels: int = 64
    """Labels of one series, resource attributes that are kept included; a point with more is refused."""
    max_label_name: int = 256
    """Characters of a label's name; of a metric's, too, but for those never more than 512."""
    max_label_value: int = 4096
    """Characters of a label's value."""
    max_metrics: int = 10_000
    """Metrics by name and kind; points of further ones are refused."""
    max_series_per_metric: int = 100_000
    """Series of one metric in the tables; what goes beyond is added up in one overflow series, and counted."""
    max_streams: int = 1_000_000
    """Streams in all that are known by their labels; points of further ones are refused until others have expired."""
    max_streams_per_metric: int | None = None
    """Streams of one metric; points of further ones are refused. Unset: three quarters of `max_streams`."""
    max_streams_per_sender: int | None = None
    """Streams of one sender: of one token, else of one address. Unset: three quarters of `max_streams`."""
    rules: tuple[str, ...] = ()
    """What becomes of series at the door, before they are counted: `drop METRIC`, `drop_labels METRIC LABEL …`,
    `keep_labels METRIC LABEL …`, `hash_labels METRIC LABEL …`, `rename METRIC NAME`; METRIC may have `*` and `?`. What
    is relayed goes on as it came."""
    max_future: float | str = "1d"
    """How far ahead of our clock a point's time may be: one broken clock must not make tables of the year 2100."""

    repeat_window: float | str = "15m"
    """For so long a request is known: the same bytes of the same sender are answered with success and not counted
    again. 0: every request is counted."""
    max_remembered: int = 1_000_000
    """Requests that are known at most, of all processes, 24 bytes each; the oldest are forgotten first."""

    @property
    def longest_name(self) -> int:
        """Characters of a metric's name."""
        return min(self.max_label_name, LONGEST_NAME)

    @property
    def streams_per_metric(self) -> int:
        return self.max_streams_per_metric or self._most_of_streams

    @property
    def streams_per_sender(self) -> int:
        return self.max_streams_per_sender or self._most_of_streams

    @property
    def _most_of_streams(self) -> int:
        return -(-self.max_streams * 3 // 4)

    @property
    def longest_labels(self) -> int:
        """Bytes of all labels of a point, or of a resource, as they are sent: more is refused unread."""
        return self.max_labels * (self.max_label_name + self.max_label_value + 16)  # 16: what protobuf adds

    def __post_init__(self) -> None:
        _set(self, "resource_attributes", tuple(self.resource_attributes))
        if self.initial_value not in _INITIALS:
            raise ConfigError(
                f"must be one of {', '.join(_INITIALS)}, got {self.initial_value!r}", field="intake.initial_value"
            )
        for name in ("max_held", "max_group"):
            _set(self, name, parse_bytes(getattr(self, name), f"intake.{name}", least=1024))
        for name in ("expiry", "max_future"):
            _set(self, name, parse_duration(getattr(self, name), f"intake.{name}", is_positive=True))
        if float(self.expiry) < 60.0:
            raise ConfigError(f"must be >= 60 s, got {self.expiry:g}", field="intake.expiry")
        for name in ("max_nesting", "max_labels", "max_label_name", "max_label_value"):
            check_count(getattr(self, name), f"intake.{name}", 1)
        window = parse_duration(self.repeat_window, "intake.repeat_window")
        _set(self, "repeat_window", window)
        for name in ("max_remembered", "max_metrics", "max_series_per_metric", "max_streams"):
            check_count(getattr(self, name), f"intake.{name}", 1)
        for name in ("max_streams_per_metric", "max_streams_per_sender"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), f"intake.{name}", 1)
        _set(self, "rules", tuple(self.rules))
        for text in self.rules:
            parse_rule(text)


def _set(config: IntakeConfig, name: str, value: object) -> None:
    object.__setattr__(config, name, value)
