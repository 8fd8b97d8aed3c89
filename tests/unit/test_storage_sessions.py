"""Several sessions on one engine: what they share, what they do not, and what is left of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import Commit, GroupShards, LookupState, NewRow, RowKey
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.index import Entry
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession

PAGE = 4096
NOWHERE = PoolRef("/nowhere", "1")
ALPHA, BETA, GAMMA = (bytes([number]) * 32 for number in (0xA, 0xB, 0xC))
OpenEngine = Callable[..., StorageEngine]


def name_of(namespace: bytes) -> str:
    return namespace.hex()[:16]


def open_session(
    engine: StorageEngine, namespace: bytes = ALPHA, num_shards: int = 1
) -> StoreSession:
    groups = [GroupShards("full", [[PAGE] * num_shards])]
    return engine.open_session(namespace, groups, NOWHERE)


def keys(letters: str) -> list[RowKey]:
    return [(letter.encode(), "full") for letter in letters]


def chunks(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def new(session: StoreSession, count: int) -> list[NewRow]:
    """Rows of one page a shard whose keys are not known."""
    return [NewRow(session.groups["full"].row_sizes(0))] * count


def commits(session: StoreSession, letters: str) -> list[Commit]:
    parents = [None, *chunks(letters)]
    digests = [7] * session.groups["full"].num_shards
    return [
        Commit(index, chunk, parents[index], "full", digests)
        for index, chunk in enumerate(chunks(letters))
    ]


def store(session: StoreSession, letters: str, store_id: int = 1000) -> int:
    """Store a chain of rows; how many found room."""
    items = session.prepare_store(store_id, new(session, len(letters)), [])
    if items:
        session.complete_store(store_id, commits(session, letters[: len(items)]))
    return len(items)


def there(engine: StorageEngine, letters: str) -> str:
    return "".join(key[0].decode() for key in keys(letters) if engine.rows.index.get(key))


def load(session: StoreSession, letters: str, load_id: int) -> list[SlotRef]:
    """Open a load; its slots."""
    session.lookup(load_id, chunks(letters), 0)
    assert session.narrow(load_id, keys(letters)) is LookupState.READY
    rows = session.prepare_load(load_id, load_id, keys(letters))
    assert rows is not None
    return [slot for row in rows for slot in row.slots]


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    made: list[StorageEngine] = []

    def make(pages: int, floor_pages: int = 0, *, shared: bool = True) -> StorageEngine:
        engine = StorageEngine(MemoryPool(pages * PAGE), None, floor_pages * PAGE, shared=shared)
        engine.mark_ready(0)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check_integrity()
        for session in list(engine.sessions):
            session.close()
        engine.clear_namespace("")
        engine.check_integrity()
        assert engine.stats().used_bytes == 0
        engine.close()


# ---- together -----------------------------------------------------------------------------------


def test_a_second_session_hits_what_the_first_stored(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    first, second = open_session(engine), open_session(engine)
    store(first, "abc")
    assert second.lookup(1, chunks("abcd"), 0).present == [[0b111]]
    first.close()
    assert second.narrow(1, keys("abc")) is LookupState.READY
    rows = second.prepare_load(1, 1, keys("abc"))
    assert rows is not None
    assert len({row.slots[0] for row in rows}) == 3
    second.complete_load(1)


def test_models_of_other_shapes_do_not_meet(open_engine: OpenEngine) -> None:
    engine = open_engine(12)
    two, three = open_session(engine, ALPHA, 2), open_session(engine, BETA, 3)
    store(two, "ab")
    store(three, "x")
    assert two.lookup(1, chunks("abx"), 0).present[0][0] & 0b11 == 0b11
    assert len(two.lookup(1, chunks("ab"), 0).present[0]) == 2
    assert three.lookup(1, chunks("x"), 0).present == [[1, 1, 1]]
    assert engine.namespaces() == {
        name_of(ALPHA): (2, 4 * PAGE, 0),
        name_of(BETA): (1, 3 * PAGE, 0),
    }
    # A store is checked against the shape of its own session.
    (items,) = three.prepare_store(5, new(three, 1), [])
    assert len(items) == 3
    with pytest.raises(ValueError, match="has 3 shards"):
        three.complete_store(5, [Commit(0, b"y", None, "full", [1, 2])])
    three.complete_store(5, [])


def test_ids_of_sessions_do_not_collide(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    first, second = open_session(engine), open_session(engine)
    store(first, "ab")
    for session in (first, second):
        load(session, "a", load_id=1)
        assert session.prepare_store(1, new(session, 1), [])
        session.lookup(2, chunks("b"), 0)
    first.complete_load(1)
    first.complete_store(1, [])
    first.release(2)
    second.check_integrity(loads=[1], stores=[1])
    first.check_integrity(loads=[], stores=[])
    stats = engine.stats()
    assert (stats.busy_rows, stats.leases) == (2, 1)
    assert len(second.loads) == 1
    second.complete_load(1)
    second.complete_store(1, [])
    with pytest.raises(AssertionError, match="stores"):
        first.check_integrity(loads=[], stores=[1])


def test_a_lookup_with_other_hashes_replaces_the_one_before(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    session = open_session(engine)
    store(session, "abcd")
    assert session.lookup(1, chunks("ab"), 0).present == [[0b11]]
    assert session.lookup(1, tuple(chunks("cdx")), 2).present == [[0b011]]
    assert engine.stats().busy_rows == 2
    # A chunk named twice is pinned once.
    session.lookup(1, chunks("aab"), 0)
    session.check_integrity([], [])
    session.release(1)
    assert engine.stats().busy_rows == 0


# ---- ends ---------------------------------------------------------------------------------------


def test_clear_of_one_session_deletes_nothing_that_is_shared(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    first, second = open_session(engine), open_session(engine)
    store(first, "ab")
    load(first, "a", load_id=1)
    for session in (first, second):
        session.prepare_store(7, new(session, 1), [])
    first.clear(BETA)
    assert (first.namespace, second.namespace) == (name_of(BETA), name_of(ALPHA))
    assert there(engine, "ab") == "ab"
    # What it had under way publishes nothing; what others had does.
    first.complete_store(7, [Commit(0, b"m", None, "full", [1])])
    second.complete_store(7, [Commit(0, b"n", None, "full", [1])])
    assert there(engine, "mn") == "n"
    first.complete_load(1)
    # It goes on, in the new namespace.
    store(first, "x")
    assert engine.namespaces()[name_of(BETA)] == (1, PAGE, 0)
    assert second.lookup(1, chunks("abnx"), 0).present == [[0b1111]]
    second.release(1)


def test_an_embedded_engine_is_emptied_by_clear(open_engine: OpenEngine) -> None:
    engine = open_engine(8, shared=False)
    session = open_session(engine)
    store(session, "abc")
    engine.set_pinned(chunks("a"), True)
    slots = load(session, "b", load_id=1)
    session.clear(BETA)
    # Pins of a person do not keep what no key leads to any more; a load's do.
    assert engine.stats().used_bytes == PAGE
    assert list(engine.rows.pool.used_slots()) == slots
    session.complete_load(1)
    assert engine.stats().used_bytes == 0


def test_only_what_is_named_stays_open(open_engine: OpenEngine) -> None:
    engine = open_engine(16)
    session, other = open_session(engine), open_session(engine)
    store(session, "abc")
    for number, letter in enumerate("abc"):
        load(session, letter, load_id=number)
        session.prepare_store(10 + number, new(session, 2), [])
    load(other, "a", load_id=0)
    other.prepare_store(10, new(other, 1), [])
    session.keep_only(loads=[1, 77], stores=[12, 78])
    session.check_integrity(loads=[1], stores=[12])
    other.check_integrity(loads=[0], stores=[10])
    assert engine.stats().used_bytes == (3 + 2 + 1) * PAGE
    assert engine.stats().busy_rows == 2
    # What stays open goes on as if nothing had been.
    session.complete_load(1, drop=keys("b"))
    session.complete_store(12, commits(session, "xy"))
    assert there(engine, "abcxy") == "acxy"
    with pytest.raises(ValueError, match="not open"):
        session.complete_store(10, [])
    other.close()


def test_lookups_end_and_the_rest_goes_on(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    session = open_session(engine)
    store(session, "abc")
    for lookup_id in (1, 2):
        session.lookup(lookup_id, chunks("abc"), 0)
    load(session, "a", load_id=5)
    session.end_lookups()
    assert engine.stats().busy_rows == 1
    assert session.narrow(1, keys("a")) is LookupState.GONE
    assert session.prepare_load(6, 2, keys("a")) is None
    session.complete_load(5)
    assert engine.stats().busy_rows == 0


def test_nothing_is_left_of_an_abandoned_session(open_engine: OpenEngine) -> None:
    engine = open_engine(16)
    stays, goes = open_session(engine), open_session(engine)
    store(stays, "abc")
    load(stays, "a", load_id=1)
    baseline = engine.stats().used_bytes
    load(goes, "ab", load_id=1)
    goes.lookup(2, chunks("abc"), 0)
    goes.prepare_store(1, new(goes, 4), [])
    # A row that only its load still keeps in memory.
    goes.complete_load(1, drop=keys("b"))
    load(goes, "c", load_id=3)
    stays.lookup(9, chunks("c"), 0)
    stays.prepare_load(9, 9, keys("c"))
    stays.complete_load(9, drop=keys("c"))
    goes.close()
    goes.close()
    assert goes not in engine.sessions
    assert engine.stats().used_bytes == baseline - 2 * PAGE
    stats = engine.stats()
    assert (stats.busy_rows, stats.leases, stats.rows) == (1, 0, 1)
    engine.check_integrity()
    stays.check_integrity(loads=[1], stores=[])


def test_sessions_may_be_used_from_many_threads(open_engine: OpenEngine) -> None:
    engine = open_engine(24)
    failures: list[BaseException] = []

    def live(seed: int) -> None:
        rng = random.Random(seed)
        session = open_session(engine, ALPHA if seed < 2 else BETA)
        try:
            for turn in range(60):
                letters = "abcdefgh"[: rng.randrange(1, 9)]
                match rng.randrange(4):
                    case 0:
                        store(session, letters, turn)
                    case 1:
                        session.lookup(turn % 5, chunks(letters), 0)
                    case 2:
                        session.narrow(turn % 5, keys(letters))
                        if session.prepare_load(turn, turn % 5, keys(letters)) is not None:
                            session.complete_load(turn, keys(letters[-1:]))
                    case _:
                        session.check_integrity([], [])
        except BaseException as error:
            failures.append(error)
        session.close()

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures
    assert engine.stats().busy_rows == 0


# ---- rows that are kept already -----------------------------------------------------------------


def named(session: StoreSession, letters: str) -> list[NewRow]:
    return [NewRow(session.groups["full"].row_sizes(0), key) for key in keys(letters)]


def test_rows_that_are_kept_already_get_no_slots(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    first, second = open_session(engine), open_session(engine)
    store(first, "ac")
    items = second.prepare_store(1, [*named(second, "abc"), *new(second, 1)], [])
    assert [len(slots) for slots in items] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="has 1 shards"):
        second.complete_store(1, [Commit(0, b"a", None, "full", [9])])
    second.complete_store(1, [Commit(1, b"b", b"a", "full", [9])])
    assert there(engine, "abc") == "abc"
    assert engine.stats().used_bytes == 3 * PAGE
    # With nothing to write there is nothing to complete.
    assert second.prepare_store(2, named(second, "abc"), []) == [[], [], []]
    assert engine.stats().leases == 0
    with pytest.raises(ValueError, match="not open"):
        second.complete_store(2, [])
    assert engine.stats().refused_stores == 0


def test_rows_that_are_kept_already_make_no_room_for_the_others(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    session = open_session(engine)
    store(session, "ab")
    store(session, "xy")
    # Used longest ago are b and a, the row asked for among them.
    items = session.prepare_store(1, named(session, "abcde"), [])
    assert [len(slots) for slots in items] == [0, 0, 1, 1]
    assert there(engine, "abxy") == "ab"
    assert engine.stats().refused_stores == 1
    assert engine.stats().busy_rows == 0
    session.complete_store(1, [])
    # A call that finds no room at all tells of what is kept up to there.
    engine.set_pinned(chunks("ab"), True)
    load(session, "ab", load_id=1)
    assert session.prepare_store(2, [*named(session, "a"), NewRow([4 * PAGE])], []) == [[]]
    assert engine.stats().leases == 0
    session.complete_load(1)


# ---- floors -------------------------------------------------------------------------------------


class Tenants:
    """Three sessions with rows of one page each, beside the obvious model of who makes room."""

    def __init__(self, pages: int, floor_bytes: int) -> None:
        self.engine = StorageEngine(MemoryPool(pages * PAGE), None, floor_bytes, shared=True)
        self.engine.mark_ready(0)
        self.sessions = [open_session(self.engine, name) for name in (ALPHA, BETA, GAMMA)]
        self.pages, self.floor = pages, floor_bytes
        # (tenant, chunk, bytes), oldest first.
        self.order: list[tuple[int, bytes, int]] = []
        self.ids = iter(range(1, 1 << 30))

    def held(self, tenant: int) -> int:
        return sum(nbytes for owner, _, nbytes in self.order if owner == tenant)

    def make_room(self, tenant: int) -> bool:
        for victim in self.order:
            if victim[0] == tenant or self.held(victim[0]) - victim[2] >= self.floor:
                self.order.remove(victim)
                return True
        return False

    def store(self, tenant: int, sizes: Sequence[int]) -> None:
        fresh: list[tuple[int, bytes, int]] = []
        for nbytes in sizes:
            if len(self.order) + len(fresh) == self.pages and not self.make_room(tenant):
                break
            fresh.append((tenant, next(self.ids).to_bytes(4, "big"), nbytes))
        self.order += fresh
        store_id = next(self.ids)
        rows = [NewRow([nbytes]) for nbytes in sizes]
        items = self.sessions[tenant].prepare_store(store_id, rows, [])
        assert len(items) == len(fresh)
        if items:
            published = [
                Commit(index, chunk, None, "full", [1]) for index, (_, chunk, _) in enumerate(fresh)
            ]
            self.sessions[tenant].complete_store(store_id, published)

    def use(self, position: int) -> None:
        if self.order:
            row = self.order.pop(position % len(self.order))
            self.order.append(row)
            lookup_id = next(self.ids)
            session = self.sessions[row[0]]
            session.lookup(lookup_id, [row[1]], 0)
            session.narrow(lookup_id, [(row[1], "full")])
            session.release(lookup_id)

    def check(self) -> None:
        self.engine.check_integrity()
        entries = self.engine.rows.index.entries()
        assert [entry.key[0] for entry in entries] == [chunk for _, chunk, _ in self.order]

    def end(self) -> None:
        for session in self.sessions:
            session.close()
        self.engine.close()


TURNS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.lists(st.integers(1, PAGE), min_size=1, max_size=5)),
        st.integers(0, 1 << 10),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, floor_bytes=st.sampled_from([0, 1, PAGE, 3 * PAGE, 5 * PAGE, 100 * PAGE]))
def test_a_namespace_keeps_its_floor_whatever_others_store(
    turns: list[tuple[int, list[int]] | int], floor_bytes: int
) -> None:
    tenants = Tenants(10, floor_bytes)
    for turn in turns:
        before = [tenants.held(tenant) for tenant in range(3)]
        if isinstance(turn, int):
            tenants.use(turn)
        else:
            tenants.store(*turn)
        tenants.check()
        held = tenants.engine.namespaces()
        for tenant, session in enumerate(tenants.sessions):
            if isinstance(turn, int) or turn[0] != tenant:
                now = held.get(session.namespace, (0, 0, 0))[1]
                assert now >= min(before[tenant], floor_bytes)
    tenants.end()


def test_a_tenant_below_its_floor_is_not_flushed_by_another(open_engine: OpenEngine) -> None:
    engine = open_engine(8, floor_pages=3)
    small, large = open_session(engine, ALPHA), open_session(engine, BETA)
    store(small, "ab")
    for letters in ("mnopqr", "stuvwx", "yzklij"):
        assert store(large, letters) == 6
    assert there(engine, "ab") == "ab"
    assert there(engine, "yzklij") == "yzklij"
    # Its own stores take room from itself where others are at their floors.
    assert store(small, "cdefgh") == 5
    assert there(engine, "ab") == ""
    assert engine.namespaces() == {
        name_of(ALPHA): (5, 5 * PAGE, 0),
        name_of(BETA): (3, 3 * PAGE, 0),
    }


@pytest.mark.parametrize("how", ["reset", "gone"])
def test_a_floor_ends_with_the_last_session_of_its_namespace(
    open_engine: OpenEngine, how: str
) -> None:
    engine = open_engine(8, floor_pages=2)
    session, other = open_session(engine), open_session(engine, GAMMA)
    store(other, "xy")
    for number in range(1, 8):
        name = bytes([number]) * 32
        session.clear(name)
        witness = open_session(engine, name)
        store(session, "abcdef")
        session.clear(bytes(32)) if how == "reset" else session.close()
        # Another engine of that model is there: its floor holds.
        store(other, "ghijklmn")
        assert engine.namespaces()[name_of(name)] == (2, 2 * PAGE, 0)
        witness.close()
        store(other, "opqrstuv")
        assert name_of(name) not in engine.namespaces()
        session = open_session(engine) if how == "gone" else session


# ---- management ---------------------------------------------------------------------------------


def test_rows_pinned_for_a_person_are_not_evicted(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    session = open_session(engine)
    store(session, "abcd")
    assert engine.set_pinned(chunks("abq"), True) == 2
    assert engine.set_pinned(chunks("a"), True) == 1
    assert store(session, "wxyz") == 2
    assert there(engine, "abcdwxyz") == "abwx"
    assert engine.namespaces() == {name_of(ALPHA): (4, 4 * PAGE, 2)}
    engine.check_integrity()
    assert engine.set_pinned(chunks("abcd"), False) == 2
    assert engine.set_pinned(chunks("ab"), False) == 0
    assert store(session, "mnop") == 4
    assert there(engine, "abwxmnop") == "mnop"


def test_a_pinned_row_that_fails_its_check_goes_all_the_same(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    session = open_session(engine)
    store(session, "a")
    engine.set_pinned(chunks("a"), True)
    load(session, "a", load_id=1)
    session.complete_load(1, drop=keys("a"))
    assert engine.stats().used_bytes == 0
    # Its successor is a row like any other, and may be pinned again.
    store(session, "a")
    assert engine.namespaces()[name_of(ALPHA)] == (1, PAGE, 0)
    engine.set_pinned(chunks("a"), True)
    assert engine.namespaces()[name_of(ALPHA)] == (1, PAGE, 1)


def test_a_namespace_is_cleared_and_others_stay(open_engine: OpenEngine) -> None:
    engine = open_engine(8)
    first, second = open_session(engine, ALPHA), open_session(engine, BETA)
    store(first, "abc")
    store(second, "xy")
    engine.set_pinned(chunks("ax"), True)
    slots = load(first, "b", load_id=1)
    first.lookup(2, chunks("ac"), 0)
    assert engine.clear_namespace(name_of(ALPHA)) == 3
    assert there(engine, "abcxy") == "xy"
    assert engine.namespaces() == {name_of(BETA): (2, 2 * PAGE, 1)}
    # Under a pin or a load, slots stay; the lookup's rows cannot be loaded any more.
    assert set(slots) < set(engine.rows.pool.used_slots())
    assert first.prepare_load(3, 2, keys("a")) is None
    assert engine.stats().used_bytes == 3 * PAGE
    first.complete_load(1)
    assert engine.clear_namespace("no such one") == 0
    assert engine.clear_namespace("") == 2
    assert engine.stats().used_bytes == 0


def test_management_of_many_rows_keeps_nobody_waiting(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(8)
    store(open_session(engine), "abcdefgh")
    held, most = 0, 0
    is_locked, rests = False, 0
    remove, num_bytes = engine.rows.remove, Entry.num_bytes.fget

    class Lock:
        def __enter__(self) -> None:
            nonlocal held, is_locked
            held, is_locked = 0, True

        def __exit__(self, *_: object) -> None:
            nonlocal most, held, is_locked
            most, held, is_locked = max(most, held), 0, False

    def rest(seconds: float) -> None:
        nonlocal rests
        rests += seconds > 0 and not is_locked

    def worked(function: Any) -> Any:
        def work(*arguments: Any) -> Any:
            nonlocal held
            held += 1
            return function(*arguments)

        return work

    monkeypatch.setattr("lmcache_connector.storage.engine._CLEAR_ROWS", 2)
    monkeypatch.setattr(engine, "lock", Lock())
    with monkeypatch.context() as patch:
        patch.setattr(Entry, "num_bytes", property(worked(num_bytes)))
        assert engine.namespaces() == {name_of(ALPHA): (8, 8 * PAGE, 0)}
    assert most == 0
    monkeypatch.setattr(engine.rows, "remove", worked(remove))
    monkeypatch.setattr("lmcache_connector.storage.engine.time.sleep", rest)
    assert engine.clear_namespace("") == 8
    # Who has just given a lock back is the first to get it, unless it rests.
    assert (most, rests) == (2, 4)


def test_probing_takes_nothing_and_pins_nothing(open_engine: OpenEngine) -> None:
    engine = open_engine(4)
    session = open_session(engine)
    store(session, "abcd")
    assert engine.probe(name_of(ALPHA), chunks("axbc")) == ({"full": 0b1101}, {}, False)
    assert engine.stats().busy_rows == 0
    assert store(session, "z") == 1
    assert there(engine, "abcd") == "abc"
