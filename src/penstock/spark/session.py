"""One Spark session, with the settings that the pipeline relies on."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

import penstock
from penstock.errors import ConfigError, MissingRequirement
from penstock.secret_text import SECRET_NAME
from penstock.spark.amqp.stream_source import StreamSource
from penstock.spark.java import SparkJava, find_java_for_spark, java_cache_folder
from penstock.spark.source import SegmentSource
from penstock.spark.table_sink import TableSink

CONFIG = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",  # no state that an empty batch would have to age
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Python processes keep what they freed for a while: steps of a merge take the same hundreds of megabytes again, and
    # getting them from the system each time is a third of a task's cost. The first two are numpy's, the last Arrow's.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": "33554432",
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": "1073741824",
    "spark.executorEnv.MIMALLOC_PURGE_DELAY": "10000",  # milliseconds
    "spark.ui.enabled": "false",
    "spark.redaction.regex": SECRET_NAME,
    "spark.ui.showConsoleProgress": "false",  # it would write over our own progress
}
# On one machine no other host needs to reach the driver.
LOCAL = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}

_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"

_PARTITIONS = "spark.sql.shuffle.partitions"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def archive_path(java: SparkJava) -> Path:
    """Where the class-data archive for this Spark and this Java lies, once `make_archive` has made it."""
    return java_cache_folder() / f"spark-{pyspark.__version__}-java-{java.version}.jsa"


def archive_options(java: SparkJava) -> str:
    """Options for the class-data archive, with which Java starts Spark in about half the time; none without one."""
    archive = archive_path(java)
    return f"-XX:SharedArchiveFile={archive} -Xshare:auto {_QUIET}" if archive.exists() else ""


def make_archive(timeout: float = 300.0) -> Path:
    """Make the class-data archive: run a session that does a little of everything, and let Java keep its classes.

    MissingRequirement if this Java cannot.
    """
    archive = archive_path(find_java_for_spark())
    archive.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = archive.with_suffix(f".{os.getpid()}.jsa")
    environ = {**os.environ, "PENSTOCK_ARCHIVE": str(scratch)}
    ran = subprocess.run(
        [sys.executable, "-m", "penstock.spark.session"], env=environ, capture_output=True, text=True, timeout=timeout
    )
    if not scratch.exists():
        raise MissingRequirement(f"this Java made no class-data archive:\n{ran.stdout}{ran.stderr}")
    scratch.replace(archive)
    return archive


def _exercise() -> None:
    """A little of everything, so that the archive has the classes that a job needs."""
    options = f"-XX:ArchiveClassesAtExit={os.environ['PENSTOCK_ARCHIVE']} {_QUIET}"
    session = start_session("local[1]", {_JAVA_OPTIONS: options})
    with tempfile.TemporaryDirectory() as folder:
        rows = session.range(1000).selectExpr("id % 10 as k", "id as v").groupBy("k").agg({"v": "sum"}).persist()
        rows.write.parquet(f"{folder}/table")
        session.read.parquet(f"{folder}/table").toArrow()
    gateway = session.sparkContext._gateway
    session.stop()
    assert gateway is not None
    java = gateway.proc
    java.stdin.close()  # Spark's Java ends with its standard input, and then writes the archive
    java.wait()


def spark_page_settings(master: str | None, *, ui: bool = False, event_log: str | None = None) -> dict[str, str]:
    """Settings for Spark's own page, which only this machine reaches, and for its event log.

    ConfigError if the page would listen on every address: it asks for no password.
    """
    if ui and not (master or "").startswith("local") and "SPARK_LOCAL_IP" not in os.environ:
        raise ConfigError(
            f"spark.ui with spark.master {master} would listen on every address of the driver's machine: set "
            "SPARK_LOCAL_IP to the one that it may listen on, or use spark.event_log and a history server"
        )
    found = {"spark.ui.enabled": "true", "spark.ui.killEnabled": "false"} if ui else {}
    if event_log:
        if "://" not in event_log:
            folder = Path(event_log).absolute()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            event_log = folder.as_uri()  # a path without a scheme would be one of Spark's default file system
        found |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": event_log}
    return found


def start_session(master: str | None = "local[*]", config: Mapping[str, str] | None = None) -> SparkSession:
    """A session on `master` that knows the formats of ours; without one, as spark-submit says.

    MissingRequirement if there is no Java for it.
    """
    java = find_java_for_spark()
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    builder = SparkSession.builder.appName("penstock")
    settings = {**CONFIG, **(config or {})}
    if master:
        builder = builder.master(master)
    if master and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = {**LOCAL, **settings}
    own = [f"-Dlog4j2.configurationFile={logging}", "" if "PENSTOCK_ARCHIVE" in os.environ else archive_options(java)]
    settings[_JAVA_OPTIONS] = " ".join(filter(None, [*own, settings.get(_JAVA_OPTIONS)]))
    if SparkContext._gateway is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        with _submitted_as_file(settings):
            session = builder.getOrCreate()
    else:  # Java runs already, as under spark-submit: it is told directly
        for key, value in settings.items():
            builder = builder.config(key, value)
        session = builder.getOrCreate()
    use_all_cores(session)
    _share_own_path(session.sparkContext)
    session.dataSource.register(SegmentSource)
    session.dataSource.register(TableSink)
    session.dataSource.register(StreamSource)
    return session


def use_all_cores(session: SparkSession) -> None:
    """A task for each core that there is now behind an exchange, unless the settings say how many; executors come."""
    if not session.sparkContext.getConf().contains(_PARTITIONS):
        session.conf.set(_PARTITIONS, str(session.sparkContext.defaultParallelism))


@contextmanager
def _submitted_as_file(settings: Mapping[str, str]) -> Iterator[None]:
    """Let Java start with these settings, from a file of ours: its command line is there for everyone to see."""
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    with _private_file() as file:
        file.writelines(f"{_escaped(key)}={_escaped(value)}\n".encode() for key, value in settings.items())
        file.flush()
        path = file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        own = f"--properties-file {shlex.quote(path)} --load-spark-defaults"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{own} {before or 'pyspark-shell'}"
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYSPARK_SUBMIT_ARGS"]
            else:
                os.environ["PYSPARK_SUBMIT_ARGS"] = before


def _private_file() -> IO[bytes]:
    """A file that only our user reads: in memory, so that even a kill leaves nothing behind, else on the disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("spark.properties"), "wb")
    return tempfile.NamedTemporaryFile(suffix=".properties")


def _escaped(text: str) -> str:
    """As a file of Java properties has it."""
    for character, code in {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "=": "\\=", ":": "\\:", " ": "\\ "}.items():
        text = text.replace(character, code)
    return text


def _share_own_path(context: SparkContext) -> None:
    """Let every Python process of Spark's find Penstock where `--py-files` has brought it.

    The one on the driver that plans a stream looks for such files in a folder where they are not.
    """
    if context.getConf().get("spark.submit.pyFiles", ""):
        paths = [str(Path(penstock.__file__).parents[1]), context.environment.get("PYTHONPATH")]
        context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


if __name__ == "__main__":
    _exercise()
