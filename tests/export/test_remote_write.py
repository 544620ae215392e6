"""Remote write to a real Prometheus: what is queried back is what was sent, value by value."""

import math
import time
from pathlib import Path

import cramjam
import pytest

from penstock.errors import PermanentExportError, TransientExportError
from penstock.export import SendQueue
from penstock.export.exporters.remote_write_exporter import RemoteWriteConfig, RemoteWriteExporter, write_request
from penstock.machine import cores
from penstock.spool import FastQueue
from penstock.spool.dead_letters import unpack_dead_letter
from penstock.testing import wait_until
from tests.export.misbehaving import Misbehaving, answer
from tests.export.quick import quick
from tests.servers import Prometheus

pytestmark = pytest.mark.server

SERIES = 40
SAMPLES = 25


def exporter(prometheus: Prometheus) -> RemoteWriteExporter:
    return RemoteWriteExporter(RemoteWriteConfig(url=f"{prometheus.url}/api/v1/write"))


def test_everything_that_went_through_the_queue_is_queried_back_value_by_value(
    prometheus: Prometheus, tmp_path: Path
) -> None:
    start = int(time.time() * 1000) - SAMPLES * 1000
    sent = {
        f"s{series}": [(start + n * 1000, [math.pi * series + n, -1e300, 5e-324, float("inf")][n % 4 if series else 0])
                       for n in range(SAMPLES)]
        for series in range(SERIES)
    }  # fmt: skip
    with (
        FastQueue(tmp_path / "queue") as queue,
        SendQueue(queue, exporter(prometheus), quick(workers=0)) as sender,
    ):
        for name, samples in sent.items():
            for half in (samples[:13], samples[13:]):
                sender.push(write_request([({"__name__": "penstock_sent", "series": name, "ünï": "cödé"}, half)]))
        wait_until(lambda: not len(sender))
        stats = sender.stats()
    assert stats.queue.dead_lettered == 0
    found = prometheus.query(f"penstock_sent[{SAMPLES + 30}s]", at=start / 1000 + SAMPLES)
    got = {
        row["metric"]["series"]: [(round(moment * 1000), float(value)) for moment, value in row["values"]]
        for row in found
    }
    assert got == sent


def test_what_prometheus_refuses_is_a_dead_letter_with_its_words(prometheus: Prometheus, tmp_path: Path) -> None:
    now = int(time.time() * 1000)
    good = write_request([({"__name__": "penstock_good"}, [(now, 2.0)])])
    bad = write_request([({"__name__": "penstock_good"}, [(now - 1000, 1.0)])])  # older than what it has
    with FastQueue(tmp_path / "queue") as queue, SendQueue(queue, exporter(prometheus), quick(workers=0)) as sender:
        sender.push(good)
        sender.push(bad)
        sender.push(b"this is no protobuf at all")
        wait_until(lambda: not len(sender))
        assert sender.stats().circuit_opened == 0
    with FastQueue(tmp_path / "queue" / "dead-letters") as letters:
        found = [unpack_dead_letter(lease.data) for lease in letters.lease(10)]
    assert [letter.data for letter in found] == [bad, b"this is no protobuf at all"]
    assert found[0].reason == "400 Bad Request: out of order sample"
    assert found[1].reason.startswith("400 Bad Request: ")
    assert [row["value"][1] for row in prometheus.query("penstock_good", at=now / 1000)] == ["2"]


def test_a_refusal_is_raised_where_there_is_no_queue(prometheus: Prometheus) -> None:
    client = exporter(prometheus)
    with pytest.raises(PermanentExportError, match="400"):
        client.send(client.prepare(b"\xff"))
    client.close()


def test_requests_are_split_by_series_and_then_by_sample(prometheus: Prometheus) -> None:
    client = exporter(prometheus)
    two = write_request([({"__name__": "a"}, [(1, 1.0)]), ({"__name__": "b"}, [(1, 2.0), (2, 3.0)])])
    halves = client.split(two)
    assert halves == [
        write_request([({"__name__": "a"}, [(1, 1.0)])]),
        write_request([({"__name__": "b"}, [(1, 2.0), (2, 3.0)])]),
    ]
    assert client.split(halves[1]) == [
        write_request([({"__name__": "b"}, [(1, 2.0)])]),
        write_request([({"__name__": "b"}, [(2, 3.0)])]),
    ]
    assert client.split(halves[0]) is None
    assert client.split(b"\xff") is None


def test_labels_are_written_in_order() -> None:
    labels = {"zone": "a", "__name__": "up", "job": "b"}
    in_order = {name: labels[name] for name in ("__name__", "job", "zone")}
    assert write_request([(labels, [(1, 1.0)])]) == write_request([(in_order, [(1, 1.0)])])


@pytest.mark.parametrize(("in_order", "workers"), [(True, 1), (False, 2 * cores())])
def test_a_receiver_that_does_not_mind_the_order_has_all_workers(tmp_path: Path, in_order: bool, workers: int) -> None:
    client = RemoteWriteExporter(RemoteWriteConfig(url="http://127.0.0.1:1", in_order=in_order))
    with SendQueue.open(client, quick(path=tmp_path / "queue", workers=0)) as sender:
        assert sender.stats().workers_total == workers


def test_a_block_is_snappy_without_framing(prometheus: Prometheus) -> None:
    prepared = exporter(prometheus).prepare(b"x" * 1000)
    assert bytes(cramjam.snappy.decompress_raw(prepared.body)) == b"x" * 1000
    assert prepared.headers == {  # what the specification asks for
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }


def test_every_server_error_is_sent_again_as_the_specification_says() -> None:
    with Misbehaving().running() as server:
        client = RemoteWriteExporter(RemoteWriteConfig(url=f"{server.url}/api/v1/write"))
        for status in (500, 501, 503):
            server.behaviours = [answer(status)]
            with pytest.raises(TransientExportError, match=str(status)):
                client.send(client.prepare(write_request([({"__name__": "up"}, [(1, 1.0)])])))
        client.close()
