"""Copies between a device's pages and pinned pool memory, beside the model.

Every copy passes through device memory: a kernel gathers pages into staging (or scatters from
it) at the device's own speed, and the copy engine moves slots over the bus, not pages. So small
pages are as fast as large ones, and no kernel waits for the bus.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lmcache_connector.buffers import StagingRing
from lmcache_connector.errors import ProtocolError
from lmcache_connector.worker.staging import (
    STAGING_ALIGNMENT,
    PageJob,
    real_blocks,
    split_job,
)

_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


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

    def remove(self, address: int) -> bool:
        """Whether it was there."""
        with self._lock:
            known = self._tensors.pop(address, None) is not None
            self._replace_bounds()
            return known

    def addresses(self) -> list[int]:
        with self._lock:
            return list(self._tensors)

    def _replace_bounds(self) -> None:
        pairs = sorted((start, start + t.numel()) for start, t in self._tensors.items())
        self._bounds = np.array(pairs, np.int64).reshape(-1, 2)

    def check(self, job: PageJob) -> None:
        """Require that every slot lies in pinned memory.

        Raises:
            ProtocolError: names the slot that does not.
        """
        bounds, slots = self._bounds, job.slot_addresses
        extent = np.searchsorted(bounds[:, 0], slots, side="right") - 1
        inside = extent >= 0
        inside[inside] = slots[inside] + job.block_bytes <= bounds[extent[inside], 1]
        if not inside.all():
            raise ProtocolError(
                f"slot at {int(slots[~inside][0]):#x} of {job.block_bytes} bytes is not in pinned "
                "pool memory"
            )

    def segments(self, job: PageJob) -> list[tuple[torch.Tensor, int]]:
        """Host memory of a checked job's blocks, with its place behind the first block in staging,
        in bytes. Neighbours are merged, but never across two extents: a single copy must not span
        two registrations."""
        bounds, slots, block_bytes = self._bounds, job.slot_addresses, job.block_bytes
        extent = np.searchsorted(bounds[:, 0], slots, side="right") - 1
        apart = (slots[1:] - slots[:-1] != block_bytes) | (extent[1:] != extent[:-1])
        firsts = [0, *(np.flatnonzero(apart) + 1).tolist()]
        segments = []
        for first, last in zip(firsts, [*firsts[1:], len(slots)], strict=True):
            address = int(bounds[extent[first], 0])
            start = int(slots[first]) - address
            host = self._tensors[address][start : start + (last - first) * block_bytes]
            segments.append((host, first * block_bytes))
        return segments


@dataclass(slots=True)
class _Area:
    """A part of the staging memory. ``freed`` ends its last use."""

    offset: int
    freed: torch.cuda.Event | None = None


_Placed = tuple[PageJob, _Area]


class _Stage(NamedTuple):
    """One half of a copy: ``copy(piece, offset)`` runs with ``stream`` as the current one."""

    stream: torch.cuda.Stream
    copy: Callable[[PageJob, int], None]


class _Flight(NamedTuple):
    """A copy under way: everything is on its stream."""

    in_ring: bool
    # Pinned sources of uploads that may not have run yet.
    tables: list[torch.Tensor]
    ended: torch.cuda.Event


class DeviceCopier:
    """Copies for one device through ``torch.cuda`` (CUDA and ROCm).

    Half of the staging memory is a ring for stores, half serves loads in two areas that take
    turns. One thread, the one that launches the model, calls everything but ``register_extent``.
    """

    def __init__(self, device: torch.device, staging_bytes: int = 64 << 20) -> None:
        # Triton is not installed where there is no device to use it on.
        from lmcache_connector.triton_kernels import paged_copy

        self._kernels = paged_copy
        self._device = device
        self._extents = _Extents()
        self._area_bytes = staging_bytes // 4 // STAGING_ALIGNMENT * STAGING_ALIGNMENT
        self._ring = StagingRing(2 * self._area_bytes)
        self._load_areas = [_Area(2 * self._area_bytes), _Area(3 * self._area_bytes)]
        self._flights: dict[int, _Flight] = {}
        self._tickets = itertools.count()
        # Staging is written to in and out of inference mode: it must not be an inference tensor.
        with torch.cuda.device(device), torch.inference_mode(False):
            self._staging = torch.empty(4 * self._area_bytes, dtype=torch.uint8, device=device)
            # One stream for each direction of the bus, and one so that scattering a piece of a
            # load overlaps the transfer of the next.
            self._to_host = torch.cuda.Stream(device)
            self._to_device = torch.cuda.Stream(device)
            self._to_pages = torch.cuda.Stream(device)
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        """Run both kernels on a null block, so that no step waits for the compiler."""
        address = torch.zeros(1, dtype=torch.int64, device=self._device)
        for kernel in (self._kernels.gather_pages, self._kernels.scatter_pages):
            kernel(address, 16, 16, address - 1, address, 16, word_bytes=16)

    # ---- pool memory ---------------------------------------------------------------------------

    def register_extent(self, address: int, nbytes: int) -> None:
        """Pin host memory and accept slots in it. Pinning takes up to 0.6 s per GiB.

        Call it on a helper thread: CUDA keeps a failure as the calling thread's last error, and
        the next launch on the model's thread would report it as its own.

        Raises:
            OSError: the driver refused, with its reason.
        """
        with torch.cuda.device(self._device):
            status = _cudart().cudaHostRegister(address, nbytes, _REGISTER_FLAGS)
        _check_status(status, f"cannot pin {nbytes} bytes of pool memory")
        self._extents.add(address, nbytes)

    def unregister_extent(self, address: int) -> None:
        """Undo ``register_extent``, if that was not done yet; no copy may use the memory.

        Raises:
            OSError: the driver refused, with its reason.
        """
        if not self._extents.remove(address):
            return
        with torch.cuda.device(self._device):
            status = _cudart().cudaHostUnregister(address)
        _check_status(status, "cannot unpin pool memory")

    # ---- copies --------------------------------------------------------------------------------

    def store(self, runs: Sequence[PageJob]) -> int | None:
        """Copy pages to slots; a ticket, or None, and nothing started, when staging is in use.

        Work that the current stream is given afterwards cannot change what is stored: pages are
        gathered on that stream, behind what it already holds. Only a store larger than the ring
        makes it wait for the bus, and only for what does not fit. Padding between runs becomes 0.

        Raises:
            ProtocolError: a slot outside of the registered extents; nothing was started.
        """
        jobs = self._checked(runs)
        total = sum(job.staged_bytes for job in jobs)
        if total == 0:
            return self._issue(None)
        self._collect()
        start = self._ring.take(min(total, self._ring.capacity))
        if start is None:
            return None
        tables: list[torch.Tensor] = []

        def gather(piece: PageJob, offset: int) -> None:
            tables.append(self._upload_table(piece, offset))
            if piece.run_pitch != piece.run_bytes:
                self._staged_blocks(piece, offset).zero_()
            self._launch(self._kernels.gather_pages, piece, offset)

        def send(piece: PageJob, offset: int) -> None:
            blocks = self._staged_blocks(piece, offset)
            for host, begin in self._extents.segments(piece):
                host.copy_(blocks[begin : begin + host.numel()], non_blocking=True)

        compute = torch.cuda.current_stream(self._device)
        plan = (
            _line_up(jobs, start)
            if total <= self._ring.capacity
            else self._alternate(jobs, [_Area(0), _Area(self._area_bytes)])
        )
        ended = _pipeline(plan, _Stage(compute, gather), _Stage(self._to_host, send))
        return self._issue(_Flight(True, tables, ended))

    def load(self, runs: Sequence[PageJob]) -> int:
        """Copy slots to pages, behind what the current stream holds now; a ticket.

        Nothing on the current stream waits for it: pages must not be read before it is done.

        Raises:
            ProtocolError: a slot outside of the registered extents; nothing was started.
        """
        jobs = self._checked(runs)
        if not jobs:
            return self._issue(None)
        tables: list[torch.Tensor] = []

        def fetch(piece: PageJob, offset: int) -> None:
            tables.append(self._upload_table(piece, offset))
            blocks = self._staged_blocks(piece, offset)
            for host, begin in self._extents.segments(piece):
                blocks[begin : begin + host.numel()].copy_(host, non_blocking=True)

        def scatter(piece: PageJob, offset: int) -> None:
            self._launch(self._kernels.scatter_pages, piece, offset)

        # Only pages are behind the current stream's work: slots can be read at once.
        self._to_pages.wait_stream(torch.cuda.current_stream(self._device))
        plan = self._alternate(jobs, self._load_areas)
        ended = _pipeline(plan, _Stage(self._to_device, fetch), _Stage(self._to_pages, scatter))
        return self._issue(_Flight(False, tables, ended))

    def done(self, ticket: int) -> bool:
        """Whether the copy has ended. Does not wait."""
        self._collect()
        return ticket not in self._flights

    def wait(self, ticket: int) -> None:
        """Return when the copy has ended."""
        if ticket in self._flights:
            self._flights[ticket].ended.synchronize()

    def close(self) -> None:
        """Wait for every copy, then unpin all extents.

        Raises:
            OSError: the driver refused, with its reason.
        """
        for ticket in self._flights:
            self.wait(ticket)
        for address in self._extents.addresses():
            self.unregister_extent(address)

    # ---- parts of a copy -----------------------------------------------------------------------

    def _checked(self, runs: Sequence[PageJob]) -> list[PageJob]:
        jobs = [job for job in map(real_blocks, runs) if len(job.block_ids)]
        for job in jobs:
            self._extents.check(job)
        return jobs

    def _issue(self, flight: _Flight | None) -> int:
        ticket = next(self._tickets)
        if flight is not None:
            self._flights[ticket] = flight
        return ticket

    def _collect(self) -> None:
        """Forget the copies that have ended. Stores end in order, so that each one seen to have
        ended frees the oldest part of the ring."""
        for ticket, flight in list(self._flights.items()):
            if flight.ended.query():
                del self._flights[ticket]
                if flight.in_ring:
                    self._ring.release_oldest()

    def _alternate(self, jobs: Sequence[PageJob], areas: Sequence[_Area]) -> Iterator[_Placed]:
        """Jobs of any size, cut to use the areas in turn."""
        turns = itertools.cycle(areas)
        for job in jobs:
            for piece in split_job(job, self._area_bytes):
                yield piece, next(turns)

    def _staged_table(self, piece: PageJob, offset: int) -> torch.Tensor:
        count = len(piece.run_addresses) + 2 * len(piece.block_ids)
        return self._staging[offset : offset + 8 * count].view(torch.int64)

    def _staged_blocks(self, piece: PageJob, offset: int) -> torch.Tensor:
        start = offset + piece.table_bytes
        return self._staging[start : start + len(piece.block_ids) * piece.block_bytes]

    def _staged_addresses(self, piece: PageJob, offset: int) -> npt.NDArray[np.int64]:
        """[N] where each block lies in staging, which is the kernels' slot."""
        first = self._staging.data_ptr() + offset + piece.table_bytes
        return first + np.arange(len(piece.block_ids), dtype=np.int64) * piece.block_bytes

    def _upload_table(self, piece: PageJob, offset: int) -> torch.Tensor:
        """Put the kernels' tables in front of the piece's blocks; their pinned source."""
        slots = self._staged_addresses(piece, offset)
        table = np.concatenate((piece.run_addresses, piece.block_ids, slots))
        pinned = torch.from_numpy(table).pin_memory()
        self._staged_table(piece, offset).copy_(pinned, non_blocking=True)
        return pinned

    def _launch(self, kernel: Callable[..., None], piece: PageJob, offset: int) -> None:
        run_addresses, stride, run_bytes, block_ids, _, pitch = piece
        num_blocks = len(block_ids)
        sizes = [len(run_addresses), num_blocks, num_blocks]
        runs, ids, slots = self._staged_table(piece, offset).split(sizes)
        staged = self._staged_addresses(piece, offset)
        word_bytes = self._kernels.word_bytes_of(run_addresses, stride, run_bytes, staged, pitch)
        kernel(runs, stride, run_bytes, ids, slots, pitch, word_bytes=word_bytes)


def _line_up(jobs: Sequence[PageJob], start: int) -> Iterator[_Placed]:
    """Whole jobs one after the other from ``start``."""
    for job in jobs:
        yield job, _Area(start)
        start += job.staged_bytes


def _pipeline(plan: Iterable[_Placed], first: _Stage, second: _Stage) -> torch.cuda.Event:
    """Put both stages of every piece on their streams; the event that ends the last one."""
    for piece, area in plan:
        if area.freed is not None:
            first.stream.wait_event(area.freed)
        with torch.cuda.stream(first.stream):
            first.copy(piece, area.offset)
        second.stream.wait_stream(first.stream)
        with torch.cuda.stream(second.stream):
            second.copy(piece, area.offset)
        area.freed = second.stream.record_event()
    assert area.freed is not None
    return area.freed


def _cudart() -> Any:
    return torch.cuda.cudart()


def _check_status(status: Any, what: str) -> None:
    if status != _cudart().cudaError.success:
        raise OSError(f"{what}: {_cudart().cudaGetErrorString(status)}")
