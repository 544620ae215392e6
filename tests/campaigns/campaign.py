"""The harness of every campaign: a real service under load, faults that strike it, and a ledger that must balance.

    with Campaign(service, seed) as campaign:
        campaign.strike(faults, seconds)      # at random moments, one after the other
        campaign.settle()                     # everything acknowledged is in the tables, once

The seed decides which faults strike, after how many requests, and what is sent. The kernel decides the rest: the same
seed repeats the campaign, not each microsecond of it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from penstock.errors import PenstockError
from penstock.model.level import Level
from penstock.tables.port import open_tables
from penstock.testing import wait_until
from tests.campaigns.ledger import Key, Ledger, Tally, held_by_segments, held_by_tables
from tests.campaigns.senders import Sender
from tests.service.running import Running

RECOVERY = 150.0  # seconds until requests are taken again: Spark's start shares the cores with it
SETTLING = 300.0  # seconds until the tables have everything

Fault = Callable[[Random], None]  # applies itself and heals


class Campaign:
    """`senders`: the name of each and how many seconds its clock is ahead. `tables`: None if no Spark runs."""

    def __init__(
        self,
        service: Running,
        seed: int,
        *,
        senders: Mapping[str, float] | None = None,
        tables: str | None = None,
        segments: Path | None = None,
    ) -> None:
        self.service = service
        self.seed = seed
        self.ledger = Ledger()
        self.rng = Random(seed)
        self.struck: Counter[str] = Counter()
        self._tables = tables
        self._segments = segments or service.folder / "segments"
        self._began = time.monotonic()
        ahead = senders or dict.fromkeys("abc", 0.0)
        self._senders = [Sender(service.port, name, self.ledger, seed, by) for name, by in ahead.items()]

    def __enter__(self) -> Self:
        self.service.start()
        for sender in self._senders:
            sender.start()
        return self

    def strike(self, faults: Mapping[str, Fault], seconds: float) -> None:
        """Apply each fault once, in any order, and then any of them until so much time has passed."""
        ends = time.monotonic() + seconds
        due = sorted(faults)
        self.rng.shuffle(due)
        while due or time.monotonic() < ends:
            name = due.pop() if due else self.rng.choice(sorted(faults))
            self.wait_for_requests(self.rng.randrange(1, 100))
            faults[name](self.rng)
            self.struck[name] += 1
        self.wait_for_requests(1)

    def wait_for_requests(self, count: int) -> None:
        """Until so many more are taken: the service has recovered."""
        wanted = self.ledger.requests + count
        wait_until(lambda: self.ledger.requests >= wanted or self.ledger.mistakes, RECOVERY)
        assert not self.ledger.mistakes, self.ledger.mistakes[:5]

    def add(self, sender: Sender) -> None:
        """A sender of another kind."""
        self._senders.append(sender)
        sender.start()

    def stop_senders(self) -> None:
        """Each ends when its last request is answered."""
        for sender in self._senders:
            sender.ask_to_stop()
        for sender in self._senders:
            sender.join()
        assert not self.ledger.mistakes, self.ledger.mistakes[:5]

    def settle(self, lost_and_counted: int = 0) -> None:
        """Let senders end, let everything arrive, and balance the ledger."""
        self.stop_senders()
        self._wait_until_held(self.ledger.points - lost_and_counted)
        code = self.service.stop()
        assert code == 0, f"the service ended with {code}:\n{self.service.text()[-3000:]}"
        for level in Level if self._tables else (Level.MINUTE,):
            self.ledger.balance(self._held(level), level, lost_and_counted)

    def _wait_until_held(self, points: int) -> None:
        """Asked now and then only: the answer costs a core."""
        deadline, never = time.monotonic() + SETTLING, threading.Event()
        while sum(tally.count for key, tally in self._held().items() if key[0] in self.ledger.metrics) < points:
            if time.monotonic() > deadline:
                self.ledger.balance(self._held())  # it says what is missing
            never.wait(0.2)

    def _held(self, level: Level = Level.MINUTE) -> dict[Key, Tally]:
        if self._tables is None:
            return held_by_segments(self._segments)
        try:
            return held_by_tables(open_tables(self._tables), level)
        except PenstockError:
            return {}  # there are none yet

    def report(self, part: str) -> str:
        """One line for `docs/reliability.md`, and how to repeat it."""
        seconds = time.monotonic() - self._began
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.struck.items())) or "none"
        refused = sum(count for status, count in self.ledger.answers.items() if status not in (200, 204))
        return (
            f"\n{part}: {seconds:.0f} s; faults: {faults}; {self.ledger.requests} requests taken, {refused} attempts "
            f"refused or cut off; {self.ledger.points} points acknowledged, all of them held once\n"
            f'again: make soak PART={part} ARGS="--seed {self.seed}"'
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sender in self._senders:
            sender.give_up()
        self.service.kill()
        if kind is not None:
            print(f"\nseed {self.seed}, struck {dict(self.struck)}")  # noqa: T201 - to repeat it
