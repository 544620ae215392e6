"""Requests that come again: recognised, answered with success and not counted.

A sender that heard no answer sends the same bytes again, and points carry their times. So the same bytes of the same
sender are the same request. Bodies without times are excluded, unless the sender gives a key (`Idempotency-Key`).

Invariants
1. A digest is in a block of the durable queue exactly if the request's points are. Segments keep it.
2. A request is answered as a repeated one only if the first was answered as safe, or its block is there.
3. Of what is not known, the request is taken again: a point may count twice then, and is never lost.
"""

import threading
from collections.abc import Iterator, Sequence

import xxhash

from penstock.clock import Clock
from penstock.decode.outcome import TAKEN, DecodeAnswer, DecodeStatus, Format
from penstock.receive.recent_requests import Claim, RecentRequests
from penstock.receive.request_group import ReceivedRequest, RequestGroup
from penstock.telemetry import Sample

_UNDER_WAY = DecodeAnswer(DecodeStatus.BUSY, "the same request waits for its answer: send it again")
Answers = list[tuple[ReceivedRequest, DecodeAnswer]]


class RepeatedRequests:
    """Screens requests before they are decoded, and remembers those that were taken.

    Threads: `settle` may be called from any thread, the others from one.
    """

    def __init__(self, recent: RecentRequests, clock: Clock) -> None:
        self._recent = recent
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._repeated = 0

    def screen(
        self, received: Sequence[tuple[ReceivedRequest, bytes]]
    ) -> tuple[list[tuple[ReceivedRequest, bytes]], Answers]:
        """Returns the requests that are to be decoded, and the answers to the others.

        Whether events have times is known once they are decoded: `screen_events`.
        """
        for request, body in received:
            if request.key or request.kind is not Format.EVENTS:
                request.digest = digest_of_request(request, body)
        answers = dict(self._claim([request for request, _ in received if request.digest]))
        return [one for one in received if one[0] not in answers], list(answers.items())

    def screen_events(self, group: RequestGroup) -> dict[int, DecodeAnswer]:
        """Returns the answers to the requests of a decoded group that are not to be taken, by their places."""
        assert group.decoded is not None
        if group.kind is not Format.EVENTS:
            return {}
        places = {group.requests[place]: place for place in group.readable if not group.requests[place].key}
        fresh = [request for request, place in places.items() if place not in group.decoded.outcomes.untimed]
        for request in fresh:
            request.digest = digest_of_request(request, group.bodies[places[request]])
        return {places[request]: answer for request, answer in self._claim(fresh)}

    def _claim(self, requests: Sequence[ReceivedRequest]) -> Answers:
        answers: Answers = []
        claims = self._recent.claim([request.digest for request in requests], self._clock.time()) if requests else []
        for request, claim in zip(requests, claims):
            if claim is not Claim.NEW:
                request.digest = b""  # this one has nothing to settle
                answers.append((request, TAKEN if claim is Claim.REPEATED else _UNDER_WAY))
        with self._lock:
            self._repeated += claims.count(Claim.REPEATED)
        return answers

    def settle(self, answers: Answers) -> None:
        """Records the answers to requests."""
        for is_taken in (True, False):
            digests = [
                request.digest
                for request, answer in answers
                if request.digest and (answer.status is DecodeStatus.TAKEN and not answer.is_useless) is is_taken
            ]
            if digests:
                self._recent.settle(digests, is_taken=is_taken)

    def samples(self) -> Iterator[Sample]:
        """For `Telemetry.watch`."""
        yield Sample("penstock_receive_repeated_total", self._repeated)
        yield Sample("penstock_receive_repeats_forgotten_total", self._recent.forgotten)

    def close(self) -> None:
        self._recent.close()


def digest_of_request(request: ReceivedRequest, body: bytes) -> bytes:
    """Returns the digest of a request: of its sender and its key, or of its sender and its body.

    XXH3 is made for speed, not against forgery. A sender that forges a pair of bodies harms itself alone.
    """
    digest = xxhash.xxh3_128(f"{request.kind.value}\n{request.sender}\n{request.key}\n".encode())
    if not request.key:
        digest.update(body)
    return digest.digest()
