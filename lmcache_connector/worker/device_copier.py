"""Copies between a device's pages and pinned pool memory, beside the model.

Every copy passes through device memory: a kernel gathers pages into staging (or scatters from
it) at the device's own speed, and the copy engine moves whole slots over the bus, not pages.
So small pages cost no more than large ones, and no kernel waits for the bus.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_connector.errors import ProtocolError

Int64Array = npt.NDArray[np.int64]

# cudaHostRegisterPortable | cudaHostRegisterMapped
_REGISTER_FLAGS = 1 | 2
# Share of the staging memory that loads use; the rest is the ring for stores.
_LOAD_SHARE = 4


@dataclass(frozen=True, slots=True)
class PageJob:
    """Blocks of one kernel group and where each lies in its slot.

    Run r of block b is ``run_bytes`` at ``run_addresses[r] + b * block_stride``. In a slot, block
    n starts at ``slot_addresses[n]`` and its runs lie ``run_pitch`` bytes apart.
    """

    run_addresses: Int64Array  # [R]
    block_stride: int
    run_bytes: int
    run_pitch: int
    block_ids: Int64Array  # [N]; a negative one is skipped
    slot_addresses: Int64Array  # [N]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in a slot."""
        return len(self.run_addresses) * self.run_pitch

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in slots."""
        return len(self.block_ids) * self.block_bytes

    def without_null_blocks(self) -> PageJob:
        real = self.block_ids >= 0
        if real.all():
            return self
        return replace(
            self, block_ids=self.block_ids[real], slot_addresses=self.slot_addresses[real]
        )


class StagingRing:
    """Hands out contiguous parts of ``capacity`` bytes and takes them back oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._parts: deque[tuple[int, int]] = deque()  # [start, end), oldest first

    def take(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` free bytes, or None, and nothing changed, when there is no room."""
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
        self._parts.popleft()


def split_job(job: PageJob, area_bytes: int) -> Iterator[PageJob]:
    """Cut a job into parts that take ``area_bytes`` at most: whole blocks, or, where one block
    is larger than that, some runs of one block, or, where one run is, a piece of one run."""
    if job.run_pitch > area_bytes:
        length = area_bytes // 16 * 16
        for start in range(0, job.run_bytes, length):
            nbytes = min(length, job.run_bytes - start)
            piece = replace(
                job, run_addresses=job.run_addresses + start, run_bytes=nbytes, run_pitch=nbytes
            )
            ...
