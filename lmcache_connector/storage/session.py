"""``StoreSession``: one client's open lookups, loads and stores on a ``StorageEngine``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage import base
from lmcache_connector.storage.index import Entry
from lmcache_connector.storage.tiering import Question

if TYPE_CHECKING:
    from lmcache_connector.storage.engine import StorageEngine

_MAX_GROUPS = 1024


class Lease(NamedTuple):
    """Slots that a worker may be writing to. Only ``complete_store`` ends it, never a clock."""

    generation: int
    namespace: str
    # An empty list for a row that was kept already.
    items: list[list[SlotRef]]


@dataclass(eq=False)
class Looking:
    """An open lookup. Changed with the engine's lock held."""

    namespace: str
    chunk_hashes: list[bytes]
    first_chunk: int
    # Each once, in the order of the chunks asked for.
    pinned: dict[base.RowKey, Entry] = field(default_factory=dict)
    question: Question | None = None
    # Whether the KV of the chunks is in a tier, where these are rows that go with it.
    kv_question: Question | None = None
    # To be given again until the question is answered; as long as its pins are there.
    reply: base.LookupReply | None = None
    fetching: set[base.RowKey] = field(default_factory=set)
    # Rows that a tier seemed to have.
    failed: set[base.RowKey] = field(default_factory=set)
    # What it is narrowed to, as long as there is nothing to do but to wait for fetches.
    awaited: Sequence[base.RowKey] | None = None

    @cached_property
    def positions(self) -> dict[bytes, int]:
        """Chunk hash -> its index."""
        return {chunk_hash: index for index, chunk_hash in enumerate(self.chunk_hashes)}

    def fetched(self, key: base.RowKey, entry: Entry | None) -> None:
        """A fetch has ended: pin what it brought."""
        if key not in self.fetching:
            return  # released by now, or narrowed to others
        self.fetching.discard(key)
        if entry is None:
            self.failed.add(key)
            self.awaited = None
        elif key not in self.pinned:
            entry.pins += 1
            self.pinned[key] = entry


class StoreSession:
    """See ``Store`` for the contract of each verb.

    Raises:
        ValueError: from ``prepare_*`` and ``complete_*``: an id used twice or not open, or
            commits that do not fit their lease. Nothing has changed then.
    """

    def __init__(
        self,
        engine: StorageEngine,
        namespace: bytes,
        groups: Sequence[base.GroupShards],
        pool_ref: PoolRef,
    ) -> None:
        self.pool_ref = pool_ref
        self.groups = {group.tag: group for group in groups}
        self.namespace_digest = namespace
        self.leases: dict[int, Lease] = {}
        self.asked_rows = 0
        self.found_rows = 0
        self._engine = engine
        self._rows = engine.rows
        self.lookups: dict[int, Looking] = {}
        self.loads: dict[int, list[Entry]] = {}
        # Counts clears: stores of before publish nothing.
        self.generation = 0
        with engine.lock:
            engine.sessions.add(self)

    @property
    def namespace(self) -> str:
        """As in names of values: 16 hex digits."""
        return self.namespace_digest.hex()[:16]

    @property
    def has_tiers(self) -> bool:
        return bool(self._engine.channels)

    def num_chunks(self, besides: int) -> int:
        """How many chunks all open lookups but one are for."""
        lookups = self.lookups.items()
        return sum(len(look.chunk_hashes) for key, look in lookups if key != besides)

    def add_groups(self, groups: Sequence[base.GroupShards]) -> None:
        check_groups(groups)
        if len({*self.groups, *(group.tag for group in groups)}) > _MAX_GROUPS:
            raise ValueError(f"more than {_MAX_GROUPS} groups")
        with self._engine.lock:
            for group in groups:
                self.groups.setdefault(group.tag, group)

    # ---- loads ----------------------------------------------------------------------------------

    def lookup(
        self, lookup_id: int, chunk_hashes: Sequence[bytes], first_chunk: int
    ) -> base.LookupReply:
        kv_chunks, kv_question, kv_is_whole = self._ask_kv(lookup_id, chunk_hashes)
        with self._engine.lock:
            look = self.lookups.get(lookup_id)
            if look is None or look.chunk_hashes != list(chunk_hashes):
                self._release(lookup_id)
                look = Looking(self.namespace, list(chunk_hashes), first_chunk)
                self.lookups[lookup_id] = look
            elif look.reply is not None and look.question is not None and not look.question.done:
                return look.reply
            entries, masks = self._rows.index.find(chunk_hashes)
            found = {entry.key: entry for entry in entries}
            for entry in found.values():
                entry.pins += 1
            self._rows.unpin(look.pinned.values())
            look.pinned = found
            look.awaited = None
            state = self._ask_tiers(look, masks)
            look.kv_question = kv_question
            if not kv_is_whole:
                state = base.LookupState.PENDING
            for group in self.groups.values():
                if group.full and self._engine.kv is not None:
                    masks[group.tag] = masks.get(group.tag, 0) & kv_chunks
            if state is base.LookupState.READY and not look.failed:
                self.asked_rows += len(chunk_hashes) * len(self.groups)
                self.found_rows += sum(mask.bit_count() for mask in masks.values())
            groups = self.groups.items()
            present = [[masks.get(tag, 0)] * group.num_shards for tag, group in groups]
            look.reply = base.LookupReply(state, present)
            return look.reply

    def _ask_kv(
        self, lookup_id: int, chunk_hashes: Sequence[bytes]
    ) -> tuple[int, Question | None, bool]:
        # Without our lock: who holds that of the KV may be waiting for it.
        if self._engine.kv is None:
            return 0, None, True
        look = self.lookups.get(lookup_id)
        is_same = look is not None and look.chunk_hashes == list(chunk_hashes)
        asked = look.kv_question if look is not None and is_same else None
        return self._engine.kv.find_whole(self.namespace, chunk_hashes, asked)

    def _ask_tiers(self, look: Looking, masks: dict[str, int]) -> base.LookupState:
        """Add to ``masks`` what is in a tier only."""
        if not self._engine.channels:
            return base.LookupState.READY
        if look.question is None:
            missing = [
                (chunk_hash, tag)
                for chunk_hash in look.chunk_hashes
                for tag in self.groups
                if (chunk_hash, tag) not in look.pinned
            ]
            look.question = self._engine.tiering.ask(self.namespace, missing)
        if not look.question.done:
            return base.LookupState.PENDING
        look.question.add_to(masks, look.chunk_hashes, self.groups, look.failed)
        return base.LookupState.READY

    def narrow(self, lookup_id: int, keep: Sequence[base.RowKey]) -> base.LookupState:
        with self._engine.lock:
            look = self.lookups.get(lookup_id)
            if look is None:
                return base.LookupState.GONE if keep else base.LookupState.READY
            if look.fetching and look.awaited == keep:
                return base.LookupState.PENDING
            look.reply = None
            wanted = set(keep)
            chunks = {chunk_hash for chunk_hash, _ in wanted}
            for key, entry in list(look.pinned.items()):
                if key[0] in chunks:
                    # Layers of hidden states age together: one without the others is of no use.
                    entry.follows = key in wanted or self._engine.kv is not None
                if key not in wanted:
                    self._rows.unpin([look.pinned.pop(key)])
            look.fetching &= wanted
            state = self._fetch_missing(look, keep)
            look.awaited = keep if state is base.LookupState.PENDING else None
            if state is base.LookupState.READY and keep:
                self._rows.index.touch(keep[-1][0])
                self._engine.persist(look.pinned.values())
            elif not keep:
                self._release(lookup_id)
            return state

    def _fetch_missing(self, look: Looking, keep: Sequence[base.RowKey]) -> base.LookupState:
        for key in keep:
            if key in look.pinned or key in look.fetching:
                continue
            entry = self._rows.index.get(key)
            if entry is not None:
                entry.pins += 1
                look.pinned[key] = entry
                continue
            found = look.question.found if look.question is not None else {}
            if key in look.failed or key not in found:
                look.failed.add(key)
                return base.LookupState.GONE
            position = look.positions[key[0]]
            sizes = self.groups[key[1]].row_sizes(look.first_chunk + position)
            parent = look.chunk_hashes[position - 1] if position else None
            if not self._engine.fetch(look, key, parent, sizes, found[key]):
                look.failed.add(key)
                return base.LookupState.GONE
            look.fetching.add(key)
        return base.LookupState.PENDING if look.fetching else base.LookupState.READY

    def release(self, lookup_id: int) -> None:
        with self._engine.lock:
            self._release(lookup_id)

    def _release(self, lookup_id: int) -> None:
        look = self.lookups.pop(lookup_id, None)
        if look is not None:
            look.fetching.clear()
            self._rows.unpin(look.pinned.values())

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[base.RowKey]
    ) -> list[base.Row] | None:
        with self._engine.lock:
            if load_id in self.loads:
                raise ValueError(f"load {load_id} is already open")
            look = self.lookups.get(lookup_id)
            held = look.pinned if look is not None else {}
            loading = [held.get(key) for key in dict.fromkeys(wanted)]
            entries = [entry for entry in loading if entry is not None and not entry.dead]
            rows = None
            if len(entries) == len(loading):
                for entry in entries:
                    entry.pins += 1
                self.loads[load_id] = entries
                rows = [held[key].row for key in wanted]
            self._release(lookup_id)
            return rows

    def complete_load(self, load_id: int, drop: Sequence[base.RowKey] = ()) -> None:
        with self._engine.lock:
            if load_id not in self.loads:
                raise ValueError(f"load {load_id} is not open")
            entries = self.loads.pop(load_id)
            dropped = set(drop)
            for entry in entries:
                if entry.key in dropped:
                    self._rows.remove(entry)
            self._rows.unpin(entries)

    # ---- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, store_id: int, rows: Sequence[base.NewRow], prefix: Sequence[bytes]
    ) -> list[list[SlotRef]]:
        with self._engine.lock:
            if store_id in self.leases:
                raise ValueError(f"store {store_id} is already open")
            there = [self._rows.index.get(row.key) if row.key else None for row in rows]
            kept = [entry for entry in there if entry is not None]
            sizes = [row.sizes for row, entry in zip(rows, there, strict=True) if entry is None]
            for entry in kept:  # does not make room for the others
                entry.pins += 1
            reserved = self._rows.reserve(sizes, prefix, self.namespace)
            self._rows.unpin(kept)
            self._engine.refused += len(sizes) - len(reserved)
            items: list[list[SlotRef]] = []
            slots = iter(reserved)
            for existing in there:
                item: list[SlotRef] | None = next(slots, None) if existing is None else []
                if item is None:
                    break
                items.append(item)
            if any(items):
                self.leases[store_id] = Lease(self.generation, self.namespace, items)
            return items

    def complete_store(self, store_id: int, commits: Sequence[base.Commit]) -> None:
        with self._engine.lock:
            lease = self.leases.get(store_id)
            if lease is None:
                raise ValueError(f"store {store_id} is not open")
            self._check_commits(lease, commits)
            del self.leases[store_id]
            unused = {index: slots for index, slots in enumerate(lease.items) if slots}
            if lease.generation == self.generation:
                published: list[Entry] = []
                for commit in commits:
                    key = (commit.chunk_hash, commit.group)
                    row = base.Row(unused.pop(commit.index), list(commit.digests))
                    entry = self._rows.publish(key, commit.parent, row, lease.namespace)
                    published += [entry] if entry is not None else []
                self._engine.persist(published)
                inner = {commit.parent for commit in commits}
                for chunk_hash in dict.fromkeys(commit.chunk_hash for commit in commits):
                    if chunk_hash not in inner:
                        self._rows.index.touch(chunk_hash)
            for slots in unused.values():
                self._rows.free(slots)

    def _check_commits(self, lease: Lease, commits: Sequence[base.Commit]) -> None:
        seen: set[int] = set()
        for commit in commits:
            if not 0 <= commit.index < len(lease.items) or commit.index in seen:
                raise ValueError(f"commit of row {commit.index} of {len(lease.items)}")
            seen.add(commit.index)
            group = self.groups.get(commit.group)
            expected = group.num_shards if group is not None else None
            counts = (len(lease.items[commit.index]), len(commit.digests))
            if counts != (expected, expected):
                raise ValueError(
                    f"group {commit.group!r} has {expected} shards, the commit brings slots and "
                    f"digests of {counts}"
                )

    # ---- the rest -------------------------------------------------------------------------------

    def clear(self, namespace: bytes) -> None:
        with self._engine.lock:
            self.generation += 1
            self.namespace_digest = namespace
            if not self._engine.shared:
                for entry in list(self._rows.index.entries()):
                    self._rows.remove(entry)

    def stats(self) -> base.StoreStats:
        return self._engine.stats()

    def check_integrity(self, loads: Collection[int], stores: Collection[int]) -> None:
        self._engine.check_integrity()
        assert self.loads.keys() <= set(loads), f"{list(self.loads)} loads open, not {loads}"
        assert self.leases.keys() == set(stores), f"{list(self.leases)} stores, not {stores}"

    def pinned(self) -> list[Collection[Entry]]:
        """Rows that open lookups and loads hold. The engine's lock is held."""
        return [*(look.pinned.values() for look in self.lookups.values()), *self.loads.values()]

    def end_lookups(self) -> None:
        """The client cannot go on with its lookups."""
        with self._engine.lock:
            for lookup_id in list(self.lookups):
                self._release(lookup_id)

    def keep_only(self, loads: Collection[int], stores: Collection[int]) -> None:
        """End every load and store but these; no worker was told of the others, or all of its
        workers are done with them."""
        with self._engine.lock:
            for load_id in self.loads.keys() - set(loads):
                self._rows.unpin(self.loads.pop(load_id))
            for store_id in self.leases.keys() - set(stores):
                for slots in self.leases.pop(store_id).items:
                    self._rows.free(slots)

    def close(self) -> None:
        """The client and its workers are gone: nobody touches a slot any more."""
        self.end_lookups()
        self.keep_only((), ())
        with self._engine.lock:
            self._engine.sessions.discard(self)


def check_groups(groups: Sequence[base.GroupShards]) -> None:
    """Raise ValueError unless the rows of each are one shard of some bytes."""
    for group in groups:
        if [len(sizes) for sizes in group.sizes] != [1] or group.sizes[0][0] <= 0:
            raise ValueError(f"group {group.tag!r} has rows of {group.sizes} bytes")
