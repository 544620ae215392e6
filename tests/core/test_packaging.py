"""What an installation of the package gives: light, complete, and saying what it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock import errors

ROOT = Path(__file__).parents[2]


def test_import_penstock_loads_neither_spark_nor_a_broker_client_nor_arrow() -> None:
    program = "import sys, penstock; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'penstock'" in loaded
    for heavy in ("pyspark", "py4j", "pika", "pyarrow", "deltalake", "rich", "yaml"):
        assert f"'{heavy}'" not in loaded


def test_import_penstock_loads_no_part_of_it_before_it_is_asked_for() -> None:
    program = "import sys, penstock; print(sorted(name for name in sys.modules if name.startswith('penstock')))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded == "['penstock', 'penstock.errors']\n"


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("AmqpExporter", "pika", "amqp"), ("SegmentExporter", "pyarrow", "spark")]
)
def test_a_name_whose_extra_is_not_installed_says_which_one_to_install(name: str, module: str, extra: str) -> None:
    program = f"import sys; sys.modules[{module!r}] = None\nfrom penstock import {name}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: penstock.{name} needs {module}, which is not installed: pip install '.[{extra}]' in the "
        "checkout of Penstock, or make setup for everything"
    )


def test_every_public_name_is_there() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


@pytest.mark.parametrize("document", ["batch-queue.md", "durable-queue.md", "send-queue.md"])
def test_every_error_and_setting_that_a_document_of_a_library_names_is_public(document: str) -> None:
    text = (ROOT / "docs" / "reference" / document).read_text()
    named = {name for name in re.findall(r"\b[A-Z]\w+", text) if hasattr(errors, name) or name.endswith("Config")}
    assert named
    assert named <= set(penstock.__all__)


def test_every_requirement_is_pinned_with_hashes_and_names_no_address() -> None:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    assert {file.name for file in files} >= {"dev.txt", "java.txt", "uv.txt"}
    for file in files:
        text = file.read_text()
        assert "://" not in text
        entries = re.split(r"\n(?=[a-z0-9])", "\n" + re.sub(r"(?m)^#.*\n", "", text))[1:]
        assert entries
        for entry in entries:
            assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==", entry), entry
            assert "--hash=sha256:" in entry, entry


def test_the_pins_cover_every_dependency_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = list(project["project"]["dependencies"]) + project["dependency-groups"]["dev"]
    for extra, members in project["project"]["optional-dependencies"].items():
        named += [member for member in members if extra not in ("all", "java")]
    pinned = (ROOT / "requirements" / "dev.txt").read_text()
    for requirement in named:
        name = re.split(r"[\[><=~ ]", requirement)[0]
        assert re.search(rf"(?m)^{re.escape(name)}==", pinned), f"{name} is not pinned: make lock"


def test_a_new_top_level_module_breaks_the_import_contract(tmp_path: Path) -> None:
    package = tmp_path / "penstock"
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    subprocess.run(["cp", "-r", str(ROOT / "src" / "penstock"), str(package)], check=True)
    (package / "helpers.py").touch()

    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ran = subprocess.run(
        lint, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "penstock.helpers" in ran.stdout


@pytest.mark.parametrize("command", [[], ["demo"], ["doctor"]])
def test_every_command_explains_itself_with_examples(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", *command, "--help"], capture_output=True, text=True, check=True
    )
    assert "Examples:" in ran.stdout


@pytest.mark.build
def test_the_wheel_is_for_every_platform_and_runs_without_the_sources(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    program = "import penstock; print(penstock.BatchQueue.__module__, penstock.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith(f"penstock.batch.queue {wheel}")
