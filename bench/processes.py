"""What this process and all that it has started have used: Java, Spark's Python workers."""

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of all cores, so it says more than wall time does while others use the machine."""
    return sum(sum(map(int, stat[11:15])) for _, stat in _family()) / _TICKS


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
