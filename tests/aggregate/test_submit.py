"""The sender's answer: once, whole, and no sooner than the durability says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from penstock import BlockTooLarge, Durability
from penstock.aggregate.config import L1Config
from penstock.aggregate.l1 import L1
from penstock.batch import BatchQueue, BatchQueueConfig, ThreadPolicy
from penstock.errors import DiskFailed, QueueClosed, QueueError
from penstock.model.definition_file import parse_definitions
from penstock.model.point import chunk_type
from penstock.testing import wait_until
from tests.aggregate.support import DEFINED, Blocker, Cpu, Downstream, Rps, Sender, points

DISK = L1Config(durability=Durability.DISK, flush_interval=3600.0)


@contextmanager
def l1_on(downstream: Downstream, config: L1Config = DISK) -> Iterator[L1]:
    l1 = L1.with_own_queue("l1-submit", downstream.push, config, definitions=DEFINED, threads=ThreadPolicy.fixed(2))
    yield l1
    l1.close()


def test_at_memory_the_answer_comes_with_the_chunks_in_the_queue() -> None:
    downstream, sender = Downstream(), Sender()
    with l1_on(downstream, L1Config(flush_interval=3600.0)) as l1:
        assert l1.submit([points(Cpu, 3), points(Rps, 3)], sender.done)
        assert sender.answers == [None]
        assert downstream.pushes == []
    assert downstream.counts() == {"cpu": 3, "rps": 3}


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC])
def test_at_disk_the_answer_comes_after_the_push_and_does_not_wait_for_the_interval(durability: Durability) -> None:
    downstream, sender = Downstream(), Sender()
    downstream.hold()
    with l1_on(downstream, L1Config(durability=durability, flush_interval=3600.0)) as l1:
        assert l1.submit([points(Cpu, 3), points(Rps, 3)], sender.done)
        wait_until(lambda: downstream.pushing)
        assert sender.answers == []
        downstream.release()
        assert sender.wait() is None
        assert downstream.counts() == {"cpu": 3, "rps": 3}
    assert sender.answers == [None]


def test_all_metrics_of_a_request_go_into_one_block() -> None:
    downstream, sender = Downstream(), Sender()
    kinds = [chunk_type(f"m{n}") for n in range(20)]
    with l1_on(downstream) as l1:
        l1.submit([points(kind, 50) for kind in kinds], sender.done)
        sender.wait()
    assert [len(blocks) for blocks in downstream.pushes] == [1]


def test_requests_that_arrive_during_a_push_share_the_next() -> None:
    downstream = Downstream()
    senders = [Sender() for _ in range(50)]
    downstream.hold()
    with l1_on(downstream) as l1:
        l1.submit([points(Cpu, 1)], senders[0].done)
        wait_until(lambda: downstream.pushing)
        for sender in senders[1:]:
            assert l1.submit([points(Cpu, 3), points(Rps, 3)], sender.done)
        downstream.release()
        assert [sender.wait() for sender in senders] == [None] * 50
    assert len(downstream.pushes) == 2
    assert downstream.counts() == {"cpu": 1 + 49 * 3, "rps": 49 * 3}


def test_a_request_that_does_not_fit_is_not_let_in_at_all_and_never_answered() -> None:
    downstream, first, second = Downstream(), Sender(), Sender()
    downstream.hold()
    chunk = points(Cpu, 100)
    with l1_on(downstream, L1Config(durability=Durability.DISK, max_bytes=2 * chunk.nbytes)) as l1:
        assert l1.submit([chunk], first.done)
        wait_until(lambda: downstream.pushing)
        assert not l1.submit([points(Rps, 1), points(Cpu, 300)], second.done)
        downstream.release()
        assert first.wait() is None
    assert downstream.counts() == {"cpu": 100}
    assert second.answers == []


def test_more_chunks_than_the_queue_holds_are_not_let_in() -> None:
    downstream, senders = Downstream(), [Sender() for _ in range(5)]
    queue = BatchQueue("l1-small", BatchQueueConfig(threads=ThreadPolicy.fixed(1), buffer_size=4))
    blocker = Blocker(queue)
    l1 = L1(queue, downstream.push, DISK, definitions=DEFINED)
    assert l1.submit([points(Cpu, 1)], senders[0].done)
    assert senders[0].wait() is None
    blocker.hold()
    assert l1.submit([points(Cpu, 1)] * 3, senders[1].done)
    assert not l1.submit([points(Cpu, 1)] * 2, senders[2].done)
    assert l1.submit([points(chunk_type("plain"), 1)] * 9, senders[3].done), "these are not queued"
    blocker.release()
    assert senders[1].wait() is None
    l1.close()
    assert downstream.counts() == {"cpu": 4, "plain": 9}
    assert senders[2].answers == []


def test_a_request_without_chunks_is_safe_at_once() -> None:
    downstream, sender = Downstream(), Sender()
    with l1_on(downstream) as l1:
        assert l1.submit([], sender.done)
        assert sender.answers == [None]
    assert downstream.pushes == []


def test_points_of_which_nothing_is_left_are_answered_without_a_push() -> None:
    downstream, sender = Downstream(), Sender()
    with l1_on(downstream) as l1:
        l1.submit([Cpu.of(["{}"], [0], [float("nan")])], sender.done)
        assert sender.wait() is None
    assert downstream.pushes == []


@pytest.mark.parametrize("refusal", [BlockTooLarge("too large"), DiskFailed("no disk"), QueueClosed("closed")])
def test_a_refused_round_is_answered_with_the_refusal_and_nothing_of_it_is_kept(refusal: QueueError) -> None:
    downstream, refused, later = Downstream(), Sender(), Sender()
    with l1_on(downstream) as l1:
        downstream.refusal = refusal
        l1.submit([points(Cpu, 3), points(Rps, 3)], refused.done)
        assert refused.wait() is refusal
        downstream.refusal = None
        l1.submit([points(Cpu, 5)], later.done)
        assert later.wait() is None
        held = [sample.value for sample in l1.samples() if sample.name == "penstock_l1_held_bytes"]
        assert held == [0]
    assert downstream.counts() == {"cpu": 5}
    assert refused.answers == [refusal]


def test_what_was_produced_survives_the_refusal_that_a_sender_heard_of() -> None:
    downstream, sender = Downstream(), Sender()
    with l1_on(downstream) as l1:
        downstream.full()
        l1.produce(points(Cpu, 7))
        l1.submit([points(Cpu, 100)], sender.done)
        assert isinstance(sender.wait(), QueueError)
        downstream.refusal = None
    assert downstream.counts() == {"cpu": 7}


def test_a_chunk_that_cannot_be_merged_fails_its_own_request_only() -> None:
    downstream, good, bad = Downstream(), Sender(), Sender()
    definitions = parse_definitions({"metrics": [{"name": "by_host", "source": "cpu", "entity": ["host"]}]})
    queue = BatchQueue("l1-bad", BatchQueueConfig(threads=ThreadPolicy.fixed(1)))
    blocker = Blocker(queue)
    l1 = L1(queue, downstream.push, DISK, definitions=definitions)
    downstream.hold()
    l1.submit([points(Rps, 1)], Sender().done)
    wait_until(lambda: downstream.pushing)
    blocker.hold()  # so that those of cpu are merged at once, in one round
    l1.submit([points(Cpu, 3)], good.done)
    l1.submit([points(Rps, 2)], good.done)
    l1.submit([Cpu.of(["not JSON"], [0], [1.0])], bad.done)
    blocker.release()
    assert isinstance(bad.wait(), ValueError)
    downstream.release()
    wait_until(lambda: len(good.answers) == 2)
    l1.close()
    assert downstream.counts() == {"rps": 3, "by_host": 3}
    assert [good.answers, len(bad.answers)] == [[None, None], 1]
    assert sum(sample.value for sample in l1.samples() if sample.name == "penstock_l1_failed_chunks_total") == 1


def test_a_sender_that_fails_on_its_answer_does_not_keep_others_from_theirs() -> None:
    downstream, sender = Downstream(), Sender()

    def broken(error: BaseException | None) -> None:
        raise RuntimeError("connection gone")

    downstream.hold()
    with l1_on(downstream) as l1:
        l1.submit([points(Cpu, 1)], broken)
        l1.submit([points(Cpu, 1)], sender.done)
        downstream.release()
        assert sender.wait() is None


def test_closing_answers_every_request_that_waits() -> None:
    downstream = Downstream()
    senders = [Sender() for _ in range(20)]
    downstream.hold()
    l1 = L1.with_own_queue("l1-end", downstream.push, DISK, definitions=DEFINED, threads=ThreadPolicy.fixed(2))
    for sender in senders:
        l1.submit([points(Cpu, 3), points(Rps, 3)], sender.done)
    wait_until(lambda: downstream.pushing)
    closing = threading.Thread(target=l1.close)
    closing.start()
    wait_until(lambda: not l1.queue.running)
    downstream.release()
    closing.join(10)
    assert [sender.answers for sender in senders] == [[None]] * 20
    assert not l1.submit([points(Cpu, 1)], senders[0].done)


def test_a_close_that_runs_out_of_time_answers_with_an_error_and_never_twice() -> None:
    downstream, first, second = Downstream(), Sender(), Sender()
    downstream.hold()
    l1 = L1.with_own_queue("l1-stuck", downstream.push, DISK, threads=ThreadPolicy.fixed(1))
    l1.submit([points(Cpu, 1)], first.done)
    wait_until(lambda: downstream.pushing)
    l1.submit([points(Cpu, 2)], second.done)
    with pytest.raises(QueueClosed, match="has not taken the block before this one"):
        l1.close(timeout=0.01)
    assert isinstance(second.answers[0], QueueClosed)
    downstream.release()
    assert first.wait() is None, "the push that was under way still answers its own round"
    assert downstream.counts() == {"cpu": 1}
    assert [len(first.answers), len(second.answers)] == [1, 1]


def test_a_queue_that_is_closed_from_outside_fails_the_request_instead_of_losing_it() -> None:
    downstream, sender = Downstream(), Sender()
    queue = BatchQueue("l1-other", BatchQueueConfig(threads=ThreadPolicy.fixed(1)))
    l1 = L1(queue, downstream.push, DISK, definitions=DEFINED)
    queue.close()
    assert l1.submit([points(Cpu, 1), points(Rps, 1)], sender.done)
    assert isinstance(sender.wait(), QueueClosed)
    assert not l1.produce(points(Cpu, 1))
    l1.close()
    assert len(sender.answers) == 1


def test_many_senders_and_a_queue_that_refuses_now_and_then_account_for_every_point() -> None:
    """A request is in the durable queue, whole, exactly if it was answered with None."""
    downstream, pushes = Downstream(), count()

    def push(blocks: list[bytes]) -> None:
        if next(pushes) % 3 == 1:
            raise DiskFailed("injected")
        downstream.push(blocks)

    l1 = L1.with_own_queue("l1-chaos", push, DISK, definitions=DEFINED, threads=ThreadPolicy.fixed(2))
    senders: list[list[Sender]] = [[] for _ in range(8)]

    def send(index: int) -> None:
        for number in range(25):
            sender = Sender()
            entity = f'{{"sender":"{index}","number":"{number}"}}'
            request = [kind.of([entity] * 3, [0, 1, 2], [1.0] * 3) for kind in (Cpu, Rps)]
            assert l1.submit(request, sender.done)
            senders[index].append(sender)
            sender.wait()

    threads = [threading.Thread(target=send, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    l1.close()
    rows = {(row["metric"], row["entity"]): row["count"] for row in downstream.rows().to_pylist()}
    taken = 0
    for index, of_one in enumerate(senders):
        for number, sender in enumerate(of_one):
            assert len(sender.answers) == 1
            entity = f'{{"sender":"{index}","number":"{number}"}}'
            expected = 3 if sender.answers[0] is None else None
            assert [rows.get((metric, entity)) for metric in ("cpu", "rps")] == [expected] * 2
            taken += expected is not None
    assert 0 < taken < 200
