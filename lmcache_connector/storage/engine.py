"""``StorageEngine``: the ``Store`` that owns a pool. Embedded in an engine core, or in a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import (
    Commit,
    GroupShards,
    LookupReply,
    LookupState,
    Row,
    StoreStats,
)
from lmcache_connector.storage.index import Entry, RowIndex
from lmcache_connector.storage.pool import MemoryPool

# What a shard of 0 bytes gets.
NO_SLOT = SlotRef(0, 0, 0)


class MemoryService(Protocol):
    """Hands the pool's memory to the workers (server/service.py)."""

    @property
    def pool_ref(self) -> PoolRef:
        """Where workers attach; valid once started."""

    def start(self, on_extent_ready: Callable[[int], None]) -> None:
        """Begin to serve. ``on_extent_ready`` is called, from another thread, once for each
        extent that all ranks have mapped."""

    def close(self) -> None:
        """Stop serving. No callback comes after the return."""


class _Lease(NamedTuple):
    """Slots that a worker may be writing to. Only ``complete_store`` ends it, never a clock."""

    generation: int
    items: list[list[SlotRef]]


class StorageEngine:
    """See ``Store`` for the contract of each verb. Safe to call from any thread.

    Every slot that the pool has handed out belongs to exactly one of: a row in the index, a
    dead row that is still pinned, a lease.

    Raises:
        ValueError: from ``prepare_*`` and ``complete_*``: an id used twice or not open, or
            commits that do not fit their lease. Nothing has changed then.
    """

    def __init__(
        self, pool: MemoryPool, groups: Sequence[GroupShards], service: MemoryService
    ) -> None:
        self._pool = pool
        self._service = service
        self._num_shards = {group.tag: group.num_shards for group in groups}
        self._lock = threading.Lock()
        self._index = RowIndex()
        # Rows pinned, each once, in the order of the chunks asked for.
        self._lookups: dict[int, list[Entry]] = {}
        self._loads: dict[int, list[Entry]] = {}
        self._leases: dict[int, _Lease] = {}
        # Counts calls of clear.
        self._generation = 0
        self._evicted = dict.fromkeys(self._num_shards, 0)
        self._refused = 0
        service.start(self._on_extent_ready)

    @property
    def pool_ref(self) -> PoolRef:
        return self._service.pool_ref

    def _on_extent_ready(self, extent: int) -> None:
        with self._lock:
            self._pool.mark_ready(extent)

    # ---- loads ----------------------------------------------------------------------------------

    def lookup(self, lookup_id: int, chunk_hashes: Sequence[bytes]) -> LookupReply:
        with self._lock:
            entries, masks = self._index.find(chunk_hashes)
            for entry in entries:
                entry.pins += 1
            self._unpin(self._lookups.get(lookup_id, ()))
            self._lookups[lookup_id] = entries
        present = [[masks.get(tag, 0)] * num for tag, num in self._num_shards.items()]
        return LookupReply(LookupState.READY, present)

    def narrow(self, lookup_id: int, keep: Sequence[tuple[bytes, str]]) -> None:
        with self._lock:
            entries = self._lookups.get(lookup_id, [])
            wanted = set(keep)
            chunks = {chunk_hash for chunk_hash, _ in wanted}
            kept = [entry for entry in entries if entry.key in wanted]
            for entry in entries:
                if entry.key[0] in chunks:
                    entry.follows = entry.key in wanted
            self._unpin(entry for entry in entries if entry.key not in wanted)
            if kept:
                self._lookups[lookup_id] = kept
                self._index.touch(kept[-1].key[0])
            else:
                self._lookups.pop(lookup_id, None)

    def release(self, lookup_id: int) -> None:
        with self._lock:
            self._unpin(self._lookups.pop(lookup_id, ()))

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[tuple[bytes, str]]
    ) -> list[Row] | None:
        with self._lock:
            if load_id in self._loads:
                raise ValueError(f"load {load_id} is already open")
            entries = self._lookups.pop(lookup_id, [])
            held = {entry.key: entry for entry in entries if not entry.dead}
            if not all(key in held for key in wanted):
                self._unpin(entries)
                return None
            loading = [held[key] for key in dict.fromkeys(wanted)]
            for entry in loading:
                entry.pins += 1
            self._loads[load_id] = loading
            self._unpin(entries)
            return [held[key].row for key in wanted]

    def complete_load(self, load_id: int, drop: Sequence[tuple[bytes, str]] = ()) -> None:
        with self._lock:
            if load_id not in self._loads:
                raise ValueError(f"load {load_id} is not open")
            entries = self._loads.pop(load_id)
            dropped = set(drop)
            for entry in entries:
                if entry.key in dropped and not entry.dead:
                    self._index.remove(entry)
            self._unpin(entries)

    # ---- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, store_id: int, sizes: Sequence[Sequence[int]], protect: bytes | None
    ) -> list[list[SlotRef]] | None:
        with self._lock:
            if store_id in self._leases:
                raise ValueError(f"store {store_id} is already open")
            victims = self._index.victims(protect)
            items: list[list[SlotRef]] = []
            evicted: list[Entry] = []
            for shard_bytes in sizes:
                slots = self._place(shard_bytes, victims, evicted)
                if slots is None:
                    break
                items.append(slots)
            for entry in evicted:
                self._index.remove(entry)
                self._evicted[entry.key[1]] += 1
            self._refused += len(sizes) - len(items)
            if not items:
                return None
            self._leases[store_id] = _Lease(self._generation, items)
            return items

    def _place(
        self, shard_bytes: Sequence[int], victims: Iterator[Entry], evicted: list[Entry]
    ) -> list[SlotRef] | None:
        """Slots for one item, and in ``evicted`` the rows that made room; or None, and nothing
        has changed. Victims stay in the index: the caller removes them."""
        if max(shard_bytes, default=0) > self._pool.largest_extent_bytes:
            return None
        freed: list[Entry] = []
        while (slots := self._allocate_all(shard_bytes)) is None:
            victim = next(victims, None)
            if victim is None:
                for entry in freed:
                    for taken in entry.row.slots:
                        if taken.nbytes:
                            self._pool.reserve(taken)
                return None
            self._free(victim.row.slots)
            freed.append(victim)
        evicted += freed
        return slots

    def _allocate_all(self, shard_bytes: Sequence[int]) -> list[SlotRef] | None:
        """Slots for all shards of an item, or None: one placed while others wait for room would
        lie in the way of the range that they are waiting for."""
        slots: list[SlotRef] = []
        for nbytes in shard_bytes:
            slot = self._pool.allocate(nbytes) if nbytes else NO_SLOT
            if slot is None:
                self._free(slots)
                return None
            slots.append(slot)
        return slots

    def complete_store(self, store_id: int, commits: Sequence[Commit]) -> None:
        with self._lock:
            lease = self._leases.get(store_id)
            if lease is None:
                raise ValueError(f"store {store_id} is not open")
            self._check_commits(lease, commits)
            del self._leases[store_id]
            unused = dict(enumerate(lease.items))
            if lease.generation == self._generation:
                for commit in commits:
                    existing = self._index.get(commit.chunk_hash, commit.group)
                    if existing is not None:
                        existing.follows = True
                        continue
                    row = Row(unused.pop(commit.index), list(commit.digests))
                    self._index.insert(commit.chunk_hash, commit.parent, commit.group, row)
                inner = {commit.parent for commit in commits}
                for chunk_hash in dict.fromkeys(commit.chunk_hash for commit in commits):
                    if chunk_hash not in inner:
                        self._index.touch(chunk_hash)
            for slots in unused.values():
                self._free(slots)

    def _check_commits(self, lease: _Lease, commits: Sequence[Commit]) -> None:
        seen: set[int] = set()
        for commit in commits:
            if not 0 <= commit.index < len(lease.items) or commit.index in seen:
                raise ValueError(f"commit of item {commit.index} of {len(lease.items)}")
            seen.add(commit.index)
            expected = self._num_shards.get(commit.group)
            counts = (len(lease.items[commit.index]), len(commit.digests))
            if counts != (expected, expected):
                raise ValueError(
                    f"group {commit.group!r} has {expected} shards, the commit brings slots and "
                    f"digests of {counts}"
                )

    # ---- the rest -------------------------------------------------------------------------------

    def contains(self, chunk_hash: bytes, group: str) -> bool:
        with self._lock:
            return self._index.get(chunk_hash, group) is not None

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
            for entry in self._index.clear():
                if not entry.pins:
                    self._free(entry.row.slots)

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                capacity_bytes=self._pool.capacity_bytes,
                used_bytes=self._pool.used_bytes,
                ready_bytes=self._pool.ready_bytes,
                rows=len(self._index),
                pinned_rows=len(self._pinned()),
                leases=len(self._leases),
                evicted=dict(self._evicted),
                refused_stores=self._refused,
            )

    def check_integrity(self) -> None:
        with self._lock:
            self._pool.check_integrity()
            self._index.check_integrity()
            pinned = self._pinned()
            entries = {*self._index.entries(), *pinned}
            for entry in entries:
                expected = pinned.get(entry, 0)
                assert entry.pins == expected, f"{entry.key}: {entry.pins} pins, not {expected}"
            slots = [slot for entry in entries for slot in entry.row.slots]
            slots += [s for lease in self._leases.values() for item in lease.items for s in item]
            owned = [slot for slot in slots if slot.nbytes]
            assert len(owned) == len(set(owned)), "a slot has two owners"
            lost = set(self._pool.used_slots()) ^ set(owned)
            assert not lost, f"slots in use and slots owned differ: {lost}"

    def close(self) -> None:
        self._service.close()
        with self._lock:
            self._pool.close()

    def _pinned(self) -> dict[Entry, int]:
        """Rows held by lookups and loads, and how many hold each."""
        pins: dict[Entry, int] = {}
        for holders in (self._lookups, self._loads):
            for entries in holders.values():
                for entry in entries:
                    pins[entry] = pins.get(entry, 0) + 1
        return pins

    def _unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.pins -= 1
            if entry.dead and not entry.pins:
                self._free(entry.row.slots)

    def _free(self, slots: Sequence[SlotRef]) -> None:
        for slot in slots:
            if slot.nbytes:
                self._pool.free(slot)
