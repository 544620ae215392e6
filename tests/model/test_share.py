"""Shares of the series: together all rows, a series in one of them, whether a segment keeps them apart or not."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import share_batches
from penstock.model.function import AVG
from penstock.model.partial import PARTIALS, encoded_partials, partials_of_columns
from penstock.model.segment import Segment, outline_of_segment, read_segment, read_segment_encoded, seal
from penstock.model.share import BY_ENTITY, BY_SERIES, Share

WAYS = (BY_SERIES, BY_ENTITY)


def partials(metrics: list[str], entities: list[str], minutes: int = 1) -> pa.Table:
    """A row for each metric, entity and minute."""
    times = pa.array([60_000_000 * minute for minute in range(minutes) for _ in entities], pa.timestamp("us", "UTC"))
    names, values = pa.array(entities * minutes, pa.string()), pa.array(map(float, range(len(times))), pa.float64())
    return pa.concat_tables([partials_of_columns(metric, AVG, names, times, values) for metric in metrics])


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(zip(*(table.cast(PARTIALS)[name].to_pylist() for name in ("metric", "entity", "bucket", "sum"))))


def shares(among: int) -> list[Share]:
    return [Share(number, among, by) for by in WAYS for number in range(among)]


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A segment that keeps shares apart."""
    return seal(tmp_path, Segment("edge", 0, 1), partials([f"m{n}" for n in range(16)], [f"e{n}" for n in range(5000)]))


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("among", [2, 3, 4])
def test_a_series_is_in_one_share_whatever_its_code_is(among: int, by: tuple[str, ...]) -> None:
    forth = encoded_partials(partials(["cpu", "rps"], [f'{{"host":"h{n}"}}' for n in range(200)]))
    back = encoded_partials(forth.cast(PARTIALS).take(list(reversed(range(400)))))  # other codes for the same texts
    table = pa.concat_tables([forth, back])
    found = [Share(number, among, by).of(table) for number in range(among)]

    assert sorted(row for share in found for row in rows_of(share)) == rows_of(table)
    owners = Counter(row for share in found for row in set(rows_of(share)))
    assert set(owners.values()) == {1}
    assert all(share.num_rows > 800 / among * 0.7 for share in found)


@given(
    st.lists(st.text(max_size=3), min_size=1, max_size=3, unique=True),
    st.lists(st.text(max_size=4), min_size=1, max_size=30, unique=True),
    st.integers(1, 3),
)
def test_shares_that_are_kept_apart_are_those_that_would_be_picked(
    tmp_path_factory: pytest.TempPathFactory, metrics: list[str], entities: list[str], minutes: int
) -> None:
    table = partials(metrics, entities, minutes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(share_batches, "_MANY_ROWS", 1)
        patched.setattr(share_batches, "_MANY_ENTITIES", 1)
        path = seal(tmp_path_factory.mktemp("segments"), Segment("edge", 0, 1), table)

    assert rows_of(read_segment(path)) == rows_of(table)
    for among in (1, 2, 3, 4):
        for share in shares(among):
            assert rows_of(read_segment_encoded(path, share)) == rows_of(share.of(encoded_partials(table)))


def test_many_rows_of_many_entities_in_few_minutes_are_kept_apart(crowded: Path) -> None:
    found = [read_segment_encoded(crowded, Share(number, 2, BY_ENTITY)) for number in range(2)]

    assert outline_of_segment(crowded).in_shares
    assert sum(share.num_rows for share in found) == 80_000
    texts = [{text for part in share["entity"].chunks for text in part.dictionary.to_pylist()} for share in found]
    assert not texts[0] & texts[1]  # the reader of a share sees no text of another
    assert len(texts[0] | texts[1]) == 5000


@pytest.mark.parametrize(
    ("metrics", "entities", "minutes"),
    [(2, 5000, 1), (80, 1000, 1), (1, 5000, 20)],
    ids=["few rows", "few entities", "many minutes"],
)
def test_others_are_not(tmp_path: Path, metrics: int, entities: int, minutes: int) -> None:
    table = partials([f"m{n}" for n in range(metrics)], [f"e{n}" for n in range(entities)], minutes)

    assert not outline_of_segment(seal(tmp_path, Segment("edge", 0, 1), table)).in_shares


def test_nor_are_those_of_which_one_share_would_have_most(tmp_path: Path) -> None:
    few, one = partials(["m"], [f"e{n}" for n in range(5000)]), partials(["m"], ["e0"])
    table = pa.concat_tables([few, one.take([0] * 65_000)])

    assert not outline_of_segment(seal(tmp_path, Segment("edge", 0, 1), table)).in_shares


def test_damage_anywhere_is_seen_by_every_share_or_by_none(crowded: Path) -> None:
    sound = crowded.read_bytes()
    seen = Counter[tuple[bool, ...]]()
    for place in np.linspace(1000, len(sound) - 5000, 60).astype(int):
        crowded.write_bytes(sound[:place] + bytes(64) + sound[place + 64 :])
        seen[tuple(_is_damaged(crowded, share) for share in shares(2) + shares(4))] += 1

    assert all(len(set(verdicts)) == 1 for verdicts in seen)
    assert seen[(True,) * 12] > 20


def test_entities_of_another_share_are_damage_that_all_see(crowded: Path) -> None:
    with pa.ipc.open_file(crowded) as reader:
        batches = [reader.get_batch(number) for number in (1, 0, 2, 3)]
        schema = reader.schema
    with pa.ipc.new_file(crowded, schema) as writer:
        for batch in batches:
            writer.write(batch)

    assert all(_is_damaged(crowded, share) for share in shares(2) + shares(4))


def _is_damaged(path: Path, share: Share) -> bool:
    try:
        read_segment_encoded(path, share)
    except (ValueError, OSError):
        return True
    return False
