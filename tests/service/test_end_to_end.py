"""From third-party clients to tables, and on to a third-party backend."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pika
import psutil
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from penstock.errors import PenstockError
from penstock.tables.port import open_tables
from penstock.tables.query import QueryRow, Question, answer_from_tables
from penstock.testing import wait_until
from tests.servers import Prometheus, RabbitMQ
from tests.service.running import Running, orders, sealed_sum

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
ONE_CORE = "spark: {master: 'local[1]', trigger: 500ms, conf: {spark.driver.memory: 512m}}\n"


def record(port: int) -> None:
    """What a program with the OpenTelemetry SDK does."""
    exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{port}/v1/metrics")
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=60_000)])
    meter = provider.get_meter("shop")

    def load(_: CallbackOptions) -> list[Observation]:
        return [Observation(0.5, {"host": "a"}), Observation(1.5, {"host": "b"})]

    meter.create_observable_gauge("load", callbacks=[load])
    sales, seconds = meter.create_counter("sales"), meter.create_histogram("duration")
    for number in range(100):
        sales.add(2, {"shop": "north" if number % 4 else "south"})
        seconds.record(number / 10, {"shop": "north"})
        if number == 49:
            provider.force_flush()
    provider.shutdown()


def kill_java(running: Running) -> None:
    """As the kernel does when memory is short."""
    assert running.process is not None
    (java,) = [one for one in psutil.Process(running.process.pid).children(recursive=True) if one.name() == "java"]
    java.kill()


@pytest.mark.spark
@pytest.mark.timeout(900)  # Spark starts in ten seconds, or in a minute on a machine that does much else
def test_an_sdks_metrics_are_in_the_minute_table_and_penstock_query_finds_them(tmp_path: Path) -> None:
    with Running(tmp_path, ONE_CORE) as running:
        record(running.port)
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{running.port}"}
        subprocess.run([sys.executable, ROOT / "examples" / "send_metrics.py"], env=environ, check=True)
        tables = open_tables(str(tmp_path / "tables"))

        def rows(metric: str, **more: Any) -> list[QueryRow]:
            try:
                return answer_from_tables(tables, Question(metric=metric, since=timedelta(hours=1), top=100, **more))
            except PenstockError:
                return []

        wait_until(lambda: all(rows(metric) for metric in ("sales", "load", "duration")), 240)
        wait_until(lambda: sum(row.value or 0 for row in rows("sales")) == 200, 120)
        assert {row.group["shop"]: row.value for row in rows("sales", by=("shop",))} == {"north": 150, "south": 50}
        assert {row.group["host"]: row.value for row in rows("load", by=("host",))} == {"a": 0.5, "b": 1.5}
        (duration,) = rows("duration")
        assert duration.points == 100

        wait_until(lambda: rows("order.duration"), 120)
        command = [sys.executable, "-m", "penstock", "query", "orders", "--by", "shop", "--json"]
        command += ["-c", str(running.file)]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert {row["shop"]: row["value"] for row in json.loads(ran.stdout)} == {"north": 750, "south": 250}

        assert "penstock_spark_batches_total" in running.ask("/metrics")[1]
        kill_java(running)
        record(running.port)  # receiving goes on without Spark, and Spark goes on when it is there again
        assert running.ask("/readyz")[0] == 200
        wait_until(lambda: sum(row.value or 0 for row in rows("sales")) == 400, 400)
        assert 'penstock_service_child_restarts_total{child="spark"} 1.0' in running.ask("/metrics")[1]
        running.stop()


@pytest.mark.server
def test_prometheus_writes_to_us_and_we_relay_to_a_second_one_and_both_say_the_same(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    text = (
        "pipelines: {rollup: false}\n"
        f"exporter: {{type: remote_write, url: '{prometheus.url}/api/v1/write', queue: {{retry_interval: 1s}}}}\n"
    )
    with Running(tmp_path, text) as running, writing_prometheus(tmp_path / "first", running.port) as first:
        wait_until(lambda: len(samples(prometheus, "up")) >= 5, 60)
        for name in ("scrape_duration_seconds", "prometheus_tsdb_head_samples_appended_total"):
            relayed = samples(prometheus, name)
            scraped = samples(first, name)

            assert len(relayed) >= 4
            # What it scraped before it watched its own log it never writes, and the last may still be on their way.
            begins = scraped.index(relayed[0])
            assert begins < 5
            assert relayed == scraped[begins : begins + len(relayed)]
            assert len(scraped) - len(relayed) < 30


def writing_prometheus(folder: Path, port: int) -> Prometheus:
    """A Prometheus that scrapes itself every second and writes all of it to us."""
    made = Prometheus(folder)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"  - {{job_name: itself, static_configs: [{{targets: ['127.0.0.1:{made.port}']}}]}}\n"
        "remote_write:\n"
        f"  - {{url: 'http://127.0.0.1:{port}/api/v1/write', queue_config: {{batch_send_deadline: 200ms}}}}\n"
    )
    return made


def samples(server: Prometheus, name: str) -> list[tuple[float, str]]:
    """Times and values of the one series of that name."""
    found = server.query(f"{name}{{job='itself'}}[5m]", time.time())
    return [tuple(pair) for pair in found[0]["values"]] if found else []


def test_events_can_just_be_posted(tmp_path: Path) -> None:
    with Running(tmp_path) as running:
        body = json.dumps([{"metric": "signups", "value": 1, "labels": {"plan": plan}} for plan in ("free", "team")])
        request = urllib.request.Request(
            f"http://127.0.0.1:{running.port}/v1/events", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answered:
            assert answered.status == 200
        assert running.stop() == 0, running.text()
        assert sealed_sum(tmp_path / "segments", "signups") == 2


@pytest.mark.server
def test_messages_of_rabbitmq_are_acknowledged_when_they_are_safe(shared_rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(shared_rabbitmq.url))
    channel = connection.channel()
    channel.exchange_declare("given-up", "fanout")
    channel.queue_declare("given-up")
    channel.queue_bind("given-up", "given-up")
    channel.queue_declare("telemetry", durable=True, arguments={"x-dead-letter-exchange": "given-up"})
    event = json.dumps([{"metric": "signups", "value": 1, "labels": {"plan": "free"}}]).encode()
    for _ in range(20):
        for body, kind in [(event, "application/json"), (orders(10), "application/x-protobuf")]:
            channel.basic_publish("", "telemetry", body, pika.BasicProperties(content_type=kind))
    channel.basic_publish("", "telemetry", b"{not json", pika.BasicProperties(content_type="application/json"))

    amqp = f"{{enabled: true, url: '{shared_rabbitmq.url}', queue: telemetry}}"
    text = f"spark: {{enabled: false}}\nreceivers: {{amqp: {amqp}}}"
    with Running(tmp_path, text) as running:
        wait_until(lambda: channel.queue_declare("given-up", passive=True).method.message_count == 1, 30)
        wait_until(lambda: channel.queue_declare("telemetry", passive=True).method.message_count == 0, 30)
        assert running.stop() == 0, running.text()
    assert channel.queue_declare("telemetry", passive=True).method.message_count == 0  # nothing came back
    connection.close()

    assert sealed_sum(tmp_path / "segments", "signups") == 20
    assert sealed_sum(tmp_path / "segments", "orders") == 200
