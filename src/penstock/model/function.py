"""Metric functions, each defined once: what a point becomes, and which final value the merged states give.

All of them share the states of `penstock.model.partial` (count, sum, min, max), because each is one of three things:

    a point counted as it is     avg, sum, count, min, max, cpm, sum_per_min, top_n
    a point counted as a score   percent (does it match: 0 or 1), apdex (1, ½ or 0), rate (numerator over denominator)
    a point filed under a part   percentile (exponential bucket), histogram (bound), latest (its own time),
                                 distinct (register of a sketch; see penstock.model.distinct)

The text of a function travels in every row, so a row says by itself what it means; and rows of a function whose
parameters were changed never mix with older ones.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.model.distinct import DEFAULT_LG_K, GREATEST, SMALLEST
from penstock.model.exponential import DEFAULT_SCALE, GREATEST_SCALE, parts_of
from penstock.model.point import Kind

State = Literal["count", "sum", "min", "max"]
_TEXT = re.compile(r"([a-z_]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class Final:
    """A final value: `state` ÷ `per` × `factor`. Both engines build it from this."""

    state: State
    per: Literal["", "count", "minutes"] = ""
    factor: float = 1.0


FINALS: dict[str, Final] = {
    "avg": Final("sum", per="count"),
    "sum": Final("sum"),
    "count": Final("count"),
    "min": Final("min"),
    "max": Final("max"),
    "cpm": Final("count", per="minutes"),
    "sum_per_min": Final("sum", per="minutes"),
    "percent": Final("sum", per="count", factor=100.0),
    "rate": Final("sum", per="count", factor=100.0),
    "apdex": Final("sum", per="count"),
    "percentile": Final("sum", per="count"),
    "histogram": Final("sum", per="count"),
    "latest": Final("max"),
    "top_n": Final("max"),
}
FUNCTIONS = (*FINALS, "distinct")  # the last is an estimate from all parts of a series
RANKS = (50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Function:
    """A metric function with its parameters; `str` gives the text that travels, `parse` reads it."""

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in FUNCTIONS:
            raise ConfigError(f"function must be one of {', '.join(FUNCTIONS)}, got {self.name!r}")
        complaint = _complaint(self.name, self.parameters)
        if complaint:
            raise ConfigError(f"function {self.name}: {complaint}, got {_listed(self.parameters)}")

    def __str__(self) -> str:
        return f"{self.name}({_listed(self.parameters)})" if self.parameters else self.name

    @staticmethod
    def parse(text: str) -> "Function":
        """The function of that text; a percentile or distinct without a parameter has the default precision."""
        match = _TEXT.fullmatch(text.replace(" ", ""))
        if not match:
            raise ConfigError(f"function must be a name or name(numbers), got {text!r}")
        try:
            parameters = tuple(float(part) for part in (match[2] or "").split(",") if part)
        except ValueError:
            raise ConfigError(f"function must have numbers in its brackets, got {text!r}") from None
        parameters = parameters or _DEFAULTS.get(match[1], ())
        return Function(match[1], parameters)

    @property
    def splits(self) -> bool:
        """Whether points of one series and minute may lie in different parts."""
        return self.name in ("percentile", "histogram", "latest", "distinct")

    def parts(self, values: Any, times: Any) -> Any:
        """The part of every point; only asked of a function that splits, and not of `distinct`: there labels say it."""
        if self.name == "percentile":
            return parts_of(values, int(self.parameters[0]))
        if self.name == "latest":
            return pc.cast(times, pa.int64())
        bounds = [pa.scalar(bound, pa.float64()) for bound in self.parameters]
        part = pc.cast(pc.greater(values, bounds[0]), pa.int64())
        for bound in bounds[1:]:
            part = pc.add(part, pc.cast(pc.greater(values, bound), pa.int64()))
        return part

    def score(self, values: Any) -> Any:
        """Apdex: 1 up to the threshold, ½ up to four times as much, 0 beyond. Halves add without rounding."""
        threshold = self.parameters[0]
        good, bad, one, half, none = (pa.scalar(x, pa.float64()) for x in (threshold, 4 * threshold, 1.0, 0.5, 0.0))
        return pc.if_else(pc.less_equal(values, good), one, pc.if_else(pc.less_equal(values, bad), half, none))


def _complaint(name: str, parameters: tuple[float, ...]) -> str:
    if name == "histogram":
        ascending = all(low < high for low, high in pairwise(parameters))
        return "" if parameters and ascending and all(map(math.isfinite, parameters)) else "needs ascending bounds"
    if name == "percentile":
        fits = len(parameters) == 1 and parameters[0].is_integer() and 0 <= parameters[0] <= GREATEST_SCALE
        return "" if fits else f"needs a whole scale of 0 to {GREATEST_SCALE}"
    if name == "apdex":
        return "" if len(parameters) == 1 and 0 < parameters[0] < math.inf else "needs a threshold above 0"
    if name == "distinct":
        fits = len(parameters) == 1 and parameters[0].is_integer() and SMALLEST <= parameters[0] <= GREATEST
        return "" if fits else f"needs a whole size (lg_k) of {SMALLEST} to {GREATEST}"
    if name == "top_n":
        fits = len(parameters) == 1 and parameters[0].is_integer() and parameters[0] >= 1
        return "" if fits else "needs how many, at least 1"
    return "takes no parameters" if parameters else ""


def _listed(parameters: tuple[float, ...]) -> str:
    return ",".join(map(_shown, parameters))


def _shown(number: float) -> str:
    """A whole number in digits: Spark finds the n of a top-n by them. Others as short as they go."""
    if number.is_integer() and abs(number) < 2**53:
        return str(int(number))
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


_DEFAULTS = {"percentile": (float(DEFAULT_SCALE),), "distinct": (float(DEFAULT_LG_K),)}
AVG = Function("avg")
# What is made of a metric that nobody defined. The states of avg and sum are the same, those of a percentile hold them.
UNDEFINED = {
    Kind.GAUGE: AVG,
    Kind.COUNTER: Function("sum"),
    Kind.DISTRIBUTION: Function.parse("percentile"),
}
