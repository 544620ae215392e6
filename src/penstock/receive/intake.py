"""The intake: requests in, answers out when what they brought is safe.

    receivers ──submit──► request queue ──a group at a time──► decompress, decode ──► relay, L1
        ▲                 (bytes bounded)                       one thread                │
        └───────────────────────────────── answers ◄─────────────────────────────── done ─┘

While one group is decoded the next one gathers: groups grow with the load, and a lone request does not wait.

Where several processes receive, each cumulative stream has one owner (`decode.stream_owners`):

    decode ──► parts that others own ──► peers ──► all of them have it safe ──► relay, L1 with the rest ──► answer
                                          └ one has not: only cumulative points are kept, the sender sends again

Invariants
1. Nothing of a request is counted here before the other processes have answered for their parts. If one refuses, the
   points that are counted of it, there and here, are known by their times when they are sent again.
2. Handed over requests are never handed on, have a bound of their own, and are never decoded together with those of
   senders: these may wait for other processes. So no process waits for another that waits for it.
3. The intake's thread waits for no process: a group that does is set aside, and resumed when the last has answered.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoded, Decoder
from penstock.decode.outcome import DecodeAnswer, DecodeStatus, Format, PointRefusal, TooMany
from penstock.decode.stream_owners import HandoverBodies
from penstock.receive.bodies import Encoding
from penstock.receive.peers import Peers
from penstock.receive.recent_requests import RecentRequests
from penstock.receive.refusal_log import REASONS, RefusalLog
from penstock.receive.repeats import RepeatedRequests
from penstock.receive.request_group import Deliver, PendingRequestParts, ReceivedRequest, RequestGroup
from penstock.receive.request_queue import RequestQueue
from penstock.receive.sink import RawSink, Sink
from penstock.telemetry import Buckets, Sample

log = logging.getLogger(__name__)

CLOSING = DecodeAnswer(DecodeStatus.BROKEN, "shutting down: send it again")
_FULL = DecodeAnswer(DecodeStatus.BUSY, "too many requests wait for their answer: send it again")
_NO_ROOM = DecodeAnswer(DecodeStatus.BUSY, "no room at the moment: send it again")
_TOO_MUCH_ASIDE = DecodeAnswer(DecodeStatus.BUSY, "too much waits for other processes: send it again")
_LONGEST_REASON = 300  # characters of it that an answer has
_NEARLY_FULL = 0.95  # of what may wait: requests are about to be refused
_SWEEP = 60.0  # seconds between two looks for series that have expired


class Intake:
    """Takes requests of all receivers, decodes them in groups and answers each once.

    Loss: an answer of TAKEN means that the points are as safe as the sinks' durability says. Without it the sender
        still has them, and may send them again.
    Order: requests of one sender and format are decoded in the order in which they came; senders have fair turns.
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
        recent: RecentRequests | None = None,
    ) -> None:
        self._memory = memory
        self._peers = peers
        self.config = config = config or IntakeConfig()
        self._clock = clock or SystemClock()
        self._repeats = RepeatedRequests(recent, self._clock) if recent is not None else None
        self._sink = sink
        self._relay = relay
        self._decoder = Decoder(config, self._clock, began, peers.owners if peers is not None else None)
        self._thread = threading.Thread(target=self._run, name="penstock-intake", daemon=True)
        self._undos: deque[Decoded] = deque()  # groups that a sink took and then failed to keep
        self.refusals = RefusalLog(self._clock)
        self._queue = RequestQueue(int(config.max_held), int(config.max_group), self._clock)
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._answers: Counter[tuple[Format, str]] = Counter()
        self._points: Counter[Format] = Counter()  # of requests that were answered with success
        # Written by the intake's thread alone.
        self._bytes_aside = 0  # decompressed, of groups that wait for other processes
        self._bytes: Counter[Format] = Counter()
        self._seconds = 0.0
        self._sizes = Buckets("penstock_receive_group_requests")

    def start(self) -> Self:
        """Restores the streams that an earlier run saved (`memory`), and takes requests."""
        if self._memory is not None and (streams := self._decoder.restore(self._memory)):
            log.info("Cumulative streams go on where the last run ended. streams=%d", streams)
        self._thread.start()
        if self._peers is not None:
            self._peers.start(self.submit_from_peer)
        return self

    def submit(self, request: ReceivedRequest) -> None:
        """Takes a request, or refuses it: BUSY if too much waits already, BROKEN while closing."""
        if not self._queue.push([request]):
            reason, answer = (PointRefusal.CLOSED, CLOSING) if self.is_closing else (PointRefusal.FULL, _FULL)
            self.refusals.add(reason, sender=request.sender, detail=answer.message)
            request.deliver([(request.reply_to, answer)])

    def submit_from_peer(
        self, kind: Format, bodies: Sequence[bytes], deliver: Deliver, senders: Sequence[str] = ()
    ) -> None:
        """Takes bodies that another process hands over, of streams that this process owns: all of them or none.

        `deliver` is called with the place of each body and its answer.
        """
        requests = [
            ReceivedRequest(kind, body, Encoding.IDENTITY, len(body), place, deliver, sender, is_from_peer=True)
            for place, (body, sender) in enumerate(zip(bodies, senders or [""] * len(bodies)))
        ]
        if not self._queue.push(requests):
            deliver([(request.reply_to, _NO_ROOM) for request in requests])

    @property
    def is_closing(self) -> bool:
        return self._queue.is_closed

    def close(self, timeout: float = 30.0) -> bool:
        """Takes nothing more, answers what waits; says whether all was answered in time."""
        deadline = self._clock.monotonic() + timeout
        self._queue.close_to_senders()
        if self._peers is not None:
            # Peers answer us, and we them, until each has answered its own senders.
            self._queue.wait_until_answered(self._left(deadline), with_peers=False)
            self._peers.stop_handing_over(self._left(deadline) / 2)
        self._queue.close()
        if self._thread.ident is not None:
            self._thread.join(self._left(deadline))
        is_done = self._queue.wait_until_answered(self._left(deadline), with_peers=True)
        if self._peers is not None:
            self._peers.close()
        if is_done and self._thread.ident is not None and not self._thread.is_alive():
            self._save_streams()
        return is_done

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    def _save_streams(self) -> None:
        """Saves the last values of cumulative streams. All requests are answered, so they are what was counted."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self._undo_failed()
        try:
            log.info("Cumulative streams are kept for the next start. streams=%d", self._decoder.save(memory))
        except OSError as error:
            log.warning("Cumulative streams could not be kept for the next start. path=%s reason=%s", memory, error)

    # -- the intake's own thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        swept = self._clock.monotonic()
        while (work := self._queue.next_work(_SWEEP)) is not None:
            began = self._clock.monotonic()
            self._undo_failed()
            if isinstance(work, RequestGroup):
                self._resume(work)
            elif work:
                self._process(work)
            now = self._clock.monotonic()
            self._seconds += now - began
            if now - swept >= _SWEEP:
                swept = now
                try:
                    self._decoder.expire()
                except Exception:  # without this thread no request is ever answered again
                    log.exception("Series that are silent could not be forgotten.")

    def _undo_failed(self) -> None:
        while self._undos:
            self._undos.popleft().undo()

    def _process(self, requests: list[ReceivedRequest]) -> None:
        """Decompresses requests and decodes them, those of senders apart from those of other processes."""
        from_senders: list[tuple[ReceivedRequest, bytes]] = []
        from_peers: list[tuple[ReceivedRequest, bytes]] = []
        charged: list[tuple[ReceivedRequest, int]] = []
        size = 0
        for place, request in enumerate(requests):
            if size >= int(self.config.max_group):  # compressed bodies may grow a thousandfold: the rest comes next
                self._queue.put_back(requests[place:])
                break
            body = request.decompressed()
            if isinstance(body, DecodeAnswer):
                charged.append((request, request.max_decompressed if body.status is DecodeStatus.TOO_LARGE else 0))
                self._answer([(request, body)])
            else:
                (from_peers if request.is_from_peer else from_senders).append((request, body))
                charged.append((request, len(body)))
                size += len(body)
        self._queue.charge(charged)
        self._bytes[requests[0].kind] += sum(len(body) for _, body in from_senders)
        if self._repeats is not None and from_senders:
            from_senders, answers = self._repeats.screen(from_senders)
            self._answer(answers)
        for some in (from_peers, from_senders):  # peers first: they wait, and what senders sent may wait for them
            if some:
                self._sizes.observe(len(some))
                self._decode(some)

    def _decode(self, received: list[tuple[ReceivedRequest, bytes]]) -> None:
        """Decodes a group of one origin, and hands other processes what they own of it."""
        requests, bodies = [request for request, _ in received], [body for _, body in received]
        kind = requests[0].kind
        group = RequestGroup(kind, requests, bodies, self._relay_of(kind) is not None)
        handed_over = range(len(requests)) if requests[0].is_from_peer else ()
        try:
            senders = [request.sender for request in requests]
            decoded = self._decoder.decode(kind, bodies, handed_over, partial(self._hand_to_peers, group), senders)
        except Exception as error:
            if len(requests) > 1:  # one of them is the cause: each for itself, so that only that one fails
                for one in received:
                    self._decode([one])
            elif isinstance(error, TooMany):
                self._answer([(requests[0], DecodeAnswer(DecodeStatus.TOO_LARGE, f"the body has {error}"))])
            else:
                log.debug("A request cannot be decoded. format=%s", kind.value, exc_info=error)
                reason = f"this request cannot be decoded: {type(error).__name__}: {error}"
                self._answer([(requests[0], DecodeAnswer(DecodeStatus.BAD, reason[:_LONGEST_REASON]))])
            return
        self._answer([(requests[place], answer) for place, answer in decoded.outcomes.errors.items()])
        group.decoded = decoded
        if group.peer_bodies or len(decoded.outcomes.errors) < len(requests):
            self._queue.group_sent()
            if not group.peer_bodies:
                repeated = self._repeats.screen_events(group) if self._repeats is not None else {}
                self._answer([(requests[place], answer) for place, answer in repeated.items()])
                self._submit_to_sinks(group, repeated)

    def _hand_to_peers(self, group: RequestGroup, bodies: HandoverBodies, points: Mapping[int, int]) -> None:
        """Hands other processes what they own of a group; it is resumed when the last has answered."""
        assert self._peers is not None
        group.peer_bodies = bodies
        self._bytes_aside += group.size
        if self._bytes_aside > int(self.config.max_held) and self._bytes_aside > group.size:
            group.awaited = 1
            self._queue.on_peer_answer(group, dict.fromkeys(group.divided, _TOO_MUCH_ASIDE))
            return
        group.awaited = len(bodies)
        for owner, parts in bodies.items():
            senders = [group.requests[place].sender for place in parts]
            on_answer = partial(self._queue.on_peer_answer, group)
            self._peers.submit(owner, group.kind, parts, points[owner], on_answer, senders)

    def _resume(self, group: RequestGroup) -> None:
        """Takes the rest of a group for whose parts other processes have answered.

        If one of them has not taken its part, the sender sends the request again. Points that would add up twice are
        then not taken. Cumulative points are: a second process may have handed over the same ones for the same sender,
        and was answered that they are known.
        """
        self._bytes_aside -= group.size
        if group.decoded is None:
            return
        refusal, refused = group.peer_refusal, group.divided.intersection(group.readable)
        if refusal is None:
            self._submit_to_sinks(group)
        else:
            self._answer([(group.requests[place], refusal) for place in sorted(refused)])
            self._submit_to_sinks(group, refused)

    def _submit_to_sinks(self, group: RequestGroup, refused: Collection[int] = ()) -> None:
        """Submits a group to the relay and to L1. Of requests that are refused only cumulative points are taken."""
        assert group.decoded is not None
        kind, decoded = group.kind, group.decoded
        places = [place for place in group.readable if place not in refused]
        pending = PendingRequestParts(group.answers(places), partial(self._finish, group, decoded.points_of(places)))
        refusal = None
        try:
            if refused:
                decoded = self._decoder.without(refused, decoded)
            raw = [decoded.raw[place] for place in places if not group.requests[place].is_from_peer]
            digests = b"".join(group.requests[place].digest for place in places)
            if not self._submit_parts(kind, decoded, raw, pending, digests):
                refusal = _NO_ROOM
        except Exception as error:  # sinks promise to raise none, but this thread must not end
            log.exception("A request could not be handed over. format=%s", kind.value)
            refusal = DecodeAnswer(DecodeStatus.BROKEN, f"{type(error).__name__} here: send it again")
        if refusal is not None:
            pending.refuse_last(refusal)
            decoded.undo()
        pending.seal()

    def _relay_of(self, kind: Format) -> RawSink | None:
        return self._relay if self._relay is not None and self._relay.takes(kind.relayed_as) else None

    def _submit_parts(
        self, kind: Format, decoded: Decoded, raw: list[bytes], pending: PendingRequestParts, digests: bytes
    ) -> bool:
        """Submits bodies to the relay, then points to L1; says whether both took them.

        In this order, since a refused request is sent again: the relay's destination tells the same point twice from
        two points by its time, L1 would add it up again.
        """
        relay = self._relay_of(kind)
        if relay is not None and raw and not relay.submit_raw(kind.relayed_as, raw, pending.add()):
            return False
        if self._sink is None or not decoded.chunks:
            return True
        done = pending.add()

        def points_done(error: BaseException | None) -> None:
            if error is not None:
                self._undos.append(decoded)
            done(error)

        # A block tells nothing of the relay: with one, only what was answered is known when it comes again.
        return self._sink.submit(decoded.chunks, points_done, b"" if relay is not None else digests)

    # -- answering, from any thread ----------------------------------------------------------------------------------

    def _finish(
        self, group: RequestGroup, points: Sequence[int], answers: list[tuple[ReceivedRequest, DecodeAnswer]]
    ) -> None:
        """Answers the requests of a group, and counts what is taken and refused of those that hear a success."""
        assert group.decoded is not None
        taken = [count for count, (_, answer) in zip(points, answers) if answer.status is DecodeStatus.TAKEN]
        with self._lock:
            self._points[group.kind] += sum(taken)
        if taken:
            self.refusals.add_outcomes(group.decoded.outcomes, [request.sender for request in group.requests])
        self._answer(answers)
        self._queue.group_settled()

    def _answer(self, answers: list[tuple[ReceivedRequest, DecodeAnswer]]) -> None:
        if not answers:
            return
        if self._repeats is not None:  # first: a sender that has its answer is known
            self._repeats.settle(answers)
        by_receiver: dict[Deliver, list[tuple[object, DecodeAnswer]]] = {}
        with self._lock:  # first: a sender that has its answer finds it counted
            for request, answer in answers:
                by_receiver.setdefault(request.deliver, []).append((request.reply_to, answer))
                if not request.is_from_peer:  # otherwise it is counted where it came from
                    self._answers[request.kind, answer.label] += 1
        for request, answer in answers:
            if answer.status is not DecodeStatus.TAKEN and not request.is_from_peer:
                self.refusals.add(REASONS[answer.status], sender=request.sender, detail=answer.message)
        for deliver, some in by_receiver.items():
            deliver(some)
        self._queue.release([request for request, _ in answers])

    # -- state -------------------------------------------------------------------------------------------------------

    def unready(self) -> list[str]:
        """Returns why requests would be refused now; nothing if they would not."""
        if self.is_closing:
            return ["the intake is closed"]
        share = self._queue.fullness
        return [f"requests that wait take {share:.0%} of intake.max_held"] if share >= _NEARLY_FULL else []

    def notes(self) -> list[str]:
        """Returns what was refused of late and needs an operator."""
        return self.refusals.notes()

    def dead_threads(self) -> list[str]:
        """Returns the threads that have ended though they should not."""
        is_dead = self._thread.ident is not None and not self._thread.is_alive() and not self.is_closing
        return [self._thread.name] if is_dead else []

    def samples(self) -> Iterator[Sample | Buckets]:
        """For `Telemetry.watch`."""
        with self._lock:
            answers, points = dict(self._answers), dict(self._points)
        yield Sample("penstock_receive_held_bytes", self._queue.held_bytes)
        yield Sample("penstock_receive_waiting_requests", self._queue.unanswered)
        for (kind, status), count in answers.items():
            yield Sample("penstock_receive_requests_total", count, (kind.value, status))
        for reason, count in self.refusals.counts().items():
            yield Sample("penstock_receive_refused_total", count, (reason.value,))
        for kind, count in points.items():
            yield Sample("penstock_receive_points_total", count, (kind.value,))
        for kind, count in list(self._bytes.items()):
            yield Sample("penstock_receive_bytes_total", count, (kind.value,))
        yield Sample("penstock_receive_decode_seconds_total", self._seconds)
        yield self._sizes
        yield from self._decoder.samples()
        for part in (self._peers, self._repeats):
            if part is not None:
                yield from part.samples()
