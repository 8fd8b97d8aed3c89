"""StorageEngine: pins, leases, eviction order, refusals, resets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.storage.base import Commit, GroupShards, LookupState, NewRow, Row
from lmcache_connector.storage.engine import StorageEngine
from lmcache_connector.storage.pool import MemoryPool

PAGE = 4096
NAMESPACE = b"n" * 32
NOWHERE = PoolRef("/nowhere", "1")


def new(*sizes: list[int]) -> list[NewRow]:
    """Rows whose keys are not known."""
    return [NewRow(each) for each in sizes]


def open_engine(pool: MemoryPool) -> StorageEngine:
    """Every extent is ready at once."""
    engine = StorageEngine(pool)
    for extent in range(len(pool.extents)):
        engine.mark_ready(extent)
    return engine


class Bench:
    """An engine whose rows are one page per shard, and short ways to use it."""

    def __init__(self, pages: int, *tags: str, extent_pages: int | None = None) -> None:
        groups = [GroupShards(tag, [[PAGE]]) for tag in tags or ("full",)]
        self.engine = open_engine(MemoryPool(pages * PAGE, (extent_pages or pages) * PAGE))
        self.pool = self.engine.rows.pool
        self.session = self.engine.open_session(NAMESPACE, groups, NOWHERE)
        self.tags = [group.tag for group in groups]
        self.ids = iter(range(1, 1 << 30))

    def store(
        self,
        chunks: Sequence[bytes],
        parent: bytes | None = None,
        tags: Sequence[str] = (),
        protect: bytes | None = None,
        pages: int = 1,
    ) -> int:
        """Store one row per chunk and tag; how many were given room."""
        items = [(chunk, tag) for chunk in chunks for tag in tags or self.tags]
        parents = dict(zip(chunks, [parent, *chunks[:-1]], strict=True))
        store_id = next(self.ids)
        prefix = [protect] if protect else []
        slots = self.session.prepare_store(store_id, new(*[[pages * PAGE]] * len(items)), prefix)
        if not slots:
            return 0
        self.session.complete_store(
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
        self.session.lookup(lookup_id, chunks, 0)
        assert self.session.narrow(lookup_id, keep) is LookupState.READY
        assert self.session.prepare_load(lookup_id, lookup_id, keep) is not None
        self.session.complete_load(lookup_id)

    def there(self, chunks: Sequence[bytes], tag: str = "full") -> str:
        """One letter per chunk that has a row."""
        return "".join(c.decode() for c in chunks if self.engine.rows.index.get((c, tag)))

    def snapshot(self) -> tuple[object, ...]:
        """All that a refusal must leave as it is."""
        free = [dict(sizes) for sizes in self.pool._range_bytes]
        rows = [
            (entry.key, entry.pins, entry.follows) for entry in self.engine.rows.index.entries()
        ]
        return free, rows, sorted(self.pool.used_slots(), key=str), dict(self.engine.rows.evicted)


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
        # No descriptor is left open.
        assert each.pool.extents == []


def chunks(letters: str) -> list[bytes]:
    return [letter.encode() for letter in letters]


MakeBench = Callable[..., Bench]
A = chunks("abcd")
X = chunks("wxyz")


# ---- what is visible ----------------------------------------------------------------------------


def test_a_lookup_tells_rows_by_group_and_shard(bench: MakeBench) -> None:
    b = bench(16, "full", "state")
    session = b.session
    assert not session.has_tiers
    b.store(A[:3], tags=["full"])
    b.store([A[1]], tags=["state"], parent=A[0])
    reply = session.lookup(1, [*A, b"unknown"], 0)
    assert reply.state is LookupState.READY
    assert reply.present == [[0b111], [0b010]]
    assert session.stats().busy_rows == 4
    session.release(1)
    session.release(1)
    session.release(99)
    assert session.stats().busy_rows == 0


def test_a_row_is_all_its_shards() -> None:
    engine = open_engine(MemoryPool(8 * PAGE))
    sizes = [PAGE, 0, 2 * PAGE]
    session = engine.open_session(NAMESPACE, [GroupShards("full", [sizes])], NOWHERE)
    (slots,) = session.prepare_store(1, new(sizes), [])
    assert [slot.nbytes for slot in slots] == sizes
    assert session.lookup(1, [b"a"], 0).present == [[0, 0, 0]]
    session.complete_store(1, [Commit(0, b"a", None, "full", [1, 0, 3])])
    assert session.lookup(1, [b"a"], 0).present == [[1, 1, 1]]
    assert session.prepare_load(5, 1, [(b"a", "full")]) == [Row(slots, [1, 0, 3])]
    session.complete_load(5)
    session.check_integrity([], [])
    engine.close()


def test_nothing_is_visible_before_its_commit(bench: MakeBench) -> None:
    b = bench(8)
    assert b.session.prepare_store(1, new([PAGE], [PAGE]), [])
    assert b.session.lookup(1, A, 0).present == [[0]]
    assert b.session.stats().leases == 1
    b.session.complete_store(1, [Commit(1, A[0], None, "full", [5])])
    assert b.there(A) == "a"
    # The row without a commit is free again.
    assert b.session.stats().used_bytes == PAGE
    assert b.session.stats().leases == 0


def test_the_first_value_of_a_key_wins(bench: MakeBench) -> None:
    b = bench(8)
    assert b.session.prepare_store(1, new([PAGE]), [])
    second = b.session.prepare_store(2, new([PAGE]), [])
    b.session.complete_store(2, [Commit(0, b"a", None, "full", [2])])
    b.session.complete_store(1, [Commit(0, b"a", None, "full", [1])])
    b.session.lookup(1, [b"a"], 0)
    assert b.session.prepare_load(1, 1, [(b"a", "full")]) == [Row(second[0], [2])]
    b.session.complete_load(1)
    assert b.session.stats().used_bytes == PAGE


def test_rows_that_failed_their_check_are_dropped_once_nobody_reads_them(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A[:2])
    for load_id in (1, 2):
        b.session.lookup(load_id, A, 0)
        assert b.session.prepare_load(load_id, load_id, [(A[0], "full")]) is not None
    b.session.complete_load(1, drop=[(A[0], "full"), (A[1], "full")])
    # Only rows of the load itself; and the other load still reads the slot.
    assert b.there(A) == "b"
    assert b.session.stats().used_bytes == 2 * PAGE
    # A new value under the same key is not the one that failed.
    b.store([A[0]])
    b.session.complete_load(2, drop=[(A[0], "full")])
    assert b.there(A) == "ab"
    assert b.session.stats().used_bytes == 2 * PAGE


# ---- pins ---------------------------------------------------------------------------------------


def test_pinned_rows_are_never_evicted(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.session.lookup(1, A[:2], 0)
    b.session.narrow(1, [(A[0], "full")])
    assert b.store(X) == 3
    assert b.there([*A, *X]) == "awxy"
    assert b.session.prepare_load(1, 1, [(A[0], "full")]) is not None
    assert b.store([b"m"], pages=4) == 0
    assert b.there(A) == "a"
    b.session.complete_load(1)
    assert b.store([b"m"], pages=4) == 1


def test_a_second_lookup_replaces_the_pins_of_the_first(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.session.lookup(1, A, 0)
    b.session.lookup(1, A[:1], 0)
    assert b.session.stats().busy_rows == 1
    b.session.narrow(1, [])
    assert b.session.stats().busy_rows == 0
    assert b.session.prepare_load(2, 1, [(A[0], "full")]) is None
    assert b.session.narrow(77, [(A[0], "full")]) is LookupState.GONE


def test_a_load_of_a_row_that_was_not_pinned_is_refused(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A[:2])
    b.session.lookup(1, A[:1], 0)
    assert b.session.prepare_load(1, 1, [(A[0], "full"), (A[1], "full")]) is None
    assert b.session.stats().busy_rows == 0


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
    b.session.lookup(1, A, 0)
    b.session.release(1)
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
    assert b.store(chunks("e"), parent=A[3], protect=A[3]) == 0
    assert b.store(chunks("e"), parent=A[3]) == 2
    assert (b.there(A), b.there(A, "window-9")) == ("abcd", "ad")
    assert b.store(chunks("x"), tags=["full"]) == 1
    assert (b.there([*A, b"e"]), b.there([*A, b"e"], "window-9")) == ("abcde", "de")


def test_a_row_that_is_stored_again_is_of_use_again(bench: MakeBench) -> None:
    b = bench(6, "full", "window-9")
    b.store(A[:2])
    b.hit(A[:2], [(A[0], "full"), (A[1], "full"), (A[1], "window-9")])
    # Two requests computed the first chunk at once: its window counts as used with it.
    b.store(A[:1])
    b.hit(A[:2], [(A[1], "full"), (A[1], "window-9")])
    assert b.store(chunks("x")) == 2
    assert b.store(chunks("y")) == 2
    assert (b.there(A), b.there(A, "window-9")) == ("a", "a")


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
        assert b.store([chunk], protect=A[3]) == 0
    assert b.there(prompt) == "abcd"
    assert b.session.stats().refused_stores == 4
    assert b.session.stats().evicted == {"full": 4}


def test_the_links_of_a_prefix_outlive_its_rows(bench: MakeBench) -> None:
    b = bench(3)
    b.store(A[:3])
    b.session.lookup(1, [A[1]], 0)
    b.session.prepare_load(1, 1, [(A[1], "full")])
    b.session.complete_load(1, drop=[(A[1], "full")])
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
    b.session.lookup(1, [A[1], X[1]], 0)
    before = b.snapshot()
    # Every extent has a pinned page in its middle, so four pages in one place are impossible.
    assert b.session.prepare_store(50, new([4 * PAGE]), []) == []
    assert b.snapshot() == before
    assert b.session.prepare_store(50, new([9 * PAGE]), []) == []
    assert b.snapshot() == before
    # Two shards, of which the second finds no place.
    assert b.session.prepare_store(50, new([2 * PAGE, 3 * PAGE]), [A[3]]) == []
    assert b.snapshot() == before
    with pytest.raises(ValueError, match="not open"):
        b.session.complete_store(50, [])


def test_a_row_that_does_not_fit_evicts_nothing(bench: MakeBench) -> None:
    b = bench(4)
    b.store(A)
    b.session.lookup(1, [A[1]], 0)
    slots = b.session.prepare_store(50, new([PAGE], [4 * PAGE], [PAGE]), [])
    assert len(slots) == 1
    assert b.there(A) == "abc"
    b.session.complete_store(50, [])


def test_room_is_made_in_one_place_for_larger_objects(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    b.store(X)
    assert b.store(chunks("m"), pages=3) == 1
    assert b.there([*A, *X]) == "awxyz"
    assert b.session.stats().used_bytes == 8 * PAGE


# ---- clear --------------------------------------------------------------------------------------


def test_clear_forgets_rows_at_once_and_keeps_slots_in_use(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    b.session.lookup(1, A[:2], 0)
    loaded = b.session.prepare_load(1, 1, [(A[0], "full")])
    assert loaded is not None
    b.session.lookup(2, A[:2], 0)
    leased = b.session.prepare_store(9, new([PAGE], [PAGE]), [])
    b.session.clear(b"m" * 32)
    assert b.session.namespace == b"m".hex() * 8
    assert b.there(A) == ""
    assert b.session.lookup(3, A, 0).present == [[0]]
    # In use: the load's and the lookup's rows (one of them the same), and the lease.
    assert b.session.stats().used_bytes == 4 * PAGE
    in_use = {loaded[0].slots[0], leased[0][0], leased[1][0]}
    fresh = b.session.prepare_store(10, new([PAGE]) * 8, [])
    assert len(fresh) == 4
    assert not in_use & {slot for item in fresh for slot in item}
    b.session.complete_store(10, [])
    # What was looked up before is gone.
    assert b.session.prepare_load(2, 2, [(A[0], "full")]) is None
    assert b.session.stats().used_bytes == 3 * PAGE
    b.session.complete_load(1, drop=[(A[0], "full")])
    assert b.session.stats().used_bytes == 2 * PAGE
    # A store from before is dropped.
    b.session.complete_store(9, [Commit(0, A[0], None, "full", [1])])
    assert b.there(A) == ""
    assert b.session.stats().used_bytes == 0
    assert b.store(A) == 4


# ---- calls that do not fit together -------------------------------------------------------------


def test_ids_used_twice_or_never_are_refused(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A[:1])
    b.session.prepare_store(100, new([PAGE]), [])
    with pytest.raises(ValueError, match="already open"):
        b.session.prepare_store(100, new([PAGE]), [])
    with pytest.raises(ValueError, match="not open"):
        b.session.complete_store(101, [])
    b.session.complete_store(100, [])
    with pytest.raises(ValueError, match="not open"):
        b.session.complete_store(100, [])
    b.session.lookup(100, A, 0)
    b.session.prepare_load(100, 100, [(A[0], "full")])
    with pytest.raises(ValueError, match="already open"):
        b.session.prepare_load(100, 100, [])
    with pytest.raises(ValueError, match="not open"):
        b.session.complete_load(101)
    b.session.complete_load(100)
    with pytest.raises(ValueError, match="not open"):
        b.session.complete_load(100)


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
    assert b.session.prepare_store(1, new([PAGE]), [])
    before = b.snapshot()
    with pytest.raises(ValueError, match=r"commit of row|has .* shards"):
        b.session.complete_store(1, commits)
    assert b.snapshot() == before
    b.session.complete_store(1, [Commit(0, b"k", None, "full", [1])])


def test_integrity_check_sees_a_slot_with_two_owners(bench: MakeBench) -> None:
    b = bench(8)
    b.store(A)
    entry = next(b.engine.rows.index.entries())
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


def test_shards_of_one_row_do_not_lie_in_each_others_way(bench: Callable[..., Bench]) -> None:
    """Four pages, of which the middle two are free: room for two shards of two pages is there
    once both rows are evicted, unless the first shard has taken the middle before."""
    used = bench(4)
    assert used.session.prepare_store(100, new([PAGE], [2 * PAGE], [PAGE]), [])
    commits = [Commit(index, chunk, None, "full", [7]) for index, chunk in ((0, b"a"), (2, b"b"))]
    used.session.complete_store(100, commits)
    assert used.session.prepare_store(101, new([2 * PAGE, 2 * PAGE]), [])
    assert used.there([b"a", b"b"]) == ""
    used.session.complete_store(101, [])
    used.engine.check_integrity()
