"""What the stages of one process say of themselves: whether requests would be refused, and what needs an operator."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock.export.breaker import CircuitState
from penstock.export.send_queue import SendQueue
from penstock.spool import Durability

if TYPE_CHECKING:  # brings pyarrow, which a relay does without
    from penstock.aggregate.l1 import L1

FULL = 0.95  # of a queue: above it requests are about to be refused


def stage_refusals_of_queues(senders: Mapping[str, SendQueue]) -> Iterator[str]:
    """Why these queues would refuse a batch now."""
    for name, sender in senders.items():
        stats = sender.stats()
        if not sender.config.enabled and stats.circuit is not CircuitState.CLOSED:
            yield f"{_failure(name, sender) or name}; there is no queue before it (queue.enabled)"
        share = max(stats.queue.size / stats.queue.max_size, stats.queue.bytes / stats.queue.max_bytes)
        if share >= FULL:
            why = f", its destination is failing (circuit {stats.circuit.value})" if stats.circuit_opened else ""
            yield f"queue {name} is {share:.0%} full{why}"
        if sender.config.durability is not Durability.MEMORY and (fault := sender.disk_fault()):
            yield f"the disk of queue {name} takes nothing: {fault}"


def stage_notes_of_queues(senders: Mapping[str, SendQueue]) -> Iterator[str]:
    """What an operator should know of these queues though requests are taken."""
    for name, sender in senders.items():
        if failure := _failure(name, sender):
            yield f"{failure}; {len(sender)} batches wait"
        if sender.config.durability is Durability.MEMORY and (fault := sender.disk_fault()):
            yield f"the disk of queue {name} takes nothing, and memory fills: {fault}"


def _failure(name: str, sender: SendQueue) -> str:
    """How the destination fails, before and after its circuit opens; empty while it works."""
    failing = sender.failing()
    if failing is None:
        return ""
    destination, seconds, error = failing
    circuit = sender.stats().circuit.value
    return f"the destination {destination} of queue {name} fails for {seconds:.0f} s (circuit {circuit}): {error}"


def stage_refusals_of_l1(l1: "L1 | None") -> Iterator[str]:
    """Why L1 would refuse points now."""
    if l1 is not None and (share := l1.fullness()) >= FULL:
        yield f"L1 holds {share:.0%} of l1.max_bytes"
