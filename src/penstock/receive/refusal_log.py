"""What is refused: counted by reason, logged once a minute for each reason with its culprit, remembered for notes."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.decode.decode_context import DecodeOutcomes
from penstock.decode.outcome import DecodeStatus, PointRefusal

log = logging.getLogger(__name__)

REASONS = {  # as which an answer is counted
    DecodeStatus.BAD: PointRefusal.MALFORMED,
    DecodeStatus.TOO_LARGE: PointRefusal.TOO_LARGE,
    DecodeStatus.BUSY: PointRefusal.FULL,
    DecodeStatus.BROKEN: PointRefusal.FAILED,
}

_QUIET = 60.0  # seconds between two lines of one reason, and for which a note stands
# What a client can do at any time, and needs no operator.
_OF_CLIENTS = ("closed", "aborted", "slow", "malformed", "unsupported")
OVERFLOWED = "overflowed"
_VERBS = {OVERFLOWED: "added up in an overflow series"}


@dataclass(slots=True)
class _Refused:
    """What was refused for one reason."""

    logged_at: float
    last_at: float = 0.0
    unlogged: int = 0
    sender: str = ""
    detail: str = ""


class RefusalLog:
    """Counts refusals of requests and points.

    Threads: every method may be called from any thread.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # _lock guards everything below.
        self._lock = threading.Lock()
        self._counts: Counter[PointRefusal] = Counter()
        self._refused: dict[str, _Refused] = {}  # by reason

    def add(self, reason: PointRefusal, count: int = 1, *, sender: str = "", detail: str = "") -> None:
        """Counts requests or points of one sender that were refused; `detail` names what was too much or wrong."""
        with self._lock:
            self._counts[reason] += count
        if unlogged := self._unlogged(reason.value, count, sender, detail):
            log.log(
                logging.INFO if reason is PointRefusal.CLOSED else logging.WARNING,
                "Requests or points are refused. reason=%s count=%d sender=%s detail=%s",
                *(reason.value, unlogged, sender or "unknown", detail),
            )

    def add_outcomes(self, outcomes: DecodeOutcomes, senders: Sequence[str]) -> None:
        """Counts points that were refused of requests of which the rest is taken."""
        for reason, count in outcomes.reasons.items():
            place, message = outcomes.examples[reason]
            self.add(reason, count, sender=senders[place], detail=message)
        if outcomes.overflowed is not None:
            place, count, message = outcomes.overflowed
            self._add_overflow(count, senders[place], message)

    def _add_overflow(self, count: int, sender: str, detail: str) -> None:
        """Logs and notes points that were taken, but added up in the overflow series of their metric."""
        if unlogged := self._unlogged(OVERFLOWED, count, sender, detail):
            log.warning(
                "New series are added up in one. points=%d sender=%s detail=%s", unlogged, sender or "unknown", detail
            )

    def _unlogged(self, reason: str, count: int, sender: str, detail: str) -> int:
        """Returns how much there is to log for that reason; 0 if its last line is too young."""
        now = self._clock.monotonic()
        with self._lock:
            refused = self._refused.setdefault(reason, _Refused(now - _QUIET))
            refused.unlogged += count
            refused.last_at, refused.sender, refused.detail = now, sender, detail
            if now - refused.logged_at < _QUIET:
                return 0
            refused.logged_at, unlogged, refused.unlogged = now, refused.unlogged, 0
            return unlogged

    def counts(self) -> dict[PointRefusal, int]:
        """Returns how much was refused for each reason; 0 too, so that the first one is an increase."""
        with self._lock:
            return {reason: self._counts[reason] for reason in PointRefusal}

    def notes(self) -> list[str]:
        """Returns what was refused within the last minute and needs an operator, with the last culprit."""
        now = self._clock.monotonic()
        with self._lock:
            return [
                f"requests or points are {_VERBS.get(reason, f'refused, reason {reason}')}: {one.detail}; "
                f"sender {one.sender or 'unknown'}"
                for reason, one in self._refused.items()
                if now - one.last_at < _QUIET and reason not in _OF_CLIENTS
            ]
