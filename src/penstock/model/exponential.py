"""Exponential buckets: counts by order of magnitude, from which any percentile follows within a stated relative error.

Bucket i of scale s holds the values in (b**i, b**(i+1)], b = 2**(2**-s): OpenTelemetry's exponential histogram, so what
comes in as one needs no conversion. The bucket's middle is at most (b-1)/(b+1) away from any value in it, relative to
that value: 0.54 % at scale 6. As one number that sorts like the values themselves:

    part = OFFSET + i     values above zero
    part = 0              zero
    part = -(OFFSET + i)  values below zero
"""

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError

OFFSET = 1 << 20  # beyond the index of the smallest double (2**-1074) at the greatest scale
GREATEST_SCALE = 9
DEFAULT_SCALE = 6
# Typed: for a plain number pyarrow searches for pandas, which takes ten times as long as a short column.
_ZERO, _NO_PART, _FIRST = pa.scalar(0.0, pa.float64()), pa.scalar(0, pa.int64()), pa.scalar(OFFSET - 1, pa.int64())


def percentile_scale_for(relative_error: float) -> int:
    """The coarsest scale that keeps within `relative_error`."""
    for scale in range(GREATEST_SCALE + 1):
        if percentile_relative_error(scale) <= relative_error:
            return scale
    smallest = percentile_relative_error(GREATEST_SCALE)
    raise ConfigError(f"relative_error must be at least {smallest:.5f}, got {relative_error}")


def percentile_relative_error(scale: int) -> float:
    """How far a bucket's middle may be from a value in it, relative to that value."""
    base = math.pow(2.0, math.pow(2.0, -scale))
    return (base - 1) / (base + 1)


def percentile_parts_of(values: Any, scale: int) -> Any:
    """The part of every value of an Arrow array."""
    logs = pc.log2(pc.abs(values))  # -inf for zero, replaced below
    finite = pc.if_else(pc.is_finite(logs), logs, _ZERO)
    width = pa.scalar(float(1 << scale), pa.float64())
    part = pc.add(pc.cast(pc.ceil(pc.multiply(finite, width)), pa.int64()), _FIRST)
    below = pc.if_else(pc.less(values, _ZERO), pc.negate(part), _NO_PART)
    return pc.if_else(pc.greater(values, _ZERO), part, below)


def percentile_part_middles(parts: Any, scale: Any) -> Any:
    """The value that stands for each part of an Arrow array; `scale` is a number or an array of them."""
    magnitude = pc.cast(pc.subtract(pc.abs(parts), OFFSET), pa.float64())
    width = pc.power(2.0, pc.negate(pc.cast(scale, pa.float64())))
    low = pc.power(2.0, pc.multiply(magnitude, width))
    base = pc.power(2.0, width)
    # The harmonic-like middle 2·l·b/(b+1), not the mean: it is equally far, relatively, from both ends.
    middle = pc.multiply(low, pc.divide(pc.multiply(2.0, base), pc.add(base, 1.0)))
    return pc.multiply(pc.cast(pc.sign(parts), pa.float64()), middle)
