"""What senders say of a metric beside its points: type, unit and description. It travels in the metadata of blocks."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

LONGEST_UNIT = 64
LONGEST_TEXT = 1024  # characters of a description that are kept


@dataclass(frozen=True, slots=True)
class MetricDescription:
    """What is known of a metric; empty is unknown."""

    type: str = ""
    unit: str = ""
    description: str = ""

    def updated_by(self, newer: "MetricDescription") -> "MetricDescription":
        """What both say; where they differ, the newer holds."""
        return MetricDescription(
            newer.type or self.type, newer.unit or self.unit, newer.description or self.description
        )


Descriptions = Mapping[str, MetricDescription]  # by metric


def text_of(raw: bytes, longest: int = LONGEST_TEXT) -> str:
    """A text as it came, cut; what is no UTF-8 or has a NUL is left out."""
    return raw.decode("utf-8", "ignore").replace("\0", "")[:longest]


def to_json(descriptions: Descriptions) -> bytes:
    """Descriptions as bytes; none as none."""
    if not descriptions:
        return b""
    return json.dumps({metric: asdict(one) for metric, one in descriptions.items()}, ensure_ascii=False).encode()


def from_json(text: bytes | str) -> dict[str, MetricDescription]:
    return {metric: MetricDescription(**one) for metric, one in json.loads(text).items()} if text else {}


def joined(older: Descriptions, newer: Descriptions) -> dict[str, MetricDescription]:
    """What both say of each metric."""
    nothing = MetricDescription()
    return {**older, **{metric: older.get(metric, nothing).updated_by(one) for metric, one in newer.items()}}
