"""Every flag and key that a user of the system we follow knows is here under its name, and does something."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.config.destinations import RelayQueueSection
from penstock.config.load import load
from penstock.config.schema import ConfigKey, schema_of
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError
from penstock.export import (
    AdaptiveWorkersConfig,
    BackoffConfig,
    BreakerConfig,
    FailoverConfig,
    PipelineSplitConfig,
    SendQueue,
    SendQueueConfig,
)
from penstock.machine import cores, machine_memory, usable_memory
from penstock.spool import Durability, FastQueueConfig, FullBehavior
from penstock.testing import MemoryExporter
from tests.export.quick import quick

SEED_FLAGS = """
queue-enabled true                    queue-type disk
queue-path ./queue                    queue-max-size 10000
queue-max-bytes 1Gi                   queue-full-behavior drop_oldest
queue-always-queue true               queue-workers 0
queue-inmemory-blocks 2048            queue-chunk-size 512Mi
queue-meta-sync 1s                    queue-stale-flush 30s
queue-write-buffer-size 256Ki         queue-compression snappy
queue-retry-interval 5s               queue-max-retry-delay 5m
queue-backoff-enabled true            queue-backoff-multiplier 2.0
queue-circuit-breaker-enabled true    queue-circuit-breaker-threshold 5
queue-circuit-breaker-reset-timeout 30s
queue-memory-percent 0.10             memory-limit-ratio 0.85
queue-adaptive-enabled true           queue-target-utilization 0.85
"""

SEED_YAML = """
type: disk
enabled: true
path: ./queue
max_size: 10000
max_bytes: 1Gi
full_behavior: drop_oldest
inmemory_blocks: 2048
chunk_size: 512Mi
meta_sync_interval: 1s
write_buffer_size: 256Ki
compression: snappy
always_queue: true
workers: 0
backoff: {enabled: true, multiplier: 2.0}
circuit_breaker: {enabled: true, threshold: 5, reset_timeout: 30s}
pipeline_split: {enabled: false, preparer_count: 0, sender_count: 0, channel_size: 256}
adaptive_workers: {enabled: false, min_workers: 1, max_workers: 0}
max_concurrent_sends: 4
"""


# -- flags and keys --------------------------------------------------------------------------------------------------


def seed_flags() -> list[tuple[str, str]]:
    return re.findall(r"([a-z-]+) (\S+)", SEED_FLAGS)


def keys() -> list[ConfigKey]:
    return list(schema_of(RelayQueueSection, ("exporter", "queue")).walk())


def loaded(text: str = "", **flags: str) -> RelayQueueSection:
    """`exporter.queue` of these lines of a file, and of these flags."""
    document = "exporter:\n  queue:\n" + "".join(f"    {line}\n" for line in text.splitlines())
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return load(ServiceConfig, text=document, flags=given).config.exporter.queue


@pytest.mark.parametrize(("name", "default"), seed_flags())
def test_every_flag_exists_and_its_default_is_the_known_one(name: str, default: str) -> None:
    if name == "queue-full-behavior":
        assert SendQueueConfig().full_behavior is FullBehavior(
            default
        )  # a relay refuses the newest: its senders are told
        return
    assert _plain(loaded(**{name: default})) == _plain(loaded())


def _plain(config: SendQueueConfig) -> dict[str, Any]:
    """Both spellings of a size or a duration are the same setting."""
    queue = config.queue_config(2**34)
    own = {name: getattr(config, name) for name in config.__dataclass_fields__}
    own |= {name: getattr(queue, name) for name in ("chunk_size", "meta_sync_interval", "stale_flush",
                                                    "write_buffer_size", "max_size")}  # fmt: skip
    return own


def test_every_key_exists_and_its_default_is_the_known_one() -> None:
    given = loaded(SEED_YAML)
    assert _plain(given) == _plain(replace(RelayQueueSection(), full_behavior=FullBehavior.DROP_OLDEST))


def test_every_setting_is_a_flag_of_the_command_under_its_short_name() -> None:
    shown = CliRunner().invoke(main, ["relay", "--help"]).output
    for key in keys():
        assert f"{key.short_flag} " in shown


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"wrokers": 3}, r"exporter.queue.wrokers is not a setting; did you mean workers\?"),
        ({"backoff": {"factor": 2}}, r"exporter.queue.backoff.factor is not a setting"),
        ({"backoff": 3}, r"exporter.queue.backoff must be a mapping of keys, got 3"),
        ({"enabled": "maybe"}, r"exporter.queue.enabled must be true or false, got 'maybe'"),
        ({"workers": "many"}, r"exporter.queue.workers must be a whole number, got 'many'"),
        ({"type": "tape"}, r"exporter.queue.type must be one of memory, disk, got 'tape'"),
        ({"path": 5}, r"exporter.queue.path must be a path, got 5"),
        ({"workers": -1}, r"exporter.queue.workers must be a whole number >= 0, got -1"),
        ({"max_size": "x"}, r"exporter.queue.max_size must be a whole number, got 'x'"),
        ({"max_attempts": "x"}, r"exporter.queue.max_attempts must be a whole number, got 'x'"),
        ({"memory_percent": 1.5}, r"exporter.queue.memory_percent must be a number within 0 and 1, got 1.5"),
        ({"memory_percent": "a tenth"}, r"exporter.queue.memory_percent must be a number, got 'a tenth'"),
        ({"target_utilization": 0.0}, r"exporter.queue.target_utilization must be > 0, got 0"),
        ({"memory_limit_ratio": 0}, r"exporter.queue.memory_limit_ratio must be > 0, got 0"),
        ({"circuit_breaker": {"enabled": "off"}}, r"exporter.queue.circuit_breaker.enabled must be true or false, got"),
        ({"full_behavior": "explode"}, r"exporter.queue.full_behavior must be one of .*'explode'"),
        ({"retry_interval": "10m"}, r"exporter.queue.max_retry_delay must be >= retry_interval = 600.0, got 300.0"),
        (
            {"backoff": {"multiplier": float("nan")}},
            r"exporter.queue.backoff.multiplier must be a number >= 1, got nan",
        ),
        ({"backoff": {"jitter": "some"}}, r"exporter.queue.backoff.jitter must be a number, got 'some'"),
        ({"circuit_breaker": {"threshold": 2.5}}, r"circuit_breaker.threshold must be a whole number, got 2.5"),
        ({"adaptive_workers": {"min_workers": "few"}}, r"adaptive_workers.min_workers must be a whole number"),
        ({"adaptive_workers": {"max_workers": -1}}, r"adaptive_workers.max_workers must be a whole number >= 0"),
        ({"pipeline_split": {"channel_size": 0}}, r"pipeline_split.channel_size must be a whole number >= 1, got 0"),
        ({"failover": {"max_size": 0}}, r"failover.max_size must be a whole number >= 1, got 0"),
        ({"failover": {"max_bytes": 0}}, r"failover.max_bytes must be >= 1 bytes, got 0"),
        ({"failover": {"drain_interval": "0s"}}, r"failover.drain_interval must be > 0, got '0s'"),
        ({"failover": {"drain_batch": "x"}}, r"failover.drain_batch must be a whole number, got 'x'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ServiceConfig, text=yaml.safe_dump({"exporter": {"queue": mapping}}))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SendQueueConfig, {"enabled": "no"}, "enabled must be true or false, got 'no'"),
        (SendQueueConfig, {"always_queue": 1}, "always_queue must be true or false, got 1"),
        (SendQueueConfig, {"adaptive_enabled": None}, "adaptive_enabled must be true or false, got None"),
        (BackoffConfig, {"enabled": "no"}, "backoff.enabled must be true or false"),
        (BreakerConfig, {"enabled": "no"}, "circuit_breaker.enabled must be true or false"),
        (PipelineSplitConfig, {"enabled": "no"}, "pipeline_split.enabled must be true or false"),
        (AdaptiveWorkersConfig, {"enabled": "no"}, "adaptive_workers.enabled must be true or false"),
        (FailoverConfig, {"enabled": "no"}, "failover.enabled must be true or false"),
        (SendQueueConfig, {"backoff": {"jitter": 0}}, "backoff must be a BackoffConfig, got {'jitter': 0}"),
        (SendQueueConfig, {"failover": None}, "failover must be a FailoverConfig, got None"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name_in_a_program_too(
    kind: type[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**settings)


@pytest.mark.parametrize("text", ["queue-enabled perhaps", "queue-workers many"])
def test_a_flag_that_makes_no_sense_is_refused_by_its_name(text: str) -> None:
    name, value = text.split()
    ran = CliRunner().invoke(main, ["relay", "--to", "console", f"--{name}", value])
    assert ran.exit_code == 2
    assert f"--{name}: exporter.queue." in ran.output


# -- settings whose effect no other test shows -----------------------------------------------------------------------


def test_zeros_stand_for_multiples_of_the_cores() -> None:
    config = SendQueueConfig()
    counts = (config.worker_count(), config.preparer_count(), config.sender_count(), config.most_workers())
    assert counts == (2 * cores(), cores(), 2 * cores(), 4 * cores())
    assert config.send_limit() == 8 * cores()


def test_adaptive_workers_end_where_the_configuration_says() -> None:
    assert SendQueueConfig(adaptive_workers=AdaptiveWorkersConfig(max_workers=3)).most_workers() == 3
    assert SendQueueConfig(adaptive_workers=AdaptiveWorkersConfig(min_workers=1000)).most_workers() == 1000


def test_the_failovers_defaults_are_the_known_ones() -> None:
    known = FailoverConfig(enabled=True, max_size=1000, max_bytes="256MB", drain_interval="5s", drain_batch=10)
    assert SendQueueConfig().failover == known


def test_percentages_bound_what_the_queue_holds_in_memory() -> None:
    config = SendQueueConfig(memory_percent=0.10, memory_limit_ratio=0.85)
    gigabyte = 2**30
    assert config.memory_budget(gigabyte) == int(0.085 * gigabyte)
    assert config.memory_bytes(gigabyte) == int(0.085 * gigabyte)
    assert config.memory_bytes(100 * gigabyte) == gigabyte  # max_bytes is less
    assert config.queue_config(gigabyte).inmemory_bytes == int(0.085 * gigabyte)
    assert config.memory_budget() == int(usable_memory() * 0.85 * 0.10)
    assert SendQueueConfig(memory_percent=0.0).queue_config(gigabyte).inmemory_bytes is None


def test_a_queue_in_memory_keeps_to_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.export.config.usable_memory", lambda: 1000)
    sender = SendQueue.open(MemoryExporter(), quick(type="memory", memory_percent=0.5, memory_limit_ratio=0.5))
    assert sender.stats().queue.max_bytes == 250
    sender.close()


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_the_containers_not_the_machines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("1073741824")
    assert usable_memory(tmp_path) == 2**30
    (tmp_path / name).write_text(str(machine_memory() + 1))
    assert usable_memory(tmp_path) == usable_memory(tmp_path / "none") == machine_memory()


def test_cores_are_the_containers_not_the_machines(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert cores(tmp_path) == 1


def test_the_queues_own_settings_reach_the_queue(tmp_path: Path) -> None:
    config = SendQueueConfig(
        path=tmp_path / "queue", max_bytes="5Mi", inmemory_blocks=3, chunk_size="1Mi", meta_sync_interval="2s",
        stale_flush="3s", write_buffer_size="4Ki", compression="zstd", durability=Durability.DISK, max_attempts=9,
        order="freshest", full_behavior=FullBehavior.DROP_NEWEST, block_timeout="4s", max_size=77, memory_percent=0.0,
    )  # fmt: skip
    sender = SendQueue.open(MemoryExporter(), config)
    queue = FastQueueConfig(
        max_bytes="5Mi", inmemory_blocks=3, chunk_size="1Mi", meta_sync_interval="2s", stale_flush="3s",
        write_buffer_size="4Ki", compression="zstd", durability=Durability.DISK, max_attempts=9, order="freshest",
        full_behavior=FullBehavior.DROP_NEWEST, block_timeout="4s", max_size=77,
    )  # fmt: skip
    assert config.queue_config(2**40) == queue
    sender.push(b"x")
    assert (tmp_path / "queue").is_dir()
    sender.close()


def test_a_queue_in_memory_leaves_no_folder(tmp_path: Path) -> None:
    sender = SendQueue.open(MemoryExporter(), quick(type="memory", path=tmp_path / "queue")).start()
    sender.push(b"x")
    sender.close()
    assert not (tmp_path / "queue").exists()
    assert sender.stats().exported_batches == 1
