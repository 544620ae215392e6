"""A standalone Spark cluster of a test's own: a master and two workers on loopback, each with folders of its own.

with Cluster(tmp_path) as cluster:
    cluster.url                    # spark://127.0.0.1:<free port>
    cluster.executors()            # their Java processes, to be killed
    cluster.hidden                 # a folder that the driver and the first worker see, and the second does not
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
import pyspark

from penstock.spark.java import find_java_for_spark
from tests.servers import Server, free_port

SPARK_HOME = Path(pyspark.__file__).parent
EXECUTOR_MEMORY = "512m"  # with Python beside it; two of them and their workers share the machine with the tests


def environ() -> dict[str, str]:
    """For every process of a cluster and for its drivers: all of them are reached on loopback only."""
    return {
        "JAVA_HOME": str(find_java_for_spark().home),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }


class SparkMaster(Server):
    """Hands workers to applications."""

    name = "Spark's master"

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"]
        return [str(SPARK_HOME / "bin" / "spark-class"), "org.apache.spark.deploy.master.Master", *where], _small()


class SparkWorker(Server):
    """One core. It starts an executor for each application; `hidden` is an empty folder to it and its executors."""

    name = "Spark's worker"

    def __init__(self, folder: Path, master: str, host: str, hidden: Path | None = None) -> None:
        super().__init__(folder)
        self._master = master
        self._host = host
        self._hidden = hidden

    def command(self) -> tuple[list[str], dict[str, str]]:
        where = ["--host", self._host, "--port", str(self.port), "--webui-port", "0"]
        limits = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / "work")]
        spark_class = [str(SPARK_HOME / "bin" / "spark-class"), "org.apache.spark.deploy.worker.Worker"]
        return [*self._hiding(), *spark_class, *where, *limits, self._master], {
            **_small(),
            "SPARK_LOCAL_IP": self._host,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
        }

    def _hiding(self) -> list[str]:
        if self._hidden is None:
            return []
        mount = f'mount -t tmpfs none "{self._hidden}" && exec "$@"'
        return [*namespace(), "sh", "-c", mount, "worker"]

    def ready(self) -> bool:
        return b"Successfully registered with master" in (self.folder / "server.log").read_bytes()

    def executors(self) -> list[psutil.Process]:
        return [child for child in self._others() if _is_executor(child)]


class Cluster:
    """A master and two workers, the second of which does not see `hidden`, where this machine can do that."""

    def __init__(self, folder: Path) -> None:
        self.hidden = folder / "hidden"
        self.hidden.mkdir(parents=True)
        self.master = SparkMaster(folder / "master")
        self.workers = [
            # Hosts of their own: Spark starts no speculative task on the host of the one that it is to overtake.
            SparkWorker(folder / "worker0", self.master.url, "127.0.0.1"),
            SparkWorker(folder / "worker1", self.master.url, "127.0.0.2", self.hidden if can_hide() else None),
        ]

    @property
    def url(self) -> str:
        return self.master.url

    def executors(self) -> list[psutil.Process]:
        return [executor for worker in self.workers for executor in worker.executors()]

    def __enter__(self) -> Self:
        try:
            self.master.start()
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self.workers, self.master):
            server.kill()


def namespace() -> list[str]:
    """A program before a command by which its mounts are its own."""
    return ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--map-root-user", "--mount"]


def can_hide() -> bool:
    """Whether this machine lets a process mount something that only it sees."""
    try:
        tried = subprocess.run([*namespace(), "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return tried.returncode == 0


@contextmanager
def standing_still(*executors: psutil.Process) -> Iterator[None]:
    """No task of these executors gets anywhere: their Python processes are stopped, their Java goes on."""
    stopped = [process for executor in executors for process in executor.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def tasks_given(executor: psutil.Process) -> int:
    """How many tasks an executor has begun with, as its log says."""
    return Path(executor.cwd(), "stderr").read_text().count("INFO Executor: Running task")


class Driver:
    """A driver as a process group of its own, so that it can be killed with everything that it has started."""

    def __init__(self, folder: Path, *command: str, **more: str) -> None:
        self._log = folder / f"driver-{free_port()}.log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ(), **more},
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text()

    def wait(self, timeout: float = 240.0) -> int:
        return self.process.wait(timeout)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _small() -> dict[str, str]:
    options = "-XX:TieredStopAtLevel=1 -Dspark.master.rest.enabled=false"  # its port would be the same for every master
    return {**environ(), "SPARK_DAEMON_MEMORY": "128m", "SPARK_DAEMON_JAVA_OPTS": options}


def _is_executor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline()
    return False
