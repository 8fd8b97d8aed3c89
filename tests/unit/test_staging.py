"""Cutting of copy jobs and the ring that staging memory is handed out from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.buffers import StagingRing
from lmcache_connector.worker.staging import PageJob, real_blocks, split_job


def make_job(num_runs: int, run_bytes: int, run_pitch: int, num_blocks: int) -> PageJob:
    return PageJob(
        run_addresses=np.arange(num_runs, dtype=np.int64) * 1_000_000,
        block_stride=10_000,
        run_bytes=run_bytes,
        run_pitch=run_pitch,
        block_ids=np.arange(num_blocks, dtype=np.int64)[::-1].copy(),
        slot_addresses=1 << 40 | np.arange(num_blocks, dtype=np.int64) * 100_000,
    )


def byte_map(job: PageJob) -> list[tuple[int, int]]:
    """(page, slot) address of every byte."""
    return [
        (int(run + block * job.block_stride + byte), int(slot + r * job.run_pitch + byte))
        for block, slot in zip(job.block_ids, job.slot_addresses, strict=True)
        for r, run in enumerate(job.run_addresses)
        for byte in range(job.run_bytes)
    ]


@settings(max_examples=60, deadline=None)
@given(
    num_runs=st.integers(1, 12),
    run_bytes=st.sampled_from([1, 16, 100, 640, 1500]),
    padding=st.sampled_from([0, 16]),
    num_blocks=st.integers(1, 4),
    area_lines=st.integers(3, 40),
)
def test_pieces_cover_each_byte_once_and_fit(
    num_runs: int, run_bytes: int, padding: int, num_blocks: int, area_lines: int
) -> None:
    job = make_job(num_runs, run_bytes, -(-run_bytes // 16) * 16 + padding, num_blocks)
    area_bytes = 128 * area_lines
    pieces = list(split_job(job, area_bytes))
    assert all(piece.staged_bytes <= area_bytes for piece in pieces)
    assert all(piece.run_pitch % 16 == 0 for piece in pieces)
    covered = [pair for piece in pieces for pair in byte_map(piece)]
    assert sorted(covered) == sorted(byte_map(job))


def test_a_job_that_fits_stays_whole() -> None:
    job = make_job(4, 512, 512, 8)
    (piece,) = split_job(job, 1 << 20)
    assert byte_map(piece) == byte_map(job)


def test_null_blocks_are_left_out() -> None:
    job = make_job(1, 16, 16, 4)
    job.block_ids[1] = -1
    real = real_blocks(job)
    assert real.block_ids.tolist() == [3, 1, 0]
    assert real.slot_addresses.tolist() == job.slot_addresses[[0, 2, 3]].tolist()


@given(st.lists(st.one_of(st.none(), st.integers(1, 60)), max_size=60))
def test_ring_parts_never_overlap(steps: list[int | None]) -> None:
    ring = StagingRing(100)
    live: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            if live:
                live.pop(0)
                ring.release_oldest()
            continue
        start = ring.take(step)
        if start is None:
            # Nowhere in the order of release: neither behind the newest part nor at the front.
            newest = live[-1][1]
            ahead = [begin for begin, _ in live if begin >= newest]
            assert min(ahead, default=100) - newest < step
            assert ahead or min(begin for begin, _ in live) < step
            continue
        assert 0 <= start <= 100 - step
        assert all(start + step <= begin or end <= start for begin, end in live)
        live.append((start, start + step))


def test_an_empty_ring_offers_all_of_itself() -> None:
    ring = StagingRing(100)
    assert ring.take(101) is None
    for _ in range(3):
        assert ring.take(70) == 0
        assert ring.take(40) is None
        ring.release_oldest()
    assert ring.take(100) == 0
    assert ring.take(1) is None


def test_a_full_wrapped_ring_has_no_room() -> None:
    ring = StagingRing(100)
    assert [ring.take(50), ring.take(50)] == [0, 50]
    ring.release_oldest()
    assert ring.take(50) == 0
    assert ring.take(1) is None


def test_nothing_is_not_a_part() -> None:
    with pytest.raises(AssertionError):
        StagingRing(100).take(0)
