"""Triton kernels that copy between pages and slots: one launch for all layers and blocks of a
kernel group. What they do is defined by ``reference.py``; pages and slots are bare addresses.

A slot may lie in device memory or in pinned host memory that the device can address.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

# Bytes that one program moves: four 16-byte words in flight for each of its 128 threads.
TILE_BYTES = 8192
MAX_PROGRAMS = (1 << 31) - 1  # CUDA's limit of the x dimension, the largest one
NUM_WARPS = 4
# A 16-byte word is two adjacent int64 of one thread, which Triton joins to one access.
_ELEMENTS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["num_runs", "block_stride", "run_bytes", "run_pitch", "num_tiles"])
def copy_runs_kernel(
    run_addresses,  # *int64 [num_runs]
    block_ids,  # *int64 [num_blocks]
    slot_addresses,  # *int64 [num_blocks]
    num_runs: tl.int64,
    block_stride: tl.int64,
    run_bytes: tl.int64,
    run_pitch: tl.int64,
    num_tiles: tl.int64,  # programs per run
    WORD_BYTES: tl.constexpr,
    ELEMENT: tl.constexpr,
    ELEMENT_BYTES: tl.constexpr,
    TILE: tl.constexpr,  # elements per program
    TO_SLOTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    i_tile = program % num_tiles
    i_pair = program // num_tiles
    i_run = i_pair % num_runs
    i_block = i_pair // num_runs
    block = tl.load(block_ids + i_block)
    if block >= 0:
        page = tl.load(run_addresses + i_run) + block * block_stride
        slot = tl.load(slot_addresses + i_block) + i_run * run_pitch
        # Addresses that come from memory carry no known alignment: the launcher checked it.
        p_page = tl.multiple_of(page.to(tl.pointer_type(ELEMENT)), WORD_BYTES)
        p_slot = tl.multiple_of(slot.to(tl.pointer_type(ELEMENT)), WORD_BYTES)
        o_element = i_tile * TILE + tl.arange(0, TILE)
        # Written as words x elements so that the mask is known to be constant within a word.
        num_elements = (run_bytes // WORD_BYTES) * (WORD_BYTES // ELEMENT_BYTES)
        mask = o_element < num_elements
        if TO_SLOTS:
            tl.store(p_slot + o_element, tl.load(p_page + o_element, mask=mask), mask=mask)
        else:
            tl.store(p_page + o_element, tl.load(p_slot + o_element, mask=mask), mask=mask)


def word_bytes_of(
    run_addresses: npt.NDArray[np.int64],
    block_stride: int,
    run_bytes: int,
    slot_addresses: npt.NDArray[np.int64],
    run_pitch: int,
) -> int:
    """The widest word (16, 8, 4, 2 or 1 bytes) of which every address and length is a multiple."""
    bits = int(np.bitwise_or.reduce(run_addresses) | np.bitwise_or.reduce(slot_addresses))
    bits |= block_stride | run_bytes | run_pitch | 16
    return bits & -bits


def kernel_constants(word_bytes: int, *, to_slots: bool) -> dict[str, object]:
    """The kernel's compile-time arguments."""
    element_bytes = min(word_bytes, 8)
    return {
        "WORD_BYTES": word_bytes,
        "ELEMENT": _ELEMENTS[word_bytes],
        "ELEMENT_BYTES": element_bytes,
        "TILE": TILE_BYTES // element_bytes,
        "TO_SLOTS": to_slots,
    }


def copy_pages(
    run_addresses: torch.Tensor,
    block_stride: int,
    run_bytes: int,
    block_ids: torch.Tensor,
    slot_addresses: torch.Tensor,
    run_pitch: int,
    *,
    word_bytes: int,
    to_slots: bool,
) -> None:
    """Copy pages into slots, or slots into pages, on the current stream.

    Args:
        run_addresses: int64 [R] on the device, where run r of block 0 starts.
        block_stride: bytes from a block to the next one, the same for all runs.
        run_bytes: length of a run.
        block_ids: int64 [N] on the device; a negative one (null block) is skipped. Pages are
            written to: no id may come twice.
        slot_addresses: int64 [N] on the device, where each block starts in its slot.
        run_pitch: bytes from a run to the next one inside a slot, >= run_bytes.
        word_bytes: ``word_bytes_of`` the arguments (the addresses are on the device already).
    """
    tables = (run_addresses, block_ids, slot_addresses)
    assert all(t.dtype == torch.int64 and t.ndim == 1 and t.is_contiguous() for t in tables)
    assert run_addresses.device == block_ids.device == slot_addresses.device
    assert block_ids.shape == slot_addresses.shape
    assert 0 < run_bytes <= run_pitch
    assert word_bytes in _ELEMENTS
    assert (block_stride | run_bytes | run_pitch) % word_bytes == 0
    num_tiles = triton.cdiv(run_bytes, TILE_BYTES)
    num_programs = block_ids.numel() * run_addresses.numel() * num_tiles
    if num_programs == 0:
        return
    assert num_programs <= MAX_PROGRAMS
    copy_runs_kernel[(num_programs,)](
        run_addresses,
        block_ids,
        slot_addresses,
        run_addresses.numel(),
        block_stride,
        run_bytes,
        run_pitch,
        num_tiles,
        **kernel_constants(word_bytes, to_slots=to_slots),
        num_warps=NUM_WARPS,
    )


gather_pages = partial(copy_pages, to_slots=True)
scatter_pages = partial(copy_pages, to_slots=False)
