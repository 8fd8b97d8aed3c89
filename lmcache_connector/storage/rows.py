"""``RowTable``: the pool and the index together: room is made, rows come and go.

Every slot that the pool has handed out belongs to exactly one of: a row in the index, a dead row
that is still pinned, a reservation that has not ended. Not thread-safe: the engine holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lmcache_connector.metadata import SlotRef
from lmcache_connector.storage.base import Row, RowKey
from lmcache_connector.storage.index import Entry, RowIndex
from lmcache_connector.storage.pool import MemoryPool

# What a shard of 0 bytes gets.
NO_SLOT = SlotRef(0, 0, 0)


class RowTable:
    """``floor_bytes``: what a namespace with a client holds at least before rows of it make room
    for others."""

    def __init__(self, pool: MemoryPool, floor_bytes: int) -> None:
        self.pool = pool
        self.index = RowIndex()
        self.evicted: dict[str, int] = {}
        # Told of each row that the pool has no more.
        self.on_forgotten: Callable[[Entry], None] = lambda entry: None
        self.is_attached: Callable[[str], bool] = lambda namespace: True
        self._floor_bytes = floor_bytes
        # Bytes in the index, by namespace.
        self.namespace_bytes: dict[str, int] = {}

    def reserve(
        self, rows: Sequence[Sequence[int]], prefix: Sequence[bytes], namespace: str
    ) -> list[list[SlotRef]]:
        """Slots for as many leading rows (bytes by shard) as fit; the others change nothing."""
        known = (chunk for chunk in reversed(prefix) if self.index.knows(chunk))
        victims = self._victims(next(known, None), namespace)
        reserved: list[list[SlotRef]] = []
        evicted: list[Entry] = []
        for sizes in rows:
            slots = self._place(sizes, victims, evicted)
            if slots is None:
                break
            reserved.append(slots)
        for entry in evicted:
            self._forget(entry)
            self.evicted[entry.key[1]] = self.evicted.get(entry.key[1], 0) + 1
        return reserved

    def _victims(self, protect: bytes | None, namespace: str) -> Iterator[Entry]:
        spare = {
            name: num_bytes - self._floor_bytes
            for name, num_bytes in self.namespace_bytes.items()
            if self._floor_bytes and name != namespace and self.is_attached(name)
        }
        for entry in self.index.victims(protect):
            if entry.namespace in spare:
                if spare[entry.namespace] < entry.num_bytes:
                    continue
                spare[entry.namespace] -= entry.num_bytes
            yield entry

    def _place(
        self, sizes: Sequence[int], victims: Iterator[Entry], evicted: list[Entry]
    ) -> list[SlotRef] | None:
        """Slots for one row, and in ``evicted`` the rows that made room; or None, and nothing
        has changed. Victims stay in the index: the caller removes them."""
        if max(sizes, default=0) > self.pool.largest_extent_bytes:
            return None
        freed: list[Entry] = []
        while (slots := self._allocate_all(sizes)) is None:
            victim = next(victims, None)
            if victim is None:
                for entry in freed:
                    for taken in entry.row.slots:
                        if taken.nbytes:
                            self.pool.reserve(taken)
                return None
            self.free(victim.row.slots)
            freed.append(victim)
        evicted += freed
        return slots

    def _allocate_all(self, sizes: Sequence[int]) -> list[SlotRef] | None:
        """Slots for all shards of a row, or None: one placed while others wait for room would
        lie in the way of the range that they are waiting for."""
        slots: list[SlotRef] = []
        for nbytes in sizes:
            slot = self.pool.allocate(nbytes) if nbytes else NO_SLOT
            if slot is None:
                self.free(slots)
                return None
            slots.append(slot)
        return slots

    def publish(self, key: RowKey, parent: bytes | None, row: Row, namespace: str) -> Entry | None:
        """Make a row visible; None, and its slots are free, when its key is taken."""
        existing = self.index.get(key)
        if existing is not None:
            existing.follows = True
            self.free(row.slots)
            return None
        entry = Entry(key, row, namespace)
        self.index.insert(entry, parent)
        self._count(namespace, entry.num_bytes)
        return entry

    def remove(self, entry: Entry) -> None:
        """Take a row out of sight. Its slots are free once nothing pins it."""
        if not entry.dead:
            self._forget(entry)
            if not entry.pins:
                self.free(entry.row.slots)

    def _forget(self, entry: Entry) -> None:
        self.index.remove(entry)
        self._count(entry.namespace, -entry.num_bytes)
        self.on_forgotten(entry)

    def _count(self, namespace: str, num_bytes: int) -> None:
        held = self.namespace_bytes.pop(namespace, 0) + num_bytes
        if held:
            self.namespace_bytes[namespace] = held

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Undo one ``entry.pins += 1`` for each."""
        for entry in entries:
            entry.pins -= 1
            if entry.dead and not entry.pins:
                self.free(entry.row.slots)

    def free(self, slots: Sequence[SlotRef]) -> None:
        """Give slots back that belong to no row."""
        for slot in slots:
            if slot.nbytes:
                self.pool.free(slot)

    def check_integrity(
        self, pins: dict[Entry, int], reserved: Iterable[Sequence[SlotRef]]
    ) -> None:
        """Raise AssertionError unless ``pins`` and the slots of open reservations explain all."""
        self.pool.check_integrity()
        self.index.check_integrity()
        entries = {*self.index.entries(), *pins}
        held: dict[str, int] = {}
        for entry in entries:
            expected = pins.get(entry, 0)
            assert entry.pins == expected, f"{entry.key}: {entry.pins} pins, not {expected}"
            if not entry.dead and entry.num_bytes:
                held[entry.namespace] = held.get(entry.namespace, 0) + entry.num_bytes
        assert held == self.namespace_bytes, f"{self.namespace_bytes} bytes counted, not {held}"
        slots = [slot for entry in entries for slot in entry.row.slots]
        slots += [slot for row in reserved for slot in row]
        owned = [slot for slot in slots if slot.nbytes]
        assert len(owned) == len(set(owned)), "a slot has two owners"
        lost = set(self.pool.used_slots()) ^ set(owned)
        assert not lost, f"slots in use and slots owned differ: {lost}"
