"""What users set about L1: the section `l1` of the configuration file. Apart from L1, which brings pyarrow."""

from dataclasses import dataclass, field

from penstock.spool import Durability
from penstock.units import check_count, parse_bytes, parse_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class L1Config:
    """Merging at the edge: points of one series and minute become one row."""

    max_bytes: int | str = "64Mi"
    """Bytes that it may hold in all its stages; beyond them requests are refused until there is room."""
    flush_interval: float | str = 0.5
    """How long points may gather that no request waits for. Where a request is answered only when it is safe, nothing
    is held back: requests that come together merge."""
    flush_rows: int = 50_000
    """Merged rows in one block at most, about 4 MB."""
    max_metrics: int = 1_000
    """Metrics that a definition names and that are merged by a handler of their own; the others share one."""
    # When a sender is answered: at `memory` as soon as the points are held, else once they are pushed. Not a key of the
    # file: the service takes it from the queue behind L1, `segments.queue.durability`.
    durability: Durability = field(default=Durability.MEMORY, metadata={"is_key": False})

    def __post_init__(self) -> None:
        flush_interval = parse_duration(self.flush_interval, "l1.flush_interval", is_positive=True)
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "l1.max_bytes", least=1))
        object.__setattr__(self, "flush_interval", flush_interval)
        for name in ("flush_rows", "max_metrics"):
            check_count(getattr(self, name), f"l1.{name}", 1)
