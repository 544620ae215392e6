"""`penstock doctor`: what is there, what is missing, what to do."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.errors import MissingRequirement
from penstock.machine import cpu_quota, memory_limit
from penstock.service import doctor
from penstock.service.doctor import examine_for_doctor, render_doctor_findings, require_extra


def test_a_machine_that_has_everything_can_run_the_default() -> None:
    ran = CliRunner().invoke(main, ["doctor"])
    assert ran.exit_code == 0, ran.output
    assert "The embedded default can run here" in ran.output


def test_without_java_the_exit_code_says_so_and_the_advice_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise MissingRequirement("get Java like this")

    monkeypatch.setattr(doctor, "find_java_for_spark", nothing)
    ran = CliRunner().invoke(main, ["doctor", "--json"])

    assert ran.exit_code == 1
    report = json.loads(ran.output)
    assert not report["ok"]
    (java,) = [finding for finding in report["findings"] if finding["name"] == "Java"]
    assert java["advice"] == "get Java like this"


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package in ("pyspark", "pika"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    findings = {finding.name: finding for finding in examine_for_doctor()}

    assert ".[spark]" in findings["Spark"].advice
    assert findings["Spark"].required
    assert ".[amqp]" in findings["AMQP client"].advice
    assert not findings["AMQP client"].required
    assert "MISSING  Spark" in render_doctor_findings(list(findings.values()))


def test_a_folder_where_nothing_may_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    findings = {finding.name: finding for finding in examine_for_doctor(tmp_path)}
    assert not findings["Permissions"].ok
    assert "not writable" in findings["Permissions"].found


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "536870912\n", 2**29),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", 2**30),
    ],
)
def test_the_containers_memory_limit_is_read_from_either_kind_of_cgroup(
    tmp_path: Path, name: str, text: str, limit: int | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit


def test_the_containers_cpu_limit_is_read_from_either_kind_of_cgroup(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert cpu_quota(tmp_path) == 2.0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None


def test_a_command_that_needs_an_extra_says_which() -> None:
    require_extra("spark", "json")
    with pytest.raises(MissingRequirement, match=r"pip install '.\[spark\]'"):
        require_extra("spark", "no_such_module")
    with pytest.raises(MissingRequirement, match=r"'.\[receive\]'"):
        require_extra("receive", "no_such_package.module")
