"""Clients that break off, send what is not HTTP, say things twice, or do not listen."""

import json
import logging
import socket
from pathlib import Path

import grpc
import pytest

from penstock.decode.config import IntakeConfig
from penstock.receive.config import AuthConfig, HttpLimits
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.testing import wait_until
from tests.receive.support import (
    BODY,
    EXPORT,
    HEAD,
    KeepingSink,
    call,
    connected,
    count,
    post,
    read_all,
    running,
    serving,
)

TOKEN = "a-token-that-is-known"


def answer(receiver: HttpReceiver, sent: bytes) -> bytes:
    with connected(receiver) as client:
        client.sendall(sent)
        return read_all(client)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Content-Length: -3\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        HEAD + b"X: " + b"x" * 10_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: x\r\n" % number for number in range(500)) + b"\r\n",
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    ],
    ids=["negative length", "two lengths", "length and chunks", "no chunk", "long", "many", "long line", "TLS"],
)
def test_what_is_not_http_is_400_counted_and_no_error_of_ours(
    intake: Intake, http: HttpReceiver, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        answered = answer(http, sent)
    assert b" 400 Bad Request" in answered
    assert b"aiohttp" not in answered
    assert b"Server: penstock" in answered
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # one line, for the operator
    assert count(intake, "penstock_receive_refused_total", "malformed") == 1


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nha"])
def test_a_client_that_breaks_off_is_counted_and_no_error_of_ours(
    intake: Intake, http: HttpReceiver, caplog: pytest.LogCaptureFixture, framing: bytes
) -> None:
    with caplog.at_level(logging.INFO):
        with connected(http) as client:
            client.sendall(HEAD + framing)
            wait_until(lambda: count(http, "penstock_receive_connections", "http") == 1)
        wait_until(lambda: count(intake, "penstock_receive_refused_total", "aborted") == 1)
        wait_until(lambda: count(http, "penstock_receive_connections", "http") == 0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # one line, for the operator


def test_a_client_that_does_not_listen_is_cut_off(intake: Intake) -> None:
    with running(intake, limits=HttpLimits(read_timeout=0.2)) as receiver:
        # Connections take after their listener: small buffers are soon full, also on a slow machine.
        receiver._listeners[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with connected(receiver) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with pytest.raises(ConnectionError):
                # It asks and asks, and reads no answer: until the buffers are full, ours do not grow.
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 1_000_000)
        wait_until(lambda: count(receiver, "penstock_receive_connections", "http") == 0)


def test_bodies_that_are_being_read_are_bounded_all_together(sink: KeepingSink) -> None:
    intake = Intake(sink, config=IntakeConfig(max_held=100_000)).start()
    with running(intake) as receiver, connected(receiver) as first:
        first.sendall(HEAD + b"Content-Length: 90000\r\n\r\n" + bytes(80_000))
        wait_until(lambda: receiver.reading == 80_000)
        second = post(receiver.port, "/v1/metrics", bytes(30_000), Content_Type="application/x-protobuf")
        assert (second.status, second.headers["Retry-After"]) == (429, "1")
        first.sendall(bytes(10_000))
        assert first.recv(100).startswith(b"HTTP/1.1 400")  # it was read whole, and is nothing
    assert receiver.reading == 0
    assert count(intake, "penstock_receive_refused_total", "full") == 1
    assert intake.close(10.0)


def test_two_encodings_are_not_one(http: HttpReceiver) -> None:
    answered = answer(
        http,
        HEAD
        + b"Connection: close\r\nContent-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
    )
    assert b" 415 " in answered


def test_two_tokens_are_none(intake: Intake, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    auth = AuthConfig(token_file=tmp_path / "tokens")
    known, other = (b"Authorization: Bearer %s\r\n" % token for token in (TOKEN.encode(), b"another-that-is-not"))
    with running(intake, auth=auth) as receiver:
        for lines in (known + other, other + known):
            assert b" 401 " in answer(receiver, HEAD + lines + b"Content-Length: 0\r\n\r\n")
    pairs = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer another-that-is-not")]
    with serving(intake, auth=auth) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for metadata in (pairs, pairs[::-1]):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(EXPORT)(BODY, timeout=10, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_an_error_is_answered_in_the_format_of_the_request(intake: Intake, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    with running(intake, auth=AuthConfig(token_file=tmp_path / "tokens")) as receiver:
        in_json = post(receiver.port, "/v1/metrics", b"{}", Content_Type="application/json")
        in_protobuf = post(receiver.port, "/v1/metrics", b"", Content_Type="application/x-protobuf")
        in_words = call("GET", receiver.port, "/v1/metrics")
    assert (in_json.status, json.loads(in_json.body)["code"]) == (401, 16)
    assert (in_protobuf.status, in_protobuf.body[:2]) == (401, b"\x08\x10")  # google.rpc.Status: code 16
    assert (in_words.status, in_words.body) == (405, b"GET is not taken here, POST is\n")


def test_a_thousand_clients_that_break_off_leave_nothing_behind(intake: Intake) -> None:
    # All of them may still stand in line, ended as they are, when the last one comes: the limit has room for it.
    with running(intake, limits=HttpLimits(max_connections=1001)) as receiver:
        before = files_open()
        for place in range(1000):
            with connected(receiver) as client:
                client.sendall((HEAD + b"Content-Length: 100\r\n\r\nhalf of it")[: 20 + place % 120])
        assert post(receiver.port, "/v1/metrics", BODY, Content_Type="application/x-protobuf").status == 200
        wait_until(lambda: count(receiver, "penstock_receive_connections", "http") == 0)
        wait_until(lambda: files_open() <= before)  # a connection's is closed after it was counted out
        assert receiver.reading == 0


def files_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_call_that_is_given_up_is_taken_all_the_same_and_the_next_one_is_answered(
    intake: Intake, sink: KeepingSink
) -> None:
    sink.hold()
    with serving(intake) as receiver, grpc.insecure_channel(f"127.0.0.1:{receiver.port}") as channel:
        export = channel.unary_unary(EXPORT)
        with pytest.raises(grpc.RpcError) as late:
            export(BODY, timeout=0.2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        cancelled = export.future(BODY, timeout=10)
        wait_until(lambda: sink.held >= 1)
        cancelled.cancel()
        wait_until(lambda: count(receiver, "penstock_receive_connections", "grpc") == 0)
        sink.release()
        assert export(BODY, timeout=10) == b""
