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


def test_a_wheel_is_pure_python_where_it_is_asked_to_be(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, compiled=False)

    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(unpacked(wheel).rglob("*.so"))


def test_a_wheel_is_pure_python_where_nothing_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    wheel = build_wheel(tmp_path, compiled=True)

    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list(unpacked(wheel).rglob("*.so"))


def test_what_lies_compiled_among_the_sources_gets_into_no_wheel_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    scratch.mkdir()
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "src/penstock/batch/producing.cpython-39-x86_64-linux-gnu.so").write_bytes(b"of some other Python")
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TMPDIR", str(scratch))

    assert not list(unpacked(build_wheel(tmp_path, compiled=True, root=root)).rglob("*.so"))
    (root / "src/penstock/gone.py").symlink_to("nowhere")
    with pytest.raises(RuntimeError, match=r"gone\.py"):
        build_wheel(tmp_path / "none", compiled=True, root=root)
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
