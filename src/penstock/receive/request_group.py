"""A group of requests between decoding and its answers, while other processes take what they keep of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.decode.decoder import Decoded
from penstock.decode.outcome import Answer, Format, Status
from penstock.decode.stream_owners import HandoverBodies

_MOST_REASONS = 10


@dataclass(slots=True, eq=False)
class UnderWay:
    """Requests, what other processes keep of them and said of that, and what was decoded of the rest."""

    kind: Format
    requests: Sequence[Any]
    bodies: Sequence[bytes]
    elsewhere: HandoverBodies = field(default_factory=dict)
    decoded: Decoded | None = None  # None until it is, and if that failed: then whatever others say means nothing
    awaited: int = 0  # processes that have not answered yet
    heard: list[Mapping[int, Answer]] = field(default_factory=list)  # of all that was not simply taken

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))

    @property
    def good(self) -> list[int]:
        """The requests that can be read."""
        assert self.decoded is not None
        return [place for place in range(len(self.requests)) if place not in self.decoded.outcomes.errors]

    @property
    def refusal(self) -> Answer | None:
        """Why the group cannot be taken now, if another process has not taken its part."""
        for answers in self.heard:
            for answer in answers.values():
                if answer.status in (Status.BUSY, Status.BROKEN):
                    return answer
        return None

    @property
    def divided(self) -> set[int]:
        """The requests of which other processes keep a part."""
        return {place for parts in self.elsewhere.values() for place in parts}

    def answer(self, place: int) -> Answer:
        """What its sender is told once all of it is safe."""
        assert self.decoded is not None
        own = self.decoded.outcomes.answer(place)
        parts = sum(place in parts for parts in self.elsewhere.values())
        if not parts:
            return own
        others = [answers[place] for answers in self.heard if place in answers]
        for answer in others:
            if answer.status is not Status.TAKEN:  # that part can never be taken
                return answer
        told = (own, *others)
        reasons = tuple(dict.fromkeys(reason for answer in told for reason in answer.reasons))[:_MOST_REASONS]
        is_useless = sum(answer.is_useless for answer in others) == parts and place not in self.decoded.outcomes.taken
        rejected = sum(answer.rejected for answer in told)
        return Answer(Status.TAKEN, "; ".join(reasons), rejected, reasons, is_useless)
