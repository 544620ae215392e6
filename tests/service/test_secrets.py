"""No secret is left behind by a whole run: not in a log, a file, an answer, a process list or a crash dump."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest

from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.servers import PostgreSQL
from tests.service.running import HEADERS, Running, orders

pytestmark = [pytest.mark.server, pytest.mark.spark]

SECRETS = {
    name: f"planted-{name}"
    for name in ("of-tables", "of-store", "of-options", "of-header", "of-token-file", "of-broker", "of-receiver")
}


def configuration(folder: Path, tables: str, destination: str) -> str:
    """A file with a secret wherever one can stand."""
    for name in ("of-token-file", "of-receiver"):
        (folder / name).write_text(SECRETS[name])
    return f"""
tables: {{location: '{tables}'}}
spark:
  master: 'local[1]'
  trigger: 200ms
  conf:
    spark.driver.memory: 512m
    spark.hadoop.fs.s3a.secret.key: {SECRETS["of-store"]}
    spark.hadoop.javax.jdo.option.ConnectionURL: 'jdbc:x://u:{SECRETS["of-options"]}@h/d'
exporter:
  type: otlp_http
  url: {destination}
  headers: {{X-Api-Key: {SECRETS["of-header"]}}}
  token_file: {folder / "of-token-file"}
exporters:
  broker: {{type: amqp, url: 'amqp://u:{SECRETS["of-broker"]}@127.0.0.1:9/', routing_key: q}}
receivers:
  http: {{auth: {{token_file: {folder / "of-receiver"}}}}}
logging: {{level: debug}}
"""


def leaks(where: str, text: str | bytes) -> list[str]:
    found = text.encode() if isinstance(text, str) else text
    return [f"{name} in {where}" for name, secret in SECRETS.items() if secret.encode() in found]


def leaks_of_files(folder: Path, but: set[Path]) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and path not in but:
            yield from leaks(str(path.relative_to(folder)), path.read_bytes())


def leaks_of_processes(running: Running) -> Iterator[str]:
    assert running.process is not None
    for one in psutil.Process(running.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            yield from leaks(f"the command line of {one.name()}", " ".join(one.cmdline()))


def leaks_of_commands(file: Path) -> Iterator[str]:
    for words in (("config", "show"), ("config", "show", "--origin"), ("config", "check"), ("query", "orders")):
        command = [sys.executable, "-m", "penstock", *words, "-c", str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
        yield from leaks(" ".join(words), ran.stdout + ran.stderr)


def java_of(running: Running) -> psutil.Process:
    assert running.process is not None
    (java,) = [one for one in psutil.Process(running.process.pid).children(recursive=True) if one.name() == "java"]
    return java


def rows_in(postgres: PostgreSQL) -> int:
    with psycopg.connect(postgres.url) as connection:
        try:
            return int(connection.execute("select count(*) from penstock_minute").fetchone()[0])  # type: ignore[index]
        except psycopg.errors.UndefinedTable:
            return 0


def test_nothing_that_a_run_leaves_behind_holds_a_secret(
    tmp_path: Path, postgres: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))  # Java's temporary files, too
    monkeypatch.setenv("JDK_JAVA_OPTIONS", f"-Djava.io.tmpdir={scratch} -XX:ErrorFile={scratch}/java_error.log")
    # A destination that repeats what it was sent, as some do.
    destination = Misbehaving(usually=answer(500, f"{SECRETS['of-header']} {SECRETS['of-token-file']}".encode()))
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"create role shop superuser login password '{SECRETS['of-tables']}'")
    tables = f"postgresql://shop:{SECRETS['of-tables']}@127.0.0.1:{postgres.port}/postgres"
    with destination.running():
        running = Running(tmp_path, configuration(tmp_path, tables, destination.url))
        found: list[str] = []
        with running:
            request = urllib.request.Request(f"http://127.0.0.1:{running.port}/v1/metrics", orders(10), HEADERS)
            request.add_header("Authorization", f"Bearer {SECRETS['of-receiver']}")
            assert urllib.request.urlopen(request, timeout=30).status == 200
            wait_until(lambda: "Spark works" in running.events(), 60.0)
            wait_until(lambda: rows_in(postgres), 60.0)
            found += leaks_of_processes(running)
            for path in ("/", "/metrics", "/readyz", "/healthz", "/status.json"):
                found += leaks(path, running.ask(path)[1])
            found += leaks_of_files(scratch, but=set())
            java_of(running).send_signal(signal.SIGSEGV)
            wait_until(lambda: (scratch / "java_error.log").exists(), 30.0)
            found += leaks_of_commands(running.file)
            running.stop()
    secret_files = {running.file, tmp_path / "of-token-file", tmp_path / "of-receiver"}
    found += leaks_of_files(tmp_path, but=secret_files)
    assert not found
