"""Real servers for tests: private, on free loopback ports, in a folder of their own, killed and restarted at will.

    with RabbitMQ(tmp_path) as broker:
        broker.url            # amqp://guest:guest@127.0.0.1:<free port>/
        broker.kill()         # SIGKILL, as a power cut would
        broker.start()        # same port, same data

Debian's packages are installed when we are root. Where a server cannot be had, `MissingRequirement` says why, and
`tests/conftest.py` turns that into a skip, or into a failure where CI=true.
"""

import contextlib
import fcntl
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from penstock.errors import MissingRequirement

SYSTEM = ("/usr/bin", "/usr/sbin")  # where packages put programs, whatever PATH says


def free_port() -> int:
    """A port that nobody has, and that the system gives to no client: one that keeps trying a dead server could be
    given the server's own port, meet itself there, and keep the server from coming back."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def provide(package: str, program: str, *folders: str) -> str:
    """The path of `program`, installing Debian's `package` for it if we are root."""
    path = os.pathsep.join([*folders, os.environ.get("PATH", ""), *SYSTEM])
    found = shutil.which(program, path=path)
    if found:
        return found
    if os.getuid() != 0 or not shutil.which("apt-get"):
        raise MissingRequirement(f"{program} is not installed and we may not install Debian's {package} (not root)")
    # No service is to be started by the installation: ours are private.
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    with open(Path(tempfile.gettempdir()) / "penstock-apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", package]):
            ran = subprocess.run(["apt-get", *command], env=environ, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise MissingRequirement(f"apt-get {' '.join(command)} failed: {ran.stderr.strip()[-500:]}")
    found = shutil.which(program, path=path)
    if not found:
        raise MissingRequirement(f"Debian's {package} was installed but brought no {program}")
    return found


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has asked yet how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Server(ABC):
    """One process (and its children) that a test owns."""

    name = "server"
    start_timeout = 60.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    user: str | None = None  # whom to run as, if not as ourselves

    @abstractmethod
    def command(self) -> tuple[list[str], dict[str, str]]:
        """How it is started: arguments and environment."""

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start and wait until it answers."""
        if self.running:
            return self
        arguments, environ = self.command()
        self._log = open(self.folder / "server.log", "ab")  # noqa: SIM115 - the server writes to it after we return
        self._process = subprocess.Popen(
            self._by_user(arguments),
            cwd=self.folder if self.user is None else "/",
            env={**os.environ, **environ},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + self.start_timeout
        while not self.ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start within {self.start_timeout} s:\n{log}")
            time.sleep(0.05)
        return self

    def _by_user(self, arguments: list[str]) -> list[str]:
        """By a program, and not by `subprocess`, which would fork for it: of such children gRPC, where a test has
        used it, aborts one in some hundred before it becomes the server."""
        if self.user is None:
            return arguments
        return ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups", *arguments]

    def _end(self, number: int, timeout: float) -> None:
        if self._process is None:
            return
        # Those of PostgreSQL have groups of their own, and one that goes on keeps the next server from starting.
        others = self._others()
        try:
            os.killpg(self._process.pid, number)
            self._process.wait(timeout)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
        deadline = time.monotonic() + timeout
        while not all(map(has_ended, others)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._process = None
        if self._log:
            self._log.close()

    def _others(self) -> list[psutil.Process]:
        """What it has started."""
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM, 30)

    def kill(self) -> None:
        """SIGKILL it and all that it has started."""
        self._end(signal.SIGKILL, 30)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class RabbitMQ(Server):
    """A broker with its own name, cookie, data and port mapper, so that several may run side by side."""

    name = "RabbitMQ"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = provide("rabbitmq-server", "rabbitmq-server", "/usr/lib/rabbitmq/bin")
        if self._program == "/usr/sbin/rabbitmq-server":  # Debian's wrapper insists on one user and one data folder
            self._program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
        self._dist_port, self._epmd_port = free_port(), free_port()
        (folder / "enabled_plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.default = 127.0.0.1:{self.port}\n"
            "disk_free_limit.absolute = 50MB\n"
            "log.console = true\nlog.console.level = warning\nlog.file = false\n"
        )
        # A cookie that we wrote is the only one that a client of ours knows.
        cookie = folder / ".erlang.cookie"
        cookie.write_text("PENSTOCKTESTS")
        cookie.chmod(0o400)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def environ(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "RABBITMQ_NODENAME": f"penstock{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_RELAXED_COMMAND_CHECK": "1",  # so that it ends when asked, though it still lists a killed broker
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "no-such-file"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            # One scheduler thread per core is for a broker that owns the machine; ours shares two cores with the test.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }

    def command(self) -> tuple[list[str], dict[str, str]]:
        return [self._program], self.environ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        # The port mapper made itself a daemon, out of reach of our signals to the broker's group.
        subprocess.run(["epmd", "-kill"], env={**os.environ, **self.environ()}, capture_output=True, check=False)

    def ready(self) -> bool:
        """It listens before it serves: only an answer to the protocol header means that it is up."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                return probe.recv(1) == b"\x01"  # a method frame: connection.start
        except OSError:
            return False

    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl` says, asked of this broker."""
        program = str(Path(self._program).with_name("rabbitmqctl"))
        environ = {**os.environ, **self.environ(), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ""}
        ran = subprocess.run(
            [program, "-q", *arguments],
            env=environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        return ran.stdout


class PostgreSQL(Server):
    """A database cluster of its own. As root it runs as the package's user, since it refuses to run as root."""

    name = "PostgreSQL"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        folders = [str(path) for path in reversed(versions)] or ["/usr/lib/postgresql/15/bin"]
        self._program = os.path.realpath(provide("postgresql", "postgres", *folders))
        self._data = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))  # the other user must be able to get there
        (self._data / "passwords").write_text("penstock\n")
        if os.getuid() == 0:
            self.user = "postgres"
            owner = pwd.getpwnam(self.user)
            for path in (self._data, self._data / "passwords"):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        initdb = str(Path(self._program).with_name("initdb"))
        options = [f"--pgdata={self._data / 'data'}", "--username=penstock", f"--pwfile={self._data / 'passwords'}"]
        more = ["--auth=scram-sha-256", "--no-sync", "--encoding=UTF8", "--locale=C"]
        subprocess.run(self._by_user([initdb, *options, *more]), cwd=self._data, check=True, capture_output=True)

    @property
    def url(self) -> str:
        return f"postgresql://penstock:penstock@127.0.0.1:{self.port}/postgres"

    def command(self) -> tuple[list[str], dict[str, str]]:
        settings = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        (self._data / "data" / "postmaster.pid").unlink(missing_ok=True)  # what a killed one left
        arguments = [self._program, "-D", str(self._data / "data")]
        for key, value in settings.items():
            arguments += ["-c", f"{key}={value}"]
        return arguments, {}

    def ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        shutil.rmtree(self._data, ignore_errors=True)


class Prometheus(Server):
    """A Prometheus that scrapes nothing and takes remote writes."""

    name = "Prometheus"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._program = provide("prometheus", "prometheus")
        (folder / "prometheus.yml").write_text("global: {}\n")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> tuple[list[str], dict[str, str]]:
        arguments = [
            self._program,
            f"--config.file={self.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-remote-write-receiver",
            "--log.level=warn",
        ]
        return arguments, {"GOMAXPROCS": "1"}

    def ready(self) -> bool:
        """It listens before it serves: while it replays its log it answers 503."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str, at: float) -> list[dict[str, Any]]:
        """The instant vector or matrix of `expression` at `at` (seconds since the epoch)."""
        parameters = urllib.parse.urlencode({"query": expression, "time": at})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{parameters}", timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


def self_signed(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """A key and a certificate for these names, that is its own authority."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    files = ["-subj", "/CN=test", "-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *options, *files], check=True, capture_output=True)
    return key, certificate
