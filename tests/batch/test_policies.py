"""Thread and partition counts, the proposal's tables among them."""

import pytest

from penstock import PartitionPolicy, PartitionSelector, ThreadPolicy, machine
from penstock.batch.policies import stable_hash
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("cores", "l1", "l2", "top_n", "io_pool", "total"),
    [(2, 2, 1, 1, 1, 5), (4, 4, 1, 1, 2, 8), (8, 8, 2, 1, 4, 15), (16, 16, 4, 1, 8, 29)],
)
def test_thread_counts_are_those_of_the_proposal_on_every_machine(
    cores: int, l1: int, l2: int, top_n: int, io_pool: int, total: int
) -> None:
    counts = [
        ThreadPolicy.cpu_cores(1.0).resolve(cores),
        ThreadPolicy.cpu_cores(0.25).resolve(cores),
        ThreadPolicy.fixed(1).resolve(cores),
        ThreadPolicy.cpu_cores(0.5).resolve(cores),
    ]

    assert counts == [l1, l2, top_n, io_pool]
    assert sum(counts) == total


def test_base_threads_are_added_to_those_per_core() -> None:
    assert ThreadPolicy.cpu_cores_with_base(1, 0.25).resolve(8) == 3
    assert ThreadPolicy.cpu_cores_with_base(1, 0.25).resolve(1) == 1


def test_a_policy_never_resolves_to_no_thread() -> None:
    assert ThreadPolicy.cpu_cores(0.01).resolve(2) == 1


def test_io_bound_threads_do_not_depend_on_the_cores() -> None:
    assert ThreadPolicy.io_bound(12).resolve(1) == ThreadPolicy.io_bound(12).resolve(64) == 12


def test_without_a_number_of_cores_what_the_process_may_use_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ThreadPolicy.cpu_cores(1.0).resolve() == machine.cores() >= 1
    monkeypatch.setattr(machine, "cpu_quota", lambda root: 0.5)  # as a container says it
    assert ThreadPolicy.cpu_cores(4.0).resolve() == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThreadPolicy.fixed(0),
        lambda: ThreadPolicy.io_bound(0),
        lambda: ThreadPolicy.cpu_cores(0),
        lambda: ThreadPolicy.cpu_cores_with_base(-1, 1.0),
        lambda: ThreadPolicy.cpu_cores_with_base(1, float("nan")),
        lambda: PartitionPolicy.fixed(0),
        lambda: PartitionPolicy.thread_multiply(0),
        lambda: PartitionPolicy.adaptive(0),
    ],
)
def test_a_policy_that_means_nothing_is_refused(make: object) -> None:
    with pytest.raises(ConfigError, match="must be"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("multiplier", "threads", "handlers", "partitions"),
    [
        (25, 8, 0, 8),
        (25, 8, 100, 100),
        (25, 8, 200, 200),
        (25, 8, 500, 350),
        (25, 8, 1000, 600),
        (25, 8, 2000, 1100),
        (25, 4, 600, 350),
        (50, 8, 600, 500),
        (25, 8, 642 + 1247, 1044),
        (25, 8, 642 + 1247 * 0.05, 452),
    ],
)
def test_adaptive_partitions_grow_one_to_one_and_then_by_half(
    multiplier: int, threads: int, handlers: float, partitions: int
) -> None:
    assert PartitionPolicy.adaptive(multiplier).resolve(threads, handlers) == partitions


def test_fixed_and_thread_relative_partitions_ignore_the_handlers() -> None:
    assert PartitionPolicy.fixed(3).resolve(8, 500) == 3
    assert PartitionPolicy.thread_multiply(2).resolve(8, 500) == 16


def test_weights_that_add_up_to_a_whole_number_make_no_partition_more() -> None:
    assert PartitionPolicy.adaptive().resolve(8, sum([0.1] * 100)) == 10  # the floats add up to 9.99999…
    assert PartitionPolicy.adaptive().resolve(8, sum([0.7] * 10)) == 7  # and these to 7.00000…1


def test_the_hash_of_a_key_is_the_same_in_every_run() -> None:
    assert stable_hash("checkout") == 2_939_694_414
    assert stable_hash(b"checkout") == stable_hash("checkout")
    assert stable_hash(17) == 17
    assert PartitionSelector.by_key(len).key is len
