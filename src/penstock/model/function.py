"""Metric functions, each defined once: an entry of `FUNCTIONS` holds everything that any engine asks about it.

All of them share the states of `penstock.model.partial` (count, sum, min, max), because each is one of three things:

    a point counted as it is     avg, sum, count, min, max, cpm, sum_per_min, top_n
    a point counted as a score   percent (does it match: 0 or 1), apdex (1, ½ or 0), rate (numerator over denominator)
    a point filed under a part   percentile (exponential bucket), histogram (bound), latest (its own time),
                                 distinct (register of a sketch; see penstock.model.distinct)

The text of a function travels in every row, so a row says by itself what it means. Rows of a function whose parameters
were changed never mix with older ones. How to add a function: docs/reference/functions.md.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.model.distinct import DEFAULT_LG_K, GREATEST, SMALLEST, hll, lg_k_for
from penstock.model.exponential import DEFAULT_SCALE, GREATEST_SCALE, percentile_parts_of, percentile_scale_for

Parameters = tuple[float, ...]
State = Literal["count", "sum", "min", "max"]
RANKS = (50, 75, 90, 95, 99)
TOP_N = 20  # records that a top_n keeps where its definition names no number
_TEXT = re.compile(r"([a-z_]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True, slots=True)
class Final:
    """A final value: `state` ÷ `per` × `factor`. Both engines build it from this."""

    state: State
    per: Literal["", "count", "minutes"] = ""
    factor: float = 1.0


MEAN = Final("sum", per="count")
PER_CENT = Final("sum", per="count", factor=100.0)
COUNT_PER_MINUTE = Final("count", per="minutes")


def _no_parameters(parameters: Parameters) -> str:
    return "takes no parameters" if parameters else ""


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """The definition of one metric function.

    final            the value that readers see; None: estimated from all parts of a series, see `counts_distinct`
    complaint        the fault in parameters; empty if there is none
    default          the parameters of a text that has none
    keys             keys beside `function` in a definition file, and whether each must be there
    read             makes the parameters from those keys
    part             files a point under a part, by its value or its time
    score            what a point counts as, in place of its value
    is_matched       a point counts as 1 if it meets the definition's condition, else as 0
    has_denominator  only points that meet a second condition are counted
    counts_distinct  the parts are the registers of a sketch, filled from labels
    keeps_newest     only the newest part of a series matters
    keeps_records    the parameter's number of greatest records is kept beside each series
    has_percentiles  the parts are exponential buckets, which give a value at any rank
    has_bounds       the parameters are bounds, and the parts lie between them
    """

    final: Final | None
    complaint: Callable[[Parameters], str] = _no_parameters
    default: Parameters = ()
    keys: Mapping[str, bool] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], Parameters] = lambda entry: ()
    part: Callable[[Parameters, Any, Any], Any] | None = None
    score: Callable[[Parameters, Any], Any] | None = None
    is_matched: bool = False
    has_denominator: bool = False
    counts_distinct: bool = False
    keeps_newest: bool = False
    keeps_records: bool = False
    has_percentiles: bool = False
    has_bounds: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether points of one series and minute may lie in different parts."""
        return self.part is not None or self.counts_distinct

    @property
    def is_score(self) -> bool:
        """Whether the states are those of scores, not of the points' values."""
        return self.score is not None or self.is_matched

    @property
    def is_ranked(self) -> bool:
        """Whether the greatest values of a series make a top list: those of scores and registers mean nothing."""
        return not (self.is_score or self.counts_distinct or self.keeps_newest)

    @property
    def takes_values(self) -> bool:
        """Whether a point's entity, time and value are all that counts."""
        return not (self.is_score or self.counts_distinct or self.keeps_records)

    @property
    def is_per_minute(self) -> bool:
        return self.final is not None and self.final.per == "minutes"


def _whole(parameters: Parameters, least: float, greatest: float = math.inf) -> bool:
    return len(parameters) == 1 and parameters[0].is_integer() and least <= parameters[0] <= greatest


def _percentile_complaint(parameters: Parameters) -> str:
    return "" if _whole(parameters, 0, GREATEST_SCALE) else f"needs a whole scale of 0 to {GREATEST_SCALE}"


def _percentile_parameters(entry: Mapping[str, Any]) -> Parameters:
    return (float(percentile_scale_for(float(entry.get("relative_error", 0.01)))),)


def _percentile_part(parameters: Parameters, values: Any, times: Any) -> Any:
    return percentile_parts_of(values, int(parameters[0]))


def _histogram_complaint(parameters: Parameters) -> str:
    ascending = all(low < high for low, high in pairwise(parameters))
    return "" if parameters and ascending and all(map(math.isfinite, parameters)) else "needs ascending bounds"


def _histogram_part(parameters: Parameters, values: Any, times: Any) -> Any:
    """How many bounds a value exceeds."""
    part = pa.repeat(pa.scalar(0, pa.int64()), len(values))
    for bound in parameters:
        part = pc.add(part, pc.cast(pc.greater(values, pa.scalar(bound, pa.float64())), pa.int64()))
    return part


def _latest_part(parameters: Parameters, values: Any, times: Any) -> Any:
    return pc.cast(times, pa.int64())


def _apdex_complaint(parameters: Parameters) -> str:
    return "" if len(parameters) == 1 and 0 < parameters[0] < math.inf else "needs a threshold above 0"


def _apdex_score(parameters: Parameters, values: Any) -> Any:
    """1 up to the threshold, ½ up to four times as much, 0 beyond. Halves add without rounding."""
    threshold = parameters[0]
    good, bad, one, half, none = (pa.scalar(x, pa.float64()) for x in (threshold, 4 * threshold, 1.0, 0.5, 0.0))
    return pc.if_else(pc.less_equal(values, good), one, pc.if_else(pc.less_equal(values, bad), half, none))


def _distinct_complaint(parameters: Parameters) -> str:
    fits = _whole(parameters, SMALLEST, GREATEST)
    return "" if fits else f"needs a whole size (lg_k) of {SMALLEST} to {GREATEST}"


def _distinct_parameters(entry: Mapping[str, Any]) -> Parameters:
    hll()  # a missing library is reported here, not at the first point
    return (float(lg_k_for(float(entry.get("relative_error", 0.02)))),)


def _top_n_complaint(parameters: Parameters) -> str:
    return "" if _whole(parameters, 1) else "needs how many, at least 1"


FUNCTIONS: dict[str, FunctionSpec] = {
    "avg": FunctionSpec(MEAN),
    "sum": FunctionSpec(Final("sum")),
    "count": FunctionSpec(Final("count")),
    "min": FunctionSpec(Final("min")),
    "max": FunctionSpec(Final("max")),
    "cpm": FunctionSpec(COUNT_PER_MINUTE),
    "sum_per_min": FunctionSpec(Final("sum", per="minutes")),
    "percent": FunctionSpec(PER_CENT, keys={"match": True}, is_matched=True),
    "rate": FunctionSpec(
        PER_CENT, keys={"numerator": True, "denominator": True}, is_matched=True, has_denominator=True
    ),
    "apdex": FunctionSpec(
        MEAN,
        complaint=_apdex_complaint,
        keys={"threshold": True},
        read=lambda entry: (float(entry["threshold"]),),
        score=_apdex_score,
    ),
    "percentile": FunctionSpec(
        MEAN,
        complaint=_percentile_complaint,
        default=(float(DEFAULT_SCALE),),
        keys={"relative_error": False},
        read=_percentile_parameters,
        part=_percentile_part,
        has_percentiles=True,
    ),
    "histogram": FunctionSpec(
        MEAN,
        complaint=_histogram_complaint,
        keys={"bounds": True},
        read=lambda entry: tuple(map(float, entry["bounds"])),
        part=_histogram_part,
        has_bounds=True,
    ),
    "latest": FunctionSpec(Final("max"), part=_latest_part, keeps_newest=True),
    "top_n": FunctionSpec(
        Final("max"),
        complaint=_top_n_complaint,
        keys={"n": False, "record": False},
        read=lambda entry: (float(entry.get("n", TOP_N)),),
        keeps_records=True,
    ),
    "distinct": FunctionSpec(
        None,
        complaint=_distinct_complaint,
        default=(float(DEFAULT_LG_K),),
        keys={"of": True, "relative_error": False},
        read=_distinct_parameters,
        counts_distinct=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A metric function with its parameters; `str` gives the text that travels, `parse` reads it."""

    name: str
    parameters: Parameters = ()

    def __post_init__(self) -> None:
        if self.name not in FUNCTIONS:
            raise ConfigError(f"function must be one of {', '.join(FUNCTIONS)}, got {self.name!r}")
        if complaint := self.spec.complaint(self.parameters):
            raise ConfigError(f"function {self.name}: {complaint}, got {_listed(self.parameters)}")

    def __str__(self) -> str:
        return f"{self.name}({_listed(self.parameters)})" if self.parameters else self.name

    @staticmethod
    def parse(text: str) -> "Function":
        """The function of that text; without parameters it has its default ones."""
        match = _TEXT.fullmatch(text.replace(" ", ""))
        if not match:
            raise ConfigError(f"function must be a name or name(numbers), got {text!r}")
        try:
            parameters = tuple(float(part) for part in (match[2] or "").split(",") if part)
        except ValueError:
            raise ConfigError(f"function must have numbers in its brackets, got {text!r}") from None
        if not parameters and match[1] in FUNCTIONS:
            parameters = FUNCTIONS[match[1]].default
        return Function(match[1], parameters)

    @property
    def spec(self) -> FunctionSpec:
        """Its definition."""
        return FUNCTIONS[self.name]

    def parts(self, values: Any, times: Any) -> Any:
        """The part of every point; only asked of a function that files points by value or time."""
        assert self.spec.part is not None
        return self.spec.part(self.parameters, values, times)

    def scores(self, values: Any) -> Any:
        """What every point counts as: its value, where the function does not score."""
        return values if self.spec.score is None else self.spec.score(self.parameters, values)


def function_names_where(claim: Callable[[FunctionSpec], bool]) -> list[str]:
    """The names of the functions of which `claim` holds, for engines that compare texts."""
    return [name for name, spec in FUNCTIONS.items() if claim(spec)]


def functions_in(column: Any) -> Iterator[tuple[str, Function]]:
    """The distinct texts of a column of functions, each with its function."""
    return ((text, Function.parse(text)) for text in pc.unique(column).to_pylist())


def is_function(column: Any, claim: Callable[[FunctionSpec], bool]) -> Any:
    """For each row of a column of functions, whether `claim` holds of its function."""
    texts = [text for text, function in functions_in(column) if claim(function.spec)]
    return pc.is_in(column.cast(pa.string()), pa.array(texts, pa.string()))


def _listed(parameters: Parameters) -> str:
    return ",".join(map(_shown, parameters))


def _shown(number: float) -> str:
    """A whole number in digits: Spark finds the n of a top-n by them. Others as short as they go."""
    if number.is_integer() and abs(number) < 2**53:
        return str(int(number))
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


AVG = Function("avg")
