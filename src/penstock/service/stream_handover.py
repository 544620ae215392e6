"""What is known of cumulative streams from one run to the next, shared out among the processes that will keep them."""

import logging
import re
from pathlib import Path

from penstock.config.tree import ServiceConfig
from penstock.service.queues import path_for_process

log = logging.getLogger(__name__)
MEMORY = "streams.arrow"  # in the data folder; those of further processes stand beside


def distribute_files_to_processes(config: ServiceConfig) -> None:
    """Leave for each process what it keeps, and nothing else. To be called before any of them starts.

    Files that do not fit together are deleted: they would be out of date when they are asked for again.
    """
    base = config.resolved(MEMORY)
    found = _files(base)
    if set(found) == (set(range(config.processes)) if config.pipelines.rollup else set()):
        return  # each finds its own, and looks whether it fits
    from penstock.decode.stream_memory import divide_streams_among, take_streams, write_streams

    known = [snapshot for path in found.values() if (snapshot := take_streams(path)) is not None]
    if not config.pipelines.rollup:
        return
    own = {
        Path(path_for_process(base, index)): part
        for index, part in enumerate(divide_streams_among(known, config.processes) or ())
    }
    if not own:  # those that ended in good order go on all the same
        same = [snapshot for snapshot in known if snapshot.part[1] == config.processes]
        own = {Path(path_for_process(base, snapshot.part[0])): snapshot for snapshot in same}
    if known:
        log.info("Cumulative streams of an earlier run are shared out. files=%d processes=%d", len(known), len(own))
    for path, snapshot in own.items():
        write_streams(path, snapshot)


def _files(base: Path) -> dict[int, Path]:
    """Those of all processes of an earlier run, by number."""
    pattern = re.compile(re.escape(base.name) + r"(?:\.([1-9][0-9]*))?")
    names = base.parent.iterdir() if base.parent.is_dir() else ()
    return {int(match[1] or 0): path for path in names if (match := pattern.fullmatch(path.name))}
