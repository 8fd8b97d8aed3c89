"""CPU gather and scatter against a byte-by-byte model of memory."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.triton_kernels import reference

NEVER = 1 << 60


@dataclass
class Layout:
    """Pages and slots as offsets into one buffer, so that a stray write anywhere is seen."""

    runs: list[int]
    block_stride: int
    run_bytes: int
    block_ids: list[int]
    slots: list[int]
    run_pitch: int
    total: int

    def arguments(self, base: int) -> tuple[np.ndarray, int, int, np.ndarray, np.ndarray, int]:
        return (
            base + np.array(self.runs, np.int64),
            self.block_stride,
            self.run_bytes,
            np.array(self.block_ids, np.int64),
            base + np.array(self.slots, np.int64),
            self.run_pitch,
        )

    def pairs(self) -> list[tuple[int, int]]:
        """(page, slot) offset of every run of every real block."""
        return [
            (run + block * self.block_stride, slot + r * self.run_pitch)
            for block, slot in zip(self.block_ids, self.slots, strict=True)
            for r, run in enumerate(self.runs)
            if block >= 0
        ]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    run_bytes = draw(st.sampled_from([1, 2, 3, 7, 8, 16, 24, 48, 132, 528]))
    num_runs = draw(st.integers(1, 4))
    pool_blocks = draw(st.integers(1, 24))
    gap = draw(st.sampled_from([0, 0, 1, 8, 16]))
    run_pitch = -(-run_bytes // 16) * 16 + draw(st.sampled_from([0, 0, 16]))
    first = draw(st.sampled_from([0, 1, 4, 8, 16]))
    if draw(st.booleans()):  # block-outermost: all runs of a block together
        block_stride = num_runs * (run_bytes + gap)
        runs = [first + r * (run_bytes + gap) for r in range(num_runs)]
    else:  # one tensor for each run
        block_stride = run_bytes + gap
        runs = [first + r * (pool_blocks * block_stride + 16) for r in range(num_runs)]
    pages_end = first + num_runs * (pool_blocks * block_stride + run_bytes + 16)
    block_ids = draw(st.permutations(range(pool_blocks)))
    if draw(st.booleans()):
        block_ids = sorted(block_ids)
    block_ids = block_ids[: draw(st.integers(0, pool_blocks))]
    nulls = draw(st.sets(st.integers(0, pool_blocks - 1)))
    block_ids = [-1 if n in nulls else b for n, b in enumerate(block_ids)]
    # Slots: neighbours, or with room between them, in any order.
    distance = num_runs * run_pitch + draw(st.sampled_from([0, 0, 0, 16, 48]))
    order = list(range(len(block_ids)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    slots_start = -(-pages_end // 16) * 16 + draw(st.sampled_from([0, 0, 8, 1]))
    slots = [slots_start + place * distance for place in order]
    total = slots_start + len(order) * distance + 32
    return Layout(runs, block_stride, run_bytes, block_ids, slots, run_pitch, total)


# How the copy is made. The other way is patched away, so that it cannot stand in.
WAYS = {
    "chosen": {"PIECE_BYTES": reference.PIECE_BYTES},
    "run by run": {"MIN_BATCH_RUNS": NEVER, "_items": None},
    "run by run, without the GIL": {
        "MIN_BATCH_RUNS": NEVER,
        "RELEASE_GIL_BYTES": 0,
        "_memmove_holding_gil": None,
    },
    "in batches": {"MIN_BATCH_RUNS": 0, "MEMMOVE_BYTES": NEVER, "_move_runs": None},
    "in short batches": {
        "MIN_BATCH_RUNS": 0,
        "MEMMOVE_BYTES": NEVER,
        "PIECE_BYTES": 100,
        "_move_runs": None,
    },
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_copies_the_runs_and_nothing_else(way: str, layout: Layout, seed: int) -> None:
    before = np.random.default_rng(seed).integers(0, 256, layout.total, dtype=np.uint8)
    gathered, scattered = before.copy(), before.copy()
    for page, slot in layout.pairs():
        gathered[slot : slot + layout.run_bytes] = before[page : page + layout.run_bytes]
        scattered[page : page + layout.run_bytes] = before[slot : slot + layout.run_bytes]
    with mock.patch.multiple(reference, **WAYS[way]):
        memory = before.copy()
        reference.gather_pages(*layout.arguments(memory.ctypes.data))
        assert np.array_equal(memory, gathered)
        memory = before.copy()
        reference.scatter_pages(*layout.arguments(memory.ctypes.data))
        assert np.array_equal(memory, scattered)


@pytest.mark.parametrize("run_bytes", [40_000, 100_000, 300_000])
def test_runs_too_long_for_a_batch_item(run_bytes: int) -> None:
    count = 20
    pages = np.random.default_rng(0).integers(0, 256, count * run_bytes, dtype=np.uint8)
    slots = np.zeros(count * (run_bytes + 1) + 16, np.uint8)
    block_ids = np.random.default_rng(1).permutation(count)
    reference.gather_pages(
        np.array([pages.ctypes.data]),
        run_bytes,
        run_bytes,
        block_ids,
        # Odd addresses: items are bytes, not words.
        slots.ctypes.data + 1 + np.arange(count) * run_bytes,
        run_bytes,
    )
    expected = pages.reshape(count, run_bytes)[block_ids].ravel()
    assert np.array_equal(slots[1 : 1 + count * run_bytes], expected)


def test_neighbours_in_pages_and_slots_move_at_once() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 16 * 4096, dtype=np.uint8)
    expected = memory[2 * 4096 : 7 * 4096].copy()
    base = memory.ctypes.data
    with mock.patch.object(
        reference, "_memmove_holding_gil", side_effect=ctypes.memmove
    ) as memmove:
        reference.gather_pages(
            np.array([base]),
            4096,
            4096,
            np.array([2, 3, 4, 5, 6, 0]),
            base + 4096 * np.array([8, 9, 10, 11, 12, 13]),
            4096,
        )
    assert [call.args[2] for call in memmove.call_args_list] == [5 * 4096, 4096]
    assert np.array_equal(memory[8 * 4096 : 13 * 4096], expected)


@pytest.mark.parametrize("way", ["run by run", "in batches"])
def test_strides_beyond_32_bits(way: str) -> None:
    stride = (1 << 31) + 4096
    noreserve = 0x4000  # MAP_NORESERVE: only touched pages take memory
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
    with mmap.mmap(-1, 2 * stride, flags=flags) as far:
        pages = np.frombuffer(far, np.uint8)
        pages[100:148], pages[stride + 100 : stride + 148] = 1, 2
        slots = np.zeros(96, np.uint8)
        arguments = (
            np.array([pages.ctypes.data + 100]),
            stride,
            48,
            np.array([1, 0]),
            slots.ctypes.data + np.array([0, 48]),
            48,
        )
        with mock.patch.multiple(reference, **WAYS[way]):
            reference.gather_pages(*arguments)
            assert slots.tolist() == [2] * 48 + [1] * 48
            slots[:] = 3
            reference.scatter_pages(*arguments)
        assert pages[100:148].tolist() == pages[stride + 100 : stride + 148].tolist() == [3] * 48
        del pages


def test_refuses_tables_of_another_type() -> None:
    with pytest.raises(AssertionError):
        reference.gather_pages(
            np.zeros(1, np.int64), 16, 16, np.zeros(1, np.int32), np.zeros(1, np.int64), 16
        )
