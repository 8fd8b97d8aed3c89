"""Copies between a device's pages and pinned pool memory, beside the model.

Every copy passes through device memory: a kernel gathers pages into staging (or scatters from
it) at the device's own speed, and the copy engine moves slots over the bus, not pages. So small
pages are as fast as large ones, and no kernel waits for the bus.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lmcache_connector.errors import ProtocolError

Int64Array = npt.NDArray[np.int64]

_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
# Parts of the staging memory start at multiples of this: a line of the device's caches.
_ALIGNMENT = 128
_ENTRY_BYTES = 8  # of a kernel's int64 tables


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class PageJob:
    """Blocks of one kernel group, and where each lies in its slot.

    Run r of block b is ``run_bytes`` at ``run_addresses[r] + b * block_stride``. In its slot,
    block n starts at ``slot_addresses[n]`` and its runs lie ``run_pitch`` bytes apart.
    """

    run_addresses: Int64Array  # [R]
    block_stride: int
    run_bytes: int
    run_pitch: int
    block_ids: Int64Array  # [N]; a negative one is skipped
    slot_addresses: Int64Array  # [N]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in its slot."""
        return len(self.run_addresses) * self.run_pitch

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernel's tables in staging."""
        return _align(_ENTRY_BYTES * (len(self.run_addresses) + 2 * len(self.block_ids)))

    @property
    def staged_bytes(self) -> int:
        """Bytes that tables and blocks take in staging."""
        return self.table_bytes + _align(len(self.block_ids) * self.block_bytes)


def real_blocks(job: PageJob) -> PageJob:
    """The job without its null blocks."""
    real = job.block_ids >= 0
    if real.all():
        return job
    return replace(job, block_ids=job.block_ids[real], slot_addresses=job.slot_addresses[real])


def split_job(job: PageJob, area_bytes: int) -> Iterator[PageJob]:
    """Cut a job into jobs that take ``area_bytes`` of staging at most: some of its blocks, or
    some runs of them where one block is larger than that, or parts of a run."""
    # What rounding adds to tables and to blocks.
    room = area_bytes - 2 * _ALIGNMENT
    num_runs = len(job.run_addresses)
    per_block = job.block_bytes + 2 * _ENTRY_BYTES
    if num_runs * _ENTRY_BYTES + per_block <= room:
        count = (room - num_runs * _ENTRY_BYTES) // per_block
        for first in range(0, len(job.block_ids), count):
            yield replace(
                job,
                block_ids=job.block_ids[first : first + count],
                slot_addresses=job.slot_addresses[first : first + count],
            )
    elif num_runs > 1:
        count = max(1, (room - 2 * _ENTRY_BYTES) // (job.run_pitch + _ENTRY_BYTES))
        for first in range(0, num_runs, count):
            runs = replace(
                job,
                run_addresses=job.run_addresses[first : first + count],
                slot_addresses=job.slot_addresses + first * job.run_pitch,
            )
            yield from split_job(runs, area_bytes)
    else:
        count = (room - 3 * _ENTRY_BYTES) // 16 * 16
        for first in range(0, job.run_bytes, count):
            nbytes = min(count, job.run_bytes - first)
            part = replace(
                job,
                run_addresses=job.run_addresses + first,
                run_bytes=nbytes,
                run_pitch=-(-nbytes // 16) * 16,
                slot_addresses=job.slot_addresses + first,
            )
            yield from split_job(part, area_bytes)


class StagingRing:
    """Hands out contiguous parts of ``capacity`` bytes and takes them back oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._parts: deque[tuple[int, int]] = deque()  # [start, end), oldest first

    def take(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` free bytes; None, and nothing changed, when there is no room."""
        assert nbytes > 0
        start = self._find(nbytes)
        if start is not None:
            self._parts.append((start, start + nbytes))
        return start

    def _find(self, nbytes: int) -> int | None:
        if not self._parts:
            return 0 if nbytes <= self.capacity else None
        oldest, end = self._parts[0][0], self._parts[-1][1]
        if end <= oldest:  # wrapped: free is what lies between
            return end if nbytes <= oldest - end else None
        if nbytes <= self.capacity - end:
            return end
        return 0 if nbytes <= oldest else None

    def release_oldest(self) -> None:
        """Take back the part that was handed out first."""
        self._parts.popleft()


class _Segment(NamedTuple):
    """Blocks that are contiguous in host memory: ``host`` goes to or from ``offset`` bytes after
    the job's first block in staging."""

    host: torch.Tensor
    offset: int


class _Extents:
    """Pinned host memory by address. Grows on a helper thread while copies look slots up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[int, torch.Tensor] = {}
        # [start, end) of each, sorted; replaced as one so that readers need no lock.
        self._bounds: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)

    def add(self, address: int, nbytes: int) -> None:
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        with self._lock:
            self._tensors[address] = torch.frombuffer(memory, dtype=torch.uint8)
            self._replace_bounds()

    def remove(self, address: int) -> None:
        with self._lock:
            del self._tensors[address]
            self._replace_bounds()

    def addresses(self) -> list[int]:
        with self._lock:
            return list(self._tensors)

    def _replace_bounds(self) -> None:
        pairs = sorted((start, start + t.numel()) for start, t in self._tensors.items())
        self._bounds = np.array(pairs, np.int64).reshape(-1, 2)

    def segments(self, job: PageJob) -> list[_Segment]:
        """Host memory of the job's blocks, neighbours merged; never across two extents, which a
        single copy must not span.

        Raises:
            ProtocolError: a slot outside of all extents.
        """
        bounds, slots, block_bytes = self._bounds, job.slot_addresses, job.block_bytes
        extent = np.searchsorted(bounds[:, 0], slots, side="right") - 1
        outside = extent < 0
        if not outside.any():
            outside = slots + block_bytes > bounds[extent, 1]
        if outside.any():
            raise ProtocolError(
                f"slot at {int(slots[outside][0]):#x} of {block_bytes} bytes is not in pinned "
                f"pool memory"
            )
        apart = (slots[1:] - slots[:-1] != block_bytes) | (extent[1:] != extent[:-1])
        firsts = [0, *(np.flatnonzero(apart) + 1).tolist()]
        segments = []
        for first, last in zip(firsts, [*firsts[1:], len(slots)], strict=True):
            address = int(bounds[extent[first], 0])
            start = int(slots[first]) - address
            host = self._tensors[address][start : start + (last - first) * block_bytes]
            segments.append(_Segment(host, first * block_bytes))
        return segments


@dataclass(slots=True)
class _Area:
    """A part of the staging memory. ``freed`` ends its last use."""

    offset: int
    freed: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Flight:
    """A copy under way. ``tables`` are pinned and must outlive their upload."""

    in_ring: bool
    ended: torch.cuda.Event | None = None
    tables: list[torch.Tensor] = field(default_factory=list)


class DeviceCopier:
    """Copies for one device through ``torch.cuda`` (CUDA and ROCm).

    Half of the staging memory is a ring for stores, half serves loads in two alternating areas.
    One thread, the one that launches the model, calls everything but ``register_extent``.
    """

    def __init__(self, device: torch.device, staging_bytes: int = 64 << 20) -> None:
        # Triton is not installed where there is no device to use it on.
        from lmcache_connector.triton_kernels import paged_copy

        self._kernels = paged_copy
        self._device = device
        self._extents = _Extents()
        self._area_bytes = staging_bytes // 4 // _ALIGNMENT * _ALIGNMENT
        self._ring = StagingRing(2 * self._area_bytes)
        self._load_areas = [_Area(2 * self._area_bytes), _Area(3 * self._area_bytes)]
        self._flights: dict[int, _Flight] = {}
        self._next_ticket = 0
        with torch.cuda.device(device):
            self._staging = torch.empty(4 * self._area_bytes, dtype=torch.uint8, device=device)
            # One stream for each direction of the bus, and one so that scattering a part of a
            # load overlaps the transfer of the next.
            self._to_host = torch.cuda.Stream(device)
            self._to_device = torch.cuda.Stream(device)
            self._scatter = torch.cuda.Stream(device)
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        """Run both kernels on a null block, so that no step waits for the compiler."""
        null = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        for copy in (self._kernels.gather_pages, self._kernels.scatter_pages):
            copy(null, 16, 16, null, null, 16, word_bytes=16)

    # ---- pool memory ---------------------------------------------------------------------------

    def register_extent(self, address: int, nbytes: int) -> None:
        """Pin host memory and accept slots in it. Takes about 0.5 s per GiB.

        Call it on a helper thread: CUDA keeps a failure as the calling thread's last error, and
        the model's next launch would report it as its own.

        Raises:
            OSError: the driver refused, with its reason.
        """
        with torch.cuda.device(self._device):
            status = _cudart().cudaHostRegister(address, nbytes, _REGISTER_FLAGS)
        _check(status, f"cannot pin {nbytes} bytes of pool memory")
        self._extents.add(address, nbytes)

    def unregister_extent(self, address: int) -> None:
        """Undo ``register_extent``; no copy may use the memory any more.

        Raises:
            OSError: the driver refused, with its reason.
        """
        self._extents.remove(address)
        with torch.cuda.device(self._device):
            status = _cudart().cudaHostUnregister(address)
        _check(status, "cannot unpin pool memory")

    # ---- copies --------------------------------------------------------------------------------

    def store(self, runs: Sequence[PageJob]) -> int | None:
        """Copy pages to slots; a ticket, or None, and nothing started, when staging is in use.

        Work that the current stream is given afterwards cannot change what is stored: pages are
        gathered on that stream, behind what it already holds. Only a store larger than the ring
        makes it wait for the bus, for the part that does not fit. Padding between runs becomes 0.

        Raises:
            ProtocolError: a slot outside of the registered extents; nothing was started.
        """
        self._collect()
        jobs = [job for job in map(real_blocks, runs) if len(job.block_ids)]
        self._check_slots(jobs)
        total = sum(job.staged_bytes for job in jobs)
        if total == 0:
            return self._ticket(None)
        start = self._ring.take(min(total, self._ring.capacity))
        if start is None:
            return None
        flight = _Flight(in_ring=True)
        compute = torch.cuda.current_stream(self._device)

        def gather(piece: PageJob, offset: int) -> None:
            table = self._upload_table(flight, piece, offset)
            if piece.run_pitch != piece.run_bytes:
                self._staged_blocks(piece, offset).zero_()
            self._launch(self._kernels.gather_pages, piece, table, offset)

        def send(piece: PageJob, offset: int) -> None:
            blocks = self._staged_blocks(piece, offset)
            for host, begin in self._extents.segments(piece):
                host.copy_(blocks[begin : begin + host.numel()], non_blocking=True)

        if total > self._ring.capacity:
            areas = [_Area(0), _Area(self._area_bytes)]
            plan = self._alternate(jobs, areas)
        else:
            plan = _line_up(jobs, start)
        self._pipeline(flight, plan, (compute, gather), (self._to_host, send))
        return self._ticket(flight)

    def load(self, runs: Sequence[PageJob]) -> int:
        """Copy slots to pages, behind what the current stream holds now; a ticket. Nothing on
        the current stream waits for it: pages must not be read before the ticket is done.

        Raises:
            ProtocolError: a slot outside of the registered extents; nothing was started.
        """
        self._collect()
        jobs = [job for job in map(real_blocks, runs) if len(job.block_ids)]
        self._check_slots(jobs)
        if not jobs:
            return self._ticket(None)
        flight = _Flight(in_ring=False)
        # Slots are free to read at once; pages only behind the current stream's work.
        self._scatter.wait_stream(torch.cuda.current_stream(self._device))

        def fetch(piece: PageJob, offset: int) -> None:
            self._upload_table(flight, piece, offset)
            blocks = self._staged_blocks(piece, offset)
            for host, begin in self._extents.segments(piece):
                blocks[begin : begin + host.numel()].copy_(host, non_blocking=True)

        def scatter(piece: PageJob, offset: int) -> None:
            table = self._staged_table(piece, offset)
            self._launch(self._kernels.scatter_pages, piece, table, offset)

        plan = self._alternate(jobs, self._load_areas)
        self._pipeline(flight, plan, (self._to_device, fetch), (self._scatter, scatter))
        return self._ticket(flight)

    def done(self, ticket: int) -> bool:
        """Whether the copy has ended. Does not wait."""
        self._collect()
        return ticket not in self._flights

    def wait(self, ticket: int) -> None:
        """Return when the copy has ended."""
        flight = self._flights.get(ticket)
        if flight is not None and flight.ended is not None:
            flight.ended.synchronize()
        self._collect()

    def close(self) -> None:
        """Wait for every copy, then unpin all extents.

        Raises:
            OSError: the driver refused, with its reason.
        """
        for ticket in list(self._flights):
            self.wait(ticket)
        for address in self._extents.addresses():
            self.unregister_extent(address)
