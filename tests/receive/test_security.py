"""Which clients may send, over what, and how slowly."""

import gc
import gzip
import http.client
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.errors import ConfigError
from penstock.receive.config import AuthConfig, HttpLimits, ServerTlsConfig
from penstock.receive.intake import Intake
from penstock.testing import wait_until
from tests.receive.support import (
    BODY,
    EXPORT,
    HEAD,
    call,
    connected,
    count,
    post,
    read_all,
    running,
    serving,
)
from tests.servers import self_signed

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> ServerTlsConfig:
    return certified(tmp_path_factory.mktemp("certificates"))


def certified(folder: Path) -> ServerTlsConfig:
    """A certificate for 127.0.0.1 that is its own authority, also for clients."""
    key, certificate = self_signed(folder)
    return ServerTlsConfig(cert_file=certificate, key_file=key, client_ca_file=certificate)


def post_securely(port: int, tls: ServerTlsConfig, *, with_certificate: bool, of: ServerTlsConfig | None = None) -> int:
    context = ssl.create_default_context(cafile=tls.cert_file)
    if with_certificate:
        shown = of or tls
        context.load_cert_chain(shown.cert_file, shown.key_file)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
    try:
        connection.request("POST", "/v1/metrics", BODY, PROTOBUF)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_client_with_its_certificate_is_let_in_and_one_without_is_not(
    intake: Intake, certificates: ServerTlsConfig
) -> None:
    with running(intake, tls=certificates) as receiver:
        assert post_securely(receiver.port, certificates, with_certificate=True) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            post_securely(receiver.port, certificates, with_certificate=False)


def test_grpc_takes_the_same_certificates(intake: Intake, certificates: ServerTlsConfig) -> None:
    pair = [Path(path).read_bytes() for path in (certificates.key_file, certificates.cert_file)]
    with serving(intake, tls=certificates) as receiver:
        address = f"localhost:{receiver.port}"
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(pair[1], *pair)) as channel:
            assert channel.unary_unary(EXPORT)(BODY, timeout=10) == b""
        with (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(pair[1])) as channel,
            pytest.raises(grpc.RpcError),
        ):
            channel.unary_unary(EXPORT)(BODY, timeout=30)


def call_securely(port: int, tls: ServerTlsConfig) -> bytes:
    pair = [Path(path).read_bytes() for path in (tls.key_file, tls.cert_file)]
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(pair[1], *pair)) as channel:
        answer: bytes = channel.unary_unary(EXPORT)(BODY, timeout=30)
        return answer


def put(tls: ServerTlsConfig, where: ServerTlsConfig) -> None:
    """Let these files be what is found there, as a renewal does."""
    for name in ("cert_file", "key_file", "client_ca_file"):
        Path(getattr(where, name)).write_bytes(Path(getattr(tls, name)).read_bytes())


@pytest.fixture
def renewal(tmp_path: Path, certificates: ServerTlsConfig) -> tuple[ServerTlsConfig, ServerTlsConfig]:
    """Files that hold the old certificates now, and the new ones to put there."""
    names = ("cert", "key", "ca")
    for folder in ("live", "fresh"):
        (tmp_path / folder).mkdir()
    cert, key, ca = (tmp_path / "live" / name for name in names)
    live = ServerTlsConfig(cert_file=cert, key_file=key, client_ca_file=ca)
    put(certificates, live)
    return live, certified(tmp_path / "fresh")


def test_http_serves_new_certificates_and_trusts_new_clients_only_after_a_reload(
    intake: Intake, certificates: ServerTlsConfig, renewal: tuple[ServerTlsConfig, ServerTlsConfig]
) -> None:
    live, fresh = renewal
    with running(intake, tls=live) as receiver:
        put(fresh, live)
        assert post_securely(receiver.port, certificates, with_certificate=True) == 200
        receiver.reload()
        assert post_securely(receiver.port, fresh, with_certificate=True) == 200
        with pytest.raises((ssl.SSLError, ConnectionError)):
            post_securely(receiver.port, certificates, with_certificate=True)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            post_securely(receiver.port, fresh, with_certificate=True, of=certificates)


def resumed_post(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[int, ssl.SSLSession, bool]:
    """Returns the status of a request, the TLS session, and whether that was an earlier one."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    with context.wrap_socket(plain, server_hostname="localhost", session=session) as client:
        client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        status = int(client.recv(65536).split()[1])
        assert client.session is not None
        return status, client.session, bool(client.session_reused)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("has_tickets", [True, False])
def test_a_session_from_before_a_reload_does_not_let_a_removed_authority_in(
    intake: Intake,
    certificates: ServerTlsConfig,
    renewal: tuple[ServerTlsConfig, ServerTlsConfig],
    version: ssl.TLSVersion,
    has_tickets: bool,
) -> None:
    live, fresh = renewal
    context = ssl.create_default_context(cafile=certificates.cert_file)
    context.load_cert_chain(certificates.cert_file, certificates.key_file)
    context.minimum_version = context.maximum_version = version
    if not has_tickets:
        context.options |= ssl.OP_NO_TICKET
    with running(intake, tls=live) as receiver:
        _, session, _ = resumed_post(receiver.port, context, None)
        assert resumed_post(receiver.port, context, session)[::2] == (200, True)
        assert live.client_ca_file is not None
        assert fresh.client_ca_file is not None
        Path(live.client_ca_file).write_bytes(Path(fresh.client_ca_file).read_bytes())
        receiver.reload()
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):  # IndexError: closed without an answer
            resumed_post(receiver.port, context, session)


def test_connections_from_before_a_reload_end_where_clients_show_certificates(
    intake: Intake, certificates: ServerTlsConfig
) -> None:
    context = ssl.create_default_context(cafile=certificates.cert_file)
    context.load_cert_chain(certificates.cert_file, certificates.key_file)
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with running(intake, tls=certificates) as receiver:
        plain = connected(receiver)
        with context.wrap_socket(plain, server_hostname="localhost") as client:
            client.sendall(request)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            receiver.reload()
            assert client.recv(1) == b""
        assert post_securely(receiver.port, certificates, with_certificate=True) == 200


def test_grpc_serves_new_certificates_and_trusts_new_clients_only_after_a_reload(
    intake: Intake, certificates: ServerTlsConfig, renewal: tuple[ServerTlsConfig, ServerTlsConfig]
) -> None:
    live, fresh = renewal
    with serving(intake, tls=live) as receiver:
        put(fresh, live)
        assert call_securely(receiver.port, certificates) == b""
        receiver.reload()
        assert call_securely(receiver.port, fresh) == b""
        assert call_securely(receiver.port, fresh) == b""
        with pytest.raises(grpc.RpcError):
            call_securely(receiver.port, certificates)


def test_grpc_connections_from_before_a_reload_end_where_clients_show_certificates(
    intake: Intake, certificates: ServerTlsConfig, renewal: tuple[ServerTlsConfig, ServerTlsConfig]
) -> None:
    live, fresh = renewal
    key, certificate = (Path(path).read_bytes() for path in (certificates.key_file, certificates.cert_file))
    with serving(intake, tls=live) as receiver:
        credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
        with grpc.secure_channel(f"localhost:{receiver.port}", credentials) as channel:
            export = channel.unary_unary(EXPORT)
            assert export(BODY, timeout=10) == b""
            receiver.reload()
            assert export(BODY, timeout=10, wait_for_ready=True) == b""  # its authority is still there
            assert live.client_ca_file is not None
            assert fresh.client_ca_file is not None
            Path(live.client_ca_file).write_bytes(Path(fresh.client_ca_file).read_bytes())
            receiver.reload()
            with pytest.raises(grpc.RpcError):
                export(BODY, timeout=10)


def test_certificates_that_do_not_belong_together_are_refused_and_the_old_ones_go_on(
    intake: Intake, certificates: ServerTlsConfig, renewal: tuple[ServerTlsConfig, ServerTlsConfig]
) -> None:
    live, fresh = renewal
    with running(intake, tls=live) as http_receiver, serving(intake, tls=live) as grpc_receiver:
        Path(live.cert_file).write_bytes(Path(fresh.cert_file).read_bytes())  # and its key is still on its way
        for receiver in (http_receiver, grpc_receiver):
            with pytest.raises(ConfigError, match=r"tls.cert_file .*live/cert and tls.key_file"):
                receiver.reload()
        assert post_securely(http_receiver.port, certificates, with_certificate=True) == 200
        assert call_securely(grpc_receiver.port, certificates) == b""


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer some-other-token-of-length", 401),
        ("Bearer first-token-of-two", 200),
        ("bearer second-token-of-two", 200),
        ("Bearer second-token-of-tw", 401),
        ("Basic first-token-of-two", 401),
        ("", 401),
        ("Bearer ünknöwn", 401),
    ],
)
def test_any_known_token_opens_and_nothing_else_does(intake: Intake, tmp_path: Path, header: str, status: int) -> None:
    (tmp_path / "tokens").write_text("first-token-of-two\nsecond-token-of-two\n")
    headers = {"Authorization": header.encode().decode("latin-1")} if header else {}
    with running(intake, auth=AuthConfig(token_file=tmp_path / "tokens")) as receiver:
        answered = post(receiver.port, "/v1/metrics", BODY, Content_Type="application/x-protobuf", **headers)

    assert answered.status == status
    assert ("WWW-Authenticate" in answered.headers) is (status == 401)


def test_a_new_token_is_known_after_a_reload(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_TOKEN", "the-token-of-yesterday")
    with running(intake, auth=AuthConfig(token_env="PENSTOCK_TEST_TOKEN")) as receiver:
        monkeypatch.setenv("PENSTOCK_TEST_TOKEN", "the-token-of-today")
        receiver.reload()
        headers = {"Content_Type": "application/x-protobuf", "Authorization": "Bearer the-token-of-today"}
        assert post(receiver.port, "/v1/metrics", BODY, **headers).status == 200


def test_grpc_wants_a_token_in_its_metadata(intake: Intake, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first-token-of-two")
    with (
        serving(intake, auth=AuthConfig(token_file=tmp_path / "tokens")) as receiver,
        grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel,
    ):
        export = channel.unary_unary(EXPORT)
        assert export(BODY, timeout=10, metadata=[("authorization", "Bearer first-token-of-two")]) == b""
        with pytest.raises(grpc.RpcError) as refused:
            export(BODY, timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_short_token_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        AuthConfig(token_file=tmp_path / "tokens").tokens()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long_is_413_before_it_is_read(intake: Intake, is_chunked: bool) -> None:
    with running(intake, limits=HttpLimits(max_body=2000)) as receiver:
        connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=10)
        body: Any = iter([b"x" * 1000] * 3) if is_chunked else b"x" * 2001
        connection.request("POST", "/v1/metrics", body, PROTOBUF, encode_chunked=is_chunked)
        assert connection.getresponse().status == 413
        connection.close()


def test_a_bomb_is_413(intake: Intake) -> None:
    with running(intake, limits=HttpLimits(max_decompressed=1_000_000)) as receiver:
        headers = {"Content_Type": "application/x-protobuf", "Content_Encoding": "gzip"}
        answered = post(receiver.port, "/v1/metrics", gzip.compress(bytes(50_000_000)), **headers)
    assert answered.status == 413
    assert b"more than 1000000 bytes" in answered.body


def test_a_client_that_does_not_finish_its_body_is_cut_off(intake: Intake) -> None:
    with running(intake, limits=HttpLimits(read_timeout=0.1)) as receiver, connected(receiver) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\nhalf of")
        assert client.recv(100).startswith(b"HTTP/1.1 408")
        read_all(client)


def test_a_client_that_does_not_finish_its_header_is_cut_off(intake: Intake) -> None:
    with running(intake, limits=HttpLimits(idle_timeout=0.2)) as receiver, connected(receiver) as client:
        client.sendall(b"POST /v1/metrics HTTP/1.1\r\nHost:")
        read_all(client)


def test_connections_beyond_the_limit_are_closed_at_once_and_without_a_word(
    intake: Intake, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what was left of other tests
    caplog.clear()
    with running(intake, limits=HttpLimits(max_connections=1)) as receiver, connected(receiver):
        wait_until(lambda: count(receiver, "penstock_receive_connections", "http") == 1)
        with connected(receiver) as second:
            read_all(second)
        assert count(intake, "penstock_receive_refused_total", "connections") == 1
    gc.collect()  # what asyncio says of a task that failed, it says when the task is gone
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "reason=connections" in line


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/events", "/api/v1/write"])
def test_a_page_of_another_site_is_refused_and_an_allowed_one_may_send(intake: Intake, path: str) -> None:
    shop = "https://shop.example"
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with running(intake, allowed_origins=(shop,)) as receiver:
        for origin in ("https://evil.example", "null", "https://shop.example.evil.example"):
            for method in ("POST", "OPTIONS"):
                refused = call(method, receiver.port, path, BODY, {**PROTOBUF, **asking, "Origin": origin})
                assert refused.status == 403
                assert "Access-Control-Allow-Origin" not in refused.headers
        asked = call("OPTIONS", receiver.port, path, b"", {**asking, "Origin": shop})
        assert asked.status == 204
        assert asked.headers["Access-Control-Allow-Origin"] == shop
        assert "content-type" in asked.headers["Access-Control-Allow-Headers"]
        sent = call("POST", receiver.port, "/v1/metrics", BODY, {**PROTOBUF, "Origin": shop})
        assert (sent.status, sent.headers["Access-Control-Allow-Origin"]) == (200, shop)
    assert count(intake, "penstock_receive_refused_total", "origin") == 6
