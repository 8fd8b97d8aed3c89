"""What both sides count: plain data that any process can merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

# Replaced, not added up: only the scheduler side sets them.
GAUGES = frozenset({"pool_used_bytes", "pool_capacity_bytes"})


class Counters(msgspec.Struct, omit_defaults=True):
    """What happened since the last ``take``. Used by one thread. Dicts are by object group tag or,
    where the name begins with "tier_", by tier, unless they say by what.

    The scheduler side counts requests, tokens and rows once; every rank counts the bytes and
    seconds of its own copies.
    """

    lookups: int = 0
    # Tokens past vLLM's own prefix hit that lookups asked for, and that could be restored.
    asked_tokens: int = 0
    hit_tokens: int = 0
    # Tokens restored; by group only those whose objects were copied (a window's, not the prefix's).
    loaded_tokens: int = 0
    loaded_group_tokens: dict[str, int] = {}
    # Tokens of loads that failed and are recomputed.
    failed_tokens: int = 0
    # Lookups that became misses because a tier did not answer in time.
    expired_lookups: int = 0
    stored_rows: dict[str, int] = {}
    # Rows that were worth storing and are not kept: no room, or doubt about their content.
    dropped_rows: dict[str, int] = {}
    evicted_rows: dict[str, int] = {}
    # Rows whose bytes had changed when they were loaded.
    corrupt_objects: dict[str, int] = {}
    # By tier.
    tier_hit_rows: dict[str, int] = {}
    tier_read_bytes: dict[str, int] = {}
    tier_written_bytes: dict[str, int] = {}
    # Rows that were not written: the queue was full, or the tier failed.
    tier_dropped_rows: dict[str, int] = {}
    tier_corrupt_rows: dict[str, int] = {}
    tier_errors: dict[str, int] = {}
    # Chunks of hidden states, counted by layer, by what became of them: "stored", "dropped",
    # "not_finite", "read", "corrupt".
    hidden_chunks: dict[str, int] = {}
    # Exports by whether they were "written" or "refused", and the bytes of rows written.
    exports: dict[str, int] = {}
    export_bytes: int = 0
    pool_used_bytes: int | None = None
    pool_capacity_bytes: int | None = None
    # Worker side.
    store_bytes: dict[str, int] = {}
    load_bytes: dict[str, int] = {}
    store_seconds: float = 0.0
    load_seconds: float = 0.0

    def take(self) -> dict[str, Any]:
        """The values as plain data, without what is zero; starts again from zero."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        for name, value in msgspec.structs.asdict(Counters()).items():
            setattr(self, name, value)
        return data


def count_group(counter: dict[str, int], group: str, amount: int = 1) -> None:
    """Add to a counter that is kept by object group; 0 leaves no trace."""
    if amount:
        counter[group] = counter.get(group, 0) + amount


def merge_counts(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what ``take`` returned elsewhere: counters are summed, gauges replaced.

    Shares no dict with ``other``. Names that this version does not know count as counters.
    """
    for name, value in other.items():
        if isinstance(value, Mapping):
            merge_counts(into.setdefault(name, {}), value)
        elif name in GAUGES:
            into[name] = value
        else:
            into[name] = into.get(name, 0) + value
