"""The ``Store``: the one interface between the scheduler side and whoever keeps the objects.

Call sequence of one request:

    lookup (until READY) -> narrow (until READY; GONE: lookup again) -> prepare_load
           -> complete_load
           -> release                                      when nothing is loaded
    prepare_store -> complete_store                        any number of times

Every verb takes lists, so that one call is one round trip. Ids are chosen by the caller and
are unique for the life of the Store. No call waits for a worker or for a tier.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import Annotated, Protocol

import msgspec

from lmcache_connector.metadata import PoolRef, SlotRef

# Limits are for what peers send. Chunk hashes are keys.TokenDatabase's.
ChunkHash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
GroupTag = Annotated[str, msgspec.Meta(max_length=64)]
# A tag becomes part of names of files.
_NewTag = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*\Z")]
RowKey = tuple[ChunkHash, GroupTag]


class LookupState(enum.Enum):
    """How far a lookup has come."""

    READY = "ready"
    # A tier is still answering or reading: ask again, until the caller's deadline.
    PENDING = "pending"
    # A row that was there cannot be had any more: look up again.
    GONE = "gone"


class GroupShards(msgspec.Struct, frozen=True):
    """An object group as the store sees it: a name, and how many bytes its rows have."""

    tag: _NewTag
    # sizes[chunk % len(sizes)][shard]: bytes of the shard of the chunk at this position.
    sizes: list[list[int]]
    # A prefix is served only as far as all of its chunks have rows of this group.
    full: bool = False

    @property
    def num_shards(self) -> int:
        return len(self.sizes[0])

    def row_sizes(self, chunk: int) -> list[int]:
        """Bytes by shard of the row of the prompt's chunk number ``chunk``."""
        return self.sizes[chunk % len(self.sizes)]


class LookupReply(msgspec.Struct):
    """``present[group][shard]`` is a bit mask: bit i = the object of ``chunk_hashes[i]``."""

    state: LookupState
    present: list[list[int]]


class Row(msgspec.Struct):
    """All shards of one (chunk, object group). A shard of 0 bytes holds nothing."""

    slots: list[SlotRef]
    digests: list[int]


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row to reserve slots for: ``sizes[shard]`` bytes, 0 = none."""

    sizes: list[int]
    # None while its tokens are not known.
    key: RowKey | None = None


class Commit(msgspec.Struct, frozen=True):
    """Makes reservation ``index`` of a store visible under its key."""

    index: int
    chunk_hash: ChunkHash
    # Hash of the chunk before, or None for the first: eviction works tail first.
    parent: ChunkHash | None
    group: GroupTag
    digests: list[Annotated[int, msgspec.Meta(ge=0)]]


class StoreStats(msgspec.Struct):
    """A snapshot. Counters only grow; clients subtract."""

    capacity_bytes: int
    used_bytes: int
    ready_bytes: int
    rows: int
    # Being read or written.
    busy_rows: int
    leases: int
    # Rows evicted to make room, by group tag.
    evicted: dict[str, int]
    # Rows of prepare_store that did not fit.
    refused_stores: int
    # By tier, as the URL was written: counters of TierCounters.
    tiers: dict[str, TierCounters] = {}


class TierCounters(msgspec.Struct):
    """What one tier did. Counters only grow."""

    hit_rows: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    # Writes given up: the queue was full, or the tier refused.
    dropped_rows: int = 0
    # Calls that raised TierError, and values that failed their check.
    errors: int = 0
    corrupt_rows: int = 0


class Store(Protocol):
    """See the module's docstring for the order of calls.

    What a lost server did not answer is a miss: empty masks, None, no slots.
    """

    @property
    def pool_ref(self) -> PoolRef:
        """Where workers attach now; its incarnation is empty while there is no pool."""

    @property
    def has_tiers(self) -> bool:
        """Whether a lookup can be PENDING, so that it is worth starting early."""

    def add_groups(self, groups: Sequence[GroupShards]) -> None:
        """Go on with more groups, behind the others; one that is known stays as it is."""

    def lookup(
        self, lookup_id: int, chunk_hashes: Sequence[bytes], first_chunk: int
    ) -> LookupReply:
        """Which rows of consecutive chunks are there, in the pool (they are pinned) or in a
        tier. ``first_chunk``: position of the first of them in the prompt."""

    def narrow(self, lookup_id: int, keep: Sequence[RowKey]) -> LookupState:
        """Keep only the pins on ``keep``, count them as used, and bring those into the pool that
        lie in a tier only. READY: all of them are pinned."""

    def release(self, lookup_id: int) -> None:
        """Drop all pins of a lookup; unknown ids are fine."""

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[RowKey]
    ) -> list[Row] | None:
        """Turn the lookup's pins into the load's: rows in the order wanted, or None (and the
        lookup released) when any of them is gone."""

    def complete_load(self, load_id: int, drop: Sequence[RowKey] = ()) -> None:
        """No worker reads the load's slots any more. ``drop``: rows that failed their check."""

    def prepare_store(
        self, store_id: int, rows: Sequence[NewRow], prefix: Sequence[bytes]
    ) -> list[list[SlotRef]]:
        """Reserve slots for as many leading rows as fit (what was used longest ago is evicted,
        never a pinned row, nor one of the prefix that ends at the last known chunk of
        ``prefix``). A row that is kept already gets an empty list. The store is open, and needs
        its ``complete_store``, when any row got slots."""

    def complete_store(self, store_id: int, commits: Sequence[Commit]) -> None:
        """No worker writes the store's slots any more: publish ``commits`` (the first value of a
        key wins) and free the rest. Every shard of a published row must have been written."""

    def clear(self, namespace: bytes) -> None:
        """Forget what this client knows, at once, and go on with keys of another ``namespace``
        (32 bytes). Its open stores publish nothing any more; slots under a pin or lease stay
        until they are released; tiers, and what other clients share, stay."""

    def stats(self) -> StoreStats:
        """Snapshot of use."""

    def check_integrity(self, loads: Collection[int], stores: Collection[int]) -> None:
        """Raise AssertionError with the numbers when bookkeeping does not add up, or when this
        client has other loads or stores open than these."""

    def close(self) -> None:
        """End it. An embedded pool's memory is given back."""
