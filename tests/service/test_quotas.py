"""One sender cannot lock out the others, and rules at the door: through `penstock run`."""

import http.client
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from penstock.model.segment import read_segment, sealed
from penstock.testing import wait_until
from tests.service.running import Running
from tests.service.test_health import EDGE_ONLY, event, ready, value

ATTACKER, VICTIM = "127.0.0.2", "127.0.0.3"


def post_from(address: str, port: int, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30, source_address=(address, 0))
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def post_events(address: str, running: Running, *events: bytes) -> dict[str, Any]:
    body = b"[%s]" % b",".join(events)
    status, text = post_from(address, running.port, "/v1/events", body, "application/json")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


def post_counters(address: str, running: Running, metric: str, values: list[str]) -> ExportMetricsServiceResponse:
    """A cumulative counter with one series for each of these values of a label."""
    request = ExportMetricsServiceRequest()
    made = request.resource_metrics.add().scope_metrics.add().metrics.add(name=metric)
    made.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
    made.sum.is_monotonic = True
    now = time.time_ns()
    for one in values:
        point = made.sum.data_points.add(as_double=1.0, time_unix_nano=now, start_time_unix_nano=now - 1_000_000)
        point.attributes.add(key="session").value.string_value = one
    body = request.SerializeToString()
    status, text = post_from(address, running.port, "/v1/metrics", body, "application/x-protobuf")
    assert status == 200
    response = ExportMetricsServiceResponse()
    response.ParseFromString(text)
    return response


def lines(running: Running, event: str) -> list[dict[str, Any]]:
    return [line for line in running.log() if line.get("event") == event]


def test_random_labels_of_one_sender_leave_room_for_the_others(tmp_path: Path) -> None:
    limits = "{max_streams: 200, max_series_per_metric: 20}"
    with Running(tmp_path, f"{EDGE_ONLY}intake: {limits}\n") as running:
        for start in range(0, 1000, 100):
            clicks = [event("clicks", page="a", session=str(n)) for n in range(start, start + 100)]
            answer = post_events(ATTACKER, running, *clicks)
            assert answer["rejected"] == 0
            assert "'clicks'" in answer["errors"][0]
            assert "label 'session'" in answer["errors"][0]
        assert value(running, "penstock_receive_streams") == 21
        answer = post_counters(ATTACKER, running, "requests", [str(n) for n in range(1000)])
        assert answer.partial_success.rejected_data_points == 960
        assert "label 'session'" in answer.partial_success.error_message

        assert post_events(VICTIM, running, *(event("orders", shop=str(n)) for n in range(20)))["rejected"] == 0
        assert not post_counters(VICTIM, running, "sales", ["a", "b"]).HasField("partial_success")

        assert value(running, "penstock_receive_overflowed_total") == 980 + 980
        assert value(running, 'penstock_receive_metric_series{metric="clicks"}') == 21
        assert value(running, 'penstock_receive_refused_total{reason="quota"}') == 960
        status, body = ready(running)
        assert status == 200
        notes = "\n".join(body["notes"])
        assert "reason quota: metric 'requests' has more than 20 series" in notes
        assert re.search(
            r"added up in an overflow series: metric .* most by label 'session'.*; sender 127.0.0.2", notes
        )
        (line,) = lines(running, "New series are added up in one")
        assert line["sender"] == ATTACKER
        assert "'clicks'" in line["detail"]
        (line,) = lines(running, "Requests or points are refused")
        assert (line["reason"], line["sender"], line["count"]) == ("quota", ATTACKER, 960)


def test_random_names_and_labels_of_one_sender_meet_its_quota(tmp_path: Path) -> None:
    with Running(tmp_path, f"{EDGE_ONLY}intake: {{max_streams: 100}}\n", processes="2") as running:
        for number in range(40):  # over many metrics, and over both processes
            post_counters(ATTACKER, running, f"metric{number}", [str(n) for n in range(10)])
        assert value(running, "penstock_receive_streams") == 2 * 75
        assert value(running, 'penstock_receive_refused_total{process="0",reason="quota"}') > 0
        assert value(running, 'penstock_receive_refused_total{process="1",reason="quota"}') > 0
        assert f"sender '{ATTACKER}' has 75 streams" in "\n".join(ready(running)[1]["notes"])

        answer = post_counters(VICTIM, running, "sales", [str(n) for n in range(20)])
        assert not answer.HasField("partial_success")


def test_rules_drop_rename_and_change_labels_before_anything_is_counted(tmp_path: Path) -> None:
    rules = [
        "drop debug.*",
        "drop_labels http.* user session",
        "keep_labels rpc.* service",
        "hash_labels mail.* email",
        "rename old.name new.name",
    ]
    with Running(tmp_path, f"{EDGE_ONLY}intake: {{rules: {json.dumps(rules)}}}\n") as running:
        answer = post_events(
            VICTIM,
            running,
            event("debug.cache", key="1"),
            event("debug.cache", key="2"),
            event("http.calls", route="/", user="a", session="1"),
            event("http.calls", route="/", user="b", session="2"),
            event("rpc.calls", service="shop", call="3"),
            event("mail.sent", email="a@example.org"),
            event("old.name", host="h"),
        )
        assert answer["rejected"] == 0
        text = running.ask("/metrics")[1]
        assert 'penstock_receive_rules_total{rule="drop debug.*"} 2.0' in text
        assert 'penstock_receive_rules_total{rule="rename old.name new.name"} 1.0' in text
        assert "penstock_receive_rule_dropped_total 2.0" in text
        assert value(running, "penstock_receive_points_total") == 5
        for shop in ("x", "y"):  # cumulative streams stay apart, though they are shown as one series
            assert not post_counters(VICTIM, running, "http.total", [shop]).HasField("partial_success")
        folder = tmp_path / "segments"
        wait_until(lambda: sum(counts_in(folder).values()) >= 7)
        found = counts_in(folder)
    assert found == {
        ("http.calls", '{"route":"/"}'): 2,
        ("rpc.calls", '{"service":"shop"}'): 1,
        ("mail.sent", '{"email":"e16bfe08be114c7b"}'): 1,
        ("new.name", '{"host":"h"}'): 1,
        ("http.total", "{}"): 2,
    }


def counts_in(folder: Path) -> Counter[tuple[str, str]]:
    """The points of each series in the segments."""
    found: Counter[tuple[str, str]] = Counter()
    for segment in sealed(folder):
        for row in read_segment(folder / segment.name).to_pylist():
            found[row["metric"], row["entity"]] += row["count"]
    return found
