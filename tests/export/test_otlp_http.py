"""OTLP/HTTP against a real server that misbehaves in every way, checked with the official protobuf definitions."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.config.destinations import ExporterSection
from penstock.errors import (
    ConfigError,
    ErrorClass,
    PayloadTooLarge,
    PermanentExportError,
    TransientExportError,
)
from penstock.export import PartialSuccess, SendQueue, http_connection
from penstock.export.classify import of_exception
from penstock.export.exporters.otlp_http_exporter import OtlpHttpConfig, OtlpHttpExporter
from penstock.export.http_client import HttpClient, HttpClientConfig, TlsConfig
from penstock.protobuf import field_bytes, field_varint
from penstock.spool import FastQueue
from penstock.testing import wait_until
from tests.export import misbehaving
from tests.export.misbehaving import Behaviour, Misbehaving, answer
from tests.export.quick import quick
from tests.servers import self_signed


def metrics(resources: int = 1, scopes: int = 1, names: int = 1, points: int = 1) -> bytes:
    """A request with that many of each, every point different."""
    request = ExportMetricsServiceRequest()
    number = 0
    for r in range(resources):
        resource = request.resource_metrics.add()
        resource.resource.attributes.add(key="host").value.string_value = f"h{r}"
        for s in range(scopes):
            scope = resource.scope_metrics.add()
            scope.scope.name = f"s{s}"
            for n in range(names):
                metric = scope.metrics.add(name=f"m{n}", unit="ms")
                for _ in range(points):
                    metric.sum.data_points.add(time_unix_nano=number, as_double=number / 2)
                    number += 1
                metric.sum.is_monotonic = True
    return bytes(request.SerializeToString())


def facts(request: bytes) -> list[tuple[str, str, str, bool, int, float]]:
    """Every point of a request with all that it hangs on."""
    parsed = ExportMetricsServiceRequest.FromString(request)
    return [
        (
            resource.resource.attributes[0].value.string_value,
            scope.scope.name,
            f"{metric.name} {metric.unit}",
            metric.sum.is_monotonic,
            point.time_unix_nano,
            point.as_double,
        )
        for resource in parsed.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.sum.data_points
    ]


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    with Misbehaving().running() as running:
        yield running


def exporter(server: Misbehaving, **settings: Any) -> OtlpHttpExporter:
    return OtlpHttpExporter(OtlpHttpConfig(url=server.url, **{"timeout": 5.0, **settings}))


def send(client: OtlpHttpExporter, batch: bytes) -> PartialSuccess | None:
    return client.send(client.prepare(batch))


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_a_receiver_reads_what_was_sent(server: Misbehaving, compression: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    client = exporter(
        server, compression=compression, headers={"X-Scope-OrgID": "tenant"}, token_file=tmp_path / "token"
    )
    assert send(client, metrics(2, 2, 2, 2)) is None
    (request,) = server.requests
    assert request.path == "/v1/metrics"
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.headers["x-scope-orgid"] == "tenant"
    assert request.headers["authorization"] == "Bearer secret"
    assert facts(request.body) == facts(metrics(2, 2, 2, 2))


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("", "/v1/metrics"),
        ("/", "/v1/metrics"),
        ("/otlp?key=1", "/otlp/v1/metrics?key=1"),
        ("/v1/metrics", "/v1/metrics"),
        ("/v1/metrics/", "/v1/metrics"),
        ("/v1/metrics?key=1", "/v1/metrics?key=1"),
    ],
)
def test_the_signals_path_is_added_where_the_url_does_not_have_it(server: Misbehaving, given: str, path: str) -> None:
    client = OtlpHttpExporter(OtlpHttpConfig(url=server.url + given))
    send(client, metrics())
    assert server.requests[0].path == path


def test_one_connection_serves_one_thread(server: Misbehaving) -> None:
    client = exporter(server)
    for _ in range(10):
        send(client, metrics())
    assert server.connections == 1
    assert len(server.requests) == 10


@pytest.mark.parametrize("ending", [misbehaving.hang_up, misbehaving.reset])
def test_a_connection_that_the_server_ended_while_idle_is_replaced_unseen(
    server: Misbehaving, ending: Behaviour
) -> None:
    client = exporter(server)
    server.behaviours = [answer(200), ending]
    assert send(client, metrics()) is None
    assert send(client, metrics()) is None
    assert server.connections == 2


def test_what_a_server_says_to_an_idle_connection_is_no_answer_to_the_next_request(server: Misbehaving) -> None:
    client = exporter(server)
    is_idle = threading.Event()

    def give_up(connection: socket.socket) -> bool:
        answer(200)(connection)
        is_idle.wait(30)
        answer(408)(connection)
        return False

    server.behaviours = [give_up]
    assert send(client, metrics()) is None
    is_idle.set()
    wait_until(lambda: not server.open)
    assert send(client, metrics()) is None
    assert server.connections == 2


def test_a_connection_that_the_server_will_end_is_not_used_again(server: Misbehaving) -> None:
    client = exporter(server)
    server.behaviours = [answer(200, Connection="close")]
    assert send(client, metrics()) is None
    assert send(client, metrics()) is None
    assert server.connections == 2


@pytest.mark.parametrize(
    ("behaviour", "error_class"),
    [
        (misbehaving.reset, ErrorClass.NETWORK),
        (misbehaving.hang_up, ErrorClass.NETWORK),
        (misbehaving.half, ErrorClass.NETWORK),
        (misbehaving.half_of_its_headers, ErrorClass.NETWORK),
        (misbehaving.nonsense, ErrorClass.NETWORK),
        (answer(503), ErrorClass.SERVER_ERROR),
        (answer(502), ErrorClass.SERVER_ERROR),
        (answer(401), ErrorClass.AUTH),
        (answer(429), ErrorClass.RATE_LIMIT),
        (answer(504), ErrorClass.TIMEOUT),
    ],
)
def test_what_may_pass_is_transient_and_the_next_send_works(
    server: Misbehaving, behaviour: Behaviour, error_class: ErrorClass
) -> None:
    client = exporter(server)
    server.behaviours = [behaviour]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the send queue classifies what it is
        send(client, metrics())
    error = of_exception(caught.value)
    assert isinstance(error, TransientExportError)
    assert error.error_class is error_class
    assert send(client, metrics()) is None


@pytest.mark.parametrize("status", [500, 501, 505, 507])
def test_other_server_errors_must_not_be_sent_again(server: Misbehaving, status: int) -> None:
    client = exporter(server)
    server.behaviours = [answer(status)]
    with pytest.raises(PermanentExportError, match=str(status)) as caught:
        send(client, metrics())
    assert caught.value.error_class is ErrorClass.SERVER_ERROR


@pytest.mark.parametrize("how", ["silent", "dripping", "dripping_headers"])
def test_a_slow_server_is_held_to_the_timeout(server: Misbehaving, how: str) -> None:
    client = exporter(server, timeout=0.15)
    server.behaviours = [getattr(server, how)]
    with pytest.raises(TimeoutError):
        send(client, metrics())


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_was_renewed_is_used_after_the_old_one_was_refused(
    server: Misbehaving, status: int, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    client = exporter(server, token_file=token)
    server.behaviours = [answer(200), answer(status)]
    send(client, metrics())
    with pytest.raises(TransientExportError, match=str(status)):
        send(client, metrics())
    token.write_text("new")
    send(client, metrics())
    tokens = [request.headers["authorization"].removeprefix("Bearer ") for request in server.requests]
    assert tokens == ["old", "old", "new"]


@pytest.mark.parametrize(
    "echo", ["got: Bearer s3cr3t-t0ken", "s3cr3t-t0ken is wrong", "x-key: k3y-of-ours!", "x" * 490]
)
def test_a_server_that_says_our_secrets_again_does_not_bring_them_into_the_log(
    server: Misbehaving, tmp_path: Path, echo: str
) -> None:
    (tmp_path / "token").write_text("s3cr3t-t0ken")
    client = exporter(server, token_file=tmp_path / "token", headers={"x-key": "k3y-of-ours!"})
    server.behaviours = [answer(401, f"{echo} s3cr3t-t0ken".encode())]
    with pytest.raises(TransientExportError) as caught:
        client.send(client.prepare(b"one"))
    assert "***" in str(caught.value)
    assert "s3c" not in str(caught.value)
    assert "k3y" not in str(caught.value)
    client.close()


@pytest.mark.parametrize("content", ["hidden\nhidden too", "hidden€", "", None])
def test_a_token_file_that_holds_no_token_is_named_without_what_it_holds_and_nothing_is_sent(
    server: Misbehaving, content: str | None, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    client = exporter(server, token_file=token)
    server.behaviours = [answer(401)]
    with pytest.raises(TransientExportError):
        send(client, metrics())
    token.unlink()
    if content is not None:
        token.write_text(content)
    for _ in range(2):
        with pytest.raises(TransientExportError, match="token_file") as caught:
            send(client, metrics())
        assert caught.value.error_class is ErrorClass.AUTH
        assert "hidden" not in str(caught.value)
    assert len(server.requests) == 1
    token.write_text("new")
    assert send(client, metrics()) is None


def test_the_servers_words_are_the_reason(server: Misbehaving) -> None:
    client = exporter(server)
    status = field_varint(1, 3) + field_bytes(2, b"unknown unit")  # google.rpc.Status
    server.behaviours = [
        answer(400, status, Content_Type="application/x-protobuf"),
        answer(400, b"no\n such  field", Content_Type="text/plain"),
        answer(400, b"\xff" * 100_000, Content_Type="application/x-protobuf"),
    ]
    with pytest.raises(PermanentExportError, match="400 Bad Request: unknown unit"):
        send(client, metrics())
    with pytest.raises(PermanentExportError, match="400 Bad Request: no such field"):
        send(client, metrics())
    with pytest.raises(PermanentExportError, match=r"400 Bad Request$"):
        send(client, metrics())
    assert send(client, metrics()) is None


def test_no_more_of_an_answer_is_read_than_we_need(server: Misbehaving) -> None:
    server.behaviours = [answer(200, bytes(100_000))]
    client = HttpClient(HttpClientConfig(url=server.url))
    assert len(client.post(b"x", {}).body) == 64 * 1024
    assert client.post(b"x", {}).body == b""  # and not what was left of the one before


def test_long_words_of_a_server_are_cut(server: Misbehaving) -> None:
    server.behaviours = [answer(400, b"x" * 10_000)]
    with pytest.raises(PermanentExportError, match=r"x{500}$") as caught:
        send(exporter(server), metrics())
    assert len(str(caught.value)) < 600


def test_a_connection_that_is_made_while_the_client_is_closed_is_not_used(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = HttpClient(HttpClientConfig(url=server.url))
    connect = http_connection.connect_to_destination

    def connect_while_closing(*where: Any) -> http_connection.HttpClientConnection:
        made = connect(*where)
        client.close()
        return made

    monkeypatch.setattr(http_connection, "connect_to_destination", connect_while_closing)
    with pytest.raises(ConnectionAbortedError, match="the exporter is closed"):
        client.post(b"x", {})
    assert server.requests == []


def test_a_second_try_has_what_the_first_has_left_of_the_timeout(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = HttpClient(HttpClientConfig(url=server.url, timeout=500.0))
    client.post(b"first", {})
    passed = 0.0
    real, receive, connect = (
        time.monotonic,
        http_connection.HttpClientConnection.receive,
        http_connection.connect_to_destination,
    )
    remaining: list[float] = []

    def slowly(
        connection: http_connection.HttpClientConnection, most: int, deadline: float
    ) -> http_connection.HttpResponse:
        nonlocal passed
        passed += 0.0 if remaining else 300.0
        return receive(connection, most, deadline)

    def note(
        host: str, port: int, context: ssl.SSLContext | None, deadline: float
    ) -> http_connection.HttpClientConnection:
        remaining.append(deadline - time.monotonic())
        return connect(host, port, context, deadline)

    monkeypatch.setattr(time, "monotonic", lambda: real() + passed)
    monkeypatch.setattr(http_connection.HttpClientConnection, "receive", slowly)
    monkeypatch.setattr(http_connection, "connect_to_destination", note)
    server.behaviours = [misbehaving.hang_up]
    assert client.post(b"second", {}).status == 200
    assert [round(seconds, -2) for seconds in remaining] == [200.0]  # beside the little that the test itself takes
    client.close()


def test_a_server_that_refuses_a_large_request_before_it_has_read_it_is_understood(server: Misbehaving) -> None:
    server.is_hasty = True
    server.behaviours = [answer(413), answer(429, Retry_After="7"), answer(200)]
    client = exporter(server, compression="none")
    large = bytes(20_000_000)  # more than the kernel takes in for a server that does not read
    with pytest.raises(PayloadTooLarge):
        send(client, large)
    with pytest.raises(TransientExportError) as caught:
        send(client, large)
    assert caught.value.retry_after == 7.0
    with pytest.raises(ConnectionError):  # a success says nothing of what it has not read
        send(client, large)


@pytest.mark.parametrize(
    ("rejected", "message", "found"),
    [
        (17, "too old", PartialSuccess(17, "too old")),
        (0, "a name will be shortened", PartialSuccess(0, "a name will be shortened")),
        (-1, "nonsense", PartialSuccess(0, "nonsense")),
        (-1, "", None),
        (0, "", None),
    ],
)
def test_partial_success_tells_how_many_and_why(
    server: Misbehaving, rejected: int, message: str, found: PartialSuccess | None
) -> None:
    partial = ExportMetricsPartialSuccess(rejected_data_points=rejected, error_message=message)
    response = ExportMetricsServiceResponse(partial_success=partial)
    server.behaviours = [answer(200, response.SerializeToString(), Content_Type="application/x-protobuf")]
    assert send(exporter(server), metrics()) == found


@pytest.mark.parametrize(
    ("body", "kind", "warns"),
    [
        (b"", "", False),
        (ExportMetricsServiceResponse().SerializeToString(), "application/x-protobuf", False),
        (b"{}", "application/json", False),  # some say it so, whatever they were asked in
        (b"<html>", "text/html; charset=utf-8", True),
        (b"\x0a\xff", "application/x-protobuf", True),
    ],
)
def test_any_other_body_of_a_success_is_a_success_and_one_of_something_else_a_warning(
    server: Misbehaving, body: bytes, kind: str, warns: bool
) -> None:
    server.behaviours = [answer(200, body, **({"Content_Type": kind} if kind else {}))]
    warning = PartialSuccess(0, f"the answer was no OTLP but {kind.partition(';')[0]}: check the url")
    assert send(exporter(server), metrics()) == (warning if warns else None)


@pytest.mark.parametrize(
    ("shape", "halves"),
    [((4, 1, 1, 1), 2), ((1, 5, 1, 1), 2), ((1, 1, 3, 1), 2), ((1, 1, 1, 7), 2), ((3, 2, 2, 3), 2)],
)
def test_a_request_is_split_without_losing_or_doubling_a_point(
    server: Misbehaving, shape: tuple[int, int, int, int], halves: int
) -> None:
    client = exporter(server)
    whole = metrics(*shape)
    parts = client.split(whole)
    assert parts is not None
    assert len(parts) == halves
    assert sorted(fact for part in parts for fact in facts(part)) == sorted(facts(whole))
    assert all(facts(part) for part in parts)


@pytest.mark.parametrize("kind", ["gauge", "sum", "histogram", "exponential_histogram", "summary"])
def test_points_of_every_kind_are_split_and_their_metric_stays_what_it_is(server: Misbehaving, kind: str) -> None:
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="m", unit="By")
    data = getattr(metric, kind)
    for moment in (1, 2):
        data.data_points.add(time_unix_nano=moment)
    if hasattr(data, "aggregation_temporality"):
        data.aggregation_temporality = 2
    parts = exporter(server).split(request.SerializeToString())
    assert parts is not None
    for moment, part in enumerate(parts, start=1):
        expected = ExportMetricsServiceRequest.FromString(request.SerializeToString())
        points = getattr(expected.resource_metrics[0].scope_metrics[0].metrics[0], kind).data_points
        del points[2 - moment]
        assert ExportMetricsServiceRequest.FromString(part) == expected


def test_a_single_point_and_nonsense_cannot_be_split(server: Misbehaving) -> None:
    client = exporter(server)
    assert client.split(metrics()) is None
    assert client.split(b"\xff\xff") is None
    assert client.split(b"") is None


@pytest.mark.parametrize(
    ("kind", "signal", "path"),
    [
        (ExportTraceServiceRequest, "traces", ("resource_spans", "scope_spans", "spans")),
        (ExportLogsServiceRequest, "logs", ("resource_logs", "scope_logs", "log_records")),
    ],
)
def test_spans_and_log_records_are_split_too(
    server: Misbehaving, kind: Any, signal: str, path: tuple[str, str, str]
) -> None:
    resources, scopes, items = path
    request = kind()
    scope = getattr(getattr(request, resources).add(), scopes).add()
    for number in range(5):
        getattr(scope, items).add(trace_id=bytes([number]) * 16)
    parts = exporter(server, signal=signal).split(request.SerializeToString())
    assert parts is not None
    found = [getattr(getattr(getattr(kind.FromString(part), resources)[0], scopes)[0], items) for part in parts]
    assert [item.trace_id[0] for some in found for item in some] == list(range(5))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> Iterator[Misbehaving]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    with Misbehaving(tls=context).running() as running:
        yield running


def test_a_certificate_that_we_trust_works(tls_server: Misbehaving, certificate: tuple[Path, Path]) -> None:
    client = exporter(tls_server, tls=TlsConfig(ca_file=certificate[1]))
    assert send(client, metrics()) is None
    assert facts(tls_server.requests[0].body) == facts(metrics())


def test_one_that_we_do_not_trust_is_an_error_and_nothing_is_sent(tls_server: Misbehaving) -> None:
    with pytest.raises(OSError, match="certificate verify failed") as caught:
        send(exporter(tls_server), metrics())
    assert of_exception(caught.value).error_class is ErrorClass.NETWORK
    assert tls_server.requests == []


def test_a_large_request_goes_over_tls_whole(tls_server: Misbehaving, certificate: tuple[Path, Path]) -> None:
    client = exporter(tls_server, tls=TlsConfig(ca_file=certificate[1]), compression="none")
    large = random.randbytes(10_000_000)
    for _ in range(2):
        assert send(client, large) is None
    assert [request.body == large for request in tls_server.requests] == [True, True]
    assert tls_server.connections == 1


def test_a_refusal_before_the_request_was_read_is_understood_over_tls(
    tls_server: Misbehaving, certificate: tuple[Path, Path]
) -> None:
    tls_server.is_hasty = True
    tls_server.behaviours = [answer(413)]
    client = exporter(tls_server, tls=TlsConfig(ca_file=certificate[1]), compression="none")
    with pytest.raises(PayloadTooLarge):
        send(client, bytes(20_000_000))


def test_an_answer_that_had_come_over_tls_can_be_read_after_the_connection_was_cut(
    tls_server: Misbehaving, certificate: tuple[Path, Path]
) -> None:
    deadline = time.monotonic() + 30.0
    connection = http_connection.connect_to_destination(
        "127.0.0.1", tls_server.port, TlsConfig(ca_file=certificate[1]).context(), deadline
    )
    connection.send("/", {"Host": "127.0.0.1"}, b"", deadline)
    assert connection.receive(100, deadline).is_reusable
    assert connection.is_quiet()
    connection.send("/", {"Host": "127.0.0.1"}, b"", deadline)
    wait_until(lambda: not connection.is_quiet())
    connection.cut()
    assert connection.receive(100, deadline).status == 200
    connection.close()
    connection.cut()  # as another thread may


def test_close_ends_a_request_that_hangs(server: Misbehaving) -> None:
    client = exporter(server, timeout=30.0)
    server.behaviours = [server.silent]
    raised: list[BaseException] = []

    def hang() -> None:
        try:
            send(client, metrics())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    wait_until(lambda: server.requests)
    client.close()
    thread.join(5)
    assert raised
    with pytest.raises(ConnectionAbortedError):
        send(client, metrics())


def test_through_the_queue_every_point_arrives_whatever_the_server_does(server: Misbehaving, tmp_path: Path) -> None:
    whole = metrics(4, 2, 2, 2)
    partial = ExportMetricsServiceResponse(
        partial_success=ExportMetricsPartialSuccess(rejected_data_points=3, error_message="too old")
    )
    server.behaviours = [
        answer(413), misbehaving.reset, misbehaving.half, answer(503, Retry_After="0"), answer(429), answer(200),
        answer(413), answer(200, partial.SerializeToString()), misbehaving.nonsense, answer(401),
    ]  # fmt: skip
    taken: list[bytes] = []

    def record(behave: Behaviour) -> Behaviour:
        def recorded(connection: Any) -> bool:
            before = len(server.requests)
            keeps_alive = behave(connection)
            if "answer" in behave.__qualname__ and behave in successes:
                taken.append(server.requests[before - 1].body)
            return keeps_alive

        return recorded

    successes: set[Behaviour] = {server.behaviours[5], server.behaviours[7]}
    server.behaviours = [record(behave) for behave in server.behaviours]
    with FastQueue(tmp_path / "queue") as queue, SendQueue(queue, exporter(server), quick(workers=1)) as sender:
        sender.push(whole)
        wait_until(lambda: not len(sender))
        stats = sender.stats()
    taken += [request.body for request in server.requests[10:]]
    assert sorted(fact for body in taken for fact in facts(body)) == sorted(facts(whole))
    assert stats.partial_rejected == 3
    assert stats.splits == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": 4318}, "url must look like http://host:port/path or https://..., got 4318"),
        ({"url": "ftp://x"}, "url must look like"),
        ({"url": "http://user:pw@host"}, "url must not hold a password"),
        ({"url": "http://x/a b?key=hidden"}, "url must be plain ASCII without spaces"),
        ({"url": "http://x/a?key=hiddén"}, "url must be plain ASCII without spaces"),
        ({"url": "http://x", "tls": TlsConfig()}, "tls is set"),
        ({"url": "http://x", "timeout": 0}, "timeout must be > 0"),
        ({"url": "http://x", "signal": "smells"}, "signal must be one of"),
        ({"url": "http://x", "compression": "lzma"}, "compression must be one of"),
        ({"url": "http://x:99999"}, "url cannot be read: Port out of range"),
        ({"url": "localhost:4318"}, "url must look like .*, got 'localhost:4318'"),
        ({"url": "user:hidden@x"}, "url must look like .*, got 'x'"),
        ({"url": "http://x", "token_file": "no/such"}, "token_file must name a file that can be read, got 'no/such'"),
        ({"url": "http://x", "headers": {"X": "a\nb"}}, "headers must be one line of plain text each: that of 'X'"),
        ({"url": "http://x", "headers": {"X:": "a"}}, "headers must be named in letters, digits and hyphens, got 'X:'"),
        ({"url": "http://x", "headers": {"content-length": "1"}}, "headers must not hold content-length"),
        ({"url": "http://" + "x" * 64}, "url names no host that can be looked up: 'xxx"),
        ({"url": "http://x", "headers": {"X": 5}}, "headers must be one line of plain text each: that of 'X'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OtlpHttpConfig(**settings)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"tls.ca_file must name a file that can be read"):
        TlsConfig(ca_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"tls.key_file is set"):
        TlsConfig(key_file=tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"tls.ca_file .* holds no certificates"):
        TlsConfig(ca_file=tmp_path / "empty").context()
    with pytest.raises(ConfigError, match=r"tls.cert_file .* cannot be used"):
        TlsConfig(cert_file=tmp_path / "empty").context()


def test_the_configuration_shows_no_secret() -> None:
    config = OtlpHttpConfig(url="http://host:1/x?key=hidden", headers={"Authorization": "hidden"})
    assert "hidden" not in repr(config)


def test_a_certificate_that_we_trust_but_of_another_host_is_an_error_and_nothing_is_sent(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path, "DNS:other.example,IP:127.0.0.2")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Misbehaving(tls=context).running() as server:
        client = exporter(server, tls=TlsConfig(ca_file=certificate))
        with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for '127\.0\.0\.1'") as caught:
            send(client, metrics())
    assert of_exception(caught.value).error_class is ErrorClass.NETWORK
    assert server.requests == []


def test_what_is_not_set_is_ten_seconds_and_gzip_also_in_a_file(server: Misbehaving) -> None:
    config = OtlpHttpConfig(url=server.url)
    from_file = ExporterSection(type="otlp_http", url=server.url)
    assert (config.timeout, config.compression, config.signal) == (10.0, "gzip", "metrics")
    assert (from_file.timeout, from_file.compression) == (10.0, "gzip")
    send(OtlpHttpExporter(config), metrics())
    assert server.requests[0].headers["content-encoding"] == "gzip"
