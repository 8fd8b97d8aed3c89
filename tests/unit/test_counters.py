"""Counters survive the way from a rank to the log: plain data, summed once, gauges replaced."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector.counters import GAUGES, Counters, count_group, merge_counts
from lmcache_connector.scheduler.ledger import Ledger
from lmcache_connector.storage.base import StoreStats, TierCounters


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for part in parts:
        merge_counts(result, part)
    return result


def test_take_gives_plain_data_without_zeros_and_starts_again():
    counters = Counters()
    assert counters.take() == {}
    counters.lookups += 2
    counters.load_seconds += 0.5
    count_group(counters.stored_rows, "full")
    count_group(counters.stored_rows, "full", 2)
    count_group(counters.stored_rows, "state", 0)
    counters.pool_used_bytes = 0
    assert counters.take() == {
        "lookups": 2,
        "load_seconds": 0.5,
        "stored_rows": {"full": 3},
        "pool_used_bytes": 0,
    }
    assert counters.take() == {}


def test_what_was_taken_does_not_change_later():
    counters = Counters()
    count_group(counters.load_bytes, "full", 1)
    taken = counters.take()
    count_group(counters.load_bytes, "full", 5)
    assert taken == {"load_bytes": {"full": 1}}


def test_two_instances_share_no_dict():
    count_group(Counters().stored_rows, "full")
    assert Counters().stored_rows == {}


def test_ranks_add_up_and_gauges_do_not():
    rank_0 = {"load_bytes": {"full": 10, "state": 1}, "load_seconds": 0.5}
    rank_1 = {"load_bytes": {"full": 10}, "load_seconds": 0.25}
    step_1 = {"lookups": 1, "pool_used_bytes": 100, "pool_capacity_bytes": 400}
    step_2 = {"lookups": 1, "pool_used_bytes": 50}
    assert merged(rank_0, rank_1, step_1, step_2) == {
        "load_bytes": {"full": 20, "state": 1},
        "load_seconds": 0.75,
        "lookups": 2,
        "pool_used_bytes": 50,
        "pool_capacity_bytes": 400,
    }


def test_merging_leaves_the_other_alone():
    other = {"stored_rows": {"full": 1}}
    first = merged(other, other)
    merge_counts(first, other)
    assert first == {"stored_rows": {"full": 3}}
    assert other == {"stored_rows": {"full": 1}}


def test_names_of_another_version_are_kept():
    assert merged({"future": 1, "future_rows": {"full": 1}}, {"future": 2}) == {
        "future": 3,
        "future_rows": {"full": 1},
    }


def test_counters_of_a_server_that_was_started_again_do_not_fall():
    def stats(evicted: dict[str, int], hit_rows: int) -> StoreStats:
        tiers = {"file:///d": TierCounters(hit_rows=hit_rows)}
        return StoreStats(4096, 0, 4096, 0, 0, 0, evicted, 0, tiers)

    ledger = Ledger(Counters())
    taken = [
        ledger.take(stats({"full": full}, hits)) for full, hits in ((5, 7), (2, 3), (2, 3), (6, 4))
    ]
    assert [one.get("evicted_rows", {}).get("full", 0) for one in taken] == [5, 2, 0, 4]
    assert [one.get("tier_hit_rows", {}).get("file:///d", 0) for one in taken] == [7, 3, 0, 1]


def test_gauges_are_fields():
    assert set(Counters.__struct_fields__) >= GAUGES


AMOUNTS = st.integers(0, 9)
DATA = st.fixed_dictionaries(
    {},
    optional={
        "lookups": AMOUNTS,
        "stored_rows": st.dictionaries(st.sampled_from(["full", "state"]), AMOUNTS),
        "load_bytes": st.dictionaries(st.sampled_from(["full", "state"]), AMOUNTS),
        "pool_used_bytes": AMOUNTS,
    },
)


@given(DATA, DATA, DATA)
def test_the_grouping_of_merges_does_not_matter(a: dict, b: dict, c: dict):
    assert merged(merged(a, b), c) == merged(a, merged(b, c)) == merged(a, b, c)


@given(DATA, DATA)
def test_merging_after_serialisation_is_the_same(a: dict, b: dict):
    for encode, decode in (
        (json.dumps, json.loads),
        (msgspec.msgpack.encode, msgspec.msgpack.decode),
    ):
        assert merged(decode(encode(a)), decode(encode(b))) == merged(a, b)
