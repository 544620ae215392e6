"""Between receiving processes: what one of them received and another keeps, handed over and answered for.

    us ──number, format, bodies──► home of the streams       a connection to each of the others, and one from each
       ◄──number, how each fared──                           in the words of `peer_wire`

A process that does not answer within `peer.PATIENCE` is left alone until it greets again. Whoever stops hangs up once
it has answered its own senders, and takes what others hand over until they have hung up, too.
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
from penstock.decode.outcome import Answer, Format, Status
from penstock.decode.stream_owners import StreamOwners
from penstock.receive.event_loop import LoopThread
from penstock.receive.peer import Heard, Peer
from penstock.receive.peer_wire import BUFFER, Address, answer, read_answer, read_message, write
from penstock.telemetry import Sample

log = logging.getLogger(__name__)

_GREETING = 5.0  # seconds within which somebody who listens says so
_FIRST_CONTACT = 10.0  # seconds of a start that wait for the others: before they are there we could only refuse
_PAUSES = (0.02, 0.5)  # seconds before another try to reach one, the first and the longest

Deliver = Callable[[list[tuple[object, Answer]]], None]
TakeOver = Callable[[Format, Sequence[bytes], Deliver], bool]


class Peers:
    """The other receiving processes; `folder` has the sockets of all of them, by number.

    Loss: none. Of what is not answered for, `submit` says so, and the sender has it still.
    Order: what is handed to one process arrives as it was handed over.
    Threads: every method may be called from any thread; one of its own reads and writes.
    """

    def __init__(self, folder: Path, homes: StreamOwners, max_held: int, clock: Clock | None = None) -> None:
        self.homes = homes
        self._folder = folder
        self._clock: Clock = clock or SystemClock()
        self._thread = LoopThread("penstock-peers")
        loop, others = self._thread.loop, [home for home in range(homes.count) if home != homes.own]
        self._others = {home: Peer(home, loop, max_held, self._clock) for home in others}
        homes.unreachable.update(self._others)
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._take_over: TakeOver | None = None
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._callers = 0
        self._is_hanging_up = False

    def start(self, take_over: TakeOver) -> None:
        """Listen, and reach the others; wait a while for those that are starting, too."""
        self._take_over = take_over
        self._thread.start()
        self._thread.run(self._open(), _GREETING)
        with self._lock:
            self._changed.wait_for(lambda: not self.homes.unreachable or self._is_hanging_up, _FIRST_CONTACT)

    def submit(self, home: int, kind: Format, parts: Mapping[int, bytes], points: int, heard: Heard) -> None:
        """Hand bodies to another process; `heard` is called once, from any thread, with what was not simply taken."""
        self._others[home].submit(Format.OTLP if kind is Format.OTLP_JSON else kind, parts, points, heard)

    def hang_up(self, timeout: float) -> None:
        """Hand over nothing more, and wait for the others to say the same."""
        with self._lock:
            self._is_hanging_up = True
            self._changed.notify_all()
        if not self._thread.is_alive:
            return
        self._thread.loop.call_soon_threadsafe(self._end_tasks)
        with self._lock:
            if not self._changed.wait_for(lambda: not self._callers, timeout):
                log.warning("Other processes have not hung up in time. callers=%d", self._callers)

    def close(self) -> None:
        if self._thread.is_alive:
            self._thread.run(self._close(), _GREETING)
        self._thread.close()

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        for home, peer in self._others.items():
            name = str(home)
            yield Sample("penstock_handover_up", float(home not in self.homes.unreachable), (name,))
            yield Sample("penstock_handover_points_total", peer.points, (name,))
            yield Sample("penstock_handover_bytes_total", peer.bytes, (name,))
            for status, count in list(peer.answers.items()):
                yield Sample("penstock_handover_requests_total", count, (name, status.value))

    # -- on the loop: towards the others -------------------------------------------------------------------------------

    async def _open(self) -> None:
        own = self._folder / str(self.homes.own)
        own.unlink(missing_ok=True)
        with Address(own) as address:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(address)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=BUFFER)
        self._tasks = [asyncio.create_task(self._keep(peer)) for peer in self._others.values()]

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close(self) -> None:
        self._end_tasks()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        (self._folder / str(self.homes.own)).unlink(missing_ok=True)
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _keep(self, peer: Peer) -> None:
        """Stay connected to one of the others."""
        pause, longest = _PAUSES
        while True:
            writer = None
            try:
                with Address(self._folder / str(peer.home)) as address:
                    reader, writer = await asyncio.open_unix_connection(address, limit=BUFFER)
                async with asyncio.timeout(_GREETING):
                    await read_answer(reader)
                peer.connected(writer)
                self._say(peer.home, is_up=True)
                pause = _PAUSES[0]
                await peer.listen(reader)
            except Exception as error:  # noqa: BLE001 - whatever it is, that process must be reached again
                log.debug("A process cannot be reached. process=%d reason=%r", peer.home, error)
            finally:
                self._say(peer.home, is_up=False)
                peer.lost()
                if writer is not None:
                    writer.transport.abort() if not self._is_hanging_up else writer.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _say(self, home: int, *, is_up: bool) -> None:
        if is_up is (home not in self.homes.unreachable):
            return
        with self._lock:
            (self.homes.unreachable.discard if is_up else self.homes.unreachable.add)(home)
            self._changed.notify_all()
        if not self._is_hanging_up:
            log.log(*((logging.INFO, _UP) if is_up else (logging.WARNING, _DOWN)), home)

    # -- on the loop: from the others ----------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._lock:
            self._callers += 1
        try:
            writer.write(answer(0, {}))
            while True:
                number, kind, bodies = await read_message(reader)
                self._take(bodies, kind, _Reply(number, len(bodies), self._thread.loop, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError) as error:  # cancelled: we close
            log.debug("Another process has hung up, or is not waited for any longer. reason=%r", error)
        except (ValueError, IndexError, struct.error) as error:
            log.error("Another process hands over nonsense. reason=%s", error)
        finally:
            writer.close()
            with self._lock:
                self._callers -= 1
                self._changed.notify_all()

    def _take(self, bodies: list[bytes], kind: Format, reply: "_Reply") -> None:
        assert self._take_over is not None
        if not self._take_over(kind, bodies, reply.deliver):
            busy = Answer(Status.BUSY, f"process {self.homes.own} has no room at the moment: send it again")
            reply.deliver([(place, busy) for place in range(len(bodies))])


_UP = "What other processes keep can be handed over. process=%d"
_DOWN = "What another process keeps cannot be handed over: its senders are told to come again. process=%d"


class _Reply:
    """Gathers how the bodies of one message fared, and says so when the last is known.

    Threads: `deliver` may be called from any thread.
    """

    def __init__(self, number: int, count: int, loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
        self._number = number
        self._loop = loop
        self._writer = writer
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._left = count
        self._answers: dict[int, Answer] = {}

    def deliver(self, answers: list[tuple[Any, Answer]]) -> None:
        with self._lock:
            self._answers.update((place, answer) for place, answer in answers if not _is_plain(answer))
            self._left -= len(answers)
            if self._left:
                return
        try:
            self._loop.call_soon_threadsafe(write, self._writer, [answer(self._number, self._answers)])
        except RuntimeError:
            pass  # closed meanwhile: whoever asked finds that nobody answers


def _is_plain(answer: Answer) -> bool:
    return answer.status is Status.TAKEN and not answer.rejected
