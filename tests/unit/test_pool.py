"""The memory pool: extents, slots, the checks at start."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_connector.errors import StartupError
from lmcache_connector.metadata import SlotRef
from lmcache_connector.storage import pool as pool_module
from lmcache_connector.storage.pool import (
    MAX_EXTENTS,
    MemoryPool,
    check_memory_budget,
)

PAGE = 4096


def ready_pool(capacity: int, extent: int) -> MemoryPool:
    pool = MemoryPool(capacity, extent)
    for index in range(len(pool.extents)):
        pool.mark_ready(index)
    return pool


def extent_sizes(*args: int) -> list[int]:
    pool = MemoryPool(*args)
    sizes = [extent.nbytes for extent in pool.extents]
    assert [os.fstat(extent.fd).st_size for extent in pool.extents] == sizes
    assert pool.capacity_bytes == sum(sizes)
    assert pool.largest_extent_bytes == max(sizes)
    pool.close()
    return sizes


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ((8 * PAGE, 4 * PAGE), [4 * PAGE, 4 * PAGE]),
        ((9 * PAGE + 5, 4 * PAGE), [4 * PAGE, 4 * PAGE, PAGE]),
        ((3 * PAGE, 4 * PAGE), [3 * PAGE]),
        # An extent holds the largest object, and a rest too small for it is not cut off.
        ((12 * PAGE, 4 * PAGE, 5 * PAGE), [5 * PAGE, 7 * PAGE]),
        ((11 * PAGE, 4 * PAGE, 4 * PAGE + 1), [5 * PAGE, 6 * PAGE]),
        ((9 * PAGE, 4 * PAGE, 2 * PAGE), [4 * PAGE, 5 * PAGE]),
    ],
)
def test_extents_sum_to_the_capacity(args: tuple[int, ...], sizes: list[int]) -> None:
    assert extent_sizes(*args) == sizes


def test_huge_pools_have_few_extents() -> None:
    sizes = extent_sizes(2 << 40)
    assert len(sizes) <= MAX_EXTENTS
    assert sum(sizes) == 2 << 40


def test_extents_are_sparse_sealed_and_not_inherited() -> None:
    pool = MemoryPool(64 << 20, 16 << 20)
    for fd, nbytes in pool.extents:
        assert os.fstat(fd).st_blocks == 0
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes // 2)
    pool.close()
    pool.close()


def test_nothing_is_handed_out_before_an_extent_is_ready() -> None:
    pool = MemoryPool(8 * PAGE, 4 * PAGE)
    assert pool.allocate(1) is None
    assert pool.ready_bytes == 0
    pool.mark_ready(1)
    slot = pool.allocate(4 * PAGE)
    assert slot == SlotRef(1, 0, 4 * PAGE)
    assert pool.allocate(1) is None
    pool.check_integrity()
    pool.close()


def test_slots_keep_the_size_asked_for_and_fill_whole_pages() -> None:
    pool = ready_pool(4 * PAGE, 4 * PAGE)
    slot = pool.allocate(PAGE + 1)
    assert slot is not None
    assert slot.nbytes == PAGE + 1
    assert pool.used_bytes == 2 * PAGE
    pool.free(slot)
    assert pool.used_bytes == 0
    pool.close()


def test_an_exact_place_is_preferred_to_a_larger_one() -> None:
    pool = ready_pool(16 * PAGE, 16 * PAGE)
    slots = [pool.allocate(pages * PAGE) for pages in (3, 1, 2, 1)]
    three, two = slots[0], slots[2]
    assert three is not None
    assert two is not None
    pool.free(three)
    pool.free(two)
    # Free: 3 pages, 2 pages, and the rest of 9.
    assert pool.allocate(2 * PAGE) == two
    assert pool.allocate(2 * PAGE) == SlotRef(0, 0, 2 * PAGE)
    pool.close()


def test_misuse_is_caught() -> None:
    pool = ready_pool(4 * PAGE, 4 * PAGE)
    slot = pool.allocate(PAGE)
    assert slot is not None
    with pytest.raises(AssertionError):
        pool.reserve(slot)
    pool.free(slot)
    with pytest.raises(AssertionError):
        pool.free(slot)
    with pytest.raises(AssertionError):
        pool.mark_ready(0)
    pool.check_integrity()
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    """Against an array of pages per extent."""

    PAGES = (6, 6, 4)

    def __init__(self) -> None:
        super().__init__()
        self.pool = MemoryPool(16 * PAGE, 6 * PAGE)
        assert [extent.nbytes // PAGE for extent in self.pool.extents] == list(self.PAGES)
        # None: not ready; False: free; True: used.
        self.pages: list[list[bool | None]] = [[None] * count for count in self.PAGES]
        self.slots: list[SlotRef] = []
        # Freed, and not yet overlapped by another slot.
        self.undoable: list[SlotRef] = []

    def teardown(self) -> None:
        for slot in self.slots:
            self.pool.free(slot)
        assert self.pool.used_bytes == 0
        self.pool.check_integrity()
        self.pool.close()

    def runs(self) -> Iterator[int]:
        """Lengths of the free runs, in pages."""
        for extent in self.pages:
            length = 0
            for page in [*extent, True]:
                if page is False:
                    length += 1
                elif length:
                    yield length
                    length = 0

    def mark(self, slot: SlotRef, used: bool) -> None:
        first, count = slot.offset // PAGE, -(-slot.nbytes // PAGE)
        pages = self.pages[slot.extent]
        assert slot.offset % PAGE == 0
        assert pages[first : first + count] == [not used] * count
        pages[first : first + count] = [used] * count

    @precondition(lambda self: any(None in extent for extent in self.pages))
    @rule(data=st.data())
    def mark_ready(self, data: st.DataObject) -> None:
        waiting = [index for index, extent in enumerate(self.pages) if None in extent]
        index = data.draw(st.sampled_from(waiting))
        self.pool.mark_ready(index)
        self.pages[index] = [False] * self.PAGES[index]

    @rule(nbytes=st.integers(1, 5 * PAGE))
    def allocate(self, nbytes: int) -> None:
        count = -(-nbytes // PAGE)
        fitting = sorted(length for length in self.runs() if length >= count)
        before = sorted(self.runs())
        slot = self.pool.allocate(nbytes)
        if not fitting:
            assert slot is None
            return
        assert slot is not None
        assert slot.nbytes == nbytes
        self.mark(slot, used=True)
        self.slots.append(slot)
        self.undoable.clear()
        # The smallest run that fits was cut, at its start.
        before.remove(fitting[0])
        rest = [fitting[0] - count] if fitting[0] > count else []
        assert sorted(self.runs()) == sorted(before + rest)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.slots.remove(slot)
        self.pool.free(slot)
        self.mark(slot, used=False)
        self.undoable.append(slot)

    @precondition(lambda self: self.undoable)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.undoable))
        self.undoable.remove(slot)
        self.pool.reserve(slot)
        self.mark(slot, used=True)
        self.slots.append(slot)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity()
        pages = [page for extent in self.pages for page in extent]
        assert self.pool.used_bytes == pages.count(True) * PAGE
        assert self.pool.ready_bytes == (len(pages) - pages.count(None)) * PAGE
        assert set(self.pool.used_slots()) == set(self.slots)


TestPoolAgainstPages = PoolMachine.TestCase
TestPoolAgainstPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- the checks at start ------------------------------------------------------------------------


def test_a_pool_smaller_than_one_object_is_a_problem() -> None:
    MemoryPool(PAGE, PAGE, PAGE).close()
    for capacity, row_bytes in ((PAGE, PAGE + 1), (PAGE - 1, 1), (PAGE, 2 * PAGE)):
        with pytest.raises(StartupError, match="max_local_cpu_size"):
            MemoryPool(capacity, PAGE, row_bytes)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 10 GiB available and no cgroup."""
    monkeypatch.setattr(pool_module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(pool_module, "_CGROUP", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {10 << 20} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits_at(nbytes: int) -> bool:
    """Whether exactly ``nbytes`` are the most that is accepted."""
    problem = check_memory_budget(nbytes + 1)
    return check_memory_budget(nbytes) is None and "max_local_cpu_size" in (problem or "")


GIB = 1 << 30


def test_budget_is_what_the_host_has_available(host: Path) -> None:
    assert limits_at(10 * GIB)
    (host / "proc/meminfo").unlink()
    assert check_memory_budget(1 << 60) is None


def test_budget_is_what_a_v2_cgroup_or_one_above_leaves(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/a/b\n")
    write(host / "cgroup/a/b/memory.max", "max\n")
    write(host / "cgroup/a/b/memory.current", f"{GIB}\n")
    assert limits_at(10 * GIB)
    write(host / "cgroup/a/memory.max", f"{6 * GIB}\n")
    write(host / "cgroup/a/memory.current", f"{5 * GIB}\n")
    assert limits_at(1 * GIB)
    # Cached files give way.
    write(host / "cgroup/a/memory.stat", f"inactive_file {GIB}\nactive_file {GIB}\nshmem 5\n")
    assert limits_at(3 * GIB)


def test_budget_is_what_a_v1_cgroup_leaves(host: Path) -> None:
    # In a container the path is the host's, and only the mount's root is visible.
    write(host / "proc/self/cgroup", "5:cpu,memory:/docker/0123\n4:pids:/docker/0123\n")
    write(host / "cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(host / "cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(host / "cgroup/memory/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    assert limits_at(3 * GIB)


def test_budget_of_this_host_can_be_read() -> None:
    assert check_memory_budget(PAGE) is None
    assert check_memory_budget(1 << 60) is not None
