"""Rows between the pool and its tiers: fetched, written, shared, given up; never lost or wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest
import xxhash

from lmcache_connector.errors import StartupError
from lmcache_connector.metadata import PoolRef
from lmcache_connector.storage import tiering
from lmcache_connector.storage.base import (
    Commit,
    GroupShards,
    LookupState,
    NewRow,
    RowKey,
    TierCounters,
)
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.session import StoreSession
from lmcache_connector.storage.tiering import Channel, Tiering, open_tiering
from lmcache_connector.storage.tiers.base import DroppedError, TierError, header_bytes, value_name
from lmcache_connector.storage.tiers.memory import MemoryTier

T = TypeVar("T")

PAGE = 4096
NAMESPACE = b"\xaa" * 32
NAME = NAMESPACE.hex()[:16]
OTHER = b"\xbb" * 32
# One page a row; a shard of another pipeline stage holds nothing.
SIZES = [PAGE, 0]
READY, PENDING, GONE = LookupState.READY, LookupState.PENDING, LookupState.GONE


def until(condition: Callable[[], T], seconds: float = 20.0) -> T:
    """Wait for a true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
    return value


def keys(letters: str) -> list[RowKey]:
    return [(letter.encode(), "full") for letter in letters]


def chunks(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


def content(letter: str, nbytes: int = PAGE) -> bytes:
    return random.Random(letter).randbytes(nbytes)


class FakeTier(MemoryTier):
    """Keeps what it has over a close. Verbs stop at closed gates, fail, or lie, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = {verb: threading.Event() for verb in ("contains", "get", "put", "clear")}
        self.fail: dict[str, Exception] = {}
        self.lies = False
        self.calls: Counter[str] = Counter()
        # Calls that wait at a gate now.
        self.waiting: Counter[str] = Counter()
        self.registered: list[memoryview] = []
        self.closed = False
        for gate in self.gates.values():
            gate.set()

    def _enter(self, verb: str, name: str = "") -> None:
        with self._lock:
            self.calls[verb] += 1
            self.calls[f"{verb} {name}"] += 1
            self.waiting[verb] += 1
        self.gates[verb].wait(30)
        with self._lock:
            self.waiting[verb] -= 1
        if verb in self.fail:
            raise self.fail[verb]

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory)

    def contains(self, names: Sequence[str]) -> list[bool]:
        self._enter("contains")
        return [True] * len(names) if self.lies else super().contains(names)

    def get(self, name: str, buffers: Sequence[memoryview]) -> bool:
        self._enter("get", name)
        return super().get(name, buffers)

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        self._enter("put", name)
        super().put(name, buffers)

    def clear(self, namespace: str) -> None:
        self._enter("clear")
        super().clear(namespace)

    def close(self) -> None:
        self.closed = True

    def letters(self, namespace: str = NAME) -> str:
        with self._lock:
            names = [name for name in self._values if name.startswith(namespace)]
        return "".join(sorted(chr(int(name[17:19], 16)) for name in names))


class Bench:
    """An engine over tiers, a session, and short ways to use them."""

    def __init__(
        self, *tiers: FakeTier, pages: int = 16, extent_pages: int = 0, shared: bool = True
    ) -> None:
        pool = MemoryPool(pages * PAGE, (extent_pages or pages) * PAGE)
        self.memory = pool.map()
        self.tiers = tiers
        named = [(f"memory://{index}", tier) for index, tier in enumerate(tiers)]
        self.engine = StorageEngine(pool, Tiering(named, self.memory), shared=shared)
        for extent in range(len(pool.extents)):
            self.engine.mark_ready(extent)
        self.session = self.open_session()
        self.ids = iter(range(1, 1 << 30))

    def open_session(self, namespace: bytes = NAMESPACE) -> StoreSession:
        return self.engine.open_session(
            namespace, [GroupShards("full", [SIZES])], PoolRef("/nowhere", "1")
        )

    def store(self, letters: str, session: StoreSession | None = None) -> None:
        """Store rows as a worker would; ``wait_written`` for the tiers."""
        session, store_id = session or self.session, next(self.ids)
        items = session.prepare_store(store_id, [NewRow(SIZES)] * len(letters), [])
        assert len(items) == len(letters)
        commits = []
        for index, letter in enumerate(letters):
            slot = items[index][0]
            view = self.memory[slot.extent][slot.offset : slot.offset + slot.nbytes]
            view[:] = content(letter)
            digests = [xxhash.xxh3_64_intdigest(view), 0]
            parent = letters[index - 1].encode() if index else None
            commits.append(Commit(index, letter.encode(), parent, "full", digests))
        session.complete_store(store_id, commits)

    def there(self, letters: str) -> str:
        """What is in the pool."""
        index = self.engine.rows.index
        return "".join(letter for letter in letters if index.get((letter.encode(), "full")))

    def wait_written(self) -> None:
        until(lambda: not any(self.engine._writing))

    def find(self, lookup_id: int, letters: str, session: StoreSession | None = None) -> str:
        """What a lookup says is there once it is ready."""
        session = session or self.session

        def ask() -> list[list[int]] | None:
            reply = session.lookup(lookup_id, chunks(letters), 0)
            return reply.present if reply.state is READY else None

        (present,) = until(ask)
        assert present[0] == present[1]
        return "".join(letter for bit, letter in enumerate(letters) if present[0] >> bit & 1)

    def settled(
        self, lookup_id: int, letters: str, session: StoreSession | None = None
    ) -> LookupState:
        """How a narrowing ends."""
        session = session or self.session

        def ask() -> LookupState | None:
            state = session.narrow(lookup_id, keys(letters))
            return state if state is not PENDING else None

        return until(ask)

    def load(self, letters: str) -> str:
        """One request: what it found, all of it loaded and compared."""
        lookup_id = next(self.ids)
        for _ in range(len(letters) + 1):
            found = self.find(lookup_id, letters)
            if self.settled(lookup_id, found) is READY:
                break
        else:
            pytest.fail("a lookup does not end")
        rows = self.session.prepare_load(lookup_id, lookup_id, keys(found))
        if not found:
            return ""
        assert rows is not None
        for letter, row in zip(found, rows, strict=True):
            slot = row.slots[0]
            view = self.memory[slot.extent][slot.offset : slot.offset + slot.nbytes]
            assert bytes(view) == content(letter)
            assert row.digests == [xxhash.xxh3_64_intdigest(view), 0]
        self.session.complete_load(lookup_id)
        return found

    def counters(self, tier: int = 0) -> TierCounters:
        return self.engine.stats().tiers[f"memory://{tier}"]

    def used_pages(self) -> int:
        return self.engine.stats().used_bytes // PAGE

    def end(self) -> None:
        for tier in self.tiers:
            for gate in tier.gates.values():
                gate.set()
        self.engine.check_integrity()
        for session in list(self.engine.sessions):
            session.close()
        self.close_tiers()
        for channel in self.engine.channels:
            for thread in channel._threads:
                thread.join(20)
                assert not thread.is_alive()
        # Nothing was lost on any way: not even what close gave up.
        self.engine.clear_namespace("")
        self.engine.check_integrity()
        assert self.engine.stats().used_bytes == 0
        assert not self.engine._fetches
        self.engine.close()

    def close_tiers(self) -> None:
        """What close does first."""
        assert self.engine.tiering is not None
        self.engine.tiering.close()


def resume(channel: Channel) -> None:
    """As if the time had passed for which it is left alone."""
    channel._suspended_until.update(dict.fromkeys(channel._suspended_until, 0.0))


OpenBench = Callable[..., Bench]


@pytest.fixture
def bench() -> Iterator[OpenBench]:
    made: list[Bench] = []

    def make(*tiers: FakeTier, **kwargs: int) -> Bench:
        made.append(Bench(*tiers, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture
def stored(bench: OpenBench) -> Callable[[str], FakeTier]:
    """A tier that holds rows which an engine of before has stored."""

    def make(letters: str) -> FakeTier:
        tier = FakeTier()
        before = bench(tier, pages=max(16, 4 * len(letters)))
        before.store(letters)
        before.wait_written()
        tier.calls.clear()
        return tier

    return make


Stored = Callable[[str], FakeTier]


# ---- from a tier into the pool ------------------------------------------------------------------


def test_rows_of_a_tier_are_found_fetched_and_pinned(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier)
    assert b.session.has_tiers
    tier.gates["contains"].clear()
    tier.gates["get"].clear()
    reply = b.session.lookup(1, chunks("abcd"), 0)
    assert (reply.state, reply.present) == (PENDING, [[0, 0]])
    assert b.session.lookup(1, chunks("abcd"), 0).state is PENDING
    tier.gates["contains"].set()
    assert b.find(1, "abcd") == "abc"
    assert tier.calls["contains"] == 1
    assert b.session.narrow(1, keys("abc")) is PENDING
    assert b.session.narrow(1, keys("abc")) is PENDING
    tier.gates["get"].set()
    assert b.settled(1, "abc") is READY
    assert b.engine.stats().busy_rows == 3
    rows = b.session.prepare_load(1, 1, keys("abc"))
    assert rows is not None
    assert [len(row.slots) for row in rows] == [2, 2, 2]
    b.session.complete_load(1)
    assert b.there("abc") == "abc"
    assert b.load("abc") == "abc"
    assert tier.calls["get"] == 3


def test_rows_of_the_pool_are_told_while_a_tier_is_asked(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier)
    b.load("a")
    tier.gates["contains"].clear()
    tier.calls.clear()
    reply = b.session.lookup(1, chunks("abc"), 0)
    assert (reply.state, reply.present) == (PENDING, [[0b001, 0b001]])
    # They are pinned from the first answer on.
    assert b.engine.stats().busy_rows == 1
    tier.gates["contains"].set()
    assert b.find(1, "abc") == "abc"
    assert b.settled(1, "abc") is READY
    assert tier.calls[f"get {value_name(NAME, b'a', 'full')}"] == 0


def test_a_row_that_vanished_makes_the_answer_smaller(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abcd")
    b = bench(tier)
    assert b.find(1, "abcd") == "abcd"
    for letter in "bd":
        tier.remove(value_name(NAME, letter.encode(), "full"))
    assert b.settled(1, "abcd") is GONE
    assert b.find(1, "abcd") in ("acd", "abc", "ac")
    assert b.load("abcd") == "ac"
    b.session.release(1)
    assert b.engine.stats().busy_rows == 0


def test_a_tier_that_lies_does_not_keep_a_request_waiting(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.lies = True
    b = bench(tier)
    assert b.load("abcdefgh") == ""
    counters = b.counters()
    assert (counters.hit_rows, counters.errors, counters.corrupt_rows) == (0, 0, 0)
    assert b.used_pages() == 0


def test_lookups_share_one_read(bench: OpenBench, stored: Stored) -> None:
    tier = stored("ab")
    b = bench(tier)
    other = b.open_session()
    tier.gates["get"].clear()
    for lookup_id, session in ((1, b.session), (2, b.session), (1, other)):
        assert b.find(lookup_id, "ab", session) == "ab"
        assert session.narrow(lookup_id, keys("ab")) is PENDING
    tier.gates["get"].set()
    for lookup_id, session in ((1, b.session), (2, b.session), (1, other)):
        assert b.settled(lookup_id, "ab", session) is READY
    assert tier.calls["get"] == 2
    assert [entry.pins for entry in b.engine.rows.index.entries()] == [3, 3]


def test_a_row_read_for_nobody_any_more_stays_in_the_pool(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abcdefgh")
    b = bench(tier)
    tier.gates["get"].clear()
    b.find(1, "abcdefgh")
    b.session.narrow(1, keys("abcdefgh"))
    until(lambda: tier.waiting["get"] == 4)
    # Only what is being read has memory.
    assert b.used_pages() == 4
    b.session.release(1)
    b.engine.check_integrity()
    tier.gates["get"].set()
    until(lambda: not b.engine._fetches)
    assert len(b.there("abcdefgh")) == 4
    assert tier.calls["get"] == 4
    assert b.engine.stats().busy_rows == 0


def test_a_narrower_question_leaves_out_what_is_not_wanted(
    bench: OpenBench, stored: Stored
) -> None:
    tier = stored("abcdefgh")
    b = bench(tier)
    tier.gates["get"].clear()
    b.find(1, "abcdefgh")
    assert b.session.narrow(1, keys("abcdefgh")) is PENDING
    until(lambda: tier.waiting["get"] == 4)
    assert b.session.narrow(1, keys("ah")) is PENDING
    # And back: what is still under way is waited for, not read again.
    assert b.session.narrow(1, keys("abh")) is PENDING
    tier.gates["get"].set()
    assert b.settled(1, "abh") is READY
    until(lambda: not b.engine._fetches)
    assert b.engine.stats().busy_rows == 3
    assert b.there("efg") == ""
    assert tier.calls["get"] == 5


def test_a_lookup_asked_again_pins_anew(bench: OpenBench, stored: Stored) -> None:
    tier = stored("ab")
    b = bench(tier)
    b.store("xy")
    b.wait_written()
    tier.gates["contains"].clear()
    assert b.session.lookup(1, chunks("xyab"), 0).state is PENDING
    assert b.session.narrow(1, keys("x")) is READY
    assert b.engine.stats().busy_rows == 1
    # The same question, which the tier has not answered yet.
    assert b.session.lookup(1, chunks("xyab"), 0).present == [[0b0011, 0b0011]]
    assert b.engine.stats().busy_rows == 2
    tier.gates["get"].clear()
    tier.gates["contains"].set()
    assert b.find(1, "xyab") == "xyab"
    assert b.session.narrow(1, keys("xa")) is PENDING
    assert b.find(1, "xyab") == "xyab"
    assert b.engine.stats().busy_rows == 2
    assert b.session.narrow(1, keys("xa")) is PENDING
    assert b.engine.stats().busy_rows == 1
    tier.gates["get"].set()
    assert b.settled(1, "xa") is READY
    assert tier.calls["get"] == 1


def test_sizes_of_a_row_are_those_of_its_place_in_the_prompt(bench: OpenBench) -> None:
    tier, sizes = FakeTier(), [[PAGE], [100], [5]]
    fill, b = bench(tier), bench(tier)
    for each in (fill, b):
        each.session = each.engine.open_session(
            NAMESPACE, [GroupShards("full", sizes)], PoolRef("/nowhere", "1")
        )
    rows = [NewRow(sizes[chunk % 3]) for chunk in range(6)]
    assert len(fill.session.prepare_store(1, rows, [])) == 6
    digests = [xxhash.xxh3_64_intdigest(bytes(row.sizes[0])) for row in rows]
    published = [
        Commit(index, letter, None, "full", [digests[index]])
        for index, letter in enumerate(chunks("abcdef"))
    ]
    fill.session.complete_store(1, published)
    fill.wait_written()
    until(lambda: b.session.lookup(1, chunks("bcdef"), 1).state is READY)
    assert b.settled(1, "bcdef") is READY
    fetched = {entry.key[0]: entry.num_bytes for entry in b.engine.rows.index.entries()}
    assert fetched == {b"b": 100, b"c": 5, b"d": PAGE, b"e": 100, b"f": 5}


def test_a_row_stored_while_it_is_fetched_is_kept_once(bench: OpenBench, stored: Stored) -> None:
    tier = stored("a")
    b = bench(tier)
    tier.gates["get"].clear()
    b.find(1, "a")
    b.session.narrow(1, keys("a"))
    until(lambda: tier.waiting["get"] == 1)
    b.store("a")
    assert b.used_pages() == 2
    tier.gates["get"].set()
    assert b.settled(1, "a") is READY
    until(lambda: b.used_pages() == 1)


def test_a_row_stored_before_the_turn_of_its_fetch_is_not_read(
    bench: OpenBench, stored: Stored
) -> None:
    tier = stored("abcde")
    b = bench(tier)
    b.find(1, "abcde")
    tier.gates["get"].clear()
    b.session.narrow(1, keys("abcde"))
    until(lambda: tier.waiting["get"] == 4)
    b.store("e")
    tier.gates["get"].set()
    assert b.settled(1, "abcde") is READY
    assert tier.calls["get"] == 4


def test_without_room_a_fetch_fails_and_the_answer_is_smaller(
    bench: OpenBench, stored: Stored
) -> None:
    b = bench(stored("abcdef"), pages=4)
    assert b.find(1, "abcdef") == "abcdef"
    assert b.settled(1, "abcdef") is GONE
    until(lambda: not b.engine._fetches)
    found = b.find(1, "abcdef")
    assert 3 <= len(found) <= 4
    assert b.settled(1, found) is READY
    assert b.engine.stats().busy_rows == len(found)


def test_a_pool_smaller_than_what_is_used_is_fed_by_the_tier(bench: OpenBench) -> None:
    tier = FakeTier()
    b = bench(tier, pages=4)
    for prompt in ("abcd", "efgh", "ijkl"):
        for letter in prompt:
            b.store(letter)
            b.wait_written()
    for prompt in ("abcd", "efgh", "ijkl") * 2:
        assert b.load(prompt) == prompt
        assert b.used_pages() == 4
    assert b.counters().hit_rows == tier.calls["get"] == 24
    # What came from the tier is not written to it again.
    assert tier.calls["put"] == 12


def test_other_namespaces_are_not_seen(bench: OpenBench, stored: Stored) -> None:
    b = bench(stored("ab"))
    other = b.open_session(OTHER)
    assert b.find(1, "ab", other) == ""
    b.store("x", other)
    b.wait_written()
    assert b.tiers[0].letters(OTHER.hex()[:16]) == "x"


# ---- what a tier gets wrong ---------------------------------------------------------------------

HEADER = header_bytes(len(SIZES))


@pytest.mark.parametrize(
    "position",
    [0, 8, 12, 16, 24, 32, 40, HEADER - 8, HEADER - 1, HEADER, HEADER + PAGE // 2, -1],
)
def test_a_value_changed_anywhere_is_removed_and_not_served(
    bench: OpenBench, stored: Stored, position: int
) -> None:
    tier = stored("abc")
    name = value_name(NAME, b"b", "full")
    changed = bytearray(tier._values[name])
    changed[position] ^= 0x10
    tier._values[name] = bytes(changed)
    b = bench(tier)
    assert b.find(1, "abc") == "abc"
    assert b.settled(1, "abc") is GONE
    assert until(lambda: tier.letters()) == "ac"
    assert b.load("abc") == "ac"
    assert b.counters() == TierCounters(hit_rows=2, read_bytes=2 * PAGE, corrupt_rows=1)
    # It can be stored again.
    b.store("b")
    b.wait_written()
    assert tier.letters() == "abc"


def test_a_value_of_another_row_is_not_served(bench: OpenBench, stored: Stored) -> None:
    tier = stored("ab")
    tier._values[value_name(NAME, b"a", "full")] = tier._values[value_name(NAME, b"b", "full")]
    b = bench(tier)
    assert b.load("ab") == "b"
    assert b.counters().corrupt_rows == 1


@pytest.mark.parametrize("length", [0, 1, HEADER, HEADER + PAGE - 1, HEADER + PAGE + 1])
def test_a_value_of_another_length_is_a_miss(bench: OpenBench, stored: Stored, length: int) -> None:
    tier = stored("ab")
    name = value_name(NAME, b"a", "full")
    tier._values[name] = (tier._values[name] + b"\0")[:length]
    b = bench(tier)
    assert b.load("ab") == "b"


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_value_that_cannot_be_read_costs_no_other(
    bench: OpenBench, stored: Stored, monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """It is removed. One that cannot be removed either makes the tier one to leave alone."""
    tier = stored("abcd")
    name, get = value_name(NAME, b"b", "full"), tier.get
    monkeypatch.setattr(tier, "get", lambda asked, buffers: asked != name and get(asked, buffers))

    def remove(name: str) -> None:
        raise TierError(f"{name} cannot be removed")

    if is_stuck:
        monkeypatch.setattr(tier, "remove", remove)
    b = bench(tier)
    assert b.load("b") == ""
    until(lambda: tier.letters() == ("abcd" if is_stuck else "acd"))
    assert b.load("acd") == ("" if is_stuck else "acd")
    assert b.counters().errors == is_stuck


@pytest.mark.parametrize("error", [TierError("no answer"), ValueError("a bug")])
@pytest.mark.parametrize("verb", ["contains", "get", "put"])
def test_errors_are_misses_and_lose_nothing(
    bench: OpenBench, stored: Stored, verb: str, error: Exception
) -> None:
    tier = stored("ab")
    tier.fail[verb] = error
    b = bench(tier)
    assert b.load("ab") == ("ab" if verb == "put" else "")
    b.store("x")
    b.wait_written()
    assert b.load("x") == "x"
    expected = 1 if isinstance(error, TierError) else 0
    until(lambda: b.counters().errors >= expected)
    until(lambda: not b.engine._fetches)
    b.engine.check_integrity()


def test_a_tier_that_failed_is_left_alone_for_a_while(
    bench: OpenBench, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = stored("ab")
    tier.fail["contains"] = TierError("no answer")
    b = bench(tier)
    assert b.load("ab") == ""
    until(lambda: not b.engine.channels[0].is_usable())
    del tier.fail["contains"]
    # No call at all, no wait, and what would be written is dropped.
    assert b.session.lookup(1, chunks("ab"), 0).state is READY
    b.store("x")
    assert tier.calls == Counter({"contains": 1, "contains ": 1})
    assert b.counters() == TierCounters(errors=1, dropped_rows=1)
    later = time.monotonic() + tiering._SUSPEND_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(tiering.time, "monotonic", lambda: later)
        assert b.engine.channels[0].is_usable()
    resume(b.engine.channels[0])
    # What was dropped is written when it is used again.
    assert b.load("abx") == "abx"
    b.wait_written()
    assert tier.letters() == "abx"
    assert b.counters().dropped_rows == 1


def test_a_tier_that_fails_is_left_alone_by_what_is_queued(
    bench: OpenBench, stored: Stored
) -> None:
    tier = stored("abcdefghijkl")
    b = bench(tier)
    b.find(1, "abcdefghijkl")
    tier.gates["get"].clear()
    tier.fail["get"] = TierError("no answer")
    b.session.narrow(1, keys("abcdefghijkl"))
    until(lambda: tier.waiting["get"] == 4)
    tier.gates["get"].set()
    assert b.settled(1, "abcdefghijkl") is GONE
    until(lambda: not b.engine._fetches)
    assert tier.calls["get"] == 4
    assert b.used_pages() == 0


# ---- a tier that does not answer ----------------------------------------------------------------


def test_a_hung_tier_holds_what_its_threads_read_and_others_go_on(
    bench: OpenBench, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = "abcdefghijklmnop"
    hung = stored(letters)
    b = bench(hung)
    assert b.find(1, letters) == letters
    hung.gates["get"].clear()
    assert b.session.narrow(1, keys(letters)) is PENDING
    until(lambda: hung.waiting["get"] == 4)
    assert b.used_pages() == 4
    # The pool is not held up.
    b.store("uvwxyz")
    assert b.session.lookup(2, chunks("uvw"), 0).present == [[0b111, 0b111]]
    assert b.session.narrow(2, keys("uvw")) is READY
    b.session.release(2)
    # Nor is a question, which the tier does answer.
    assert b.find(2, "abc") == "abc"
    # A call that takes too long makes the tier one to leave alone.
    monkeypatch.setattr(tiering, "_STALL_SECONDS", 0.02)
    until(lambda: not b.engine.channels[0].is_usable())
    assert b.session.lookup(3, chunks("qr"), 0).state is READY
    # Nor does it hold up the end.
    monkeypatch.setattr(tiering, "_FLUSH_SECONDS", 0.2)
    began = time.monotonic()
    b.close_tiers()
    assert time.monotonic() - began < 3
    assert not hung.closed, "its memory may still be written to"
    # What waited for its turn has ended; what hangs, holds its slots.
    assert b.session.narrow(1, keys(letters)) is GONE
    b.session.release(1)
    b.engine.check_integrity()
    assert b.used_pages() == 4 + len("uvwxyz")


def test_a_hung_tier_does_not_take_the_room_of_another(bench: OpenBench) -> None:
    hung, healthy = FakeTier(), FakeTier()
    hung.gates["put"].clear()
    b = bench(hung, healthy, pages=16)
    for letter in "abcdefghijkl":
        b.store(letter)
        until(lambda: not b.engine._writing[1])
    assert healthy.letters() == "abcdefghijkl"
    assert b.counters(1).dropped_rows == 0
    assert b.counters(0).dropped_rows == 12 - 4


def test_a_question_goes_on_to_the_next_tier(bench: OpenBench, stored: Stored) -> None:
    near, far = FakeTier(), stored("abcd")
    b = bench(near, far)
    near.fail["contains"] = TierError("no answer")
    assert b.load("ab") == "ab"
    assert (b.counters(0).errors, b.counters(1).hit_rows) == (1, 2)
    # One that is left alone is passed over.
    until(lambda: not b.engine.channels[0].is_usable())
    assert b.load("cd") == "cd"
    assert near.calls["contains"] == 1


# ---- from the pool into a tier ------------------------------------------------------------------


def test_writes_wait_in_at_most_half_of_the_pool_and_stores_never(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.gates["put"].clear()
    b = bench(tier, pages=16)
    for letter in "abcdefghijkl":
        b.store(letter)
    assert b.engine.stats().busy_rows == 8
    assert b.counters() == TierCounters(dropped_rows=4)
    # Rows that are not waiting make room.
    b.store("mnopqr")
    assert b.there("abcdefgh") == "abcdefgh"
    tier.gates["put"].set()
    b.wait_written()
    assert b.engine.stats().busy_rows == 0
    assert tier.letters() == "abcdefgh"
    # What was dropped is written when it is used, unless it has left the pool.
    b.load("mno")
    b.wait_written()
    assert tier.letters() == "abcdefghmno"
    assert b.counters().written_bytes == 11 * PAGE


def test_a_tier_that_takes_no_more_is_read_all_the_same(bench: OpenBench, stored: Stored) -> None:
    """One that is full, or read-only: each write that it refuses is one too many."""
    tier = stored("abcdef")
    tier.fail["put"] = TierError("no room")
    b = bench(tier)
    for count, letter in enumerate("abcdef", 1):
        b.store(letter.upper())
        b.wait_written()
        assert b.counters().dropped_rows == count
        assert not b.engine.channels[0].is_usable()
        assert b.load(letter) == letter
    assert b.counters().errors == tier.calls["put"] == 1
    assert b.counters().hit_rows == 6


def test_a_row_that_a_tier_refused_is_offered_again_when_it_is_used(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.fail["put"] = TierError("no room")
    b = bench(tier)
    b.store("a")
    b.wait_written()
    until(lambda: b.counters() == TierCounters(dropped_rows=1, errors=1))
    del tier.fail["put"]
    resume(b.engine.channels[0])
    assert b.load("a") == "a"
    b.wait_written()
    assert tier.letters() == "a"


def test_a_row_that_a_tier_does_not_take_now_is_offered_again_at_its_next_use(
    bench: OpenBench,
) -> None:
    """And the others are written meanwhile: nothing is wrong with the tier."""
    tier = FakeTier()
    b = bench(tier)
    for count, letter in enumerate("abc", 1):
        tier.fail["put"] = DroppedError("not now")
        b.store(letter)
        b.wait_written()
        assert b.counters().dropped_rows == count
        assert b.engine.channels[0].is_usable()
        del tier.fail["put"]
        b.store(letter.upper())
        b.wait_written()
    assert tier.letters() == "ABC"
    assert b.load("abc") == "abc"
    b.wait_written()
    assert tier.letters() == "ABCabc"
    assert b.counters() == TierCounters(written_bytes=6 * PAGE, dropped_rows=3)


def test_a_row_larger_than_half_of_the_pool_is_written_alone(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.gates["put"].clear()
    b = bench(tier, pages=1)
    b.store("a")
    assert b.engine.stats().busy_rows == 1
    tier.gates["put"].set()
    b.wait_written()
    assert tier.letters() == "a"


def test_a_row_that_is_gone_before_its_turn_is_not_written(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.gates["put"].clear()
    b = bench(tier)
    b.store("abcd")
    until(lambda: tier.waiting["put"] == 2)
    b.session.lookup(1, chunks("d"), 0)
    b.session.narrow(1, keys("d"))
    assert b.session.prepare_load(1, 1, keys("d")) is not None
    b.session.complete_load(1, drop=keys("d"))
    assert b.used_pages() == 4
    tier.gates["put"].set()
    b.wait_written()
    assert tier.letters() == "abc"
    assert b.counters() == TierCounters(written_bytes=3 * PAGE, dropped_rows=1)
    assert b.used_pages() == 3


def test_close_writes_what_is_queued(bench: OpenBench) -> None:
    tier = FakeTier()
    tier.gates["put"].clear()
    b = bench(tier, shared=False)
    b.store("abcdef")
    until(lambda: tier.waiting["put"] == 2)
    closer = threading.Thread(target=b.close_tiers)
    closer.start()
    tier.gates["put"].set()
    closer.join(20)
    assert tier.letters() == "abcdef"
    assert tier.closed
    # The first request after a restart hits.
    assert bench(tier, shared=False).load("abcdef") == "abcdef"


def test_close_gives_up_in_time_what_it_cannot_write(
    bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FakeTier()
    tier.gates["put"].clear()
    b = bench(tier)
    b.store("abcdef")
    monkeypatch.setattr(tiering, "_FLUSH_SECONDS", 0.1)
    began = time.monotonic()
    b.close_tiers()
    assert time.monotonic() - began < 3
    b.engine.check_integrity()
    # Pinned are the two that are being written.
    assert b.engine.stats().busy_rows == 2
    assert b.counters().dropped_rows == 4


def test_nothing_is_asked_of_a_closed_tiering(bench: OpenBench, stored: Stored) -> None:
    tier = stored("ab")
    b = bench(tier)
    b.find(1, "ab")
    b.close_tiers()
    assert b.session.narrow(1, keys("ab")) is GONE
    assert b.session.lookup(2, chunks("ab"), 0).state is READY
    assert tier.calls["get"] == 0


# ---- several tiers ------------------------------------------------------------------------------


def test_the_nearest_tier_serves_and_is_given_what_only_a_far_one_had(
    bench: OpenBench, stored: Stored
) -> None:
    near, far = stored("ab"), stored("abcd")
    b = bench(near, far)
    assert b.load("abcd") == "abcd"
    b.wait_written()
    assert (near.calls["get"], far.calls["get"]) == (2, 2)
    assert (b.counters(0).hit_rows, b.counters(1).hit_rows) == (2, 2)
    assert near.letters() == "abcd"
    # Nothing is written again to where it came from, nor to those behind.
    assert (near.calls["put"], far.calls["put"]) == (2, 0)
    # Only what the near one lacks is asked of the far one.
    b.engine.clear_namespace(OTHER.hex()[:16])
    near.calls.clear()
    far.calls.clear()
    assert b.find(next(b.ids), "wx") == ""
    assert (near.calls["contains"], far.calls["contains"]) == (1, 1)


def test_rows_are_written_to_every_tier(bench: OpenBench) -> None:
    near, far = FakeTier(), FakeTier()
    b = bench(near, far)
    b.store("abc")
    b.wait_written()
    assert (near.letters(), far.letters()) == ("abc", "abc")
    assert b.engine.stats().busy_rows == 0
    assert b.load("abc") == "abc"
    assert (near.calls["put"], far.calls["put"]) == (3, 3)


def test_counters_add_up_and_a_snapshot_stays_as_it_is(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier)
    before = b.counters()
    b.load("abc")
    b.store("xy")
    b.wait_written()
    assert before == TierCounters()
    assert b.counters() == TierCounters(hit_rows=3, read_bytes=3 * PAGE, written_bytes=2 * PAGE)
    # Found once each, whether in the pool or a tier.
    assert (b.session.asked_rows, b.session.found_rows) == (3, 3)


# ---- management ---------------------------------------------------------------------------------


def test_a_namespace_is_cleared_in_tiers_too(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier)
    other = b.open_session(OTHER)
    b.store("x", other)
    b.load("a")
    b.wait_written()
    b.find(1, "bc")
    assert b.engine.clear_namespace(NAME) == 1
    until(lambda: tier.letters() == "")
    assert tier.letters(OTHER.hex()[:16]) == "x"
    # A lookup that was told of them is told better.
    assert b.settled(1, "bc") is GONE
    assert b.load("abc") == ""
    # Of all namespaces, those too whose sessions have ended.
    other.close()
    assert b.engine.clear_namespace("") == 1
    until(lambda: tier.letters(OTHER.hex()[:16]) == "")


def test_what_is_being_written_is_cleared_too(bench: OpenBench) -> None:
    tier = FakeTier()
    house = bench(tier)
    tier.gates["put"].clear()
    house.store("a")
    until(lambda: tier.waiting["put"])
    assert house.engine.clear_namespace(NAME) == 1
    until(lambda: tier.calls["clear"] and not tier.waiting["clear"])
    tier.gates["put"].set()
    until(lambda: not house.engine.stats().busy_rows)
    assert tier.letters() == ""
    assert house.find(1, "a") == ""


@pytest.mark.parametrize("namespace", [NAME, ""])
@pytest.mark.parametrize("order", ["answer first", "clear first"])
def test_what_is_under_way_when_it_is_cleared_does_not_come_in(
    bench: OpenBench, stored: Stored, namespace: str, order: str
) -> None:
    near, far = FakeTier(), stored("abcdef")
    b = bench(near, far)
    get, may_answer, has_read = far.get, threading.Event(), threading.Semaphore(0)

    def get_late(name: str, buffers: Sequence[memoryview]) -> bool:
        found = get(name, buffers)
        has_read.release()
        return may_answer.wait(20) and found

    far.get = get_late  # type: ignore[method-assign]
    # Rows that are being read, that wait for their turn, that are asked for meanwhile; a store.
    assert b.find(1, "abcde") == "abcde"
    assert b.find(2, "f") == "f"
    assert b.session.narrow(1, keys("abcde")) is PENDING
    assert all(has_read.acquire(timeout=20) for _ in range(4))
    items = b.session.prepare_store(90, [NewRow(SIZES)], [])
    far.gates["clear"].clear()
    b.engine.clear_namespace(namespace)
    assert b.session.narrow(2, keys("f")) is GONE
    if order == "clear first":
        far.gates["clear"].set()
        until(lambda: not far.letters())
    may_answer.set()
    until(lambda: not b.engine._fetches)
    far.gates["clear"].set()
    until(lambda: not far.letters())
    b.session.complete_store(90, [Commit(0, b"x", None, "full", [1, 0])])
    assert items != [[]]
    assert b.settled(1, "abcde") is GONE
    for letter in "abcdefx":
        assert b.load(letter) == ""
    b.wait_written()
    assert (b.used_pages(), near.letters(), far.letters()) == (0, "", "")
    # What is stored from now on stays.
    b.store("x")
    b.wait_written()
    assert (b.load("x"), near.letters(), far.letters()) == ("x", "x", "x")


def test_what_is_asked_for_while_the_pool_is_cleared_does_not_come_in(
    bench: OpenBench, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = stored("ab")
    b = bench(tier)
    other = b.open_session(OTHER)
    b.store("xy", other)
    b.store("z")
    b.wait_written()
    assert b.find(1, "ab") == "ab"
    clear = tier.clear

    def cleared(namespace: str) -> None:
        assert b.settled(1, "ab") is GONE
        clear(namespace)

    assert b.engine.tiering is not None
    queue_clear = b.engine.tiering.clear

    def clear_at_last(namespace: str) -> None:
        assert b.settled(1, "ab") is GONE
        queue_clear(namespace)

    monkeypatch.setattr(tier, "clear", cleared)
    monkeypatch.setattr(b.engine.tiering, "clear", clear_at_last)
    assert b.engine.clear_namespace(NAME) == 1
    until(lambda: tier.letters() == "")
    until(lambda: not b.engine.channels[0].clears[0])
    assert b.there("abz") == ""
    # Others are served again.
    assert b.there("xy") == "xy"
    b.store("a")
    b.wait_written()
    assert b.load("a") == "a"


def test_clear_of_a_session_leaves_tiers_as_they_are(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier, shared=False)
    b.load("ab")
    b.session.clear(OTHER)
    assert b.used_pages() == 0
    assert b.load("abc") == ""
    assert tier.letters() == "abc"


def test_probing_asks_the_tiers(bench: OpenBench, stored: Stored) -> None:
    tier = stored("abc")
    b = bench(tier)
    b.load("a")
    tier.gates["contains"].clear()
    asked = chunks("abcd")
    assert b.engine.probe(NAME, asked) == ({"full": 0b0001}, {}, True)
    assert b.engine.probe(NAME, asked) == ({"full": 0b0001}, {}, True)
    tier.gates["contains"].set()
    until(lambda: not b.engine.probe(NAME, asked)[2])
    answer = until(lambda: b.engine.probe(NAME, asked)[1])
    assert answer == {"full": 0b0111}
    assert tier.calls["get"] == 1


# ---- opening ------------------------------------------------------------------------------------


def test_tiers_know_the_memory_they_read_into(bench: OpenBench) -> None:
    tier = FakeTier()
    b = bench(tier, pages=8, extent_pages=2)
    assert [len(view) for view in tier.registered] == [2 * PAGE] * 4
    for letters in ("abcd", "efgh"):
        b.store(letters)
        b.wait_written()
    fresh = bench(tier, pages=8, extent_pages=2)
    assert fresh.load("abcdefgh") == "abcdefgh"


def test_all_urls_are_checked_at_once() -> None:
    pool = MemoryPool(PAGE)
    assert not open_tiering([], pool).channels
    with pytest.raises(StartupError) as caught:
        open_tiering(["memory://", "ftp://host", "memory://?size=1", "file://relative"], pool)
    assert len(caught.value.problems) == 3
    opened = open_tiering(["memory://"], pool)
    assert opened is not None
    assert [channel.url for channel in opened.channels] == ["memory://"]
    opened.close()
    pool.close()


def test_only_writes_find_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "_MAX_WRITES", 1)
    tier, released = FakeTier(), threading.Event()
    started = threading.Semaphore(0)
    channel = Channel("memory://", tier)

    def job(_: object) -> None:
        started.release()
        released.wait(20)

    for _ in range(2):
        assert channel.submit(job, "write")
        assert started.acquire(timeout=20)
    assert channel.submit(job, "write")
    assert not channel.submit(job, "write")
    assert all(channel.submit(job, "read") for _ in range(10))
    released.set()
    channel.close(time.monotonic() + 20)
    assert not channel.submit(job, "write")
    assert tier.closed
