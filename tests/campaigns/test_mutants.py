"""Mutated bodies for every decoder: make soak PART=mutants ARGS="--seed 7 --seconds 600"."""

import gzip
import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import cramjam
import psutil
import pytest

from penstock.export.exporters.remote_write_exporter import write_request
from tests.campaigns.campaign import Campaign
from tests.campaigns.senders import JSON, PROTOBUF, SNAPPY
from tests.decode.support import DELTA, exponential, histogram
from tests.receive.support import counter, gauge, request
from tests.service.running import Running

pytestmark = pytest.mark.server

V2 = {**SNAPPY, "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}
SLOWEST = 20.0  # seconds for one answer, on a machine that does much else
GROWTH = 300 << 20  # bytes: a body of 16 MB may pass through, and stays in no memory
FINE = {200, 204, 400, 413, 415, 429}
NUMBERS = (b"\x00", b"\xff", b"\x80", b"\x7f", b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\xf0\x7f", b"\x0a\x00")
TOKENS = (b"null", b"-1", b"1e999", b"[[[[", b"{}", b'"\\ud800"', b"9" * 400, b"NaN", b'""', b",", b"true")


def valid_bodies(now: int) -> dict[str, list[bytes]]:
    """What honest senders send, with every kind of point."""
    metrics = [
        gauge("mutant.gauge", 1.0, 2.5, time=now, host="a"),
        counter("mutant.cumulative", (now, 5.0), start=now - 10**9, host="a"),
        counter("mutant.delta", (now, 5.0), start=now - 10**9, temporality=DELTA, host="b"),
        histogram(now, [1, 2, 3], 9.0, start=now - 10**9),
        exponential(now, [1, 2, 3], 9.0, start=now - 10**9, temporality=DELTA),
    ]
    summary = request().resource_metrics[0].scope_metrics[0].metrics.add(name="mutant.summary")
    point = summary.summary.data_points.add(time_unix_nano=now, count=3, sum=2.0)
    point.quantile_values.add(quantile=0.5, value=1.0)
    metrics.append(summary)
    point_of_json = {
        "timeUnixNano": str(now),
        "asDouble": 1.5,
        "attributes": [{"key": "a", "value": {"intValue": "3"}}],
    }
    buckets = {"timeUnixNano": str(now), "count": "3", "sum": 2, "bucketCounts": ["1", "2"], "explicitBounds": [1.0]}
    in_json = [
        {"name": "mutant.json", "gauge": {"dataPoints": [point_of_json]}},
        {"name": "mutant.j", "histogram": {"aggregationTemporality": 1, "dataPoints": [buckets]}},
    ]
    series = [
        ({"__name__": "mutant_total", "host": "a"}, [(now // 10**6, 1.0), (now // 10**6 + 1, 2.0)]),
        ({"__name__": "mutant_bucket", "le": "+Inf"}, [(now // 10**6, 3.0)]),
    ]
    events = [
        {"metric": "mutant.event", "value": 1, "labels": {"a": "b"}, "time": now / 1e9},
        {"metric": "m", "value": 2},
    ]
    return {
        "otlp": [request(*metrics).SerializeToString(), *(request(one).SerializeToString() for one in metrics)],
        "otlp_json": [json.dumps({"resourceMetrics": [{"scopeMetrics": [{"metrics": in_json}]}]}).encode()],
        "remote_write": [write_request(series), write_request(series[:1])],
        "remote_write_2": [write_request(series)],
        "events": [json.dumps(events).encode()],
    }


DOORS = {
    "otlp": ("/v1/metrics", PROTOBUF),
    "otlp_json": ("/v1/metrics", JSON),
    "remote_write": ("/api/v1/write", SNAPPY),
    "remote_write_2": ("/api/v1/write", V2),
    "events": ("/v1/events", JSON),
}


def mutate(rng: Random, body: bytes, other: bytes) -> bytes:
    """One to four mutations: flips, cuts, doubled and spliced parts, lengths and tokens that lie."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):  # one keeps most of a body valid, and so goes deepest
        at = rng.randrange(len(body) + 1)
        to = min(len(body), at + rng.randrange(1, 40))
        match rng.choice((0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7)):
            case 0:
                body = body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
            case 1:
                body = body[:at] + bytes(byte ^ (1 << rng.randrange(8)) for byte in body[at:to]) + body[to:]
            case 2:
                body = body[:at]
            case 3:
                body = body[:at] + body[to:]
            case 4:
                body = body[:to] + body[at:to] * rng.randrange(1, 50) + body[to:]
            case 5:
                body = body[:at] + other[rng.randrange(len(other) + 1) :]
            case 6:
                body = body[:at] + rng.choice(NUMBERS) + body[at:]
            case _:
                body = body[:at] + rng.choice(TOKENS) + body[to:]
    return body


def mutants(rng: Random) -> Iterator[tuple[str, str, dict[str, str], bytes]]:
    """Without end: decoder, path, headers, body."""
    while True:
        valid = valid_bodies(time.time_ns())
        for name, bodies in valid.items():
            path, headers = DOORS[name]
            every = [body for listed in valid.values() for body in listed]
            body = mutate(rng, rng.choice(bodies), rng.choice(bodies if rng.random() < 0.7 else every))
            sent = dict(headers)
            if "snappy" in sent.values():
                body = bytes(cramjam.snappy.compress_raw(body))
            elif rng.random() < 0.1:
                body, sent["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            if "Content-Encoding" in sent and rng.random() < 0.1:
                body = mutate(rng, body, body)  # what is compressed is broken, too
            yield name, path, sent, body


def attack(port: int, rng: Random, seconds: float, least: int) -> dict[str, Counter[int]]:
    """Send mutants one after another; the answers of each decoder."""
    answers: dict[str, Counter[int]] = {name: Counter() for name in DOORS}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SLOWEST)
    ends = time.monotonic() + seconds
    for number, (name, path, headers, body) in enumerate(mutants(rng)):
        if time.monotonic() > ends and number >= least:
            break
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.read()
        answers[name][answer.status] += 1
        assert answer.status in FINE, (name, answer.status, said[:300], body.hex())
        assert answer.status < 300 or said, f"{name} was refused without a reason: {body.hex()}"
    connection.close()
    return answers


def run(folder: Path, seed: int, seconds: float, least: int) -> str:
    service = Running(folder)
    with Campaign(service, seed) as campaign:
        campaign.wait_for_requests(10)
        assert service.process is not None
        process = psutil.Process(service.process.pid)
        before = process.memory_info().rss
        answers = attack(service.port, campaign.rng, seconds, least)
        grown = process.memory_info().rss - before
        assert service.process.poll() is None
        campaign.wait_for_requests(1)
        campaign.settle()
        assert grown < GROWTH
        raw = [line for line in service.text().splitlines() if not line.startswith("{")]
        assert not raw, raw[:3]  # a warning or a traceback that is no line of the log
        errors = [line for line in service.log() if line["level"] == "error" or "exception" in line]
        assert not errors, errors[:3]
    tried = {name: dict(sorted(counted.items())) for name, counted in answers.items()}
    total = sum(counted.total() for counted in answers.values())
    return f"{campaign.report('mutants')}\n{total} mutants, by decoder and answer: {tried}; grew by {grown >> 20} MB"


@pytest.mark.timeout(300)
def test_a_thousand_mutated_bodies_are_answered_and_honest_requests_stay_exact(tmp_path: Path, seed: int) -> None:
    run(tmp_path, seed, 0.0, 1000)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_mutated_bodies_are_answered_and_honest_requests_stay_exact(tmp_path: Path, seed: int, seconds: float) -> None:
    print(run(tmp_path, seed, seconds, 1000))  # noqa: T201 - the campaign's report
