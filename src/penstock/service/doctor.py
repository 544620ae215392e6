"""`penstock doctor`: what this machine has, what is missing, what to do."""

import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.errors import MissingRequirement
from penstock.machine import cpu_quota, how_to_install, machine_memory, memory_limit
from penstock.spark.java import find_java_for_spark
from penstock.units import format_bytes

NEEDED_DISK = 2 * 2**30  # the default queue (1 GiB) full, and as much again for segments and tables
NEEDED_MEMORY = 2 * 2**30  # Spark's driver takes 1 GiB of heap by default, and there is Python beside it
AMQP = ("127.0.0.1", 5672)


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    required: bool = True  # the embedded default cannot run without it


def examine_for_doctor(folder: Path | None = None) -> list[DoctorFinding]:
    """Everything that the pipeline may need, as it is on this machine."""
    return [
        _python(),
        _java(),
        _package("Spark", "pyspark", "spark"),
        _package("Arrow", "pyarrow", "spark"),
        _package("Delta tables", "deltalake", "spark"),
        _package("AMQP client", "pika", "amqp", required=False),
        _package("OTLP messages", "opentelemetry-proto", "receive", required=False),
        _broker(),
        *_disk(folder or Path.cwd()),
        _cores(),
        _memory(),
    ]


def require_extra(extra: str, *modules: str) -> None:
    """MissingRequirement with the command that installs `extra`, if one of `modules` is not there."""
    for module in modules:
        if not _is_there(module):
            raise MissingRequirement(f"{module} is not installed: {how_to_install(extra)}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is part of
        return False


def render_doctor_findings(findings: list[DoctorFinding], *, as_json: bool = False) -> str:
    """The findings as text for a terminal, or as JSON."""
    able = all(finding.ok for finding in findings if finding.required)
    if as_json:
        return json.dumps({"ok": able, "findings": [asdict(finding) for finding in findings]}, indent=2)
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok     " if finding.ok else "MISSING" if finding.required else "-      "
        lines.append(f"{mark}  {finding.name:<{width}}  {finding.found}")
        if finding.advice and not finding.ok:
            lines.append(f"{'':7}  {'':<{width}}  → {finding.advice}")
    lines += [
        "",
        "The embedded default can run here: penstock demo" if able else "The embedded default cannot run here yet.",
    ]
    return "\n".join(lines)


def _python() -> DoctorFinding:
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    return DoctorFinding("Python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")


def _java() -> DoctorFinding:
    try:
        java = find_java_for_spark()
    except MissingRequirement as error:
        return DoctorFinding("Java", False, "none that Spark can use", str(error))
    return DoctorFinding("Java", True, f"{java.version} at {java.home} ({java.source})")


def _package(name: str, package: str, extra: str, *, required: bool = True) -> DoctorFinding:
    try:
        return DoctorFinding(name, True, f"{package} {version(package)}", required=required)
    except PackageNotFoundError:
        return DoctorFinding(name, False, f"{package} is not installed", how_to_install(extra), required)


def _broker() -> DoctorFinding:
    where = f"{AMQP[0]}:{AMQP[1]}"
    try:
        with socket.create_connection(AMQP, timeout=1):
            return DoctorFinding("RabbitMQ", True, f"something listens at {where}", required=False)
    except OSError:
        advice = "only needed to receive from or send to a broker; the tests start their own"
        return DoctorFinding("RabbitMQ", False, f"nothing listens at {where}", advice, required=False)


def _disk(folder: Path) -> list[DoctorFinding]:
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK | os.X_OK)
    return [
        DoctorFinding(
            "Disk space",
            free >= NEEDED_DISK,
            f"{format_bytes(free)} free at {folder}",
            f"free at least {format_bytes(NEEDED_DISK)}, or work in a folder on another disk",
        ),
        DoctorFinding(
            "Permissions",
            writable,
            f"{folder} is {'' if writable else 'not '}writable",
            "work in a folder where you may write, or name one with --dir",
        ),
    ]


def _cores() -> DoctorFinding:
    usable = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}" + (f", limited to {quota:.1f} by the container" if quota else "")
    return DoctorFinding("Cores", True, found)


def _memory() -> DoctorFinding:
    machine = machine_memory()
    limit = memory_limit()
    usable = min(machine, limit or machine)
    found = f"{format_bytes(machine)}" + (f", limited to {format_bytes(limit)} by the container" if limit else "")
    advice = f"give it at least {format_bytes(NEEDED_MEMORY)}: Spark's driver alone takes half of that"
    return DoctorFinding("Memory", usable >= NEEDED_MEMORY, found, advice)
