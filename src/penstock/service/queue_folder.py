"""Recognises the folder of a durable queue by its files, so that a command refuses any other folder."""

import os
import re
from pathlib import Path
from typing import Any

import click

from penstock.errors import ConfigError

_QUEUE_FILE = re.compile(r"fastqueue\.meta|[0-9a-f]{16}")  # its state, or a chunk that lost it
_MOST_NAMED = 3
FILE = "penstock.queue_file"  # in the context of a command: the file of -c


def is_queue_folder(folder: Path) -> bool:
    """Whether the folder holds a queue: opening any other would make an empty one. OSError if it is unreadable."""
    return folder.is_dir() and any(_QUEUE_FILE.fullmatch(entry.name) for entry in folder.iterdir())


def explain_missing_queue(folder: Path) -> str:
    """The text for a folder without a queue: what was expected, what is there, and which folders below hold one."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    there = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")
    below = sorted(str(meta.parent) for meta in folder.glob("*/fastqueue.meta"))
    meant = f"did you mean {' or '.join(below[:_MOST_NAMED])}?" if below else "name the folder that `queue.path` says"
    return (
        f"there is no queue in {folder}: neither a fastqueue.meta nor a chunk (16 hex digits) lies there, "
        f"but {there or 'nothing'}; {meant}"
    )


def queues_of(file: Path) -> dict[str, Path]:
    """The folders of the queues of a configuration file, by name: `rollup`, `relay` and those of `exporters`."""
    from penstock.config.load import load
    from penstock.config.tree import ServiceConfig
    from penstock.service.queues import SEGMENTS

    config = load(ServiceConfig, file, environ=os.environ).config
    return {SEGMENTS: config.resolved(config.segments.queue.path)} | {
        name: config.queue_path(name) for name in config.relays()
    }


class QueueFolder(click.Path):
    """An argument that names a queue's folder, with -c also by the queue's name; any other is refused untouched."""

    name = "queue"

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        file = ctx.meta.get(FILE) if ctx is not None else None
        value = value if file is None else queues_of(file).get(value, value)
        folder = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            if not is_queue_folder(folder):
                raise ConfigError(explain_missing_queue(folder))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
        return str(folder)
