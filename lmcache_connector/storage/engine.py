"""``StorageEngine``: one pool with its tiers, for any number of sessions.

Embedded in an engine core it has one session, in a server one for each engine core. Sessions take
the lock; jobs of the tiers' threads take it when they begin and when they end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import and_, or_

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import GroupShards, Row, RowKey, StoreStats
from lmcache_connector.storage.index import Entry
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.rows import RowTable
from lmcache_connector.storage.session import Looking, StoreSession
from lmcache_connector.storage.tiering import Channel, Job, Question, Tiering
from lmcache_connector.storage.tiers.base import Tier, value_name

# Rows deleted at a time: schedulers wait for the lock meanwhile.
_CLEAR_ROWS = 512
# Chunks times groups of one call: so long do others wait, and so many keys are held.
_MAX_ROWS = 1 << 20


@dataclass(eq=False)
class Fetch:
    """A row on its way from a tier into the pool, shared by all lookups that wait for it."""

    key: RowKey
    parent: bytes | None
    namespace: str
    sizes: list[int]
    waiting: list[Looking] = field(default_factory=list)
    slots: list[SlotRef] | None = None
    is_cleared: bool = False


class StorageEngine:
    """Safe to call from any thread.

    Args:
        tiering: the tiers behind the pool.
        floor_bytes: what a namespace with a session keeps at least when others need room.
        shared: sessions come and go, and ``Store.clear`` of one deletes nothing.
        kv: the engine whose KV the rows here go with. They are found only where that of their
            chunk can be had, and go when it does; the tiers are that engine's.
    """

    def __init__(
        self,
        pool: MemoryPool,
        tiering: Tiering | None = None,
        floor_bytes: int = 0,
        *,
        shared: bool = False,
        kv: StorageEngine | None = None,
    ) -> None:
        self.shared = shared
        self.kv = kv
        # The engine whose ``kv`` this is.
        self._beside: StorageEngine | None = None
        if kv is not None:
            kv.rows.on_forgotten = self._on_kv_forgotten
            kv._beside = self
        self.floor_bytes = floor_bytes
        self.tiering = tiering or Tiering([], [])
        self.channels = self.tiering.channels
        self.lock = threading.Lock()
        self.rows: RowTable = RowTable(pool, floor_bytes)
        self.refused = 0
        self.sessions: set[StoreSession] = set()
        self.rows.is_attached = lambda name: any(one.namespace == name for one in self.sessions)
        self._pool = pool
        # By tier: rows that are pinned until it has them, and their bytes.
        self._writing: list[dict[Entry, None]] = [{} for _ in self.channels]
        self._writing_bytes = [0 for _ in self.channels]
        self._fetches: dict[RowKey, Fetch] = {}
        self._clearing = 0
        self._probe: tuple[Sequence[bytes], Question | None] = ((), None)

    def open_session(
        self, namespace: bytes, groups: Sequence[GroupShards], pool_ref: PoolRef
    ) -> StoreSession:
        """A client's view. ``namespace``: 32 bytes that its chunk hashes are chained from."""
        return StoreSession(self, namespace, groups, pool_ref)

    def mark_ready(self, extent: int) -> None:
        """Let slots be handed out from an extent."""
        with self.lock:
            self._pool.mark_ready(extent)

    # ---- tiers ----------------------------------------------------------------------------------

    def persist(self, entries: Collection[Entry]) -> None:
        """Queue writes of rows to the tiers that lack them. The lock is held."""
        for index, channel in enumerate(self.channels):
            lacking = [entry for entry in entries if not entry.tiers >> index & 1]
            is_usable = not lacking or channel.is_usable()
            dropped = 0
            for entry in lacking:
                # Rows that wait are pinned: those of all tiers may not fill half of the pool.
                queued = self._writing_bytes[index] + entry.num_bytes
                fits = 2 * len(self.channels) * queued <= self._pool.capacity_bytes
                job = self._write_job(entry, index, channel)
                is_wanted = is_usable and (fits or not self._writing[index])
                if not (is_wanted and channel.submit(job, "write")):
                    dropped += 1
                    continue
                entry.tiers |= 1 << index
                entry.pins += 1
                self._writing[index][entry] = None
                self._writing_bytes[index] = queued
            if dropped:
                channel.count(dropped_rows=dropped)

    def _write_job(self, entry: Entry, index: int, channel: Channel) -> Job:
        def job(tier: Tier | None) -> None:
            written = False
            try:
                if tier is not None and not entry.dead:
                    name = value_name(entry.namespace, *entry.key)
                    self.tiering.write(channel, tier, name, entry.row)
                    written = True
                    if entry.dead:
                        # Cleared meanwhile, and the tier perhaps before this was there.
                        tier.remove(name)
            finally:
                with self.lock:
                    if not written:
                        channel.count(dropped_rows=1)
                        entry.tiers &= ~(1 << index)
                    del self._writing[index][entry]
                    self._writing_bytes[index] -= entry.num_bytes
                    self.rows.unpin([entry])

        return job

    def fetch(
        self, look: Looking, key: RowKey, parent: bytes | None, sizes: list[int], tier: int
    ) -> bool:
        """Bring a row from a tier into the pool, pinned for ``look``; False when it cannot be
        had. The lock is held."""
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = Fetch(key, parent, look.namespace, sizes)
            channel = self.channels[tier]
            is_clearing = self._clearing or channel.clears[0]  # what goes must not come back
            if is_clearing or not channel.submit(self._fetch_job(fetch, tier, channel), "read"):
                return False
            self._fetches[key] = fetch
        fetch.waiting.append(look)
        return True

    def _fetch_job(self, fetch: Fetch, index: int, channel: Channel) -> Job:
        def job(tier: Tier | None) -> None:
            digests: list[int] | None = None
            try:
                if tier is not None and self._begin_fetch(fetch):
                    assert fetch.slots is not None
                    name = value_name(fetch.namespace, *fetch.key)
                    digests = self.tiering.read(channel, tier, name, fetch.slots)
            finally:
                self._end_fetch(fetch, digests, index)

        return job

    def _begin_fetch(self, fetch: Fetch) -> bool:
        with self.lock:
            # Only now: what waits for a slow tier must not hold memory.
            is_wanted = any(fetch.key in look.fetching for look in fetch.waiting)
            if not is_wanted or fetch.is_cleared or self.rows.index.get(fetch.key) is not None:
                return False
            reserved = self.rows.reserve([fetch.sizes], (), fetch.namespace)
            fetch.slots = reserved[0] if reserved else None
            return bool(reserved)

    def _end_fetch(self, fetch: Fetch, digests: list[int] | None, index: int) -> None:
        with self.lock:
            del self._fetches[fetch.key]
            if fetch.slots is not None and (digests is None or fetch.is_cleared):
                self.rows.free(fetch.slots)
            elif fetch.slots is not None and digests is not None:
                row = Row(fetch.slots, digests)
                new = self.rows.publish(fetch.key, fetch.parent, row, fetch.namespace)
                if new is not None:
                    # Only nearer ones lack it: it came through those behind, or they dropped it.
                    new.tiers = -1 << index
                    self.persist([new])
            entry = self.rows.index.get(fetch.key)
            for look in fetch.waiting:
                look.fetched(fetch.key, entry)

    # ---- rows that go with KV: its lock is taken before ours, never after -----------------------

    def find_whole(
        self, namespace: str, chunk_hashes: Sequence[bytes], asked: Question | None
    ) -> tuple[int, Question, bool]:
        """Bit mask of the chunks that have rows of all FULL groups (where there are none: any
        row) in the pool or, as far as the question to them was answered, in a tier; the question;
        and whether all of its answers are in the mask."""
        with self.lock:
            groups = self._groups_of(namespace)
            check_rows(len(chunk_hashes), len(groups))
            full = [tag for tag, group in groups.items() if group.full]
            tags = full or list(groups)
            _, masks = self.rows.index.find(chunk_hashes)
            if asked is None:
                missing = [
                    (chunk_hash, tag)
                    for bit, chunk_hash in enumerate(chunk_hashes if self.channels else ())
                    for tag in tags
                    if not masks.get(tag, 0) >> bit & 1
                ]
                asked = self.tiering.ask(namespace, missing)
            # First of all: answers that come from here on may be missing.
            is_whole = asked.done
            asked.add_to(masks, chunk_hashes, tags)
            found = [masks.get(tag, 0) for tag in tags] or [0]
            return reduce(and_ if full else or_, found), asked, is_whole

    def _groups_of(self, namespace: str) -> dict[str, GroupShards]:
        ours = [one.groups for one in self.sessions if one.namespace == namespace]
        return {tag: group for groups in ours for tag, group in groups.items()}

    def _on_kv_forgotten(self, entry: Entry) -> None:
        assert self.kv is not None
        chunk_hash, tag = entry.key
        full = [one.tag for one in self.kv._groups_of(entry.namespace).values() if one.full]
        is_whole = tag not in full if full else bool(self.kv.rows.index.find([chunk_hash])[0])
        if is_whole or entry.tiers:
            return
        with self.lock:
            for row in self.rows.index.find([chunk_hash])[0]:
                self.rows.remove(row)

    # ---- management -----------------------------------------------------------------------------

    def probe(
        self, namespace: str, chunk_hashes: Sequence[bytes]
    ) -> tuple[dict[str, int], dict[str, int], bool]:
        """By group, bit masks of rows in the pool and in tiers, and whether the tiers are still
        being asked: then call again."""
        with self.lock:
            _, in_pool = self.rows.index.find(chunk_hashes)
            hashes, question = self._probe
            if question is None or hashes != chunk_hashes:
                tags = sorted(self._groups_of(namespace))
                check_rows(len(chunk_hashes), len(tags))
                keys = [(chunk_hash, tag) for chunk_hash in chunk_hashes for tag in tags]
                question = self.tiering.ask(namespace, keys)
                self._probe = (chunk_hashes, question)
            in_tiers: dict[str, int] = {}
            if question.done:
                self._probe = ((), None)
                question.add_to(in_tiers, chunk_hashes, {tag for _, tag in question.found})
            return in_pool, in_tiers, not question.done

    def set_pinned(self, chunk_hashes: Sequence[bytes], pinned: bool) -> int:
        """Keep rows of the pool from being evicted, or no more; how many it concerns."""
        with self.lock:
            entries, _ = self.rows.index.find(chunk_hashes)
            count = sum(pinned or entry.is_kept for entry in entries)
            for entry in entries:
                entry.is_kept = pinned
            return count

    def clear_namespace(self, namespace: str) -> int:
        """Delete rows, of "" all, from pool and tiers; how many there were in the pool."""
        with self.lock:
            self._clearing += 1
            # What is under way is of before: it does not come in any more.
            for fetch in self._fetches.values():
                fetch.is_cleared |= namespace in ("", fetch.namespace)
            for session in self.sessions:
                if namespace in ("", session.namespace):
                    session.generation += 1
            cleared = [
                entry for entry in self.rows.index.entries() if namespace in ("", entry.namespace)
            ]
            names = {namespace} if namespace else {session.namespace for session in self.sessions}
            names |= {entry.namespace for entry in cleared}
        try:
            for start in range(0, len(cleared), _CLEAR_ROWS):
                with self.lock:
                    for entry in cleared[start : start + _CLEAR_ROWS]:
                        self.rows.remove(entry)
                time.sleep(0.001)  # else we are the first again to get the lock
            if self._beside is not None:
                self._beside.clear_namespace(namespace)
            if self.kv is None:
                for name in names:
                    self.tiering.clear(name)
        finally:
            with self.lock:
                self._clearing -= 1
        return len(cleared)

    def namespaces(self) -> dict[str, tuple[int, int, int]]:
        """Rows, bytes and pinned rows in the pool, by namespace."""
        with self.lock:
            entries = list(self.rows.index.entries())
        held: dict[str, tuple[int, int, int]] = {}
        for entry in entries:
            rows, num_bytes, pinned = held.get(entry.namespace, (0, 0, 0))
            held[entry.namespace] = rows + 1, num_bytes + entry.num_bytes, pinned + entry.is_kept
        return held

    def stats(self) -> StoreStats:
        """Snapshot over all sessions."""
        with self.lock:
            return StoreStats(
                capacity_bytes=self._pool.capacity_bytes,
                used_bytes=self._pool.used_bytes,
                ready_bytes=self._pool.ready_bytes,
                rows=len(self.rows.index),
                busy_rows=len(self._pins()),
                leases=sum(len(session.leases) for session in self.sessions),
                evicted=dict(self.rows.evicted),
                refused_stores=self.refused,
                tiers={channel.url: channel.snapshot() for channel in self.channels},
            )

    def _pins(self) -> dict[Entry, int]:
        held = (entries for session in self.sessions for entries in session.pinned())
        return Counter(chain(*self._writing, *held))

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers when bookkeeping does not add up."""
        with self.lock:
            reserved = [
                slots
                for session in self.sessions
                for lease in session.leases.values()
                for slots in lease.items
            ]
            reserved += [fetch.slots for fetch in self._fetches.values() if fetch.slots]
            self.rows.check_integrity(self._pins(), reserved)
        if self._beside is not None:
            self._beside.check_integrity()

    def close(self) -> None:
        """End the tiers and give the memory back, that of rows that go with ours last."""
        if self.kv is None:
            self.tiering.close()
        with self.lock:
            self._pool.close()
        if self._beside is not None:
            self._beside.close()


def check_rows(num_chunks: int, num_groups: int) -> None:
    """Raise ValueError when they are too many to be asked for in one call."""
    if num_chunks * num_groups > _MAX_ROWS:
        raise ValueError(f"{num_chunks} chunks of {num_groups} groups are too many for one call")
