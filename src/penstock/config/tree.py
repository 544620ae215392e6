"""The whole configuration of `penstock run`, as one tree of frozen classes: the reference page is made of it."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from penstock.aggregate.config import L1Config
from penstock.config.destinations import ExporterSection, RelayQueueSection
from penstock.config.relay_loops import refuse_configured_loop
from penstock.decode.config import IntakeConfig
from penstock.errors import ConfigError
from penstock.export.config import ExportQueueConfig
from penstock.receive.config import LOOPBACK, AuthConfig, ReceiversConfig, ServerTlsConfig, problems_of_listener
from penstock.spool import Durability, DurabilitySetting, FullBehavior, FullBehaviorSetting
from penstock.units import parse_address, parse_bytes, parse_duration

DEFAULT_WRITER = "edge"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinesSection:
    """What happens to received requests. With both on, a request is answered when both have it safely."""

    relay: bool = True
    """Forward requests to every exporter that is set."""
    rollup: bool = True
    """Merge points at the edge and seal them into segments for Spark."""

    def __post_init__(self) -> None:
        if not self.relay and not self.rollup:
            raise ConfigError(
                "must be true where relay is false: nothing would happen to received requests", field="rollup"
            )


# Keys of `exporter.queue` that have no effect on the queue before segments, each with what to do instead.
_WITHOUT_EFFECT_ON_SEGMENTS = {
    **dict.fromkeys(("enabled", "type", "always_queue"), "segments always pass a queue on the disk; leave it out"),
    "order": "segments are sealed oldest first; leave it out",
    "max_attempts": "a block is tried until it is sealed; leave it out",
    **dict.fromkeys(
        ("workers", "adaptive_workers", "max_concurrent_sends", "global_send_limit", "pipeline_split"),
        "one thread seals segments; for more throughput raise processes",
    ),
    **dict.fromkeys(
        ("adaptive_enabled", "target_utilization"), "the limits are max_size and max_bytes as they are set"
    ),
    "failover": "what the disk refuses stays in L1, up to l1.max_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentQueueSection(ExportQueueConfig):
    """The durable queue between L1 and segments."""

    path: str | Path = "./rollup-queue"
    """Folder of the queue on disk."""
    max_size: int = 10_000
    """Most blocks."""
    full_behavior: FullBehaviorSetting = FullBehavior.DROP_NEWEST
    durability: DurabilitySetting = Durability.DISK

    REFUSED: ClassVar[Mapping[str, str]] = {
        word: f"{remedy} (exporter.queue has the key)" for word, remedy in _WITHOUT_EFFECT_ON_SEGMENTS.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsSection:
    """Sealed files of merged points: what Spark reads."""

    location: str | Path = "./segments"
    """Their folder, as a path or a `file://` URI. On a cluster one that edge machines and Spark share."""
    writer: str = DEFAULT_WRITER
    """Name in the file names. Machines that share a folder need names of their own, the same over restarts."""
    interval: float | str = 1.0
    """How long blocks gather before they are sealed. Shorter: fresher tables, and more files for Spark to open."""
    max_blocks: int = 1000
    """Blocks in one segment at most."""
    max_bytes: int | str = "64Mi"
    """Bytes of blocks in one segment at most: what one task of Spark reads without spilling."""
    queue: SegmentQueueSection = field(default_factory=SegmentQueueSection)
    path: str | Path | None = field(default=None, metadata={"replaced_by": "location"})
    """the same folder."""

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "location", self.path)
            object.__setattr__(self, "path", None)
        if "://" in str(self.location):
            from penstock.tables.location import local_tables_folder  # brings pyarrow, which a relay does without

            object.__setattr__(self, "location", local_tables_folder(self.location, "location"))
        if self.writer != DEFAULT_WRITER:
            from penstock.model.segment import check_segment_writer  # brings pyarrow, which a relay does without

            check_segment_writer(self.writer)
        object.__setattr__(self, "interval", parse_duration(self.interval, "interval"))
        object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes"))
        _check_at_least(self, max_blocks=1, max_bytes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSection:
    """The job from segments to tables: here, in a process of its own, or elsewhere with `penstock spark run`."""

    enabled: bool = True
    """False on an edge machine: segments are sealed, a job elsewhere reads them."""
    master: str = "local[*]"
    """Where Spark works: `local[N]`, `spark://host:7077`, `yarn`, `k8s://…`."""
    trigger: float | str = 2.0
    """How often a batch begins. A batch costs about 0.2 s even when it is small."""
    checkpoint: str | None = None
    """Where Spark keeps its log; left out: `.checkpoint` inside the segments' folder."""
    max_files: int | None = None
    """Segments in one batch at most."""
    max_rows: int | None = None
    """Rows in one batch at most."""
    max_bytes: int | str | None = None
    """Bytes in one batch at most."""
    keep_segments: float | str | None = "1d"
    """Segments of this age that are in all tables are deleted; null keeps them all."""
    ui: bool = False
    """Spark's own page, on loopback: the plan, the stages and the tasks of each batch."""
    event_log: str | None = None
    """A folder or URI for Spark's event log, which a history server shows; left out: none."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Further settings for Spark: `spark.driver.memory: 2g`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trigger", parse_duration(self.trigger, "trigger"))
        if self.keep_segments is not None:
            object.__setattr__(self, "keep_segments", parse_duration(self.keep_segments, "keep_segments"))
        if self.max_bytes is not None:
            object.__setattr__(self, "max_bytes", parse_bytes(self.max_bytes, "max_bytes"))
        for name in ("max_files", "max_rows", "max_bytes"):
            if getattr(self, name) is not None:
                _check_at_least(self, **{name: 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSection:
    """How long each table keeps its rows, where a metric's definition does not say."""

    minute: float | str = "7d"
    """Rows of the minute table."""
    hour: float | str = "30d"
    """Rows of the hour table."""
    day: float | str = "365d"
    """Rows of the day table."""
    top_n: float | str = "3d"
    """Rows of the top-n table: the largest."""

    def __post_init__(self) -> None:
        for name in ("minute", "hour", "day", "top_n"):
            object.__setattr__(self, name, parse_duration(getattr(self, name), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesSection:
    """Where the minute, hour, day and top-n tables are."""

    location: str = "./tables"
    """A folder (Delta), `parquet:FOLDER` or `postgresql://user@host/database`."""
    maintain_every: float | str = "1h"
    """How often old rows and dead files are deleted, where Spark runs here; 0: never."""
    fold_every: float | str = "5m"
    """How often increments become final rows, where Spark runs here; 0: never."""
    readable_by: Literal["owner", "group", "all"] = "owner"
    """Users of this machine that may read tables in a folder. All other files are for their owner only."""
    keep: KeepSection = field(default_factory=KeepSection)

    def __post_init__(self) -> None:
        object.__setattr__(self, "maintain_every", parse_duration(self.maintain_every, "maintain_every"))
        object.__setattr__(self, "fold_every", parse_duration(self.fold_every, "fold_every"))
        if not self.location:
            raise ConfigError("must name a folder or a database, got ''", field="location")
        if "://" in self.location and not self.location.startswith(("postgresql://", "postgres://")):
            from penstock.tables.location import local_tables_folder  # brings pyarrow, which a relay does without

            local_tables_folder(self.location.removeprefix("parquet:"), "location")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSection:
    """HTTP for operators: `/metrics`, `/healthz`, `/readyz` and a status page at `/`."""

    enabled: bool = True
    """False: no admin port."""
    listen: str = "127.0.0.1:9109"
    """Address and port. Beyond loopback set `tls` and `auth`, or have a private network."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which it is asked, beside addresses, `localhost`, this machine's name and the one in `listen`; `*`:
    any. Others are refused, so that no web page can ask it through a name of its own."""
    tls: ServerTlsConfig | None = None
    """Certificates; without them the connection is not encrypted."""
    auth: AuthConfig | None = None
    """Tokens. With them `/healthz` and `/readyz` give no reasons without one, and the rest is not answered. A browser
    takes one as the password of any user."""

    def __post_init__(self) -> None:
        parse_address(self.listen, "listen")
        object.__setattr__(self, "allowed_hosts", tuple(self.allowed_hosts))

    def problems(self) -> Iterator[ConfigError]:
        """What would keep it from starting here, as files that cannot be read."""
        return problems_of_listener(self.tls, self.auth)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingSection:
    """What is logged to standard error, and how."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "human", "json"] = "auto"
    """`auto`: readable lines in a terminal, one JSON object a line otherwise."""

    @property
    def number(self) -> int:
        return int(logging.getLevelNamesMapping()[self.level.upper()])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownSection:
    """How the service ends."""

    timeout: float | str = 30.0
    """From SIGTERM to the end, for everything together. What is not sent by then stays in its durable queue."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", parse_duration(self.timeout, "timeout"))
        if not self.timeout:
            raise ConfigError("must be > 0, got 0", field="timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Everything that `penstock run` needs."""

    data_dir: str | Path = "."
    """Relative paths are taken from here; left out: where the process was started."""
    processes: int = 1
    """Receiving processes that share the ports. Each has queue folders and a writer of its own."""
    definitions: str | Path | None = field(default=None, metadata={"is_beside_file": True})
    """Metric definitions; left out: every metric is kept by its own labels. A relative path in this file is taken from
    the folder of this file, not from `data_dir`."""
    definitions_warn_after: float | str = "5m"
    """How long a definition may match nothing, or a label of its entity not come, before the log says so, once; 0:
    never."""
    receivers: ReceiversConfig = field(default_factory=ReceiversConfig)
    intake: IntakeConfig = field(default_factory=IntakeConfig)
    pipelines: PipelinesSection = field(default_factory=PipelinesSection)
    exporter: ExporterSection = field(default_factory=ExporterSection)
    exporters: Mapping[str, ExporterSection] = field(default_factory=dict)
    """Further destinations, each under a name. Their queues lie in `./queue-NAME` unless they say otherwise."""
    l1: L1Config = field(default_factory=L1Config)
    segments: SegmentsSection = field(default_factory=SegmentsSection)
    spark: SparkSection = field(default_factory=SparkSection)
    tables: TablesSection = field(default_factory=TablesSection)
    admin: AdminSection = field(default_factory=AdminSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    shutdown: ShutdownSection = field(default_factory=ShutdownSection)

    def __post_init__(self) -> None:
        _check_at_least(self, processes=1)
        warn_after = parse_duration(self.definitions_warn_after, "definitions_warn_after")
        object.__setattr__(self, "definitions_warn_after", warn_after)
        for name, exporter in self.exporters.items():
            if exporter.type == "none":
                raise ConfigError("must say what the destination speaks, got 'none'", field=f"exporters.{name}.type")
        seen: dict[str, str] = {}
        for key, path in self._queue_paths():
            place = os.path.normpath(path)
            if place in seen:
                raise ConfigError(f"must be a folder of its own, got {str(path)!r}, which {seen[place]} has", field=key)
            seen[place] = key
        for name, exporter in self.relays().items():
            try:
                refuse_configured_loop(exporter, self.receivers)
            except ConfigError as error:
                raise error.within(self._key_of(name)) from error

    def notes(self) -> Iterator[str]:
        """Warnings: settings that are valid but probably not intended."""
        receivers = self.receivers.enabled()
        if not receivers:
            yield "no receiver is enabled: nothing comes in here"
        for name, receiver in receivers.items():
            for problem in receiver.problems():
                yield str(problem.within(f"receivers.{name}"))
        if self.admin.enabled:
            for problem in self.admin.problems():
                yield str(problem.within("admin"))
            if parse_address(self.admin.listen, "admin.listen")[0] not in LOOPBACK and not self.admin.auth:
                yield "admin.listen is open to the network and admin.auth is not set: every client may look"
        if not self.relays() and self.pipelines.relay and not self.pipelines.rollup:
            yield "pipelines.rollup is false and no exporter is set: requests are taken and go nowhere"
        if self.exporter.type == "none" and self.exporter.url:
            yield "exporter.url is set and exporter.type is none: nothing is sent there. Say what it speaks"
        for name, exporter in self.relays().items():
            for key in exporter.keys_without_effect():
                yield f"{self._key_of(name)}.{key} has no effect on a destination of type {exporter.type}"
            if exporter.queue.durability is Durability.MEMORY:
                yield f"{name}: queue.durability is memory, so kill -9 loses requests that were answered for"
            if exporter.queue.full_behavior is FullBehavior.DROP_OLDEST:
                yield f"{name}: queue.full_behavior is drop_oldest, so a full queue loses what was answered for"

    def relays(self) -> dict[str, ExporterSection]:
        """The destinations that requests are relayed to, by name; the one of `exporter` is called `relay`."""
        if not self.pipelines.relay:
            return {}
        single = {"relay": self.exporter} if self.exporter.type != "none" else {}
        return {**single, **self.exporters}

    def queue_path(self, name: str) -> Path:
        """Where the queue of that destination lies."""
        path = Path(self.relays()[name].queue.path)
        is_default = path == Path(RelayQueueSection().path)
        return self.resolved(f"./queue-{name}" if is_default and name in self.exporters else path)

    def _queue_paths(self) -> Iterator[tuple[str, Path]]:
        if self.pipelines.rollup:
            yield "segments.queue.path", self.resolved(self.segments.queue.path)
        for name, exporter in self.relays().items():
            if exporter.queue.type == "disk" and exporter.queue.enabled:
                yield f"{self._key_of(name)}.queue.path", self.queue_path(name)

    def _key_of(self, name: str) -> str:
        """The section of that destination."""
        return f"exporters.{name}" if name in self.exporters else "exporter"

    def resolved(self, path: str | Path) -> Path:
        return Path(self.data_dir) / path

    @property
    def definitions_path(self) -> Path | None:
        return None if self.definitions is None else self.resolved(self.definitions)

    @property
    def tables_location(self) -> str:
        """Where the tables are, with a relative folder taken from `data_dir`."""
        location = self.tables.location
        if location.startswith(("postgresql://", "postgres://")) or "://" in location:
            return location
        scheme, found, folder = location.partition("parquet:")
        return f"parquet:{self.resolved(folder)}" if found and not scheme else str(self.resolved(location))


def _check_at_least(config: object, **bounds: int) -> None:
    for name, least in bounds.items():
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"must be >= {least}, got {value!r}", field=name)
