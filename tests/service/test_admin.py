"""The admin port: what operators and their tools ask."""

import base64
import json
import logging
import socket
import ssl
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.tree import AdminSection
from penstock.receive.config import AuthConfig, ServerTlsConfig
from penstock.service.admin import AdminGuard, AdminServer
from penstock.service.status import status_page_flow
from penstock.telemetry import Sample, Telemetry, Value
from penstock.testing import wait_until
from tests.servers import self_signed


class AdminSource:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def metrics(self) -> bytes:
        return b"penstock_service_info 1\n"

    def unhealthy(self) -> list[str]:
        return []

    def unready(self) -> list[str]:
        return self.reasons

    def notes(self) -> list[str]:
        return ["spark is down"]

    def status(self) -> dict[str, Any]:
        raise RuntimeError("cannot say")


@pytest.fixture
def observed() -> AdminSource:
    return AdminSource()


@contextmanager
def answering(observed: AdminSource, guard: AdminGuard | None = None) -> Iterator[str]:
    server = AdminServer("127.0.0.1", 0, observed, guard)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


@pytest.fixture
def url(observed: AdminSource) -> Iterator[str]:
    with answering(observed) as url:
        yield url


def get(url: str, **headers: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_are_served_as_prometheus_wants_them(url: str) -> None:
    assert get(f"{url}/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", "penstock_service_info 1\n")


def test_ready_says_why_it_is_not(url: str, observed: AdminSource) -> None:
    status, _, body = get(f"{url}/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": [], "notes": ["spark is down"]})

    observed.reasons = ["queue relay is 97% full"]
    status, _, body = get(f"{url}/readyz")
    assert (status, json.loads(body)["reasons"]) == (503, ["queue relay is 97% full"])


def test_healthy_is_about_the_process_only(url: str, observed: AdminSource) -> None:
    observed.reasons = ["stopping"]
    assert get(f"{url}/healthz")[0] == 200


def test_the_page_needs_nothing_from_elsewhere(url: str) -> None:
    status, kind, body = get(f"{url}/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "//" not in body.replace("</", ""), "the page loads something from another place"


def test_a_failing_question_is_a_500_and_the_next_one_is_answered(url: str) -> None:
    assert get(f"{url}/status.json")[0] == 500
    assert get(f"{url}/healthz")[0] == 200


def test_what_is_not_there_is_a_404_that_says_what_is(url: str) -> None:
    status, _, body = get(f"{url}/nothing")
    assert status == 404
    assert "/readyz" in body


def test_a_scraper_that_hangs_up_is_no_error(
    url: str, observed: AdminSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(observed, "metrics", lambda: b"x" * (64 << 20))  # more than any buffer between the two
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert scraper.recv(10) == b"HTTP/1.1 2"
        scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, at once

    wait_until(lambda: "broke off" in caplog.text)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_clients_that_say_nothing_do_not_keep_others_out(url: str) -> None:
    port = int(url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    assert get(f"{url}/healthz")[0] == 200
    for one in silent:
        one.close()


def test_clients_that_dawdle_make_room_for_others(url: str) -> None:
    port = int(url.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
    for one in slow:
        one.sendall(b"GET /healthz HTTP/1.1\r\nX-And-")
    assert get(f"{url}/healthz")[0] == 200
    assert slow[0].recv(10) == b""
    slow[-1].sendall(b"So: on\r\n\r\n")
    assert slow[-1].recv(100).startswith(b"HTTP/1.1 200")
    for one in slow:
        one.close()


def test_what_others_call_things_is_text_in_metrics_and_on_the_page(url: str) -> None:
    name = 'a"} 1\nforged_total 7\n#\\<script>alert(1)</script>'
    telemetry = Telemetry()
    telemetry.watch(lambda: [Sample("penstock_queue_size", 5)], queue=name)
    lines = telemetry.render().decode().splitlines()
    assert not [line for line in lines if line.startswith("forged_total")]
    (shown,) = [line for line in lines if line.startswith("penstock_queue_size{")]
    assert "\\n" in shown
    assert f"Queue {name}" in status_page_flow(telemetry.values())
    page = get(url)[2]
    assert "innerHTML" not in page
    assert "document.write" not in page


def test_the_status_adds_up_what_several_processes_say() -> None:
    values = [Value("penstock_queue_size", "", {"queue": "relay", "process": str(n)}, 3.0 + n) for n in range(2)] + [
        Value("penstock_queue_bytes", "", {"queue": "relay"}, 50.0),
        Value("penstock_queue_max_bytes", "", {"queue": "relay"}, 100.0),
    ]

    rows = {row["name"]: row for row in status_page_flow(values)["Queue relay"]}

    assert rows["waiting"]["value"] == 7.0
    assert rows["bytes"]["share"] == 0.5


def test_values_of_another_process_are_rendered_beside_ours() -> None:
    theirs, ours = Telemetry(), Telemetry()
    theirs.watch(lambda: [Sample("penstock_queue_size", 4)], queue="relay")
    ours.watch(lambda: [Sample("penstock_queue_size", 5)], queue="relay", process="0")
    ours.watch_values(theirs.values, process="1")

    text = ours.render().decode()

    assert 'penstock_queue_size{process="0",queue="relay"} 5.0' in text
    assert 'penstock_queue_size{process="1",queue="relay"} 4.0' in text
    assert text.count("# TYPE penstock_queue_size ") == 1


def exchange(url: str, request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """Returns all that comes back for these bytes."""
    port = int(url.rpartition(":")[2])
    client: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
    if context is not None:
        client = context.wrap_socket(client, server_hostname="localhost")
    received = b""
    with client:
        client.sendall(request)
        while piece := client.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9109", 200),
        ("localhost", 200),
        ("[::1]:9109", 200),
        ("10.1.2.3", 200),
        ("penstock.internal:9109", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:9109", 403),
        ("", 403),
    ],
)
def test_only_a_known_host_is_answered(observed: AdminSource, host: str, status: int) -> None:
    guard = AdminGuard(AdminSection(allowed_hosts=("penstock.internal",)))
    with answering(observed, guard) as url:
        answer = exchange(url, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_the_page_of_another_site_is_not_answered(url: str) -> None:
    for origin, status in (("https://evil.example", 403), ("http://127.0.0.1", 200)):
        head = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: {origin}\r\nConnection: close\r\n\r\n"
        assert exchange(url, head.encode()).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("framing", ["Content-Length: 44", "Transfer-Encoding: chunked"])
def test_what_a_request_has_as_its_body_is_not_answered(url: str, framing: str) -> None:
    inner = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n\r\n"
    answer = exchange(url, f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{framing}\r\n\r\n".encode() + inner)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"penstock_service_info" not in answer


def test_with_a_token_probes_hear_how_it_is_and_others_nothing(observed: AdminSource, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("the-token-of-operators\n")
    observed.reasons = ["queue secret-name is 97% full"]
    guard = AdminGuard(AdminSection(auth=AuthConfig(token_file=tmp_path / "tokens")))
    basic = base64.b64encode(b"any:the-token-of-operators").decode()
    with answering(observed, guard) as url:
        assert get(f"{url}/healthz")[0] == 200
        assert get(f"{url}/readyz")[::2] == (503, "no\n")
        for path in ("/metrics", "/status.json", "/", "/nothing"):
            assert get(f"{url}{path}")[0] == 401
        for header in ("Bearer the-token-of-operators", f"Basic {basic}"):
            assert get(f"{url}/metrics", Authorization=header)[0] == 200
        for header in ("Bearer the-token-of-operator", "Basic !", "Basic " + base64.b64encode(b"a:b").decode()):
            assert get(f"{url}/metrics", Authorization=header)[0] == 401
        (tmp_path / "tokens").write_text("another-token-of-them\n")
        guard.reload()
        assert get(f"{url}/metrics", Authorization="Bearer the-token-of-operators")[0] == 401


def test_with_certificates_it_speaks_tls_and_a_client_that_does_not_holds_up_none(
    observed: AdminSource, tmp_path: Path
) -> None:
    key, certificate = self_signed(tmp_path)
    guard = AdminGuard(AdminSection(tls=ServerTlsConfig(cert_file=certificate, key_file=key)))
    context = ssl.create_default_context(cafile=certificate)
    head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with answering(observed, guard) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):
        assert exchange(url, head, context).startswith(b"HTTP/1.1 200 ")
        assert b"200" not in exchange(url, head)
