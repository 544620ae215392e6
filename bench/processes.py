"""What this process and all that it has started have used: Java, Spark's Python workers."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class _Used(NamedTuple):
    parent: str
    ticks: int
    of_children: int  # that it has waited for


_last: dict[str, _Used] = {}
_lost = Counter[str]()  # what processes had used that ended, by their parent that had not waited for them


def cpu_seconds() -> float:
    """Of all cores, so it says more than wall time does while others use the machine.

    Spark's Python processes end without anybody waiting for them, so what they had used when last seen is remembered.
    """
    now = {process.name: _used(stat) for process, stat in _family()}
    ended = Counter[str]()
    for name, used in _last.items():
        if name not in now:
            ended[used.parent] += used.ticks
    for parent, ticks in ended.items():
        before, after = _last.get(parent), now.get(parent)
        waited = after.of_children - before.of_children if before and after else 0
        _lost[parent] += max(0, ticks - waited)
    _last.clear()
    _last.update(now)
    return (sum(used.ticks for used in now.values()) + _lost.total()) / _TICKS


def _used(stat: list[str]) -> _Used:
    own, of_children = sum(map(int, stat[11:13])), sum(map(int, stat[13:15]))
    return _Used(stat[1], own + of_children, of_children)


def peak_memory() -> str:
    """The greatest resident memory so far, by kind of process."""
    peaks: dict[str, int] = {}
    for process, _ in _family():
        try:
            status = (process / "status").read_text().splitlines()
            kind = "driver" if process.name == str(os.getpid()) else (process / "comm").read_text().strip()
        except OSError:
            continue
        kib = sum(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        peaks[kind] = max(peaks.get(kind, 0), kib)
    return ", ".join(f"{kind} {kib / 2**20:.2f} GiB" for kind, kib in sorted(peaks.items()))


def _family() -> Iterator[tuple[Path, list[str]]]:
    """This process and its descendants, with what follows the name in their stat."""
    stats = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                stats[process.name] = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
    for name, stat in stats.items():
        ancestor = name
        while ancestor in stats and ancestor != str(os.getpid()):
            ancestor = stats[ancestor][1]
        if ancestor == str(os.getpid()):
            yield Path("/proc") / name, stat
