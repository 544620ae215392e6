"""What this process may use of the machine: cores and memory, as the container limits them (cgroup v1 and v2)."""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores(root: Path = CGROUP) -> int:
    """How many threads can really run at a time: the affinity, or less if the container has a smaller quota."""
    usable = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return max(1, min(usable, math.ceil(quota)) if quota else usable)


def machine_memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory(root: Path = CGROUP) -> int:
    """Bytes that this process may use: the container's limit if there is one, else the machine's memory."""
    return min(machine_memory(), memory_limit(root) or machine_memory())


def memory_limit(root: Path = CGROUP) -> int | None:
    """The container's memory limit in bytes (cgroup v2, then v1); None if there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        # v1 says "no limit" with a number near 2**63
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def cpu_quota(root: Path = CGROUP) -> float | None:
    """How many cores' worth of time the container may use (cgroup v2, then v1); None if there is no limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None
