"""Which rows are there, how chunks follow each other, and what was used longest ago.

One LRU order over the rows of all prefixes and groups. Using a prefix moves its rows from the
tail to the head, so the head ends as the most recent: eviction is LRU between prefixes and
tail first within one. Not thread-safe: the engine holds the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lmcache_connector.storage.base import Row, RowKey


@dataclass(slots=True, eq=False)
class Entry:
    """A row in the index or, when ``dead``, one that only its pins still keep in memory."""

    key: RowKey
    row: Row
    # Of the client that brought it: 16 hex digits.
    namespace: str
    pins: int = 0
    dead: bool = False
    # Moves with its chunk when a later chunk of the prefix is used. False for a row that the
    # last hit on its chunk did not ask for (a window behind the boundary): it ages.
    follows: bool = True
    # Bit i: tier i has it, or will have.
    tiers: int = 0
    # Pinned by a person: not evicted.
    is_kept: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.row.slots)


@dataclass(slots=True)
class _Node:
    """A chunk. It outlives its rows while later chunks are known, to keep the prefix linked."""

    # None: the first chunk, or not known yet.
    parent: bytes | None = None
    num_children: int = 0
    # By group tag.
    rows: dict[str, Entry] = field(default_factory=dict)


class RowIndex:
    """Chunk hash -> rows by group tag, with the order of eviction."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        # Oldest first. Rows of one (chunk, group) are evicted as one, groups on their own.
        self._order: OrderedDict[Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def get(self, key: RowKey) -> Entry | None:
        node = self._nodes.get(key[0])
        return None if node is None else node.rows.get(key[1])

    def find(self, chunk_hashes: Sequence[bytes]) -> tuple[list[Entry], dict[str, int]]:
        """Rows of the chunks, and by group tag a bit mask of the chunks that have one."""
        entries: list[Entry] = []
        digits: dict[str, bytearray] = {}
        zeros = b"0" * len(chunk_hashes)
        nodes = self._nodes
        for position, chunk_hash in enumerate(chunk_hashes):
            node = nodes.get(chunk_hash)
            if node is None:
                continue
            for group, entry in node.rows.items():
                if group not in digits:
                    digits[group] = bytearray(zeros)
                digits[group][~position] = 49  # ord("1")
                entries.append(entry)
        return entries, {group: int(text, 2) for group, text in digits.items()}

    def insert(self, entry: Entry, parent: bytes | None) -> None:
        """Add a row that is not there yet, as the most recent one; ``touch`` places it."""
        chunk_hash, group = entry.key
        node = self._nodes.setdefault(chunk_hash, _Node())
        assert group not in node.rows
        if parent is not None and node.parent is None:
            self._link(chunk_hash, node, parent)
        node.rows[group] = entry
        self._order[entry] = None

    def knows(self, chunk_hash: bytes) -> bool:
        """Whether any row of the chunk, or of one behind it, is there."""
        return chunk_hash in self._nodes

    def _link(self, chunk_hash: bytes, node: _Node, parent: bytes) -> None:
        # Hash chains have no cycles, but a peer may claim one; it gets no link.
        if parent == chunk_hash or (node.num_children and chunk_hash in self._prefix(parent)):
            return
        node.parent = parent
        self._nodes.setdefault(parent, _Node()).num_children += 1

    def remove(self, entry: Entry) -> None:
        """Forget a row: it is dead from now on."""
        chunk_hash, group = entry.key
        del self._order[entry]
        entry.dead = True
        node = self._nodes[chunk_hash]
        del node.rows[group]
        while not node.rows and not node.num_children:
            del self._nodes[chunk_hash]
            if node.parent is None:
                return
            chunk_hash, node = node.parent, self._nodes[node.parent]
            node.num_children -= 1

    def touch(self, chunk_hash: bytes) -> None:
        """The prefix that ends with this chunk was used: its head becomes the most recent."""
        move_to_end = self._order.move_to_end
        cursor: bytes | None = chunk_hash
        while cursor is not None and (node := self._nodes.get(cursor)) is not None:
            for entry in node.rows.values():
                if entry.follows:
                    move_to_end(entry)
            cursor = node.parent

    def victims(self, protect: bytes | None) -> Iterator[Entry]:
        """Rows that may be evicted, in the order of eviction: none that is pinned, none of the
        prefix that ends at ``protect``. The index must not change while this is used."""
        protected = self._prefix(protect)
        for entry in self._order:
            if not entry.pins and not entry.is_kept and entry.key[0] not in protected:
                yield entry

    def _prefix(self, chunk_hash: bytes | None) -> set[bytes]:
        """The known chunks of the prefix that ends with ``chunk_hash``."""
        chain: set[bytes] = set()
        while chunk_hash is not None and (node := self._nodes.get(chunk_hash)) is not None:
            chain.add(chunk_hash)
            chunk_hash = node.parent
        return chain

    def entries(self) -> Iterator[Entry]:
        """All rows, oldest first."""
        return iter(self._order)

    def check_integrity(self) -> None:
        """Raise AssertionError unless order, nodes and links agree."""
        held = [entry for node in self._nodes.values() for entry in node.rows.values()]
        assert set(held) == set(self._order), f"{len(held)} rows, {len(self._order)} in order"
        assert not any(entry.dead for entry in held), "a dead row is in the index"
        children: dict[bytes, list[bytes]] = {}
        for chunk_hash, node in self._nodes.items():
            assert node.rows or node.num_children, f"chunk {chunk_hash.hex()} is of no use"
            for group, entry in node.rows.items():
                assert entry.key == (chunk_hash, group), f"{entry.key} is in the wrong place"
            if node.parent is not None:
                assert node.parent in self._nodes, f"chunk {chunk_hash.hex()} has lost its parent"
                children.setdefault(node.parent, []).append(chunk_hash)
        reached = [chunk for chunk, node in self._nodes.items() if node.parent is None]
        for chunk_hash in reached:  # grows while it is walked
            counted, found = self._nodes[chunk_hash].num_children, children.get(chunk_hash, [])
            assert counted == len(found), f"{len(found)} children, {counted} are counted"
            reached += found
        assert len(reached) == len(self._nodes), "parent links form a cycle"
