"""README's library example runs, and it names the two commands."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_library_example_runs_and_finds_every_order(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 17

    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert sum(int(line.split()[0]) for line in ran.stdout.splitlines()) == 1000


def test_the_two_commands_are_named() -> None:
    assert re.findall(r"(?m)^\$ make (demo|test)\b", README) == ["demo", "test"]


def test_the_picture_of_the_demo_loads_nothing_from_elsewhere() -> None:
    (picture,) = re.findall(r"!\[.*\]\((.*\.svg)\)", README)
    addresses = re.findall(r"url\(\"?http[^)]*", (Path(__file__).parents[1] / picture).read_text())
    assert addresses == []
