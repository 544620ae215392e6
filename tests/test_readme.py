"""The README's examples run, its links lead somewhere, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_library_example_runs_and_finds_every_order(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 17

    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert sum(int(line.split()[0]) for line in ran.stdout.splitlines()) == 1000


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_are_there(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = document.read_text()
    for target in re.findall(r"`make ([a-z0-9-]+)", text) + re.findall(r"(?m)^\$ make ([a-z0-9-]+)", text):
        assert re.search(rf"(?m)^{target}:", makefile), f"{document.name} names make {target}"
