"""StorageEngine against a slow, obvious model: every row, pin, lease and place in the order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import Commit, GroupShards, LookupState, NewRow, RowKey
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

PAGE = 4096
EXTENT_PAGES = (6, 6, 4)
SHARDS = {"full": 2, "window": 1, "state": 1}
# Two prompts with a common head: a b c d e and a b m n o.
PARENTS = dict(zip("abcdemno", [None, *"abcdbmn"], strict=True))
PROMPTS = ["abcde", "abmno"]


@dataclass(eq=False)
class ModelRow:
    key: tuple[str, str]
    slots: list[SlotRef]
    digests: list[int]
    # Breaks ties between rows of one chunk.
    serial: int
    visible: bool = True
    follows: bool = True


@dataclass
class ModelLease:
    group: str
    generation: int
    items: list[list[SlotRef]]


@dataclass
class Model:
    """Oldest row first in ``order``."""

    order: list[ModelRow] = field(default_factory=list)
    # What is known of who follows whom.
    links: dict[str, str] = field(default_factory=dict)
    lookups: dict[int, list[ModelRow]] = field(default_factory=dict)
    loads: dict[int, list[ModelRow]] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    generation: int = 0
    num_rows: int = 0

    def get(self, chunk: str, group: str) -> ModelRow | None:
        return next((row for row in self.order if row.key == (chunk, group)), None)

    def of_chunk(self, chunk: str) -> list[ModelRow]:
        return sorted((r for r in self.order if r.key[0] == chunk), key=lambda row: row.serial)

    def pinned(self) -> list[ModelRow]:
        holders = [*self.lookups.values(), *self.loads.values()]
        return [row for rows in holders for row in rows]

    def prefix(self, chunk: str | None) -> Iterator[str]:
        while chunk is not None:
            yield chunk
            chunk = self.links.get(chunk)

    def touch(self, chunk: str) -> None:
        for ancestor in list(self.prefix(chunk)):
            for row in self.of_chunk(ancestor):
                if row.follows:
                    self.order.remove(row)
                    self.order.append(row)

    def add(self, chunk: str, group: str, slots: list[SlotRef], digests: list[int]) -> bool:
        existing = self.get(chunk, group)
        if existing is not None:
            existing.follows = True
            return False
        self.num_rows += 1
        self.order.append(ModelRow((chunk, group), slots, digests, self.num_rows))
        parent = PARENTS[chunk]
        if parent is not None:
            self.links.setdefault(chunk, parent)
        return True

    def remove(self, row: ModelRow) -> None:
        self.order.remove(row)
        row.visible = False
        self.forget_useless_links()

    def forget_useless_links(self) -> None:
        while useless := [
            chunk
            for chunk in self.links
            if not self.of_chunk(chunk) and chunk not in self.links.values()
        ]:
            for chunk in useless:
                del self.links[chunk]

    def owned(self) -> set[SlotRef]:
        rows = {*self.order, *self.pinned()}
        slots = [slot for row in rows for slot in row.slots]
        slots += [s for lease in self.leases.values() for item in lease.items for s in item]
        return {slot for slot in slots if slot.nbytes}

    def evictable(self, protect: str | None) -> list[ModelRow]:
        pinned, protected = self.pinned(), set(self.prefix(protect))
        return [row for row in self.order if row not in pinned and row.key[0] not in protected]


def pages_of(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def encoded(key: tuple[str, str]) -> RowKey:
    return key[0].encode(), key[1]


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(sum(EXTENT_PAGES) * PAGE, EXTENT_PAGES[0] * PAGE)
        groups = [GroupShards(tag, [[PAGE] * num]) for tag, num in SHARDS.items()]
        self.engine = StorageEngine(self.pool)
        self.session = self.engine.open_session(b"n" * 32, groups, PoolRef("/nowhere", "1"))
        self.engine.mark_ready(0)
        self.num_ready = 1
        self.model = Model()
        self.ids = iter(range(1, 1 << 30))

    def teardown(self) -> None:
        for lookup_id in self.model.lookups:
            self.session.release(lookup_id)
        for load_id in self.model.loads:
            self.session.complete_load(load_id)
        for store_id in self.model.leases:
            self.session.complete_store(store_id, [])
        self.session.clear(b"m" * 32)
        self.engine.check_integrity()
        assert self.session.stats().used_bytes == 0
        self.engine.close()

    def longest_run(self, used: set[SlotRef]) -> int:
        """Pages of the longest free run if exactly ``used`` were in use."""
        longest = 0
        for extent, count in enumerate(EXTENT_PAGES[: self.num_ready]):
            pages = [False] * count + [True]
            for slot in used:
                if slot.extent == extent:
                    first = slot.offset // PAGE
                    pages[first : first + pages_of(slot.nbytes)] = [True] * pages_of(slot.nbytes)
            run = 0
            for page in pages:
                run = 0 if page else run + 1
                longest = max(longest, run)
        return longest

    @precondition(lambda self: self.num_ready < len(EXTENT_PAGES))
    @rule()
    def extent_becomes_ready(self) -> None:
        self.engine.mark_ready(self.num_ready)
        self.num_ready += 1

    @rule(
        group=st.sampled_from(sorted(SHARDS)),
        sizes=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=3),
        keys=st.lists(st.sampled_from([None, *PARENTS]), min_size=3, max_size=3),
        protect=st.sampled_from([None, *PARENTS]),
    )
    def prepare_store(
        self, group: str, sizes: list[list[int]], keys: Sequence[str | None], protect: str | None
    ) -> None:
        # Sizes in pages, less a few bytes; 0 stays 0.
        wanted = [[max(0, n * PAGE - 5) for n in item[: SHARDS[group]]] for item in sizes]
        rows = [
            NewRow(item, None if key is None else (key.encode(), group))
            for item, key in zip(wanted, keys, strict=False)
        ]
        kept = [self.model.get(key, group) if key else None for key in keys[: len(rows)]]
        evictable = [row for row in self.model.evictable(protect) if row not in kept]
        used_before = self.model.owned()
        free_before = [dict(sizes) for sizes in self.pool._range_bytes]
        refused_before = self.session.stats().refused_stores
        store_id = next(self.ids)
        # Of a prefix, the last chunk that is known counts.
        prefix = [b"never seen", protect.encode(), b"not yet"] if protect else []
        items = self.session.prepare_store(store_id, rows, prefix)
        for item, nbytes, existing in zip(items, wanted, kept, strict=False):
            assert [slot.nbytes for slot in item] == ([] if existing else nbytes)
        given = sum(existing is None for existing in kept[: len(items)])
        refused = self.session.stats().refused_stores - refused_before
        assert refused == kept.count(None) - given
        evicted = [row for row in self.model.order if not self.is_there(*row.key)]
        # In the order of eviction, without a gap.
        assert set(evicted) == set(evictable[: len(evicted)])
        for row in evicted:
            self.model.remove(row)
        assert not self.model.owned() & {s for item in items for s in item if s.nbytes}
        if not given:
            assert not evicted
            assert [dict(sizes) for sizes in self.pool._range_bytes] == free_before
        else:
            self.model.leases[store_id] = ModelLease(group, self.model.generation, items)
        if len(items) < len(wanted):
            # Not even with everything evicted would there be one place for all its shards.
            assert kept[len(items)] is None
            rest = {s for row in evictable if row.visible for s in row.slots}
            need = sum(pages_of(nbytes) for nbytes in wanted[len(items)])
            assert self.longest_run(self.model.owned() - rest) < need
        new = [item for item, existing in zip(wanted, kept, strict=True) if existing is None]
        if self.longest_run(used_before) >= sum(pages_of(n) for item in new for n in item):
            assert not evicted
            assert len(items) == len(wanted)

    @rule(
        group=st.sampled_from(sorted(SHARDS)),
        prompt=st.sampled_from(PROMPTS),
        first=st.integers(0, 3),
        pages=st.integers(1, 2),
        protecting=st.booleans(),
    )
    def store(self, group: str, prompt: str, first: int, pages: int, protecting: bool) -> None:
        """What a step does: the next two chunks of a prompt, reported at once."""
        sizes = [[pages] * 2] * 2
        protect = PARENTS[prompt[first]] if protecting else None
        before = set(self.model.leases)
        self.prepare_store(group, sizes, prompt[first : first + 2], protect)
        for store_id in set(self.model.leases) - before:
            self.commit(store_id, prompt[first:], [True] * 2)

    def is_there(self, chunk: str, group: str) -> bool:
        return self.engine.rows.index.get((chunk.encode(), group)) is not None

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def complete_store(self, data: st.DataObject) -> None:
        store_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        prompt = data.draw(st.sampled_from(PROMPTS))
        first = data.draw(st.integers(0, 4))
        chosen = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
        self.commit(store_id, prompt[first:], chosen)

    def commit(self, store_id: int, prompt: str, chosen: list[bool]) -> None:
        """Publish the chosen items of a lease under consecutive chunks of ``prompt``."""
        lease = self.model.leases.pop(store_id)
        commits = []
        for index, (slots, chunk, publish) in enumerate(
            zip(lease.items, prompt, chosen, strict=False)
        ):
            if not publish or not slots:
                continue
            digests = [store_id * 10 + index + shard for shard in range(len(slots))]
            parent = PARENTS[chunk]
            key = (chunk.encode(), None if parent is None else parent.encode(), lease.group)
            commits.append(Commit(index, *key, digests))
            if lease.generation == self.model.generation:
                self.model.add(chunk, lease.group, slots, digests)
        self.session.complete_store(store_id, commits)
        if lease.generation == self.model.generation:
            stored = [commit.chunk_hash.decode() for commit in commits]
            for chunk in stored:
                if chunk not in [PARENTS[other] for other in stored]:
                    self.model.touch(chunk)

    @rule(
        lookup_id=st.integers(1, 3),
        prompt=st.sampled_from(PROMPTS),
        first=st.integers(0, 2),
        last=st.integers(2, 5),
    )
    def lookup(self, lookup_id: int, prompt: str, first: int, last: int) -> None:
        asked = prompt[first:last]
        reply = self.session.lookup(lookup_id, [chunk.encode() for chunk in asked], first)
        expected = [
            [sum(1 << i for i, c in enumerate(asked) if self.model.get(c, tag))] * num_shards
            for tag, num_shards in SHARDS.items()
        ]
        assert reply.present == expected
        self.model.lookups[lookup_id] = [
            row for chunk in asked for row in self.model.of_chunk(chunk)
        ]

    @rule(lookup_id=st.integers(1, 3))
    def release(self, lookup_id: int) -> None:
        self.session.release(lookup_id)
        self.model.lookups.pop(lookup_id, None)

    def draw_rows(self, data: st.DataObject, rows: list[ModelRow]) -> list[ModelRow]:
        return [row for row in rows if data.draw(st.booleans())]

    @rule(lookup_id=st.integers(1, 3), data=st.data())
    def narrow(self, lookup_id: int, data: st.DataObject) -> None:
        rows = self.model.lookups.get(lookup_id)
        kept = self.draw_rows(data, rows or [])
        keep = [row.key for row in kept]
        if data.draw(st.booleans()):
            # One that the lookup did not pin, because it was not there or was not asked for.
            chunk = data.draw(st.sampled_from(sorted(PARENTS)))
            keep += [(chunk, group) for group in SHARDS if (chunk, group) not in keep][:1]
        state = self.session.narrow(lookup_id, [encoded(key) for key in keep])
        if rows is None:
            assert state is (LookupState.GONE if keep else LookupState.READY)
            return
        for row in rows:
            if row.key[0] in {chunk for chunk, _ in keep}:
                row.follows = row.key in keep
        for key in keep[len(kept) :]:
            held = {row.key: row for row in rows}
            other = held.get(key) or self.model.get(*key)
            kept += [other] if other is not None else []
        assert state is (LookupState.READY if len(kept) == len(keep) else LookupState.GONE)
        self.model.lookups[lookup_id] = kept
        if not keep:
            del self.model.lookups[lookup_id]
        elif state is LookupState.READY:
            self.model.touch(keep[-1][0])

    @rule(lookup_id=st.integers(1, 3), data=st.data())
    def prepare_load(self, lookup_id: int, data: st.DataObject) -> None:
        rows = self.model.lookups.pop(lookup_id, [])
        wanted = data.draw(st.permutations(self.draw_rows(data, rows)))
        load_id = next(self.ids)
        reply = self.session.prepare_load(load_id, lookup_id, [encoded(row.key) for row in wanted])
        if not all(row.visible for row in wanted):
            assert reply is None
            return
        assert reply is not None
        assert [(row.slots, row.digests) for row in reply] == [
            (row.slots, row.digests) for row in wanted
        ]
        self.model.loads[load_id] = wanted

    @precondition(lambda self: self.model.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        load_id = data.draw(st.sampled_from(sorted(self.model.loads)))
        rows = self.model.loads.pop(load_id)
        drop = self.draw_rows(data, rows)
        self.session.complete_load(load_id, [encoded(row.key) for row in drop])
        for row in drop:
            if row.visible:
                self.model.remove(row)

    @rule(often=st.integers(0, 4))
    def clear(self, often: int) -> None:
        if often:
            return
        self.session.clear(next(self.ids).to_bytes(32, "big"))
        for row in self.model.order:
            row.visible = False
        self.model.order.clear()
        self.model.links.clear()
        self.model.generation += 1

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.session.check_integrity(self.model.loads, self.model.leases)
        entries = self.engine.rows.index.entries()
        order = [(key[0].decode(), key[1]) for key in (entry.key for entry in entries)]
        assert order == [row.key for row in self.model.order]
        assert set(self.pool.used_slots()) == self.model.owned()
        stats = self.session.stats()
        used_pages = sum(pages_of(slot.nbytes) for slot in self.model.owned())
        assert stats.used_bytes == used_pages * PAGE
        assert stats.ready_bytes == sum(EXTENT_PAGES[: self.num_ready]) * PAGE
        assert stats.rows == len(self.model.order)
        assert stats.busy_rows == len(set(self.model.pinned()))
        assert stats.leases == len(self.model.leases)


TestEngineAgainstModel = EngineMachine.TestCase
TestEngineAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
