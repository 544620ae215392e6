"""Where a percentile is less exact than its function: its points came as a sender's buckets, and those are wide.

Every value lies in its part, so the least and the greatest of plain points lie in the first and the last part. A
histogram's bucket stands in the part of its middle, with its ends as min and max: those lie outside. The true value at
a rank is then between the values that stand for the buckets before and after it.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.exponential import percentile_part_middles, percentile_parts_of
from penstock.model.finals import ORDER
from penstock.model.function import functions_in
from penstock.model.grouping import group_starts
from penstock.model.partial import SERIES, merged

Range = tuple[float, float]
_NEXT_TO = 1  # parts: the end of a bucket as fine as ours is the end of the part beside it


def percentile_ranges_of_partials(partials: pa.Table, ranks: Sequence[float]) -> list[list[Range | None]]:
    """For each series and bucket, in the order of `finals.with_finals`, and each rank: between what the value is.

    None where the value is as exact as the function says.
    """
    partials = merged(partials)
    partials = partials.filter(pc.is_null(partials["record"])).sort_by([*ORDER, ("part", "ascending")])
    starts = group_starts(partials, SERIES)
    found: list[list[Range | None]] = []
    functions = dict(functions_in(partials["function"]))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), partials.num_rows]):
        own = partials.slice(start, end - start)
        function = functions[own["function"][0].as_py()]
        ranges: list[Range | None] = [None] * len(ranks)
        if function.spec.has_percentiles:
            ranges = _ranges(own, int(function.parameters[0]), ranks)
        found.append(ranges)
    return found


def _ranges(own: pa.Table, scale: int, ranks: Sequence[float]) -> list[Range | None]:
    least, greatest = pc.min(own["min"]), pc.max(own["max"])
    first, last = percentile_parts_of(pa.array([least.as_py(), greatest.as_py()], pa.float64()), scale).to_pylist()
    parts, upto = own["part"].to_numpy(), np.cumsum(own["count"].to_numpy())
    if first >= parts[0] - _NEXT_TO and last <= parts[-1] + _NEXT_TO:
        return [None] * len(ranks)
    values = [least.as_py(), *percentile_part_middles(own["part"], scale).to_pylist(), greatest.as_py()]
    found: list[Range | None] = []
    for rank in ranks:
        place = int(np.searchsorted(upto, np.clip(np.ceil(upto[-1] * float(rank) / 100), 1, upto[-1])))
        found.append((values[place], values[place + 2]))
    return found
