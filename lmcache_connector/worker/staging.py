"""What a device copier needs to know before it copies: jobs, how they are cut, and where they fit.

Pure: no device, no memory is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_connector.buffers import PAGE_ALIGNMENT, align_up

Int64Array = npt.NDArray[np.int64]

# Parts of the staging memory start at multiples of this: a line of the device's caches.
STAGING_ALIGNMENT = 128
_ENTRY_BYTES = 8  # of a kernel's int64 tables


class PageJob(NamedTuple):
    """Blocks of one kernel group, and where each lies in its slot: the page copiers' arguments.

    Run r of block b is ``run_bytes`` at ``run_addresses[r] + b * block_stride``. In its slot,
    block n starts at ``slot_addresses[n]`` and its runs lie ``run_pitch`` bytes apart.
    """

    run_addresses: Int64Array  # [R]
    block_stride: int
    run_bytes: int
    block_ids: Int64Array  # [N]; a negative one is skipped
    slot_addresses: Int64Array  # [N]
    run_pitch: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in its slot."""
        return len(self.run_addresses) * self.run_pitch

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernel's tables in staging."""
        num_entries = len(self.run_addresses) + 2 * len(self.block_ids)
        return align_up(_ENTRY_BYTES * num_entries, STAGING_ALIGNMENT)

    @property
    def staged_bytes(self) -> int:
        """Bytes that tables and blocks take in staging."""
        block_bytes = len(self.block_ids) * self.block_bytes
        return self.table_bytes + align_up(block_bytes, STAGING_ALIGNMENT)


def real_blocks(job: PageJob) -> PageJob:
    """The job without its null blocks."""
    real = job.block_ids >= 0
    if real.all():
        return job
    return job._replace(block_ids=job.block_ids[real], slot_addresses=job.slot_addresses[real])


def split_job(job: PageJob, area_bytes: int) -> Iterator[PageJob]:
    """Cut a job into jobs that take ``area_bytes`` of staging at most: some of its blocks, or
    some runs of them where one block is larger than that, or parts of a run."""
    # What rounding adds to tables and to blocks.
    room = area_bytes - 2 * STAGING_ALIGNMENT
    num_runs = len(job.run_addresses)
    per_block = job.block_bytes + 2 * _ENTRY_BYTES
    if num_runs * _ENTRY_BYTES + per_block <= room:
        count = (room - num_runs * _ENTRY_BYTES) // per_block
        for first in range(0, len(job.block_ids), count):
            yield job._replace(
                block_ids=job.block_ids[first : first + count],
                slot_addresses=job.slot_addresses[first : first + count],
            )
    elif num_runs > 1:
        count = max(1, (room - 2 * _ENTRY_BYTES) // (job.run_pitch + _ENTRY_BYTES))
        for first in range(0, num_runs, count):
            runs = job._replace(
                run_addresses=job.run_addresses[first : first + count],
                slot_addresses=job.slot_addresses + first * job.run_pitch,
            )
            yield from split_job(runs, area_bytes)
    else:
        count = (room - 3 * _ENTRY_BYTES) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        for first in range(0, job.run_bytes, count):
            nbytes = min(count, job.run_bytes - first)
            part = job._replace(
                run_addresses=job.run_addresses + first,
                run_bytes=nbytes,
                run_pitch=align_up(nbytes, PAGE_ALIGNMENT),
                slot_addresses=job.slot_addresses + first,
            )
            yield from split_job(part, area_bytes)
