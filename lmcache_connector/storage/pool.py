"""The memory of one pool: memfd extents, and the allocator of slots inside them.

memfd memory is not limited by /dev/shm, leaves no name behind after a crash, and costs nothing
until it is touched. Bytes are reached through the descriptors (see server/service.py); nothing
here maps or reads them. Not thread-safe: its owner holds the lock.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lmcache_connector.buffers import align_up
from lmcache_connector.errors import StartupError
from lmcache_connector.metadata import SlotRef

SLOT_ALIGNMENT = 4096
EXTENT_BYTES = 256 << 20
# Each extent is an open file in the owner and in every worker.
MAX_EXTENTS = 256

# Absent from Python's os module. Kernels from 6.3 on warn, or by sysctl refuse, without it.
_MFD_NOEXEC_SEAL = 0x8
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


class Extent(NamedTuple):
    """One memfd: a file descriptor of the owner, and its size."""

    fd: int
    nbytes: int


class MemoryPool:
    """``capacity_bytes`` (rounded down to 4 KiB) of memory, handed out as slots.

    A slot never spans two extents. Free ranges are coalesced; the smallest range that fits is
    taken, so a range of exactly the size wanted comes first and objects of one size recycle
    each other's places.

    Args:
        extent_bytes: size of an extent; larger where the pool would need too many of them.
        min_object_bytes: every extent holds at least this much; give the bytes of the largest
            row, all shards together, and an empty pool always has room for it.

    Raises:
        StartupError: the pool is smaller than one page or one object.
        OSError: the kernel refuses a memfd.
    """

    def __init__(
        self, capacity_bytes: int, extent_bytes: int = EXTENT_BYTES, min_object_bytes: int = 1
    ) -> None:
        needed = align_up(max(1, min_object_bytes), SLOT_ALIGNMENT)
        if capacity_bytes < needed:
            raise StartupError(
                f"a pool of {capacity_bytes} bytes cannot hold one chunk's object of "
                f"{min_object_bytes} bytes: set max_local_cpu_size (of hidden states "
                f'max_hidden_state_cpu_size) to at least "{needed >> 10}KiB", better to many times '
                "that, or make chunk_size smaller"
            )
        sizes = _extent_sizes(capacity_bytes, extent_bytes, min_object_bytes)
        self.capacity_bytes = sum(sizes)
        self.used_bytes = 0
        self.ready_bytes = 0
        self.largest_extent_bytes = max(sizes)
        self.extents: list[Extent] = []
        self._ready: set[int] = set()
        # By (extent, offset): every slot that is handed out.
        self._used: dict[tuple[int, int], SlotRef] = {}
        # Free ranges, by extent: offsets in order, and offset -> bytes.
        self._offsets: list[list[int]] = [[] for _ in sizes]
        self._range_bytes: list[dict[int, int]] = [{} for _ in sizes]
        # Free ranges, by size: the sizes in order, and size -> {(extent, offset)}.
        self._sizes: list[int] = []
        self._by_size: dict[int, dict[tuple[int, int], None]] = {}
        try:
            for nbytes in sizes:
                self.extents.append(_create_extent(nbytes))
        except OSError:
            self.close()
            raise

    def mark_ready(self, extent: int) -> None:
        """Let slots be handed out from ``extent``; once per extent."""
        assert extent not in self._ready
        self._ready.add(extent)
        self.ready_bytes += self.extents[extent].nbytes
        self._add_range(extent, 0, self.extents[extent].nbytes)

    def allocate(self, nbytes: int) -> SlotRef | None:
        """A slot of ``nbytes`` bytes, or None when no free range is long enough."""
        assert nbytes > 0
        size = align_up(nbytes, SLOT_ALIGNMENT)
        position = bisect.bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        extent, offset = next(reversed(self._by_size[self._sizes[position]]))
        slot = SlotRef(extent, offset, nbytes)
        self._take(slot, offset)
        return slot

    def free(self, slot: SlotRef) -> None:
        """Give a slot back."""
        extent, offset, nbytes = slot.extent, slot.offset, slot.nbytes
        assert self._used.get((extent, offset)) == slot, f"{slot} is not in use"
        del self._used[extent, offset]
        size = align_up(nbytes, SLOT_ALIGNMENT)
        self.used_bytes -= size
        offsets, ranges = self._offsets[extent], self._range_bytes[extent]
        position = bisect.bisect_left(offsets, offset)
        if position < len(offsets) and offsets[position] == offset + size:
            size += self._remove_range(extent, offset + size)
        if position > 0:
            before = offsets[position - 1]
            if before + ranges[before] == offset:
                size += self._remove_range(extent, before)
                offset = before
        self._add_range(extent, offset, size)

    def reserve(self, slot: SlotRef) -> None:
        """Undo ``free(slot)``: take back exactly this range, which must be free."""
        offsets = self._offsets[slot.extent]
        position = bisect.bisect_right(offsets, slot.offset)
        assert position > 0, f"{slot} is not free"
        self._take(slot, offsets[position - 1])

    def used_slots(self) -> Iterator[SlotRef]:
        """Every slot that is handed out."""
        return iter(self._used.values())

    def map(self) -> list[memoryview]:
        """The extents' bytes, in this process; mapped anew at each call."""
        return [
            memoryview(mmap.mmap(extent.fd, extent.nbytes, mmap.MAP_SHARED))
            for extent in self.extents
        ]

    def close(self) -> None:
        """Close the descriptors. Memory lives on in processes that have mapped it."""
        for extent in self.extents:
            os.close(extent.fd)
        self.extents.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers unless slots and free ranges tile the memory."""
        ranges: list[list[tuple[int, int, bool]]] = [
            [(offset, size, True) for offset, size in sizes.items()] for sizes in self._range_bytes
        ]
        free = sum(size for extent in ranges for _, size, _ in extent)
        used = 0
        for (extent, offset), slot in self._used.items():
            size = align_up(slot.nbytes, SLOT_ALIGNMENT)
            ranges[extent].append((offset, size, False))
            used += size
        for index, tiles in enumerate(ranges):
            end, after_free = 0, False
            for offset, size, is_free in sorted(tiles):
                assert offset == end, f"extent {index}: a range ends at {end}, next at {offset}"
                assert not (after_free and is_free), f"extent {index}: not coalesced at {offset}"
                end, after_free = offset + size, is_free
            expected = self.extents[index].nbytes if index in self._ready else 0
            assert end == expected, f"extent {index}: ranges end at {end}, not at {expected}"
            assert self._offsets[index] == sorted(self._range_bytes[index])
        assert used == self.used_bytes, f"slots hold {used} bytes, {self.used_bytes} are counted"
        assert used + free == self.ready_bytes, f"{used} + {free} is not {self.ready_bytes}"
        by_size = {(place, size) for size, places in self._by_size.items() for place in places}
        by_extent = {
            ((extent, offset), size)
            for extent, sizes in enumerate(self._range_bytes)
            for offset, size in sizes.items()
        }
        assert by_size == by_extent, f"free ranges differ: {by_size ^ by_extent}"
        assert self._sizes == sorted(self._by_size), "free sizes are out of order"

    def _take(self, slot: SlotRef, start: int) -> None:
        """Cut ``slot`` out of the free range that begins at ``start``."""
        size = align_up(slot.nbytes, SLOT_ALIGNMENT)
        end = start + self._remove_range(slot.extent, start)
        assert slot.offset + size <= end, f"{slot} is not free"
        if start < slot.offset:
            self._add_range(slot.extent, start, slot.offset - start)
        if slot.offset + size < end:
            self._add_range(slot.extent, slot.offset + size, end - slot.offset - size)
        self._used[slot.extent, slot.offset] = slot
        self.used_bytes += size

    def _add_range(self, extent: int, offset: int, size: int) -> None:
        bisect.insort(self._offsets[extent], offset)
        self._range_bytes[extent][offset] = size
        if size not in self._by_size:
            bisect.insort(self._sizes, size)
            self._by_size[size] = {}
        self._by_size[size][extent, offset] = None

    def _remove_range(self, extent: int, offset: int) -> int:
        """Forget a free range; its size."""
        offsets = self._offsets[extent]
        del offsets[bisect.bisect_left(offsets, offset)]
        size = self._range_bytes[extent].pop(offset)
        del self._by_size[size][extent, offset]
        if not self._by_size[size]:
            del self._by_size[size]
            del self._sizes[bisect.bisect_left(self._sizes, size)]
        return size


def _extent_sizes(capacity_bytes: int, extent_bytes: int, min_object_bytes: int) -> list[int]:
    capacity = capacity_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
    wanted = max(extent_bytes, min_object_bytes, -(-capacity // MAX_EXTENTS))
    size = align_up(wanted, SLOT_ALIGNMENT)
    count, rest = divmod(capacity, size)
    sizes = [size] * count
    if count and rest < min_object_bytes:
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes


def _create_extent(nbytes: int) -> Extent:
    try:
        fd = os.memfd_create("lmcache-pool", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create("lmcache-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A peer that shrank the file would crash everyone who has it mapped. Where the platform
        # has no seals, the peers (our own workers) are trusted not to.
        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return Extent(fd, nbytes)


def check_memory_budget(kv_bytes: int, hidden_bytes: int = 0) -> str | None:
    """The problem with pools of so much more memory on this host, or None.

    memfd pages count as used memory and in the cgroup: exceeding either is a kill by the
    kernel, not an error.
    """
    nbytes = kv_bytes + hidden_bytes
    available_kib = _figures(_PROC / "meminfo").get("MemAvailable:")
    available = nbytes if available_kib is None else available_kib * 1024
    if nbytes > available:
        return _over_budget(nbytes, available, "are available on this host (MemAvailable)")
    for limit, usage in _cgroup_budgets():
        if nbytes > limit - usage:
            source = f"are left of the cgroup's memory limit of {limit / _GIB:.2f} GiB"
            return _over_budget(nbytes, max(0, limit - usage), source)
    return None


def _over_budget(nbytes: int, room: int, source: str) -> str:
    return (
        f"max_local_cpu_size: the pool needs {nbytes / _GIB:.2f} GiB, but only {room / _GIB:.2f} "
        f"GiB {source}; the kernel would kill the process. Make max_local_cpu_size or "
        "max_hidden_state_cpu_size smaller (they count once per engine core) or give the host or "
        "container more memory"
    )


def _figures(path: Path) -> dict[str, int]:
    """The numbers that a file of the kernel names, a line each; none where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split() for line in path.read_text().splitlines()]
        return {name: int(value) for name, value, *_ in lines}
    return {}


def _cgroup_budgets() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of this cgroup and all above it."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, prefix = _CGROUP, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, prefix = _CGROUP / "memory", "total_"
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's; then only the root of the mount is there.
        own = root / path.strip("/")
        for directory in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = int((directory / limit_name).read_text())
                usage = int((directory / usage_name).read_text())
                # The kernel drops file pages before it kills (memfd is not among them).
                stat = _figures(directory / "memory.stat")
                cached = [stat.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active")]
                yield limit, usage - sum(cached)
            if directory == root:
                break
