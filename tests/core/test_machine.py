"""What the process may use is what its own group, and each one around it, allows."""

import os
from pathlib import Path

import pytest

from penstock.machine import cores, cpu_quota, memory_limit


def membership(folder: Path, text: str) -> Path:
    (folder / "membership").write_text(text)
    return folder / "membership"


@pytest.mark.parametrize(
    ("own", "around", "limit"), [("max", "1000", 1000), ("500", "1000", 500), ("2000", "max", 2000)]
)
def test_the_least_memory_limit_on_the_way_up_holds_in_v2(tmp_path: Path, own: str, around: str, limit: int) -> None:
    unit = tmp_path / "system.slice" / "penstock.service"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text(f"{own}\n")
    (unit.parent / "memory.max").write_text(f"{around}\n")
    assert memory_limit(tmp_path, membership(tmp_path, "0::/system.slice/penstock.service\n")) == limit


def test_the_groups_own_limits_hold_in_v1(tmp_path: Path) -> None:
    for controller, name, text in (
        ("memory", "memory.limit_in_bytes", "1073741824"),
        ("cpu", "cpu.cfs_quota_us", "150000"),
        ("cpu", "cpu.cfs_period_us", "100000"),
    ):
        folder = tmp_path / controller / "docker" / "abc"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    own = membership(tmp_path, "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    assert memory_limit(tmp_path, own) == 2**30
    assert cpu_quota(tmp_path, own) == 1.5


def test_what_v1_says_where_there_is_no_limit_is_none(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path, membership(tmp_path, "4:memory:/\n")) is None


def test_a_group_that_is_not_mounted_here_leaves_the_containers_own(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4096")
    assert memory_limit(tmp_path, membership(tmp_path, "0::/kubepods/pod1\n")) == 4096
    assert memory_limit(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("quota", "affinity", "threads"),
    [("150000 100000", 8, 2), ("50000 100000", 8, 1), ("400000 100000", 3, 3), ("max 100000", 3, 3)],
)
def test_as_many_threads_run_as_the_quota_lets_begin_and_the_affinity_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, affinity: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    (tmp_path / "cpu.max").write_text(quota)
    assert cores(tmp_path) == threads
