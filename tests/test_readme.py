"""The examples of README and docs run or can be read by themselves, links lead somewhere, and commands exist."""

import ast
import builtins
import importlib
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


@pytest.mark.parametrize(
    ("document", "printed"),
    [("batch-queue.md", "1\n"), ("durability.md", "b'a block'\n")],
    ids=["batch-queue", "durability"],
)
def test_the_first_example_of_a_library_runs(document: str, printed: str, tmp_path: Path) -> None:
    example = snippets(ROOT / "docs" / document)[0][1]
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_an_example_names_nothing_that_was_not_introduced(document: Path) -> None:
    """By the example itself, or in `code` of the section's text before it; what it imports from us is there."""
    for before, example in snippets(document):
        tree = ast.parse(example)
        section = before.rpartition("\n## ")[2]
        unknown = {name for name in names_used(tree) if f"`{name}`" not in section}
        assert not unknown, f"{document.name}: {sorted(unknown)} in\n{example}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, one.name) for one in node.names), ast.unparse(node)


def snippets(document: Path) -> list[tuple[str, str]]:
    """Each Python example with all that stands before it."""
    text = document.read_text()
    return [(text[: found.start()], found[1]) for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def names_used(tree: ast.AST) -> set[str]:
    """Names that are read, and neither made in here nor built in."""
    made, read = set(dir(builtins)), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.alias(name=name, asname=other):
                made.add((other or name).partition(".")[0])
    return read - made


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
