"""What the running service lets in, tells and leaves behind, as a stranger on its machine or network finds it."""

import http.client
import os
import stat
from pathlib import Path

import pytest

from tests.service.running import HEADERS, Running, orders

pytestmark = pytest.mark.server

TOKEN = "the-token-of-operators"
SETTINGS = """\
spark: {enabled: false}
admin: {auth: {token_file: admin-tokens}}
receivers: {http: {allowed_origins: ["https://shop.example"]}}
exporter: {type: otlp_http, url: "http://127.0.0.1:9/v1/metrics"}
"""


def asked(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return connection.getresponse().status
    finally:
        connection.close()


def open_to_others(folder: Path) -> list[str]:
    """What the service has made there, and others than its owner may use."""
    made = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    given = ("penstock.yaml", "log.jsonl", "admin-tokens")
    return [str(path) for path in made if path.name not in given and stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_a_stranger_gets_nothing_out_of_a_running_service_and_nothing_into_it(tmp_path: Path) -> None:
    (tmp_path / "admin-tokens").write_text(TOKEN)
    before = os.umask(0o022)
    try:
        service = Running(tmp_path, SETTINGS).start()
    finally:
        os.umask(before)
    try:
        assert asked(service.port, "POST", "/v1/metrics", orders(1), **HEADERS) == 200
        # the admin port
        assert asked(service.admin, "GET", "/metrics") == 401
        assert asked(service.admin, "GET", "/metrics", Authorization=f"Bearer {TOKEN}") == 200
        assert asked(service.admin, "GET", "/metrics", Authorization=f"Bearer {TOKEN}", Host="evil.example") == 403
        assert asked(service.admin, "GET", "/healthz", b"GET /metrics HTTP/1.1\r\n\r\n") == 400
        # pages
        assert asked(service.port, "POST", "/v1/metrics", orders(1), Origin="https://evil.example", **HEADERS) == 403
        assert asked(service.port, "POST", "/v1/metrics", orders(1), Origin="https://shop.example", **HEADERS) == 200
        # nonsense
        for body in (b"\xff" * 100, orders(3)[:-5], b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"):
            assert asked(service.port, "POST", "/v1/metrics", body, **HEADERS) == 400
        for body in (b"{", b"[1]" * 3, b'"' + b"\xff" * 50):
            assert asked(service.port, "POST", "/v1/events", body, Content_Type="application/json") == 400
        assert service.stop() == 0
        assert "Traceback" not in service.text()
        assert TOKEN not in service.text()
        assert open_to_others(tmp_path) == []
    finally:
        service.kill()
