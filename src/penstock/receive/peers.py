"""The other receiving processes: each is handed over what it owns, and answers for it.

    this process ──number, format, bodies──► owner of the streams     a connection to each of the others, one from each
                 ◄──number, answers─────────                          in the format of `peer_wire`

A process that does not answer within `peer_link.PATIENCE` is left alone until it greets again. A process that stops
disconnects once it has answered its own senders, and takes what others hand over until they have disconnected, too.
"""

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.decode.outcome import TAKEN, DecodeAnswer, Format
from penstock.decode.stream_owners import StreamOwners
from penstock.receive.event_loop import ReceiverLoopThread
from penstock.receive.peer_link import OnAnswer, PeerLink
from penstock.receive.peer_wire import BUFFER, SocketAddress, answer_message, read_answer, read_handover, write_to_peer
from penstock.receive.request_group import Deliver
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

_GREETING = 5.0  # seconds within which a process that listens greets
_FIRST_CONTACT = 10.0  # seconds of a start that wait for the others: without them requests could only be refused
_PAUSES = (0.02, 0.5)  # seconds before another try to reach one, the first and the longest

SubmitFromPeer = Callable[[Format, Sequence[bytes], Deliver, Sequence[str]], None]


class Peers:
    """The other receiving processes; `folder` has the sockets of all of them, by number.

    Loss: none. Of what is not answered for, `submit` says so, and the sender still has it.
    Order: what is handed to one process arrives as it was handed over.
    Threads: every method may be called from any thread; one of its own reads and writes.
    """

    def __init__(self, folder: Path, owners: StreamOwners, max_held: int, clock: Clock | None = None) -> None:
        self.owners = owners
        self._folder = folder
        self._clock: Clock = clock or SystemClock()
        self._thread = ReceiverLoopThread("penstock-peers")
        self._links = {
            process: PeerLink(process, self._thread.loop, max_held, self._clock)
            for process in range(owners.count)
            if process != owners.own
        }
        owners.unreachable.update(self._links)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._submit: SubmitFromPeer | None = None
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connections = 0  # from the others
        self._is_stopping = False

    def start(self, submit: SubmitFromPeer) -> None:
        """Listens, and connects to the others; waits a while for those that are starting, too.

        `submit` takes what they hand over, and delivers an answer for each body.
        """
        self._submit = submit
        self._thread.start()
        self._thread.run(self._open(), _GREETING)
        with self._lock:
            self._changed.wait_for(lambda: not self.owners.unreachable or self._is_stopping, _FIRST_CONTACT)

    def submit(
        self,
        owner: int,
        kind: Format,
        parts: Mapping[int, bytes],
        points: int,
        on_answer: OnAnswer,
        senders: Sequence[str] = (),
    ) -> None:
        """Hands bodies over; `on_answer` is called once, from any thread, with all that was not simply taken."""
        self._links[owner].submit(Format.OTLP if kind is Format.OTLP_JSON else kind, parts, points, on_answer, senders)

    def stop_handing_over(self, timeout: float) -> None:
        """Disconnects from the others, and waits until they have disconnected, too."""
        with self._lock:
            self._is_stopping = True
            self._changed.notify_all()
        if not self._thread.is_alive:
            return
        self._thread.loop.call_soon_threadsafe(self._end_tasks)
        with self._lock:
            if not self._changed.wait_for(lambda: not self._connections, timeout):
                log.warning("Other processes have not disconnected in time. connections=%d", self._connections)

    def close(self) -> None:
        if self._thread.is_alive:
            self._thread.run(self._close(), _GREETING)
        self._thread.close()

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        for process, link in self._links.items():
            name = str(process)
            yield Sample("penstock_handover_up", float(process not in self.owners.unreachable), (name,))
            yield Sample("penstock_handover_points_total", link.points, (name,))
            yield Sample("penstock_handover_bytes_total", link.bytes, (name,))
            for status, count in list(link.answers.items()):
                yield Sample("penstock_handover_requests_total", count, (name, status.value))

    # -- on the loop: towards the others -------------------------------------------------------------------------------

    async def _open(self) -> None:
        own = self._folder / str(self.owners.own)
        own.unlink(missing_ok=True)
        with SocketAddress(own) as address:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(address)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=BUFFER)
        self._tasks = [asyncio.create_task(self._stay_connected(link)) for link in self._links.values()]

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close(self) -> None:
        self._end_tasks()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        (self._folder / str(self.owners.own)).unlink(missing_ok=True)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _stay_connected(self, link: PeerLink) -> None:
        pause, longest = _PAUSES
        while True:
            writer = None
            try:
                with SocketAddress(self._folder / str(link.process)) as address:
                    reader, writer = await asyncio.open_unix_connection(address, limit=BUFFER)
                async with asyncio.timeout(_GREETING):
                    await read_answer(reader)
                link.on_connected(writer)
                self._set_reachable(link.process, is_reachable=True)
                pause = _PAUSES[0]
                await link.read_answers(reader)
            except Exception as error:  # noqa: BLE001 - whatever it is, that process must be reached again
                log.debug("A process cannot be reached. process=%d reason=%r", link.process, error)
            finally:
                self._set_reachable(link.process, is_reachable=False)
                link.on_lost()
                if writer is not None:
                    writer.transport.abort() if not self._is_stopping else writer.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _set_reachable(self, process: int, *, is_reachable: bool) -> None:
        if is_reachable is (process not in self.owners.unreachable):
            return
        with self._lock:
            (self.owners.unreachable.discard if is_reachable else self.owners.unreachable.add)(process)
            self._changed.notify_all()
        if is_reachable:
            log.info("What another process keeps can be handed over. process=%d", process)
        elif not self._is_stopping:
            log.warning(
                "What another process keeps cannot be handed over: its senders are told to come again. process=%d",
                process,
            )

    # -- on the loop: from the others ----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._submit is not None
        with self._lock:
            self._connections += 1
        try:
            writer.write(answer_message(0, {}))
            while True:
                number, kind, bodies, senders = await read_handover(reader)
                reply = _HandoverReply(number, len(bodies), self._thread.loop, writer)
                self._submit(kind, bodies, reply.deliver, senders)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError) as error:  # cancelled: we close
            log.debug("Another process has disconnected, or is not waited for any longer. reason=%r", error)
        except (ValueError, IndexError, struct.error) as error:
            log.error("Another process hands over nonsense. reason=%s", error)
        finally:
            writer.close()
            with self._lock:
                self._connections -= 1
                self._changed.notify_all()


class _HandoverReply:
    """Gathers the answers to the bodies of one message, and writes them when the last is known.

    Threads: `deliver` may be called from any thread.
    """

    def __init__(self, number: int, count: int, loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
        self._number = number
        self._loop = loop
        self._writer = writer
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._left = count
        self._answers: dict[int, DecodeAnswer] = {}

    def deliver(self, answers: list[tuple[Any, DecodeAnswer]]) -> None:
        with self._lock:
            self._answers.update((place, answer) for place, answer in answers if answer != TAKEN)
            self._left -= len(answers)
            if self._left:
                return
        try:
            self._loop.call_soon_threadsafe(write_to_peer, self._writer, [answer_message(self._number, self._answers)])
        except RuntimeError:
            pass  # the loop has closed: the other process finds that the connection is gone
