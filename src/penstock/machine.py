"""What this process may use of the machine: cores and memory, as the container limits them (cgroup v1 and v2)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores(root: Path = CGROUP) -> int:
    """How many threads can really run at a time: the affinity, or less if the container has a smaller quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, min(usable, math.ceil(quota)) if quota else usable)


def machine_memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(root: Path = CGROUP) -> int:
    """Bytes that this process may use: the container's limit if there is one, else the machine's memory."""
    return min(machine_memory(), memory_limit(root) or machine_memory())


def memory_limit(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """The container's memory limit in bytes (cgroup v2 or v1); None if there is none.

    The least of those of the process's own group (a systemd unit, a pod) and of all around it.
    """
    texts = [
        *_read("memory.max", root, "", membership),
        *_read("memory.limit_in_bytes", root / "memory", "memory", membership),
    ]
    # v2 says "no limit" with a word, v1 with a number near 2**63
    return min((int(text) for text in texts if text.isdigit() and int(text) < 2**60), default=None)


def cpu_quota(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """How many cores' worth of time the container may use (cgroup v2 or v1); None if there is no limit."""
    pairs = [text.split() for text in _read("cpu.max", root, "", membership)]
    if not pairs:
        quotas = _read("cpu.cfs_quota_us", root / "cpu", "cpu", membership)
        periods = _read("cpu.cfs_period_us", root / "cpu", "cpu", membership)
        pairs = [[quota, period] for quota, period in zip(quotas, periods)]
    limits = (int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and all(map(str.isdigit, pair)))
    return min(limits, default=None)


def _read(name: str, root: Path, controller: str, membership: Path) -> list[str]:
    """The file of that name in the process's own group and in each one around it, where there is one."""
    found = []
    for folder in _groups(root, controller, membership):
        try:
            found.append((folder / name).read_text().strip())
        except OSError:
            continue
    return found


def _groups(root: Path, controller: str, membership: Path) -> Iterator[Path]:
    """The process's group under `root` and all around it; `controller` names a hierarchy of v1, nothing v2's."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    folder = root / own.strip("/")
    yield folder
    while folder != root:
        folder = folder.parent
        yield folder


def how_to_install(extra: str) -> str:
    """The command that brings an extra, for messages."""
    return f"pip install '.[{extra}]' in the checkout of Penstock, or make setup for everything"
