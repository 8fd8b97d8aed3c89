"""Two sessions and a tier whose jobs run in any order: no row is ever wrong, lost or left over."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from unittest import mock

import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage import tiering
from lmcache_connector.storage.base import (
    Commit,
    GroupShards,
    LookupState,
    NewRow,
    Row,
    RowKey,
    TierCounters,
)
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.index import Entry
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.storage.tiering import Channel, Job, Tiering, Work
from lmcache_connector.storage.tiers.base import Tier, TierError, pack_header, value_name
from lmcache_connector.storage.tiers.memory import MemoryTier

PAGE = 4096
NAMESPACE = b"\xaa" * 32
PROMPT = "abcdef"
# The chunks of a prompt take turns: rows of one and of two pages.
GROUPS = [
    GroupShards("full", [[100, 0], [200, 50]]),
    GroupShards("state", [[300], [300]]),
]
SIZES = {group.tag: group for group in GROUPS}
READY, PENDING, GONE = LookupState.READY, LookupState.PENDING, LookupState.GONE


ALL_KEYS: list[RowKey] = [(chunk.encode(), group.tag) for group in GROUPS for chunk in PROMPT]


def sizes_of(key: RowKey) -> list[int]:
    return SIZES[key[1]].row_sizes(PROMPT.index(key[0].decode()))


def content(key: RowKey) -> list[bytes]:
    """By shard."""
    return [
        random.Random(f"{key} {shard}").randbytes(nbytes)
        for shard, nbytes in enumerate(sizes_of(key))
    ]


def digests_of(key: RowKey) -> list[int]:
    return [xxhash.xxh3_64_intdigest(part) if part else 0 for part in content(key)]


class ChannelByHand(Channel):
    """Its jobs run when they are told to."""

    def __init__(self, url: str, tier: Tier) -> None:
        self.url, self.tier, self.counters = url, tier, TierCounters()
        self._lock = threading.Lock()
        self._threads = []
        self.jobs: list[Job] = []
        self.clears = [0, 0]
        self.is_down = False

    def is_usable(self, work: Work = "write") -> bool:
        return not self.is_down

    def submit(self, job: Job, work: Work) -> bool:
        if self.is_down or len(self.jobs) >= 12:
            return False
        self.jobs.append(job)
        return True

    def run(self, index: int, *, given_up: bool = False) -> None:
        job = self.jobs.pop(index)
        try:
            job(None if given_up else self.tier)
        except TierError:
            self.count(errors=1)

    def close(self, deadline: float) -> None:
        assert not self.jobs


class InterruptedTier(MemoryTier):
    """Things happen while it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] = lambda: None
        self.fails = False

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        self.meanwhile()
        if self.fails:
            raise TierError("no answer")
        return super().get(name, buffers)

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self.meanwhile()
        if self.fails:
            raise TierError("no room")
        super().put(name, buffers)


class TieringMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        pool = MemoryPool(8 * PAGE, 5 * PAGE)
        self.memory = pool.map()
        self.tier = InterruptedTier()
        with mock.patch.object(tiering, "Channel", ChannelByHand):
            opened = Tiering([("memory://", self.tier)], self.memory)
        (channel,) = opened.channels
        assert isinstance(channel, ChannelByHand)
        self.channel = channel
        self.engine = StorageEngine(pool, opened, 2 * PAGE, shared=True)
        for extent in range(len(pool.extents)):
            self.engine.mark_ready(extent)
        self.sessions = [self.open_session(), self.open_session()]
        self.ids = iter(range(100, 1 << 30))
        # (session, lookup id) -> what was told to be there.
        self.lookups: dict[tuple[int, int], list[RowKey]] = {}
        self.loads: dict[tuple[int, int], list[RowKey]] = {}
        self.stores: dict[tuple[int, int], list[tuple[RowKey, list[SlotRef]]]] = {}

    def open_session(self) -> StoreSession:
        return self.engine.open_session(NAMESPACE, GROUPS, PoolRef("/nowhere", "1"))

    def teardown(self) -> None:
        self.channel.is_down = self.tier.fails = False
        self.run_all()
        for number, session in enumerate(self.sessions):
            session.check_integrity(
                [load for owner, load in self.loads if owner == number],
                [store for owner, store in self.stores if owner == number],
            )
            session.close()
        self.run_all()
        assert self.engine.stats().busy_rows == 0
        self.engine.clear_namespace(NAMESPACE.hex()[:16])
        self.run_all()
        self.engine.check_integrity()
        assert self.engine.stats().used_bytes == 0
        assert not self.engine._fetches
        assert not any(self.engine._writing)
        assert self.engine._writing_bytes == [0]
        assert not self.tier._values
        self.engine.close()

    def run_all(self) -> None:
        while self.channel.jobs:
            self.channel.run(0)

    def bytes_of(self, row: Row) -> list[bytes]:
        return [
            bytes(self.memory[slot.extent][slot.offset : slot.offset + slot.nbytes])
            for slot in row.slots
        ]

    def check_row(self, key: RowKey, row: Row) -> None:
        assert self.bytes_of(row) == content(key)
        assert row.digests == digests_of(key)

    # ---- the tier -------------------------------------------------------------------------------

    @initialize(held=st.sets(st.sampled_from(ALL_KEYS)))
    def rows_of_before(self, held: set[RowKey]) -> None:
        for key in held:
            name = value_name(NAMESPACE.hex()[:16], *key)
            header = pack_header(name, sizes_of(key), digests_of(key))
            self.tier.put(name, [memoryview(part) for part in (header, *content(key))])

    @rule()
    def run_all_jobs(self) -> None:
        self.run_all()

    @precondition(lambda self: self.channel.jobs)
    @rule(data=st.data(), given_up=st.sampled_from([False, False, False, True]))
    def run_job(self, data: st.DataObject, given_up: bool) -> None:
        """A job begins and ends; in the middle, something else may happen."""
        index = data.draw(st.integers(0, len(self.channel.jobs) - 1))
        if data.draw(st.booleans()):
            self.tier.meanwhile = lambda: self.interrupt(data)
        self.channel.run(index, given_up=given_up)
        self.tier.meanwhile = lambda: None

    def interrupt(self, data: st.DataObject) -> None:
        number, lookup_id = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 2))
        match data.draw(st.integers(0, 5)):
            case 0:
                self.release(number, lookup_id)
            case 1:
                self.narrow(number, lookup_id, data)
            case 2:
                self.store(number, data.draw(st.integers(0, 4)), 2, data)
            case 3:
                self.clear_namespace(0)
            case 4:
                self.lookup(number, lookup_id, data.draw(st.integers(0, 2)), 5)
            case 5:
                self.end_session(number, 0)
        self.engine.check_integrity()

    @rule(state=st.sampled_from(["well", "well", "well", "down", "fails"]))
    def tier_changes(self, state: str) -> None:
        self.channel.is_down, self.tier.fails = state == "down", state == "fails"

    @precondition(lambda self: self.tier._values)
    @rule(data=st.data(), bit=st.integers(0, 1 << 20), is_removed=st.booleans())
    def value_changes(self, data: st.DataObject, bit: int, is_removed: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.tier._values)))
        if is_removed:
            self.tier.remove(name)
            return
        value = bytearray(self.tier._values[name])
        value[bit // 8 % len(value)] ^= 1 << bit % 8
        self.tier._values[name] = bytes(value)

    # ---- lookups and loads ----------------------------------------------------------------------

    @rule(
        number=st.integers(0, 1),
        lookup_id=st.integers(1, 2),
        first=st.integers(0, 3),
        last=st.integers(3, 6),
    )
    def lookup(self, number: int, lookup_id: int, first: int, last: int) -> None:
        self.find(number, lookup_id, first, last)

    def find(self, number: int, lookup_id: int, first: int, last: int) -> list[RowKey] | None:
        """The keys that are told to be there, when the answer is final."""
        session = self.sessions[number]
        asked = [chunk.encode() for chunk in PROMPT[first:last]]
        reply = session.lookup(lookup_id, asked, first)
        told = []
        for group, by_shard in zip(GROUPS, reply.present, strict=True):
            assert by_shard == [by_shard[0]] * group.num_shards
            assert by_shard[0] >> len(asked) == 0
            told += [(c, group.tag) for i, c in enumerate(asked) if by_shard[0] >> i & 1]
        self.lookups[number, lookup_id] = told
        if reply.state is PENDING:
            # What is told meanwhile is in the pool, and stays.
            assert set(told) <= session.lookups[lookup_id].pinned.keys()
            return None
        assert reply.state is READY
        return told

    @rule(number=st.integers(0, 1), lookup_id=st.integers(1, 2), data=st.data())
    def narrow(self, number: int, lookup_id: int, data: st.DataObject) -> None:
        told = self.lookups.get((number, lookup_id), [])
        how = data.draw(st.sampled_from(["all", "all", "some", "any"]))
        choices = ALL_KEYS if how == "any" else told
        keep = [key for key in choices if how == "all" or data.draw(st.booleans())]
        self.settle(number, lookup_id, keep)

    def settle(self, number: int, lookup_id: int, keep: list[RowKey]) -> LookupState:
        session = self.sessions[number]
        state = session.narrow(lookup_id, keep)
        look = session.lookups.get(lookup_id)
        if state is READY and keep:
            assert look is not None
            assert look.pinned.keys() == set(keep)
            assert not look.fetching
            for key, entry in look.pinned.items():
                assert entry.pins > 0
                self.check_row(key, entry.row)
        elif state is PENDING:
            assert look is not None
            assert look.fetching <= self.engine._fetches.keys()
        return state

    @rule(number=st.integers(0, 1), lookup_id=st.integers(1, 2))
    def release(self, number: int, lookup_id: int) -> None:
        self.sessions[number].release(lookup_id)
        self.lookups.pop((number, lookup_id), None)

    @rule(number=st.integers(0, 1), first=st.integers(0, 3))
    def request(self, number: int, first: int) -> None:
        """All of a request's rounds, with the tier's jobs run whenever it has to wait."""
        lookup_id, load_id = 3, next(self.ids)
        for _ in range(2 * len(PROMPT) + 3):
            found = self.find(number, lookup_id, first, len(PROMPT))
            if found is None:
                self.run_all()
                continue
            state = self.settle(number, lookup_id, found)
            if state is PENDING:
                self.run_all()
                state = self.settle(number, lookup_id, found)
            assert state is not PENDING, "nothing runs any more"
            if state is READY:
                break
        else:
            raise AssertionError("the answer does not become final")
        rows = self.sessions[number].prepare_load(load_id, lookup_id, found)
        del self.lookups[number, lookup_id]
        if rows is not None:
            for key, row in zip(found, rows, strict=True):
                self.check_row(key, row)
            self.loads[number, load_id] = found

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        number, load_id = data.draw(st.sampled_from(sorted(self.loads)))
        rows = self.loads.pop((number, load_id))
        drop = [key for key in rows if data.draw(st.integers(0, 4)) == 0]
        self.sessions[number].complete_load(load_id, drop)

    # ---- stores ---------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, 1), first=st.integers(0, 4), count=st.integers(1, 2), data=st.data()
    )
    def store(self, number: int, first: int, count: int, data: st.DataObject) -> None:
        chunks = PROMPT[first : first + count]
        wanted = [(chunk.encode(), group.tag) for chunk in chunks for group in GROUPS]
        keyed = data.draw(st.booleans())
        rows = [NewRow(sizes_of(key), key if keyed else None) for key in wanted]
        store_id = next(self.ids)
        prefix = [chunk.encode() for chunk in PROMPT[:first]]
        items = self.sessions[number].prepare_store(store_id, rows, prefix)
        if any(items):
            given = list(zip(wanted[: len(items)], items, strict=True))
            self.stores[number, store_id] = given
            if data.draw(st.booleans()):
                self.finish_store(number, store_id, [True] * len(given))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def complete_store(self, data: st.DataObject) -> None:
        number, store_id = data.draw(st.sampled_from(sorted(self.stores)))
        given = self.stores[number, store_id]
        self.finish_store(number, store_id, [data.draw(st.booleans()) for _ in given])

    def finish_store(self, number: int, store_id: int, published: list[bool]) -> None:
        commits = []
        for index, (key, slots) in enumerate(self.stores.pop((number, store_id))):
            for slot, part in zip(slots, content(key), strict=False):
                self.memory[slot.extent][slot.offset : slot.offset + slot.nbytes] = part
            position = PROMPT.index(key[0].decode())
            parent = PROMPT[position - 1].encode() if position else None
            if slots and published[index]:
                commits.append(Commit(index, key[0], parent, key[1], digests_of(key)))
        self.sessions[number].complete_store(store_id, commits)

    # ---- the rest -------------------------------------------------------------------------------

    @rule(often=st.integers(0, 3))
    def clear_namespace(self, often: int) -> None:
        if not often:
            self.engine.clear_namespace(NAMESPACE.hex()[:16])

    @rule(chunk=st.sampled_from(PROMPT), pinned=st.booleans())
    def set_pinned(self, chunk: str, pinned: bool) -> None:
        self.engine.set_pinned([chunk.encode()], pinned)

    @rule(number=st.integers(0, 1), often=st.integers(0, 5))
    def end_session(self, number: int, often: int) -> None:
        """A client and its workers die, and come back."""
        if often:
            return
        self.sessions[number].close()
        self.sessions[number] = self.open_session()
        for table in (self.lookups, self.loads, self.stores):
            for owner, key in list(table):
                if owner == number:
                    del table[owner, key]  # type: ignore[attr-defined]

    @invariant()
    def all_rows_are_what_they_should_be(self) -> None:
        self.engine.check_integrity()
        held: set[Entry] = set(self.engine.rows.index.entries())
        for session in self.sessions:
            for entries in session.pinned():
                held.update(entries)
        for entry in held:
            self.check_row(entry.key, entry.row)
        assert len(self.engine._fetches) <= len(self.channel.jobs)
        # Rows that wait for the tier leave room for others.
        waiting = sum(entry.num_bytes for entry in self.engine._writing[0])
        assert self.engine._writing_bytes == [waiting]


TestTieringAgainstModel = TieringMachine.TestCase
TestTieringAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
