"""The commands of `docs/how-to/run-on-a-cluster.md` for Kubernetes and YARN, as far as Spark's own submission goes."""

import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster import SPARK_HOME, environ

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"


def submit(master: str, folder: Path, *changes: tuple[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command of the page that names this master."""
    found = re.search(rf"(?s)```sh\n(spark-submit --master {master}.*?)```", PAGE.read_text())
    assert found
    text = found[1]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--verbose", *shlex.split(text.replace("\\\n", " "))[1:]]
    surroundings = {**os.environ, **environ(), "HOME": str(folder), "KUBECONFIG": os.devnull, **more}
    return subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=150)


class Kubernetes(BaseHTTPRequestHandler):
    """Takes whatever is created and remembers it."""

    protocol_version = "HTTP/1.1"
    created: list[dict[str, Any]]

    def take(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.created.append(body)
        body["metadata"]["uid"] = "1"
        answer = json.dumps(body).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_PATCH = take  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def kubernetes() -> Iterator[ThreadingHTTPServer]:
    Kubernetes.created = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def test_kubernetes_is_asked_for_a_driver_with_our_image_command_and_volume(
    kubernetes: ThreadingHTTPServer, tmp_path: Path
) -> None:
    here = f"k8s://http://127.0.0.1:{kubernetes.server_port}"
    ran = submit("k8s://", tmp_path, ("k8s://https://cluster:6443", here))

    assert ran.returncode == 0, ran.stderr
    made = {one["kind"]: one for one in Kubernetes.created}
    spec = made["Pod"]["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "registry/penstock-spark:1"
    assert container["args"][-8:] == [
        "local:///usr/local/lib/python3.11/site-packages/penstock/cli/spark_command.py",
        "run", "--segments", "/shared/segments", "--tables", "/shared/tables", "--checkpoint", "file:///shared/checkpoint",
    ]  # fmt: skip
    assert ("/shared", "shared") in [(one["mountPath"], one["name"]) for one in container["volumeMounts"]]
    claims = [one["persistentVolumeClaim"]["claimName"] for one in spec["volumes"] if one["name"] == "shared"]
    assert claims == ["penstock"]
    handed_on = made["ConfigMap"]["data"]["spark.properties"]
    assert "spark.kubernetes.executor.volumes.persistentVolumeClaim.shared.mount.path=/shared" in handed_on
    assert "spark.executor.memoryOverhead=1g" in handed_on


def test_yarn_would_be_handed_our_command_and_penstock(tmp_path: Path) -> None:
    for name in ("penstock.zip", "spark_command.py"):
        (tmp_path / name).touch()
    nowhere = {"yarn.resourcemanager.address": "127.0.0.1:9", "yarn.resourcemanager.connect.max-wait.ms": "1"}
    nowhere |= {"yarn.resourcemanager.connect.retry-interval.ms": "1", "ipc.client.connect.max.retries": "0"}
    settings = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in nowhere.items())
    (tmp_path / "yarn-site.xml").write_text(f"<configuration>{settings}</configuration>")
    ran = submit("yarn", tmp_path, HADOOP_CONF_DIR=str(tmp_path))

    said = ran.stdout + ran.stderr
    assert "Connection refused" in said  # it got as far as asking YARN
    assert "org.apache.spark.deploy.yarn.YarnClusterApplication" in said
    arguments = re.findall(r"--arg\n(.+)", said)
    assert arguments == [
        "run", "--segments", "/shared/segments", "--tables", "/shared/tables",
        "--checkpoint", "hdfs:///penstock/checkpoint",
    ]  # fmt: skip
    assert re.search(r"\(spark.yarn.dist.pyFiles,file:\S*/penstock.zip\)", said)
    assert "(spark.executorEnv.PYSPARK_PYTHON,/opt/penstock/bin/python)" in said
