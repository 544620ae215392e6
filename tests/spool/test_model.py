"""The queue against a list: any mix of calls, crashes and restarts, on a disk that forgets what was not synced."""

import os
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock import Durability, FastQueue, FastQueueConfig, Lease
from penstock.spool.config import Order
from penstock.testing import FakeClock
from tests.examples import examples
from tests.spool.fake_files import FakeFiles

BLOCKS = st.binary(max_size=60)
LIVES = int(os.environ.get("PENSTOCK_SOAK_LIVES", "500"))
SETTINGS = settings(
    max_examples=examples(25),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same examples each time; the soak target draws others
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class QueueMachine(RuleBasedStateMachine):
    """`held`: what the queue holds. `forgotten`: acked, but a crash may bring it back. Both by sequence."""

    durability = Durability.MEMORY
    order: Order = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self.files = FakeFiles()
        self.clock = FakeClock()
        self.held: dict[int, bytes] = {}
        self.leased: dict[int, Lease] = {}
        self.attempts: dict[int, int] = {}
        self.safe_from_kill: set[int] = set()
        self.safe_from_power_cut: set[int] = set()
        self.forgotten_by_kill: dict[int, bytes] = {}
        self.forgotten_by_power_cut: dict[int, bytes] = {}
        self.used: set[int] = set()

    @initialize(compression=st.sampled_from(["none", "snappy"]), chunk_size=st.sampled_from([200, 1000, 100_000]))
    def first_open(self, compression: str, chunk_size: int) -> None:
        self.config = FastQueueConfig(
            durability=self.durability,
            order=self.order,
            compression=compression,  # type: ignore[arg-type]
            chunk_size=chunk_size,
            inmemory_blocks=5,
            write_buffer_size=150,
            meta_sync_interval=3600,
            max_size=100_000,
        )
        self.open()

    def open(self) -> None:
        self.queue = FastQueue("q", self.config, clock=self.clock, files=self.files)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.files.heal()
            self.queue.close()

    # -- what callers do -------------------------------------------------------------------------------------------

    @rule(block=BLOCKS)
    def push(self, block: bytes) -> None:
        self.pushed(self.queue.push(block), block)

    @rule(blocks=st.lists(BLOCKS, min_size=1, max_size=12))
    def push_many(self, blocks: list[bytes]) -> None:
        for sequence, block in zip(self.queue.push_many(blocks), blocks, strict=True):
            self.pushed(sequence, block)

    def pushed(self, sequence: int, block: bytes) -> None:
        assert sequence not in self.used
        self.used.add(sequence)
        self.held[sequence] = block
        if self.durability is not Durability.MEMORY:
            self.safe_from_kill.add(sequence)
        if self.durability is Durability.FSYNC:
            self.safe_from_power_cut.add(sequence)

    @rule(most=st.integers(1, 15))
    def lease(self, most: int) -> None:
        ready = sorted(self.held.keys() - self.leased.keys(), reverse=self.order == "freshest")
        peeked = self.queue.peek()
        leases = self.queue.lease(most)
        assert [lease.sequence for lease in leases] == ready[:most]
        assert peeked == (leases[0].data if leases else None)
        for lease in leases:
            assert lease.data == self.held[lease.sequence]
            assert lease.attempts == self.attempts.get(lease.sequence, 0) + 1
            self.attempts[lease.sequence] = lease.attempts
            self.leased[lease.sequence] = lease

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.leased)), min_size=1, unique=True))
        self.queue.ack([self.leased[sequence] for sequence in chosen])
        for sequence in chosen:
            self.acked(sequence)

    def acked(self, sequence: int) -> None:
        del self.leased[sequence]
        self.attempts.pop(sequence, None)
        block = self.held.pop(sequence)
        if self.durability is Durability.MEMORY:
            self.forgotten_by_kill[sequence] = block
        self.forgotten_by_power_cut[sequence] = block

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.leased)))
        self.queue.nack(self.leased.pop(sequence))

    @rule()
    def flush(self) -> None:
        self.queue.flush()
        self.everything_is_safe()

    @rule()
    def let_the_stale_flush_come(self) -> None:
        self.clock.advance(31.0)
        self.queue._syncer.run_once()

    @rule()
    def close_and_reopen(self) -> None:
        self.queue.close()
        self.everything_is_safe()
        self.open()
        self.reopened(set(self.held), {})

    # -- what happens to them --------------------------------------------------------------------------------------

    @rule()
    def kill_and_reopen(self) -> None:
        self.files.kill()
        self.queue._syncer.close()
        self.open()
        self.reopened(self.safe_from_kill & self.held.keys(), self.forgotten_by_kill)

    @rule(seed=st.integers(0, 2**32))
    def cut_power_and_reopen(self, seed: int) -> None:
        self.queue._syncer.close()
        self.files.cut_power(random.Random(seed))
        self.open()
        self.reopened(self.safe_from_power_cut & self.held.keys(), self.forgotten_by_power_cut, power_cut=True)

    def reopened(self, must: set[int], may: dict[int, bytes], *, power_cut: bool = False) -> None:
        """Everything that was promised is there, nothing that was never pushed, all of it in order."""
        known = self.held | may
        counted = (len(self.queue), self.queue.size_bytes)
        leases = self.queue.lease(100_000)
        found = {lease.sequence: lease.data for lease in leases}
        if not power_cut:  # a frame whose body did not make it to the disk is found out when it is read
            assert counted == (len(found), sum(map(len, found.values())))
        assert [lease.sequence for lease in leases] == sorted(found, reverse=self.order == "freshest")
        assert must <= found.keys(), "a promised block is lost"
        assert found.keys() <= known.keys(), "a block came back that was done with, or that was never pushed"
        assert found == {sequence: known[sequence] for sequence in found}
        for lease in leases:
            if lease.sequence in must and not power_cut and self.durability is not Durability.MEMORY:
                assert lease.attempts == self.attempts.get(lease.sequence, 0) + 1
            self.queue.nack(lease)
        self.held = found
        self.leased = {}
        self.attempts = {lease.sequence: lease.attempts for lease in leases}
        self.queue.flush()
        self.everything_is_safe()

    def everything_is_safe(self) -> None:
        self.safe_from_kill = set(self.held)
        self.safe_from_power_cut = set(self.held)
        self.forgotten_by_kill = {}
        self.forgotten_by_power_cut = {}

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.held)
            assert self.queue.size_bytes == sum(map(len, self.held.values()))


def run(durability: Durability, order: Order, how: settings) -> None:
    machine = type("Machine", (QueueMachine,), {"durability": durability, "order": order})
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))
def test_the_queue_is_a_list_that_survives(durability: Durability, order: Order) -> None:
    run(durability, order, SETTINGS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ["fifo", "freshest"])
@pytest.mark.parametrize("durability", list(Durability), ids=lambda level: str(level.value))
def test_the_queue_is_a_list_that_survives_for_long(durability: Durability, order: Order) -> None:
    run(durability, order, settings(SETTINGS, max_examples=LIVES, stateful_step_count=80, derandomize=False))
