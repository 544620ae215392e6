"""The intake: requests in, answers out when what they brought is safe.

    receivers ──submit──► waiting ──a group at a time──► decompress, decode ──► relay, L1
        ▲                 (bytes bounded)                 one thread                │
        └───────────────────────────── answers ◄──────────────────────────── done ─┘

While one group is decoded and made safe the next one gathers, so groups grow with the load and a lone request does not
wait: a group of four requests costs almost as much as one of sixteen.

Where several processes receive, each cumulative stream is kept by one of them (`decode.homes`):

    decode ──► what others keep ──► peers ──► all of them have it safe ──► relay, L1 with the rest ──► answer
                                     └ one has not: cumulative points alone, the sender comes again

Invariants
1. Nothing of a request is counted here before the other processes have answered for their parts. If one refuses, what
   is counted of it, there and here, is known by its time when it comes again.
2. What was handed to us is never handed on, has room of its own, and is never decoded together with what came to us:
   that may wait for other processes, so no process waits for another that waits for it.
3. The intake's thread waits for no process: a group that does is set aside, and goes on when the last has answered.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import Answer, Format, Refusal, Status, TooMany
from penstock.decode.stream_owners import HandoverBodies
from penstock.receive.bodies import Encoding, TooLarge, decompressed
from penstock.receive.peers import Peers
from penstock.receive.request_group import UnderWay
from penstock.receive.sink import RawSink, Sink
from penstock.receive.ticket import Ticket
from penstock.receive.waiting_requests import Deliver, Request, WaitingRoom
from penstock.telemetry import Buckets, Sample

log = logging.getLogger(__name__)

_SWEEP = 60.0  # seconds between two looks for series that have expired

_REASONS = {  # as which an answer is counted
    Status.BAD: Refusal.MALFORMED,
    Status.TOO_LARGE: Refusal.TOO_LARGE,
    Status.BUSY: Refusal.FULL,
    Status.BROKEN: Refusal.FAILED,
}


class Intake:
    """Takes requests of all receivers, decodes them in groups and answers each once.

    Loss: an answer of TAKEN means that the points are as safe as the sinks' durability says. Without it the sender
        still has them, and may send them again.
    Order: requests of one format are decoded in the order in which they came.
    Threads: `submit` may be called from any thread.
    """

    def __init__(
        self,
        sink: Sink | None,
        relay: RawSink | None = None,
        config: IntakeConfig | None = None,
        *,
        clock: Clock | None = None,
        began: float | None = None,
        memory: Path | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._memory = memory
        self._peers = peers
        self.config = config = config or IntakeConfig()
        self._clock = clock or SystemClock()
        self._sink = sink
        self._relay = relay
        self._decoder = Decoder(config, self._clock, began, peers.homes if peers is not None else None)
        self._thread = threading.Thread(target=self._work, name="penstock-intake", daemon=True)
        self._undos: deque[Decoded] = deque()  # filled by whoever learns that a group was not taken after all
        self._room = WaitingRoom(int(config.max_held), int(config.max_group), self._clock)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._answers: Counter[tuple[Format, Status]] = Counter()
        self._refused: Counter[Refusal] = Counter()
        # Written by the intake's thread alone.
        self._aside = 0  # bytes, decompressed, of groups that wait for other processes
        self._points: Counter[Format] = Counter()
        self._bytes: Counter[Format] = Counter()
        self._seconds = 0.0
        self._sizes = Buckets("penstock_receive_group_requests")

    def start(self) -> Self:
        """Go on where an earlier run ended in good order (`memory`), and take requests."""
        if self._memory is not None and (streams := self._decoder.restore(self._memory)):
            log.info("Cumulative streams go on where the last run ended. streams=%d", streams)
        self._thread.start()
        if self._peers is not None:
            self._peers.start(self.take_over)
        return self

    def submit(self, request: Request) -> bool:
        """Take a request; False if too much waits already, or if we are closing."""
        if self._room.enter([request]):
            return True
        self.refuse(Refusal.CLOSED if self.is_closing else Refusal.FULL)
        return False

    def take_over(self, kind: Format, bodies: Sequence[bytes], deliver: Deliver) -> bool:
        """Take what another process hands over, of streams that we keep: all of it or, with False, nothing.

        `deliver` is called with the place of each body and how it fared.
        """
        return self._room.enter(
            [
                Request(kind, body, Encoding.IDENTITY, len(body), place, deliver, is_ours=False)
                for place, body in enumerate(bodies)
            ]
        )

    @property
    def is_closing(self) -> bool:
        return self._room.is_closed

    def refuse(self, reason: Refusal) -> None:
        """Count a request that a receiver turned away itself."""
        with self._lock:
            self._refused[reason] += 1

    def close(self, timeout: float = 30.0) -> bool:
        """Take nothing more, answer what waits; whether all was answered in time."""
        deadline = self._clock.monotonic() + timeout
        self._room.close()
        if self._peers is not None:
            # Others answer us, and we them, until each has answered its own senders.
            self._room.wait_until_answered(self._left(deadline), also_others=False)
            self._peers.hang_up(self._left(deadline) / 2)
        self._room.end()
        if self._thread.ident is not None:
            self._thread.join(self._left(deadline))
        is_done = self._room.wait_until_answered(self._left(deadline), also_others=True)
        if self._peers is not None:
            self._peers.close()
        if is_done and self._thread.ident is not None and not self._thread.is_alive():
            self._remember()
        return is_done

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    def _remember(self) -> None:
        """Keep the last values of cumulative streams. Everybody was answered, so they are what was counted."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        while self._undos:
            self._undos.popleft().undo()
        try:
            log.info("Cumulative streams are kept for the next start. streams=%d", self._decoder.save(memory))
        except OSError as error:
            log.warning("Cumulative streams could not be kept for the next start. path=%s reason=%s", memory, error)

    # -- the intake's own thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        swept = self._clock.monotonic()
        while (group := self._room.next_group(_SWEEP)) is not None:
            while self._undos:
                self._undos.popleft().undo()
            while (returned := self._room.next_returned()) is not None:
                began = self._clock.monotonic()
                self._go_on(returned)
                self._seconds += self._clock.monotonic() - began
            if group:
                self._process(group)
            if self._clock.monotonic() - swept >= _SWEEP:
                swept = self._clock.monotonic()
                try:
                    self._decoder.expire()
                except Exception:  # without this thread nobody is ever answered again
                    log.exception("Series that are silent could not be forgotten.")

    def _process(self, requests: list[Request]) -> None:
        began = self._clock.monotonic()
        ready: list[Request] = []
        bodies: list[bytes] = []
        size = 0
        for place, request in enumerate(requests):
            if size >= int(self.config.max_group):  # compressed bodies may grow a thousandfold: the rest comes next
                self._room.put_back(requests[place:])
                break
            try:
                body = decompressed(request.body, request.encoding, request.most)
            except TooLarge as error:
                self._answer([(request, Answer(Status.TOO_LARGE, str(error)))])
                continue
            except ValueError as error:
                self._answer([(request, Answer(Status.BAD, str(error)))])
                continue
            except MemoryError:
                self._answer([(request, Answer(Status.BROKEN, "no memory: send it again"))])
                continue
            ready.append(request)
            bodies.append(body)
            size += len(body)
        # What others hand over is taken apart and first: they wait for it, and what is ours may wait for them.
        for is_ours in (False, True):
            some = [(request, body) for request, body in zip(ready, bodies) if request.is_ours is is_ours]
            if some:
                self._sizes.observe(len(some))
                self._bytes[some[0][0].kind] += is_ours * sum(len(body) for _, body in some)
                self._take([request for request, _ in some], [body for _, body in some])
        self._seconds += self._clock.monotonic() - began

    def _take(self, requests: Sequence[Request], bodies: Sequence[bytes]) -> None:
        """Decode a group, and hand on what others keep of it."""
        kind = requests[0].kind
        group = UnderWay(kind, requests, bodies)
        handed_to_us = {place for place, request in enumerate(requests) if not request.is_ours}
        try:
            decoded = self._decoder.decode(kind, list(bodies), handed_to_us, partial(self._hand_on, group))
        except Exception as error:
            if len(requests) > 1:  # one of them is the cause: each for itself, so that only that one fails
                for request, body in zip(requests, bodies):
                    self._take([request], [body])
                return
            if isinstance(error, TooMany):
                self._answer([(requests[0], Answer(Status.TOO_LARGE, f"the body has {error}"))])
                return
            log.exception("A request could not be decoded. format=%s bytes=%d", kind.value, len(bodies[0]))
            answer = Answer(Status.BAD, "this request cannot be decoded; our log says why")
            self._answer([(requests[0], answer)])
            return
        account = decoded.outcomes
        self._answer([(requests[place], account.answer(place)) for place in account.errors])
        group.decoded = decoded
        if not group.good and not group.elsewhere:
            return
        self._room.sent_on()
        if not group.elsewhere:
            self._hand_over(group)

    def _hand_on(self, group: UnderWay, elsewhere: HandoverBodies, points: Mapping[int, int]) -> None:
        """Hand others what they keep of a group that is being decoded; it goes on when the last has answered."""
        assert self._peers is not None
        group.elsewhere = elsewhere
        self._aside += group.size
        if self._aside > int(self.config.max_held) and self._aside > group.size:
            group.awaited = 1
            busy = Answer(Status.BUSY, "too much waits for other processes: send it again")
            self._room.heard(group, dict.fromkeys(group.divided, busy))
            return
        group.awaited = len(elsewhere)
        for home, parts in elsewhere.items():
            self._peers.submit(home, group.kind, parts, points[home], partial(self._room.heard, group))

    def _go_on(self, group: UnderWay) -> None:
        """Take the rest of a group of which others have answered for their parts.

        If one of them has not taken its part, nothing of the requests concerned is taken that would add up again when
        they come again. Cumulative points do not, and are: others may have asked for the same ones meanwhile, handed
        over by a process that the sender has turned to, and were told that we know them.
        """
        self._aside -= group.size
        if group.decoded is None:
            return
        refusal, refused = group.refusal, group.divided.intersection(group.good)
        if refusal is None:
            self._hand_over(group)
        else:
            self._answer([(group.requests[place], refusal) for place in sorted(refused)])
            self._hand_over(group, refused)

    def _hand_over(self, group: UnderWay, refused: Collection[int] = ()) -> None:
        """Hand what we keep of a group to the relay and to L1; who was refused is answered, and comes again."""
        assert group.decoded is not None
        kind, requests, decoded = group.kind, group.requests, group.decoded
        good = [place for place in group.good if place not in refused]

        def finish(answers: list[tuple[Request, Answer]], error: BaseException | None) -> None:
            if error is not None:
                log.warning("What was received is not safe, its senders are told. reason=%s", error)
            self._answer(answers)
            self._room.settled()

        ticket = Ticket([(requests[place], self._told(group, place)) for place in good], finish)
        try:
            if refused:
                decoded = self._decoder.without(refused, decoded)
            raw = [decoded.raw[place] for place in good if requests[place].is_ours]
            is_taken = self._is_taken(kind, decoded, raw, ticket)
            instead = Answer(Status.BUSY, "no room at the moment: send it again")
        except Exception as error:  # none that they promise; but without this thread nobody is ever answered again
            log.exception("A request could not be handed over. format=%s", kind.value)
            is_taken, instead = False, Answer(Status.BROKEN, f"{type(error).__name__} here: send it again")
        if is_taken:
            self._points[kind] += sum(map(len, decoded.chunks))
            with self._lock:
                self._refused.update(decoded.outcomes.reasons)
        else:
            ticket.refused(instead)
            decoded.undo()
        ticket.sealed()

    def _told(self, group: UnderWay, place: int) -> Answer:
        """What the sender of a request is told once all of it is safe."""
        answer = group.answer(place)
        if answer.is_useless and group.requests[place].is_ours and self._relay_of(group.kind) is not None:
            return replace(answer, is_useless=False)
        return answer

    def _relay_of(self, kind: Format) -> RawSink | None:
        return self._relay if self._relay is not None and self._relay.takes(_relayed(kind)) else None

    def _is_taken(self, kind: Format, decoded: Decoded, raw: list[bytes], ticket: Ticket) -> bool:
        """Hand the group to the relay, then to L1.

        In this order, since a sender repeats what was refused: the relay's destination tells the same point twice from
        two points by its time, L1 would add it up again.
        """
        relay = self._relay_of(kind)
        if relay is not None and raw and not relay.submit_raw(_relayed(kind), raw, ticket.part()):
            return False
        if self._sink is None or not decoded.chunks:
            return True
        done = ticket.part()

        def points_done(error: BaseException | None) -> None:
            if error is not None:
                self._undos.append(decoded)
            done(error)

        return self._sink.submit(decoded.chunks, points_done)

    # -- answering, from any thread ----------------------------------------------------------------------------------

    def _answer(self, answers: list[tuple[Request, Answer]]) -> None:
        if not answers:
            return
        by_receiver: dict[Deliver, list[tuple[object, Answer]]] = {}
        for request, answer in answers:
            by_receiver.setdefault(request.deliver, []).append((request.token, answer))
        with self._lock:  # first: who has the answer finds it counted
            for request, answer in answers:
                if not request.is_ours:
                    continue  # it is counted where it came from
                self._answers[request.kind, answer.status] += 1
                if answer.status is not Status.TAKEN:
                    self._refused[_REASONS[answer.status]] += 1
        for deliver, some in by_receiver.items():
            deliver(some)
        self._room.answered([request for request, _ in answers])

    # -- state -------------------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample | Buckets]:
        """For `Telemetry.watch`."""
        with self._lock:
            answers, refused = dict(self._answers), dict(self._refused)
        yield Sample("penstock_receive_held_bytes", self._room.held_bytes)
        yield Sample("penstock_receive_waiting_requests", self._room.unanswered)
        for (kind, status), count in answers.items():
            yield Sample("penstock_receive_requests_total", count, (kind.value, status.value))
        for reason, count in refused.items():
            yield Sample("penstock_receive_refused_total", count, (reason.value,))
        for kind, count in list(self._points.items()):
            yield Sample("penstock_receive_points_total", count, (kind.value,))
        for kind, count in list(self._bytes.items()):
            yield Sample("penstock_receive_bytes_total", count, (kind.value,))
        yield Sample("penstock_receive_decode_seconds_total", self._seconds)
        yield self._sizes
        yield from self._decoder.samples()
        if self._peers is not None:
            yield from self._peers.samples()


def _relayed(kind: Format) -> Format:
    """As what a body of that format is relayed."""
    return Format.OTLP if kind is Format.OTLP_JSON else kind
