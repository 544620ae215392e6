"""The rules of the house: what the folder list, the names and the words of `src` promise to a reader."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "penstock"
MODULES = sorted(SRC.rglob("*.py"))
SHARED_NAMES = {"__init__", "config", "stats"}  # every room has its own settings and its own figures
# What each room shows to the others: the modules that they may import. "" is the package itself.
DOORS = {
    "aggregate": {"config", "l1"},
    "batch": {"", "config"},
    "cli": {"main"},
    "config": {"command_options", "destinations", "load", "schema", "show", "tree"},
    "consume": {"backoff_policy", "consumer_options", "declarations", "into_queue", "message", "registry", "stats"},
    "decode": {"config", "decode_context", "decoder", "outcome", "stream_memory", "stream_owners"},
    "export": {
        "",
        "breaker",
        "config",
        "exporter",
        "exporters.amqp_exporter",
        "exporters.console_exporter",
        "exporters.otlp_http_exporter",
        "exporters.remote_write_exporter",
        "exporters.segment_exporter",
        "http_client",
        "paced_exporter",
        "send_queue",
    },
    "model": {
        "chunk_partials",
        "columns",
        "definition",
        "definition_file",
        "distinct",
        "exponential",
        "finals",
        "function",
        "grouping",
        "level",
        "metric_description",
        "name",
        "packed",
        "partial",
        "point",
        "resolution",
        "segment",
        "share",
    },
    "receive": {
        "bodies",
        "config",
        "grpc_receiver",
        "http_receiver",
        "intake",
        "peers",
        "rabbitmq_receiver",
        "recent_requests",
        "request_group",
        "request_memory",
        "sink",
    },
    "service": {
        "definition_trial",
        "demo",
        "doctor",
        "exit_codes",
        "generator",
        "logs",
        "printable",
        "queue_folder",
        "quick_bench",
        "relay_pipeline",
        "service",
        "signals",
        "trial_points",
    },
    "spark": {"backfill", "fold_tasks", "java", "job", "progress", "session", "supervisor"},
    "spool": {"", "dead_letter_report", "dead_letters", "examine"},
    "tables": {
        "catalog_sql",
        "delta",
        "fold",
        "landing",
        "location",
        "maintenance",
        "metrics_table",
        "port",
        "query",
        "snapshot",
        "table_rows",
        "upgrade",
    },
}
PERSONS = re.compile(r"\b(nobody|somebody|whoever|meanwhile|everybody)\b", re.IGNORECASE)


def room_of(module: Path) -> str:
    """The top-level folder of a module; of a flat module, nothing."""
    parts = module.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(module: Path) -> Iterator[tuple[str, str]]:
    """The rooms that a module imports from, each with the module inside that room."""
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("penstock."):
            continue
        room, *inside = (node.module or "").split(".")[1:]
        folder = SRC.joinpath(room, *inside)
        for name in (alias.name for alias in node.names):
            is_module = folder.is_dir() and ((folder / f"{name}.py").exists() or (folder / name).is_dir())
            if (SRC / room).is_dir():
                yield room, ".".join([*inside, name] if is_module else inside)


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(module.relative_to(SRC)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_module_name_exists_once() -> None:
    names = Counter(module.stem for module in MODULES if module.stem not in SHARED_NAMES)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_has_more_than_thirty_modules() -> None:
    assert {folder: count for folder, count in Counter(m.parent for m in MODULES).items() if count > 31} == {}


def test_modules_are_read_in_one_sitting() -> None:
    assert [str(module) for module in MODULES if len(module.read_text().splitlines()) > 400] == []


def test_rooms_import_only_what_another_room_shows() -> None:
    used = defaultdict(set)
    for module in MODULES:
        for room, inside in imports_of(module):
            if room != room_of(module):
                used[room].add(inside)
    assert used == DOORS  # a door that is used by no other room is none


@pytest.mark.parametrize("place", ["src", "docs", "README.md", "CONTRIBUTING.md"])
def test_sentences_are_about_components_not_persons(place: str) -> None:
    path = ROOT / place
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in (".py", ".md")]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert found == []


def test_every_log_line_is_an_event_with_fields_by_name() -> None:
    """`What happened. key=%s key=%d`: only so does a line of JSON have its event and its fields."""
    lines = [
        (module, call.args[call.func.attr == "log"])
        for module in MODULES
        for call in ast.walk(ast.parse(module.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "log"
    ]
    assert len(lines) > 100
    texts = [(module, str(line.value)) for module, line in lines if isinstance(line, ast.Constant)]
    assert [
        f"{module.relative_to(SRC)}: {text}"
        for module, text in texts
        if "%" in re.sub(r" \w+=%[-+.\d]*[a-z]", "", text) or not re.search(r"\.( \w+=|$)", text)
    ] == []
