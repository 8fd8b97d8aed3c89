"""StorageEngine: pins, leases, eviction order, refusals, resets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import Commit, GroupShards, LookupState, Row
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

PAGE = 4096


class InstantService:
    """Every extent is ready at once."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.closed = False

    @property
    def pool_ref(self) -> PoolRef:
        return PoolRef("/nowhere", "1")

    def start(self, on_extent_ready: Callable[[int], None]) -> None:
        for index in range(len(self.pool.extents)):
            on_extent_ready(index)

    def close(self) -> None:
        self.closed = True


class Bench:
    """An engine whose rows are one page per shard, and short ways to use it."""

    def __init__(self, pages: int, *tags: str, extent_pages: int | None = None) -> None:
        self.pool = MemoryPool(pages * PAGE, (extent_pages or pages) * PAGE)
        groups = [GroupShards(tag, 1) for tag in tags or ("full",)]
        self.service = InstantService(self.pool)
        self.engine = StorageEngine(self.pool, groups, self.service)
        self.tags = [group.tag for group in groups]
        self.ids = iter(range(1, 1 << 30))

    def store(
        self,
        chunks: Sequence[bytes],
        parent: bytes | None = None,
        tags: Sequence[str] = (),
        protect: bytes | None = None,
        pages: int = 1,
    ) -> int | None:
        """Store one row per chunk and tag; how many items were given room, None if refused."""
        items = [(chunk, tag) for chunk in chunks for tag in tags or self.tags]
        parents = dict(zip(chunks, [parent, *chunks[:-1]], strict=True))
        store_id = next(self.ids)
        slots = self.engine.prepare_store(store_id, [[pages * PAGE]] * len(items), protect)
        if slots is None:
            return None
        self.engine.complete_store(
            store_id,
            [
                Commit(index, chunk, parents[chunk], tag, [7])
                for index, (chunk, tag) in enumerate(items[: len(slots)])
            ],
        )
        return len(slots)

    def hit(self, chunks: Sequence[bytes], keep: Sequence[tuple[bytes, str]]) -> None:
        """One request that is served: its pins are gone at the end."""
        lookup_id = next(self.ids)
        self.engine.lookup(lookup_id, chunks)
        self.engine.narrow(lookup_id, keep)
        assert self.engine.prepare_load(lookup_id, lookup_id, keep) is not None
        self.engine.complete_load(lookup_id)

    def there(self, chunks: Sequence[bytes], tag: str = "full") -> str:
        """One letter per chunk that has a row."""
        return "".join(c.decode() for c in chunks if self.engine.contains(c, tag))

    def snapshot(self) -> tuple[object, ...]:
        """All that a refusal must leave as it is."""
        free = [dict(sizes) for sizes in self.pool._range_bytes]
        rows = [(entry.key, entry.pins, entry.follows) for entry in self.engine._index.entries()]
        return free, rows, sorted(self.pool.used_slots(), key=str), dict(self.engine._evicted)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*args: object, **kwargs: object) -> Bench:
        made.append(Bench(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.engine.check_integrity()
        each.engine.close()
        assert each.service.closed


def chunks(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


MakeBench = Callable[..., Bench]
A = chunks("abcd")
X = chunks("wxyz")


# ---- what is visible ----------------------------------------------------------------------------


def test_a_lookup_tells_rows_by_group_and_shard(bench: MakeBench) -> None:
    b = bench(16, "full", "state")
    engine = b.engine
    b.store(A[:3], tags=["full"])
    b.store([A[1]], tags=["state"], parent=A[0])
    reply = engine.lookup(1, [*A, b"unknown"])
    assert reply.state is LookupState.READY
    assert reply.present == [[0b111], [0b010]]
    assert engine.stats().pinned_rows == 4
    engine.release(1)
    engine.release(1)
    engine.release(99)
    assert engine.stats().pinned_rows == 0


def test_a_row_is_all_its_shards(bench: MakeBench) -> None:
    pool = MemoryPool(8 * PAGE)
    engine = StorageEngine(pool, [GroupShards("full", 3)], InstantService(pool))
    slots = engine.prepare_store(1, [[PAGE, 0, 2 * PAGE]], None)
    assert slots is not None
    assert [slot.nbytes for slot in slots[0]] == [PAGE, 0, 2 * PAGE]
    assert engine.lookup(1, [b"a"]).present == [[0, 0, 0]]
    engine.complete_store(1, [Commit(0, b"a", None, "full", [1, 0, 3])])
    assert engine.lookup(1, [b"a"]).present == [[1, 1, 1]]
    assert engine.prepare_load(5, 1, [(b"a", "full")]) == [Row(slots[0], [1, 0, 3])]
    engine.complete_load(5)
    engine.check_integrity()
    engine.close()


def test_nothing_is_visible_before_its_commit(bench: MakeBench) -> None:
    b = bench(8)
    assert b.engine.prepare_store(1, [[PAGE], [PAGE]], None) is not None
    assert b.engine.lookup(1, A).present == [[0]]
    assert b.engine.stats().leases == 1
    b.engine.complete_store(1, [Commit(1, A[0], None, "full", [5])])
    assert b.there(A) == "a"
    # The item without a commit is free again.
    assert b.engine.stats().used_bytes == PAGE
    assert b.engine.stats().leases == 0


def test_the_first_value_of_a_key_wins(bench: MakeBench) -> None:
    b = bench(8)
    first = b.engine.prepare_store(1, [[PAGE]], None)
    second = b.engine.prepare_store(2, [[PAGE]], None)
    assert first is not None
    assert second is not None
    b.engine.complete_store(2, [Commit(0, b"a", None, "full", [2])])
    b.engine.complete_store(1, [Commit(0, b"a", None, "full", [1])])
    b.engine.lookup(1, [b"a"])
    assert b.engine.prepare_load(1, 1, [(b"a", "full")]) == [Row(second[0], [2])]
    b.engine.complete_load(1)
    assert b.engine.stats().used_bytes == PAGE


def test_rows_that_failed_their_check_are_dropped_once_nobody_reads_them(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A[:2])
    for load_id in (1, 2):
        b.engine.lookup(load_id, A)
        assert b.engine.prepare_load(load_id, load_id, [(A[0], "full")]) is not None
    b.engine.complete_load(1, drop=[(A[0], "full"), (A[1], "full")])
    # Only rows of the load itself; and the other load still reads the slot.
    assert b.there(A) == "b"
    assert b.engine.stats().used_bytes == 2 * PAGE
    # A new value under the same key is not the one that failed.
    b.store([A[0]])
    b.engine.complete_load(2, drop=[(A[0], "full")])
    assert b.there(A) == "ab"
    assert b.engine.stats().used_bytes == 2 * PAGE


# ---- pins ---------------------------------------------------------------------------------------


def test_pinned_rows_are_never_evicted(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.engine.lookup(1, A[:2])
    b.engine.narrow(1, [(A[0], "full")])
    assert b.store(X) == 3
    assert b.there([*A, *X]) == "awxy"
    assert b.engine.prepare_load(1, 1, [(A[0], "full")]) is not None
    assert b.store([b"m"], pages=4) is None
    assert b.there(A) == "a"
    b.engine.complete_load(1)
    assert b.store([b"m"], pages=4) == 1


def test_a_second_lookup_replaces_the_pins_of_the_first(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.engine.lookup(1, A)
    b.engine.lookup(1, A[:1])
    assert b.engine.stats().pinned_rows == 1
    b.engine.narrow(1, [])
    assert b.engine.stats().pinned_rows == 0
    assert b.engine.prepare_load(2, 1, [(A[0], "full")]) is None
    b.engine.narrow(77, [(A[0], "full")])


def test_a_load_of_a_row_that_was_not_pinned_is_refused(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A[:2])
    b.engine.lookup(1, A[:1])
    assert b.engine.prepare_load(1, 1, [(A[0], "full"), (A[1], "full")]) is None
    assert b.engine.stats().pinned_rows == 0


# ---- eviction -----------------------------------------------------------------------------------


def test_the_tail_of_a_prefix_goes_first(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    for left, new in zip(("abc", "ab", "a"), X, strict=False):
        # Each newcomer takes the last chunk's place; x was used later than any of a..d.
        assert b.store([new]) == 1
        assert b.there(A) == left


def test_the_tail_goes_first_when_chunks_were_stored_in_steps(bench: MakeBench) -> None:
    b = bench(4)
    for chunk, parent in zip(A, [None, *A], strict=False):
        b.store([chunk], parent)
    b.store(X[:2])
    assert b.there([*A, *X]) == "abwx"


def test_between_prefixes_the_one_used_longest_ago_goes_first(bench: MakeBench) -> None:
    b = bench(6)
    b.store(A[:3])
    b.store(X[:3])
    b.hit(A[:3], [(chunk, "full") for chunk in A[:3]])
    b.store(chunks("mn"))
    assert b.there([*A, *X]) == "abcw"


def test_a_lookup_alone_counts_nothing_as_used(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A[:2])
    b.store(X[:2])
    b.engine.lookup(1, A)
    b.engine.release(1)
    b.store(chunks("m"))
    assert b.there([*A, *X]) == "awx"


def test_a_shared_head_stays_as_long_as_any_of_its_prefixes(bench: MakeBench) -> None:
    b = bench(6)
    b.store(A)
    b.store(X[:2], parent=A[0])
    b.store(chunks("mn"))
    assert b.there([*A, *X]) == "abwx"
    b.store(chunks("opq"))
    assert b.there([*A, *X]) == "a"


def test_a_hit_behind_a_local_prefix_keeps_the_head_recent(bench: MakeBench) -> None:
    b = bench(6)
    b.store(A)
    b.store(X[:2])
    # The engine itself held a and b: it asked for the rest only.
    b.hit(A[2:], [(A[2], "full"), (A[3], "full")])
    b.store(chunks("mn"))
    assert b.there([*A, *X]) == "abcd"


def test_window_rows_that_nobody_asks_for_go_before_full_rows_in_use(bench: MakeBench) -> None:
    b = bench(8, "full", "window-9")
    b.store(A)
    wanted = [(chunk, "full") for chunk in A] + [(A[3], "window-9")]
    b.hit(A, wanted)
    # The next turn of the same conversation does not bring the old windows back to life.
    assert b.store(chunks("e"), parent=A[3], protect=A[3]) is None
    assert b.store(chunks("e"), parent=A[3]) == 2
    assert (b.there(A), b.there(A, "window-9")) == ("abcd", "ad")
    assert b.store(chunks("x"), tags=["full"]) == 1
    assert (b.there([*A, b"e"]), b.there([*A, b"e"], "window-9")) == ("abcde", "de")


def test_without_hits_the_groups_of_a_chunk_go_together(bench: MakeBench) -> None:
    b = bench(8, "full", "window-9")
    for chunk, parent in zip(A, [None, *A], strict=False):
        b.store([chunk], parent)
    b.store(X[:2])
    assert (b.there(A), b.there(A, "window-9")) == ("ab", "ab")


def test_the_head_stays_when_the_pool_is_smaller_than_the_prompt(bench: MakeBench) -> None:
    b = bench(4)
    prompt = chunks("abcdefgh")
    b.store(X)
    for chunk, parent in zip(A, [None, *A], strict=False):
        assert b.store([chunk], parent, protect=parent) == 1
    for chunk in prompt[4:]:
        # No later one is of use without its predecessor; the last one there is still protected.
        assert b.store([chunk], protect=A[3]) is None
    assert b.there(prompt) == "abcd"
    assert b.engine.stats().refused_stores == 4
    assert b.engine.stats().evicted == {"full": 4}


def test_the_links_of_a_prefix_outlive_its_rows(bench: MakeBench) -> None:
    b = bench(3)
    b.store(A[:3])
    b.engine.lookup(1, [A[1]])
    b.engine.prepare_load(1, 1, [(A[1], "full")])
    b.engine.complete_load(1, drop=[(A[1], "full")])
    # b has no row any more, but c still leads to a.
    assert b.store([X[0]], protect=A[2]) == 1
    assert b.store([X[1]], protect=A[2]) == 1
    assert b.there([*A, *X]) == "acx"


def test_a_chunk_whose_parent_is_stored_later_is_linked_then(bench: MakeBench) -> None:
    b = bench(4)
    b.store([A[1]], parent=A[0])
    b.store([A[0]])
    b.store(X[:2])
    assert b.store(chunks("mn"), protect=A[1]) == 2
    assert b.there([*A, *X]) == "ab"


def test_a_claimed_cycle_of_parents_does_no_harm(bench: MakeBench) -> None:
    b = bench(4)
    b.store([A[1]], parent=A[0])
    b.store([A[0]], parent=A[1])
    b.store([A[2]], parent=A[2])
    b.engine.check_integrity()
    assert b.store(chunks("m"), protect=A[0]) == 1


# ---- room ---------------------------------------------------------------------------------------


def test_a_refusal_changes_nothing(bench: MakeBench) -> None:
    b = bench(8, extent_pages=4)
    b.store(A)
    b.store(X)
    b.engine.lookup(1, [A[1], X[1]])
    before = b.snapshot()
    # Every extent has a pinned page in its middle, so four pages in one place are impossible.
    assert b.engine.prepare_store(50, [[4 * PAGE]], None) is None
    assert b.snapshot() == before
    assert b.engine.prepare_store(50, [[9 * PAGE]], None) is None
    assert b.snapshot() == before
    # Two shards, of which the second finds no place.
    assert b.engine.prepare_store(50, [[2 * PAGE, 3 * PAGE]], A[3]) is None
    assert b.snapshot() == before
    with pytest.raises(ValueError, match="not open"):
        b.engine.complete_store(50, [])


def test_an_item_that_does_not_fit_evicts_nothing(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.engine.lookup(1, [A[1]])
    slots = b.engine.prepare_store(50, [[PAGE], [4 * PAGE], [PAGE]], None)
    assert slots is not None
    assert len(slots) == 1
    assert b.there(A) == "abc"
    b.engine.complete_store(50, [])


def test_room_is_made_in_one_place_for_larger_objects(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    b.store(X)
    assert b.store(chunks("m"), pages=3) == 1
    assert b.there([*A, *X]) == "awxyz"
    assert b.engine.stats().used_bytes == 8 * PAGE


# ---- clear --------------------------------------------------------------------------------------


def test_clear_forgets_rows_at_once_and_keeps_slots_in_use(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    b.engine.lookup(1, A[:2])
    loaded = b.engine.prepare_load(1, 1, [(A[0], "full")])
    assert loaded is not None
    b.engine.lookup(2, A[:2])
    leased = b.engine.prepare_store(9, [[PAGE], [PAGE]], None)
    assert leased is not None
    b.engine.clear()
    assert b.there(A) == ""
    assert b.engine.lookup(3, A).present == [[0]]
    # In use: the load's and the lookup's rows (one of them the same), and the lease.
    assert b.engine.stats().used_bytes == 4 * PAGE
    in_use = {loaded[0].slots[0], leased[0][0], leased[1][0]}
    fresh = b.engine.prepare_store(10, [[PAGE]] * 8, None)
    assert fresh is not None
    assert len(fresh) == 4
    assert not in_use & {slot for item in fresh for slot in item}
    b.engine.complete_store(10, [])
    # What was looked up before is gone.
    assert b.engine.prepare_load(2, 2, [(A[0], "full")]) is None
    assert b.engine.stats().used_bytes == 3 * PAGE
    b.engine.complete_load(1, drop=[(A[0], "full")])
    assert b.engine.stats().used_bytes == 2 * PAGE
    # A store from before is dropped.
    b.engine.complete_store(9, [Commit(0, A[0], None, "full", [1])])
    assert b.there(A) == ""
    assert b.engine.stats().used_bytes == 0
    assert b.store(A) == 4


# ---- calls that do not fit together -------------------------------------------------------------


def test_ids_used_twice_or_never_are_refused(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A[:1])
    b.engine.prepare_store(100, [[PAGE]], None)
    with pytest.raises(ValueError, match="already open"):
        b.engine.prepare_store(100, [[PAGE]], None)
    with pytest.raises(ValueError, match="not open"):
        b.engine.complete_store(101, [])
    b.engine.complete_store(100, [])
    with pytest.raises(ValueError, match="not open"):
        b.engine.complete_store(100, [])
    b.engine.lookup(100, A)
    b.engine.prepare_load(100, 100, [(A[0], "full")])
    with pytest.raises(ValueError, match="already open"):
        b.engine.prepare_load(100, 100, [])
    with pytest.raises(ValueError, match="not open"):
        b.engine.complete_load(101)
    b.engine.complete_load(100)
    with pytest.raises(ValueError, match="not open"):
        b.engine.complete_load(100)


@pytest.mark.parametrize(
    "commits",
    [
        [Commit(1, b"k", None, "full", [1])],
        [Commit(-1, b"k", None, "full", [1])],
        [Commit(0, b"k", None, "full", [1]), Commit(0, b"l", None, "full", [1])],
        [Commit(0, b"k", None, "other", [1])],
        [Commit(0, b"k", None, "full", [1, 2])],
        [Commit(0, b"k", None, "full", [])],
    ],
)
def test_commits_that_do_not_fit_their_lease_change_nothing(
    bench: MakeBench, commits: list[Commit]
) -> None:
    b = bench(8)
    assert b.engine.prepare_store(1, [[PAGE]], None) is not None
    before = b.snapshot()
    with pytest.raises(ValueError, match=r"commit of item|has .* shards"):
        b.engine.complete_store(1, commits)
    assert b.snapshot() == before
    b.engine.complete_store(1, [Commit(0, b"k", None, "full", [1])])


def test_integrity_check_sees_a_slot_with_two_owners(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    entry = next(b.engine._index.entries())
    good = entry.row.slots
    for bad in ([*good, *good], [], [SlotRef(0, 7 * PAGE, PAGE)]):
        entry.row.slots = bad
        with pytest.raises(AssertionError):
            b.engine.check_integrity()
    entry.row.slots = good
    entry.pins = 1
    with pytest.raises(AssertionError, match="1 pins"):
        b.engine.check_integrity()
    entry.pins = 0


def test_shards_of_one_item_do_not_lie_in_each_others_way(bench: Callable[..., Bench]) -> None:
    """Four pages, of which the middle two are free: room for two shards of two pages is there
    once both rows are evicted, unless the first shard has taken the middle before."""
    used = bench(4)
    sizes = [[PAGE], [2 * PAGE], [PAGE]]
    assert used.engine.prepare_store(100, sizes, None) is not None
    commits = [Commit(index, chunk, None, "full", [7]) for index, chunk in ((0, b"a"), (2, b"b"))]
    used.engine.complete_store(100, commits)
    items = used.engine.prepare_store(101, [[2 * PAGE, 2 * PAGE]], None)
    assert items is not None
    assert used.there([b"a", b"b"]) == ""
    used.engine.complete_store(101, [])
    used.engine.check_integrity()
