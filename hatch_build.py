"""Compiles the batch queue's hot path with mypyc where the machine can; the wheel is pure Python otherwise.

    pip install .
    HATCH_BUILD_NO_HOOKS=true pip install .        # pure Python in any case

It takes a C compiler and Python's headers. What is compiled is a copy, so nothing is left among the sources.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULE = "penstock/batch/producing.py"


class CompiledProducing(BuildHookInterface[Any]):
    """Puts the compiled module into the wheel, beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # what runs is the source
        # It ends with the process, so also where the build fails later on.
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-build-")
        folder = Path(self._scratch.name)
        shutil.copytree(Path(self.root, "src"), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so"))
        # Of other modules the compiler needs to know nothing: all that it is to know is in this one.
        options = ("--config-file=", "--follow-imports=skip", "--ignore-missing-imports")
        command = [sys.executable, "-m", "mypyc", *options, MODULE]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            self.app.display_warning(f"{(done.stdout + done.stderr).strip()}\nNot compiled: the wheel is pure Python.")
            return
        for built in (folder / MODULE).parent.glob("*.so"):
            build_data["force_include"][str(built)] = str(built.relative_to(folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._scratch.cleanup()
