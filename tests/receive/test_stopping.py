"""A receiver that stops: what has begun is answered, and nobody who sends slowly or nothing holds it up."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from aiohttp import web

from penstock.receive.config import GrpcReceiverConfig
from penstock.receive.grpc_receiver import GrpcReceiver
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.http_server import HttpServer
from penstock.receive.intake import Intake
from penstock.testing import wait_until
from tests.receive.support import KeepingSink, count, gauge, request

BODY = request(gauge("cpu", 0.5)).SerializeToString()
HEAD = b"POST /v1/metrics HTTP/1.1\r\nHost: a\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"
LONG = 600.0  # seconds: nothing here takes as long, unless it waits for nothing


@contextmanager
def half_sent(receiver: HttpReceiver) -> Iterator[socket.socket]:
    """A connection whose request has come as far as the middle of its body."""
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=20) as client:
        client.sendall(HEAD % len(BODY) + BODY[:10])
        wait_until(lambda: receiver.reading == 10)
        yield client


def all_of(client: socket.socket) -> bytes:
    told = b""
    while piece := client.recv(65536):
        told += piece
    return told


def connections(receiver: HttpReceiver) -> float:
    return count(receiver, "penstock_receive_connections", "http")


def test_a_body_that_is_half_sent_when_it_stops_is_read_and_answered(
    sink: KeepingSink, intake: Intake, http: HttpReceiver
) -> None:
    with half_sent(http) as client:
        http.stop_accepting()
        client.sendall(BODY[10:])
        told = all_of(client)
    assert told.startswith(b"HTTP/1.1 200 OK"), told
    assert b"Connection: close" in told
    assert len(sink.chunks) == 1


def test_closing_waits_for_a_body_that_is_half_sent(sink: KeepingSink, intake: Intake, http: HttpReceiver) -> None:
    closing = threading.Thread(target=http.close, args=(LONG,))
    with half_sent(http) as client, socket.create_connection(("127.0.0.1", http.port), timeout=20) as idle:
        wait_until(lambda: connections(http) == 2)
        closing.start()
        assert idle.recv(1) == b""  # so it has begun to close
        client.sendall(BODY[10:])
        told = all_of(client)
    closing.join(20)
    assert not closing.is_alive()
    assert told.startswith(b"HTTP/1.1 200 OK"), told


def test_a_body_that_does_not_come_holds_nobody_up_once_the_intake_is_closed(
    intake: Intake, http: HttpReceiver
) -> None:
    closing = threading.Thread(target=http.close, args=(LONG,))
    with half_sent(http) as client:
        http.stop_accepting()
        assert intake.close(10.0)
        closing.start()
        told = all_of(client)
    closing.join(20)
    assert not closing.is_alive()
    assert told.startswith(b"HTTP/1.1 503 "), told
    assert b"shutting down: send it again" in told
    assert count(intake, "penstock_receive_refused_total", "closed") == 1


def test_answers_under_way_close_their_connections(sink: KeepingSink, intake: Intake, http: HttpReceiver) -> None:
    sink.hold()
    closing = threading.Thread(target=http.close, args=(LONG,))
    with socket.create_connection(("127.0.0.1", http.port), timeout=20) as client:
        client.sendall(HEAD % len(BODY) + BODY)
        wait_until(lambda: len(sink.chunks) == 1)
        http.stop_accepting()
        closing.start()
        sink.release()
        assert all_of(client).startswith(b"HTTP/1.1 200 OK")
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_connection_that_comes_while_it_stops_is_closed(sent: bytes) -> None:
    """The system has accepted it, and hands it over only when the listener is closed already."""

    async def answer(_request: web.BaseRequest) -> web.Response:
        raise AssertionError("nothing was asked")

    async def stop() -> None:
        loop = asyncio.get_running_loop()
        server = HttpServer(answer, 10, lambda _reason: None)
        clients = [socket.socketpair() for _ in range(2)]
        for ours, _ in clients:
            ours.setblocking(False)
        await loop.connect_accepted_socket(server, clients[0][0])  # its task has not begun
        server.pre_shutdown()
        await loop.connect_accepted_socket(server, clients[1][0])
        for _, theirs in clients:
            theirs.setblocking(False)
            try:
                theirs.sendall(sent)
            except BrokenPipeError:
                pass
        await server.finish(LONG)
        assert server.open == 0
        for _, theirs in clients:
            theirs.close()

    asyncio.run(asyncio.wait_for(stop(), 20))


def test_a_call_that_does_not_come_as_a_whole_holds_no_grpc_server_up(sink: KeepingSink) -> None:
    intake = Intake(sink).start()
    server = GrpcReceiver(GrpcReceiverConfig(port=0), intake).start()
    export = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
    closing = threading.Thread(target=server.close, args=(LONG,))
    never = threading.Event()

    def messages() -> Iterator[bytes]:
        never.wait(LONG)
        yield BODY

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        grpc.channel_ready_future(channel).result(20)
        call = channel.stream_unary(export).future(messages())
        try:
            server.stop_accepting()
            assert intake.close(10.0)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
            with pytest.raises(grpc.RpcError):
                call.result(20)
        finally:
            never.set()
