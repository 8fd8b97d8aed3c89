"""The ``Store``: the one interface between the scheduler side and whoever keeps the objects.

Call sequence of one request:

    lookup -> (narrow) -> prepare_load -> complete_load
           -> release                                      when nothing is loaded
    prepare_store -> complete_store                        any number of times

Every verb takes lists, so that one call is one round trip. Ids are chosen by the caller and
are unique for the life of the Store. No call waits for a worker or for a tier.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from lmcache_connector.metadata import PoolRef, SlotRef


class LookupState(enum.Enum):
    """Whether a lookup's answer is final."""

    READY = "ready"
    # A slower tier is still answering: ask again, until the caller's deadline.
    PENDING = "pending"


class GroupShards(msgspec.Struct, frozen=True):
    """An object group as the store sees it: a name and how many objects make one row."""

    tag: str
    num_shards: int


class LookupReply(msgspec.Struct):
    """``present[group][shard]`` is a bit mask: bit i = the object of ``chunk_hashes[i]``."""

    state: LookupState
    present: list[list[int]]


class Row(msgspec.Struct):
    """All shards of one (chunk, object group). A shard of 0 bytes holds nothing."""

    slots: list[SlotRef]
    digests: list[int]


class Commit(msgspec.Struct, frozen=True):
    """Makes reservation ``index`` of a store visible under its key."""

    index: int
    chunk_hash: bytes
    # Hash of the chunk before, or None for the first: eviction works tail first.
    parent: bytes | None
    group: str
    digests: list[int]


class StoreStats(msgspec.Struct):
    """A snapshot. Counters only grow; clients subtract."""

    capacity_bytes: int
    used_bytes: int
    ready_bytes: int
    rows: int
    pinned_rows: int
    leases: int
    # Rows evicted to make room, by group tag.
    evicted: dict[str, int]
    # Items of prepare_store that did not fit.
    refused_stores: int


class Store(Protocol):
    """See the module's docstring for the order of calls."""

    @property
    def pool_ref(self) -> PoolRef:
        """Where workers attach."""

    def lookup(self, lookup_id: int, chunk_hashes: Sequence[bytes]) -> LookupReply:
        """Which rows of consecutive chunks are there; pins all that are. READY ends the lookup's
        search, PENDING may be repeated with the same id."""

    def narrow(self, lookup_id: int, keep: Sequence[tuple[bytes, str]]) -> None:
        """Keep only the pins on ``keep`` (chunk hash, group tag), and count them as used."""

    def release(self, lookup_id: int) -> None:
        """Drop all pins of a lookup; unknown ids are fine."""

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[tuple[bytes, str]]
    ) -> list[Row] | None:
        """Turn the lookup's pins into the load's: rows in the order wanted, or None (and the
        lookup released) when any of them is gone."""

    def complete_load(self, load_id: int, drop: Sequence[tuple[bytes, str]] = ()) -> None:
        """No worker reads the load's slots any more. ``drop``: rows that failed their check."""

    def prepare_store(
        self, store_id: int, sizes: Sequence[Sequence[int]], protect: bytes | None
    ) -> list[list[SlotRef]] | None:
        """Reserve slots: ``sizes[i][shard]`` bytes, 0 = none. As many leading items as fit (what
        was used longest ago is evicted, never a pinned row, nor one of the prefix that ends at
        ``protect``); None, and nothing changed, when not even the first fits. A chunk that has
        not been committed, or that nothing is known of any more, protects nothing."""

    def complete_store(self, store_id: int, commits: Sequence[Commit]) -> None:
        """No worker writes the store's slots any more: publish ``commits`` (the first value of a
        key wins) and free the rest. Every shard of a published row must have been written."""

    def contains(self, chunk_hash: bytes, group: str) -> bool:
        """Whether a row is there. A hint: it may be evicted at once."""

    def clear(self) -> None:
        """Forget every row at once. Slots under a pin or lease stay until they are released."""

    def stats(self) -> StoreStats:
        """Snapshot of use."""

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers when bookkeeping does not add up."""

    def close(self) -> None:
        """End the service and give the memory back."""
