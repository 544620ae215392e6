"""Distinct counts: registers that merge like any partial, sketches that are those of the library, a stated error."""

import random
import sys
from typing import Any

import pyarrow as pa
import pytest
from datasketches import hll_sketch, hll_union, tgt_hll_type

from penstock.errors import MissingRequirement
from penstock.model.definition import Definition
from penstock.model.definition_file import parse_definitions
from penstock.model.distinct import distinct_relative_error, image_of, lg_k_for
from penstock.model.finals import with_finals
from penstock.model.function import Function
from penstock.model.level import Level
from penstock.model.partial import merged
from penstock.model.point import POINTS, entity_of

USERS = {"name": "users", "source": "requests", "function": "distinct", "of": "user", "entity": ["service"]}


def definition(**changes: Any) -> Definition:
    (found,) = parse_definitions({"metrics": [USERS | changes]}).metrics
    return found


def points(users: list[str], service: str = "shop", minute: int = 0) -> pa.Table:
    entities = [entity_of({"service": service, "user": user}) for user in users]
    times = pa.array([minute * 60_000_000] * len(users), pa.int64()).cast(POINTS.field("time").type)
    return pa.table([pa.array(entities, pa.string()), times, pa.array([1.0] * len(users))], schema=POINTS)


def sketch(users: list[str], lg_k: int = 12) -> Any:
    made = hll_sketch(lg_k, tgt_hll_type.HLL_8)
    for user in users:
        made.update(user)
    return made


def image(partials: pa.Table, lg_k: int = 12) -> bytes:
    return image_of(partials["part"].to_numpy(), partials["max"].to_numpy(), lg_k)


def test_registers_merged_in_any_order_and_grouping_are_the_union_of_the_librarys_sketches() -> None:
    rng = random.Random(5)
    users = [f"user-{rng.randrange(40_000)}ü" for _ in range(30_000)]
    made = definition()
    pieces = [made.partials(points(users[n : n + 3000])) for n in range(0, 30_000, 3000)]
    rng.shuffle(pieces)
    halves = [merged(pa.concat_tables(pieces[:4])), merged(pa.concat_tables(pieces[2:]))]  # two of them twice
    found = merged(pa.concat_tables(halves))
    union = hll_union(12)
    union.update(sketch(users[:20_000]))
    union.update(sketch(users[10_000:]))

    assert image(found) == union.get_result(tgt_hll_type.HLL_8).serialize_updatable()


@pytest.mark.parametrize("count", [1, 10, 100, 1_000, 10_000, 50_000])
def test_the_estimate_is_within_three_standard_errors(count: int) -> None:
    made = definition()
    partials = made.partials(points([f"u{n}" for n in range(count)]))
    (row,) = with_finals(partials, Level.DAY).to_pylist()

    assert (row["metric"], row["function"], row["entity"]) == ("users", "distinct(12)", '{"service":"shop"}')
    assert row["count"] == count
    assert row["value"] == pytest.approx(count, rel=3 * distinct_relative_error(12), abs=0.5)
    assert row["p50"] is None


def test_estimates_stand_beside_other_functions_series_and_buckets() -> None:
    made = definition(relative_error=0.05)
    other = Definition(name="rps", source="requests", function=Function("count"), entity=("service",))
    partials = [
        made.partials(points(["a", "b", "a"])),
        made.partials(points(["a", "c", "d", "e"], "cart")),
        made.partials(points(["a"], minute=1)),
        other.partials(points(["a", "b", "a"])),
    ]
    found = with_finals(pa.concat_tables(partials), Level.MINUTE).select(["metric", "entity", "value"]).to_pylist()

    assert [row["value"] for row in found] == [3.0, 4.0, 2.0, 1.0]
    assert [row["metric"] for row in found] == ["rps", "users", "users", "users"]


def test_points_without_the_label_are_not_counted_and_several_labels_count_together() -> None:
    assert definition().partials(points(["", "a", ""]))["count"].to_pylist() == [1]
    both = definition(of=["user", "service"]).partials(points(["a", "a", ""]))
    assert with_finals(both, Level.MINUTE)["value"].to_pylist() == [2.0]


def test_without_an_entity_it_is_all_labels_but_the_counted_one() -> None:
    entry = {key: value for key, value in USERS.items() if key != "entity"}
    (made,) = parse_definitions({"metrics": [entry]}).metrics
    assert set(made.partials(points(["a", "b"]))["entity"].to_pylist()) == {'{"service":"shop"}'}


@pytest.mark.parametrize(("error", "lg_k"), [(0.02, 12), (0.05, 9), (0.0041, 16), (0.3, 4)])
def test_a_relative_error_chooses_the_smallest_sketch_that_keeps_it(error: float, lg_k: int) -> None:
    assert lg_k_for(error) == lg_k


def test_without_the_library_the_definition_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(MissingRequirement, match=r"metrics\[0\] \(users\).function: .* pip install '\.\[distinct\]'"):
        definition()
