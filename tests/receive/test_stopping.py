"""A receiver that stops: what has begun is answered, and a client that sends slowly or nothing does not hold it up."""

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
from tests.receive.support import BODY, EXPORT, HEAD, KeepingSink, connected, count, read_all

WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LONG = 600.0  # seconds: nothing here takes as long, unless it waits for nothing


@contextmanager
def half_sent(receiver: HttpReceiver) -> Iterator[socket.socket]:
    """A connection whose request has come as far as the middle of its body."""
    with connected(receiver) as client:
        client.sendall(WHOLE[: -len(BODY) + 10])
        wait_until(lambda: receiver.reading == 10)
        yield client


def connections(receiver: HttpReceiver) -> float:
    return count(receiver, "penstock_receive_connections", "http")


def test_a_body_that_is_half_sent_when_it_stops_is_read_and_answered(
    sink: KeepingSink, intake: Intake, http: HttpReceiver
) -> None:
    with half_sent(http) as client:
        http.stop_accepting()
        client.sendall(BODY[10:])
        answered = read_all(client)
    assert answered.startswith(b"HTTP/1.1 200 OK"), answered
    assert b"Connection: close" in answered
    assert len(sink.chunks) == 1


def test_closing_waits_for_a_body_that_is_half_sent(sink: KeepingSink, intake: Intake, http: HttpReceiver) -> None:
    closing = threading.Thread(target=http.close, args=(LONG,))
    with half_sent(http) as client, connected(http) as idle:
        wait_until(lambda: connections(http) == 2)
        closing.start()
        assert idle.recv(1) == b""  # so it has begun to close
        client.sendall(BODY[10:])
        answered = read_all(client)
    closing.join(20)
    assert not closing.is_alive()
    assert answered.startswith(b"HTTP/1.1 200 OK"), answered


def test_a_body_that_does_not_come_holds_nothing_up_once_the_intake_is_closed(
    intake: Intake, http: HttpReceiver
) -> None:
    closing = threading.Thread(target=http.close, args=(LONG,))
    with half_sent(http) as client:
        http.stop_accepting()
        assert intake.close(10.0)
        closing.start()
        answered = read_all(client)
    closing.join(20)
    assert not closing.is_alive()
    assert answered.startswith(b"HTTP/1.1 503 "), answered
    assert b"shutting down: send it again" in answered
    assert count(intake, "penstock_receive_refused_total", "closed") == 1


def test_requests_that_wait_are_answered_and_their_connections_closed(
    sink: KeepingSink, intake: Intake, http: HttpReceiver
) -> None:
    sink.hold()
    closing = threading.Thread(target=http.close, args=(LONG,))
    with connected(http) as client:
        client.sendall(WHOLE)
        wait_until(lambda: len(sink.chunks) == 1)
        http.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            connected(http)
        closing.start()
        sink.release()
        assert read_all(client).startswith(b"HTTP/1.1 200 OK")
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
    closing = threading.Thread(target=server.close, args=(LONG,))
    never = threading.Event()

    def messages() -> Iterator[bytes]:
        never.wait(LONG)
        yield BODY

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        grpc.channel_ready_future(channel).result(20)
        call = channel.stream_unary(EXPORT).future(messages())
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
