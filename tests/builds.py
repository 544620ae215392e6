"""Wheels of this project, built from these sources and unpacked."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def why_not_compiled() -> str | None:
    """What a compiled wheel needs and this machine lacks, if anything."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "there are no headers of Python (Python.h)"
    missing = [name for name in ("mypyc", "setuptools", "hatchling") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def build_wheel(folder: Path, *, compiled: bool, root: Path = ROOT) -> Path:
    """The wheel, in `folder`, compiled where that can be; RuntimeError with the builder's last words if it fails."""
    environment = os.environ if compiled else {**os.environ, "HATCH_BUILD_NO_HOOKS": "true"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"no wheel was built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpacked(wheel: Path) -> Path:
    """A folder that makes the wheel's package importable, put before all others on the path."""
    folder = wheel.with_suffix("")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
