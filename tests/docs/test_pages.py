"""Pages can be read: links lead somewhere, paragraphs are short, examples stand by themselves, names exist."""

import ast
import builtins
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs.generate import pages as generated

from penstock.config.load import load
from penstock.config.schema import schema_of
from penstock.config.tree import ServiceConfig
from penstock.model.definition import BOUNDS
from penstock.model.definition_file import KEYS, parse_definitions
from penstock.model.function import FUNCTIONS
from penstock.telemetry import DECLARATIONS
from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, name_of, prose_of, snippets

MAKEFILE = (ROOT / "Makefile").read_text()
WRITTEN = [page for page in PAGES if page.name not in generated()]
LONGEST_PARAGRAPH = 6 * 120  # six lines
LONGEST_LINE = 900
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_written_page = pytest.mark.parametrize("page", WRITTEN, ids=name_of)


@each_page
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{link} in {name_of(page)}"
        if anchor:
            assert anchor in anchors_of(path), f"{link} in {name_of(page)}: there are {sorted(anchors_of(path))}"


@each_page
def test_no_line_is_too_long_to_read(page: Path) -> None:
    assert [line[:60] for line in page.read_text().splitlines() if len(line) > LONGEST_LINE] == []


@each_written_page
def test_no_paragraph_has_more_than_six_lines(page: Path) -> None:
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d\. )", prose_of(page))
    long = [one[:60] for one in paragraphs if not one.lstrip().startswith("|") and len(one) > LONGEST_PARAGRAPH]
    assert long == []


@each_written_page
def test_a_page_opens_with_what_its_reader_wants(page: Path) -> None:
    """Before the first table, picture or heading stands a sentence."""
    opening = page.read_text().split("\n", 1)[1].lstrip()
    assert re.match(r"[A-Z*\[`$]|```", opening), opening[:60]
    assert not opening.startswith(("#", "|")), opening[:60]


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / "README.md").read_text())}
    for page in DOCS.rglob("*.md"):
        if page.parent.name != "adr" and page != DOCS / "README.md":
            assert page in listed, f"docs/README.md does not list {name_of(page)}"


@pytest.mark.parametrize("name", sorted(generated()))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / "reference" / name).read_text() == generated()[name], "python -m docs.generate"


@each_page
def test_an_example_names_nothing_that_was_not_introduced(page: Path) -> None:
    """By the example itself, or in `code` of the section's text before it; what it imports from us is there."""
    for before, example in snippets(page):
        tree = ast.parse(example)
        section = before.rpartition("\n## ")[2]
        unknown = {name for name in names_used(tree) if f"`{name}`" not in section}
        assert not unknown, f"{page.name}: {sorted(unknown)} in\n{example}"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, one.name) for one in node.names), ast.unparse(node)


def names_used(tree: ast.AST) -> set[str]:
    """Names that are read, and neither made in here nor built in."""
    made, read = set(dir(builtins)), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                made.add(name)
            case ast.alias(name=name, asname=other):
                made.add((other or name).partition(".")[0])
    return read - made


@pytest.mark.parametrize(
    ("page", "printed"),
    [("use-the-batch-queue.md", "1\n"), ("use-the-durable-queue.md", "b'a block'\n")],
    ids=["batch-queue", "durable-queue"],
)
def test_the_first_example_of_a_library_runs(page: str, printed: str, tmp_path: Path) -> None:
    example = snippets(DOCS / "how-to" / page)[0][1]
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ran.returncode, ran.stdout) == (0, printed), ran.stderr


@each_page
def test_make_targets_and_parts_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"`make ([a-z0-9-]+)", text) + re.findall(r"(?m)^\$ make ([a-z0-9-]+)", text):
        assert re.search(rf"(?m)^{target}:", MAKEFILE), f"make {target}"
    for target, part in re.findall(r"make (bench|soak) PART=([\w-]+)", text):
        assert re.search(rf"(?m)^{target.upper()}_{part} +:=", MAKEFILE), f"make {target} PART={part}"


@each_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`(penstock_[a-z0-9_]+)[`{]", text) + re.findall(r"\((penstock_\w+?)[{\[]", text):
        assert name in DECLARATIONS or name in TABLES, name


TABLES = ("penstock_minute", "penstock_hour", "penstock_day", "penstock_top_n", "penstock_guard")


@each_written_page
def test_flags_and_keys_of_a_queue_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    flags = {key.short_flag.removeprefix("--") for key in schema_of(ServiceConfig).walk() if key.short_flag}
    assert set(re.findall(r"--(queue-[a-z-]*[a-z])", text)) <= flags
    keys = {".".join(path) for path in key_paths(schema_of(ServiceConfig))}
    sections = "|".join(("receivers", "intake", "pipelines", "l1", "segments", "spark", "tables", "admin", "shutdown"))
    for key in re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)(?::|`)", text):
        if not key.endswith((".py", ".md", ".log")):
            assert any(known == key or known.startswith(f"{key}.") for known in keys), key


@each_written_page
def test_configurations_and_definitions_that_are_shown_are_accepted(page: Path) -> None:
    sections = set(schema_of(ServiceConfig).sections) | set(schema_of(ServiceConfig).keys)
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        document = yaml.safe_load(text)
        if "metrics" in document:
            if page.name != "functions.md":  # it adds a function, and tests/model runs it
                parse_definitions(document)
        elif set(document) <= sections and "service" not in document:
            load(ServiceConfig, text=re.sub(r"/etc/[\w/.]+", "/dev/null", text))


def test_the_page_of_definitions_has_every_key() -> None:
    text = (DOCS / "reference" / "definitions.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \|(?: `(\w+)` \|)?", text)
    for key in ("metrics", "undefined", *KEYS):
        assert key in {first for first, _ in rows}, key
    for function, spec in FUNCTIONS.items():
        for key in spec.keys:
            assert (function, key) in rows, f"{function}: {key}"
    for bound in BOUNDS:
        assert f"`{bound}`" in text or f"{bound}:" in text, bound


def key_paths(section: object) -> list[tuple[str, ...]]:
    from penstock.config.schema import ConfigSection

    assert isinstance(section, ConfigSection)
    inner = [path for one in section.sections.values() for path in key_paths(one)]
    return [key.path for key in section.keys.values()] + inner


@each_written_page
def test_modules_and_tests_that_are_named_exist(page: Path) -> None:
    rooms = "|".join(sorted(path.name for path in (ROOT / "src/penstock").iterdir() if path.is_dir()))
    for name in re.findall(rf"`(?:src/)?(?:penstock/)?((?:{rooms})/[\w/.]*)`", page.read_text()):
        assert (ROOT / "src/penstock" / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)`", page.read_text()):
        assert list((ROOT / "tests").rglob(name)), name


def test_the_api_page_has_every_public_name() -> None:
    import penstock
    import penstock.amqp
    from penstock import errors

    text = (DOCS / "reference" / "api.md").read_text()
    told = {name.rpartition(".")[2] for name in re.findall(r"auto(?:class|function|data):: (\S+)", text)}
    public = {*penstock.__all__, *penstock.amqp.__all__} - {"__version__", "queues"}
    assert {name for name in public if name not in told and not hasattr(errors, name)} == set()
