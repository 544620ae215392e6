"""The queue keeps its promises, too, when the one module that can be compiled is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.batch.producing import COMPILED
from tests.builds import ROOT, build_wheel, unpacked, why_not_compiled

CORE = ("test_bounds.py", "test_close.py", "test_dispatch.py", "test_protocol.py", "test_waiting.py")
STRESS = "test_stress.py::test_nothing_is_lost_doubled_reordered_or_run_twice_at_once"
STRESSED = (f"{STRESS}[7-BufferStrategy.BLOCKING]", f"{STRESS}[3000-BufferStrategy.IF_POSSIBLE]")

IN_A_CHILD = """
import sys, pytest
from penstock.batch import producing
assert producing.COMPILED, producing.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


pytestmark = pytest.mark.build


def test_a_wheel_is_pure_python_where_it_is_asked_to_be(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, compiled=False)

    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(unpacked(wheel).rglob("*.so"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, with something compiled among them, where there is no compiler."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "src/penstock/batch/producing.cpython-39-x86_64-linux-gnu.so").write_bytes(b"of some other Python")
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    return root


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a build may write beside its wheel."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_where_nothing_can_be_compiled_a_wheel_is_pure_python_whatever_lies_among_the_sources(
    tmp_path: Path, root: Path, scratch: Path
) -> None:
    wheel = build_wheel(tmp_path, compiled=True, root=root)

    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(unpacked(wheel).rglob("*.so"))
    assert not list(scratch.iterdir())


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, root: Path, scratch: Path) -> None:
    (root / "src/penstock/gone.py").symlink_to("nowhere")

    with pytest.raises(RuntimeError, match=r"gone\.py"):
        build_wheel(tmp_path, compiled=True, root=root)

    assert not list(scratch.iterdir())


@pytest.mark.skipif(COMPILED, reason="these tests are run by the one below")
@pytest.mark.skipif(why_not_compiled() is not None, reason=f"nothing can be compiled here: {why_not_compiled()}")
def test_the_compiled_queue_passes_the_tests_of_the_interpreted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYPYC_OPT_LEVEL", "0")  # the C compiler is quicker by two seconds, and the C is the same
    wheel = build_wheel(tmp_path, compiled=True)
    package = unpacked(wheel)
    assert not wheel.name.endswith("-none-any.whl")
    chosen = [f"tests/batch/{name}" for name in (*CORE, *STRESSED)]

    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, "-q", "-x", "-m", "not soak", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
