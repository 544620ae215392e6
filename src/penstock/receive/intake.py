"""The intake: requests in, answers out when what they brought is safe.

    receivers ──submit──► waiting ──a group at a time──► decompress, decode ──► relay, L1
        ▲                 (bytes bounded)                 one thread                │
        └───────────────────────────── answers ◄──────────────────────────── done ─┘

While one group is decoded and made safe the next one gathers, so groups grow with the load and a lone request does not
wait: a group of four requests costs almost as much as one of sixteen.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.clock import Clock, SystemClock
from penstock.receive.bodies import Encoding, TooLarge, decompressed
from penstock.receive.config import IntakeConfig
from penstock.receive.decode.decoder import Decoded, Decoder
from penstock.receive.decode.plain import TooMany
from penstock.receive.sink import Answer, Format, RawSink, Refusal, Sink, Status
from penstock.receive.ticket import Ticket
from penstock.telemetry import Buckets, Sample

log = logging.getLogger(__name__)

_GATHER = 0.025  # seconds that requests wait for a group to be safe, so that they are decoded together
_SWEEP = 60.0  # seconds between two looks for series that have expired

Deliver = Callable[[list[tuple[object, Answer]]], None]


@dataclass(slots=True, eq=False)
class Request:
    """A body that waits for its answer: `deliver` is called once, with `token` and it, from any thread."""

    kind: Format
    body: bytes
    encoding: Encoding
    most: int  # bytes that it may have once decompressed
    token: object
    deliver: Deliver


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
    ) -> None:
        self._memory = memory
        self.config = config = config or IntakeConfig()
        self._clock = clock or SystemClock()
        self._sink = sink
        self._relay = relay
        self._decoder = Decoder(config, self._clock, began)
        self._thread = threading.Thread(target=self._work, name="penstock-intake", daemon=True)
        self._undos: deque[Decoded] = deque()  # filled by whoever learns that a group was not taken after all
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._in_flight = 0  # groups that were handed over and are not safe yet
        self._held = 0
        self._unanswered = 0
        self._is_closing = False
        self._answers: Counter[tuple[Format, Status]] = Counter()
        self._refused: Counter[Refusal] = Counter()
        # Written by the intake's thread alone.
        self._points: Counter[Format] = Counter()
        self._bytes: Counter[Format] = Counter()
        self._seconds = 0.0
        self._sizes = Buckets("penstock_receive_group_requests")

    def start(self) -> Self:
        """Go on where an earlier run ended in good order (`memory`), and take requests."""
        if self._memory is not None and (streams := self._decoder.restore(self._memory)):
            log.info("Cumulative streams go on where the last run ended. streams=%d", streams)
        self._thread.start()
        return self

    def submit(self, request: Request) -> bool:
        """Take a request; False if too much waits already, or if we are closing."""
        with self._lock:
            if self._is_closing or self._held + len(request.body) > int(self.config.max_held):
                self._refused[Refusal.CLOSED if self._is_closing else Refusal.FULL] += 1
                return False
            self._held += len(request.body)
            self._unanswered += 1
            self._waiting.append(request)
            self._waiting_bytes += len(request.body)
            if len(self._waiting) == 1 or self._waiting_bytes >= int(self.config.max_group):
                self._changed.notify_all()
        return True

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def refuse(self, reason: Refusal) -> None:
        """Count a request that a receiver turned away itself."""
        with self._lock:
            self._refused[reason] += 1

    def close(self, timeout: float = 30.0) -> bool:
        """Take nothing more, answer what waits; whether all was answered in time."""
        deadline = self._clock.monotonic() + timeout
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        with self._lock:
            is_done = self._changed.wait_for(lambda: not self._unanswered, max(0.0, deadline - self._clock.monotonic()))
        if is_done and self._thread.ident is not None and not self._thread.is_alive():
            self._remember()
        return is_done

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
        while (group := self._gather()) is not None:
            while self._undos:
                self._undos.popleft().undo()
            if group:
                self._process(group)
            if self._clock.monotonic() - swept >= _SWEEP:
                swept = self._clock.monotonic()
                try:
                    self._decoder.expire()
                except Exception:  # without this thread nobody is ever answered again
                    log.exception("Series that are silent could not be forgotten.")

    def _gather(self) -> list[Request] | None:
        """Requests of one format to decode together; none when it is time to look around, None at the end."""
        most = int(self.config.max_group)
        with self._lock:
            if not self._waiting and not self._is_closing:
                self._changed.wait(_SWEEP)
            if not self._waiting:
                return None if self._is_closing else []
            self._changed.wait_for(
                lambda: not self._in_flight or self._waiting_bytes >= most or self._is_closing, _GATHER
            )
            group = [self._waiting.popleft()]
            size = len(group[0].body)
            while self._waiting and self._waiting[0].kind is group[0].kind and size < most:
                size += len(self._waiting[0].body)
                group.append(self._waiting.popleft())
            self._waiting_bytes -= size
            return group

    def _process(self, requests: list[Request]) -> None:
        began = self._clock.monotonic()
        ready: list[Request] = []
        bodies: list[bytes] = []
        size = 0
        for place, request in enumerate(requests):
            if size >= int(self.config.max_group):  # compressed bodies may grow a thousandfold: the rest comes next
                self._put_back(requests[place:])
                break
            try:
                body = decompressed(request.body, request.encoding, request.most)
            except TooLarge as error:
                self._answer([(request, Answer(Status.TOO_LARGE, str(error)))], Refusal.TOO_LARGE)
                continue
            except ValueError as error:
                self._answer([(request, Answer(Status.BAD, str(error)))], Refusal.MALFORMED)
                continue
            except MemoryError:
                self._answer([(request, Answer(Status.BROKEN, "no memory: send it again"))], Refusal.FAILED)
                continue
            ready.append(request)
            bodies.append(body)
            size += len(body)
        if ready:
            self._sizes.observe(len(ready))
            self._bytes[ready[0].kind] += size
            self._hand_over(ready, bodies)
        self._seconds += self._clock.monotonic() - began

    def _put_back(self, requests: list[Request]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(requests))
            self._waiting_bytes += sum(len(request.body) for request in requests)

    def _hand_over(self, requests: list[Request], bodies: list[bytes]) -> None:
        kind = requests[0].kind
        try:
            decoded = self._decoder.decode(kind, bodies)
        except Exception as error:
            if len(requests) > 1:  # one of them is the cause: each for itself, so that only that one fails
                for request, body in zip(requests, bodies):
                    self._hand_over([request], [body])
                return
            if isinstance(error, TooMany):
                self._answer([(requests[0], Answer(Status.TOO_LARGE, f"the body has {error}"))], Refusal.TOO_LARGE)
                return
            log.exception("A request could not be decoded. format=%s bytes=%d", kind.value, len(bodies[0]))
            answer = Answer(Status.BAD, "this request cannot be decoded; our log says why")
            self._answer([(requests[0], answer)], Refusal.MALFORMED)
            return
        account = decoded.account
        self._answer([(requests[place], account.answer(place)) for place in account.errors], Refusal.MALFORMED)
        good = [place for place in range(len(requests)) if place not in account.errors]
        if not good:
            return

        def finish(answers: list[tuple[Request, Answer]], error: BaseException | None) -> None:
            if error is not None:
                log.warning("What was received is not safe, its senders are told. reason=%s", error)
            self._answer(answers, Refusal.FULL if error is None else Refusal.FAILED)
            with self._lock:
                self._in_flight -= 1
                self._changed.notify_all()

        with self._lock:
            self._in_flight += 1
        ticket = Ticket([(requests[place], account.answer(place)) for place in good], finish)
        try:
            is_taken = self._is_taken(kind, decoded, [decoded.raw[place] for place in good], ticket)
            instead = Answer(Status.BUSY, "no room at the moment: send it again")
        except Exception as error:  # none that they promise; but without this thread nobody is ever answered again
            log.exception("A request could not be handed over. format=%s", kind.value)
            is_taken, instead = False, Answer(Status.BROKEN, f"{type(error).__name__} here: send it again")
        if is_taken:
            self._points[kind] += sum(map(len, decoded.chunks))
            with self._lock:
                self._refused.update(account.reasons)
        else:
            ticket.refused(instead)
            decoded.undo()
        ticket.sealed()

    def _is_taken(self, kind: Format, decoded: Decoded, raw: list[bytes], ticket: Ticket) -> bool:
        """Hand the group to the relay, then to L1.

        In this order, since a sender repeats what was refused: the relay's destination tells the same point twice from
        two points by its time, L1 would add it up again.
        """
        relayed = Format.OTLP if kind is Format.OTLP_JSON else kind
        if (
            self._relay is not None
            and kind is not Format.EVENTS
            and not self._relay.submit_raw(relayed, raw, ticket.part())
        ):
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

    def _answer(self, answers: list[tuple[Request, Answer]], reason: Refusal | None = None) -> None:
        if not answers:
            return
        by_receiver: dict[Deliver, list[tuple[object, Answer]]] = {}
        for request, answer in answers:
            by_receiver.setdefault(request.deliver, []).append((request.token, answer))
        for deliver, some in by_receiver.items():
            deliver(some)
        with self._lock:
            for request, answer in answers:
                self._held -= len(request.body)
                self._answers[request.kind, answer.status] += 1
                if reason is not None and answer.status is not Status.TAKEN:
                    self._refused[reason] += 1
            self._unanswered -= len(answers)
            if self._is_closing:
                self._changed.notify_all()

    # -- state -------------------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample | Buckets]:
        """For `Telemetry.watch`."""
        with self._lock:
            answers, refused = dict(self._answers), dict(self._refused)
            yield Sample("penstock_receive_held_bytes", self._held)
            yield Sample("penstock_receive_waiting_requests", self._unanswered)
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
