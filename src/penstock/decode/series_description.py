"""What a series is, once its raw key is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.model.point import PointKind


@dataclass(frozen=True, slots=True)
class SeriesDescription:
    """What a raw key means."""

    metric: str
    kind: PointKind
    is_cumulative: bool
    labels: Mapping[str, str]
