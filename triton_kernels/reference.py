"""Copies of pages, and of rows of hidden states, on the CPU: the production path there, and the
kernels' reference.

A kernel group's pages are R runs per block: run r of block b starts at
``run_addresses[r] + b * block_stride``. A block in a slot starts at ``slot_addresses[n]`` and
its runs lie ``run_pitch`` apart. Everything is an address, a length and an int64, so that dtypes
and layouts do not matter.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

# Measured on an AMD EPYC (Zen 4, 2 cores, 13.6 GB/s), one thread, permuted pages of 4 / 16 / 64 /
# 256 KiB, as a fraction of one big memcpy: one memmove a run 0.30 / 0.54 / 0.87 / 1.02,
# index_select 0.72 / 0.82 / 1.00 / 1.10, NumPy's indexed assignment 0.71 / 0.80 / 1.00 / 1.10,
# index_copy_ 0.43 / 0.52 / 0.74 / 0.67.
# Runs that reach this length once neighbours are merged are moved one by one.
MEMMOVE_BYTES = 128 << 10
# torch copies index_select's items with memcpy below this many elements, else more slowly. It
# also keeps the overlapping view of _items within 2**63 bytes.
MAX_ITEM_WORDS = 1 << 15
# One batched call costs as much as moving about this many runs one by one.
MIN_BATCH_RUNS = 16
# NumPy assigns through a temporary where pages lie on both sides of the slots in memory: a piece
# of this size stays in the L3 cache.
PIECE_BYTES = 4 << 20
# memmove gives up the GIL from this length on. Below, a busy thread would keep it for 5 ms after
# each run (8192 runs of 16 KiB beside one: 4.0 s, against 0.03 s when it is held).
RELEASE_GIL_BYTES = 4 << 20

_memmove_holding_gil = ctypes.PyDLL(None).memmove
_memmove_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_holding_gil.restype = None


def copy_pages(
    run_addresses: Int64Array,
    block_stride: int,
    run_bytes: int,
    block_ids: Int64Array,
    slot_addresses: Int64Array,
    run_pitch: int,
    *,
    to_slots: bool,
) -> None:
    """Copy pages into slots, or slots into pages: N blocks of R runs.

    Args:
        run_addresses: [R], where run r of block 0 starts.
        block_stride: bytes from a block to the next one, the same for all runs.
        run_bytes: length of a run.
        block_ids: [N]; a negative one (null block) is skipped. Pages are written to: no id may
            come twice.
        slot_addresses: [N], where each block starts in its slot.
        run_pitch: bytes from a run to the next one inside a slot, >= run_bytes.

    Nothing outside the N x R destination runs is written. Sources and destinations are disjoint.
    """
    assert run_addresses.dtype == block_ids.dtype == slot_addresses.dtype == np.int64
    assert block_ids.shape == slot_addresses.shape
    assert 0 < run_bytes <= run_pitch
    real = block_ids >= 0
    if not real.all():
        block_ids, slot_addresses = block_ids[real], slot_addresses[real]
    pages = block_ids[:, None] * block_stride + run_addresses
    slots = slot_addresses[:, None] + np.arange(len(run_addresses)) * run_pitch
    _copy_runs(pages.ravel(), slots.ravel(), run_bytes, run_pitch, to_slots=to_slots)


gather_pages = partial(copy_pages, to_slots=True)
scatter_pages = partial(copy_pages, to_slots=False)


def _copy_runs(
    pages: Int64Array, slots: Int64Array, run_bytes: int, run_pitch: int, *, to_slots: bool
) -> None:
    """Copy each run between its page and its slot: in batches along the slots, or run by run
    where that is as fast or batches would be short."""
    source, target = (pages, slots) if to_slots else (slots, pages)
    count = len(source)
    if count == 0:
        return
    apart = (source[1:] - source[:-1] != run_bytes) | (target[1:] - target[:-1] != run_bytes)
    firsts = np.flatnonzero(apart) + 1
    cuts = np.flatnonzero(slots[1:] - slots[:-1] != run_pitch) + 1
    # Slots of one batch are run_pitch apart, so the first one of each stands for all of them.
    bits = np.bitwise_or.reduce(pages) | np.bitwise_or.reduce(slots[cuts])
    word = np.uint8 if (int(bits | slots[0]) | run_bytes | run_pitch) % 8 else np.int64
    long_runs = count * run_bytes >= MEMMOVE_BYTES * (len(firsts) + 1)
    short_batches = count < MIN_BATCH_RUNS * (len(cuts) + 1)
    if long_runs or short_batches or run_bytes >= MAX_ITEM_WORDS * np.dtype(word).itemsize:
        _move_runs(source, target, firsts, run_bytes)
        return
    longest = max(1, PIECE_BYTES // run_bytes)
    ends = [*cuts.tolist(), count]
    for begin, end in zip([0, *ends], ends, strict=False):
        for first in range(begin, end, longest):
            piece = pages[first : min(first + longest, end)]
            items, index = _items(piece, run_bytes, word)
            memory = _Memory(int(slots[first]), len(piece), run_pitch, run_bytes, word)
            in_slots = np.asarray(memory)
            if to_slots:
                # np.take wants both arrays contiguous, or goes through copies.
                chosen, out = torch.from_numpy(index), torch.from_numpy(in_slots)
                torch.index_select(torch.from_numpy(items), 0, chosen, out=out)
            else:
                items[index] = in_slots


def _move_runs(
    source: Int64Array, target: Int64Array, firsts: npt.NDArray[np.intp], run_bytes: int
) -> None:
    """Move run by run; a run that is not in ``firsts`` goes together with the one before."""
    firsts = np.concatenate(([0], firsts))
    nbytes = np.diff(firsts, append=len(source)) * run_bytes
    for from_, to, size in zip(
        source[firsts].tolist(), target[firsts].tolist(), nbytes.tolist(), strict=True
    ):
        move = ctypes.memmove if size >= RELEASE_GIL_BYTES else _memmove_holding_gil
        move(to, from_, size)


class _Memory:
    """Lets NumPy see ``count`` items of ``item_bytes`` each, ``pitch`` bytes apart."""

    def __init__(
        self, address: int, count: int, pitch: int, item_bytes: int, word: type[np.generic]
    ) -> None:
        dtype = np.dtype(word)
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count, item_bytes // dtype.itemsize),
            "strides": (pitch, dtype.itemsize),
            "typestr": dtype.str,
        }


def _items(
    addresses: Int64Array, item_bytes: int, word: type[np.generic]
) -> tuple[npt.NDArray[np.generic], Int64Array]:
    """A view with an item at every word from the lowest address to the highest (they overlap),
    and the index of each address in it: items anywhere in memory, for one indexed call."""
    step = np.dtype(word).itemsize
    lowest = int(addresses.min())
    index = (addresses - lowest) // step
    count = int(index.max()) + 1
    return np.asarray(_Memory(lowest, count, step, item_bytes, word)), index


# ---- rows of hidden states ---------------------------------------------------------------------


def row_views(
    tokens: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens as [num_blocks, block_size, taps, hidden], rows as [n, taps, hidden]. A flat tensor
    is one block of all its tokens. ``slots``: of the rows, or None for a span of them."""
    assert {tokens.dtype, rows.dtype} <= {torch.bfloat16, torch.float16, torch.float32}
    assert rows.ndim in (2, 3)
    assert tokens.ndim in (rows.ndim, rows.ndim + 1)
    assert tokens.shape[1 - rows.ndim :] == rows.shape[1:]
    assert slots is None or (slots.dtype == torch.int64 and slots.shape == rows.shape[:1])
    if tokens.ndim == rows.ndim:
        tokens = tokens.unsqueeze(0)
    return (tokens, rows) if rows.ndim == 3 else (tokens.unsqueeze(2), rows.unsqueeze(1))


@torch.inference_mode()
def gather_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows of tokens by their slots, ``block_id * block_size + offset``.

    Args:
        source: [num_tokens, *row] or, paged, [num_blocks, block_size, *row], bfloat16, float16 or
            float32. A row is [hidden] or [taps, hidden]; its last dimension is contiguous. vLLM's
            [num_blocks, taps, block_size, hidden] is passed as its ``.transpose(1, 2)``.
        slots: int64 [n]; a negative one is skipped, and its row of ``out`` stays as it is.
        out: [n, *row], of any of the three dtypes: rows of another one are cast, rounding to
            nearest even, those of the same one keep every bit.
    """
    tokens, rows = row_views(source, out, slots)
    real = slots >= 0
    if not real.any():
        return
    num_blocks, block_size, *row = tokens.shape
    assert slots.max() < num_blocks * block_size
    # Every place where a row may start, so that one index finds it: index_select is the only way
    # as fast as copy_ (64 MiB of bfloat16: 6 ms and 5, against 50 when indexed).
    step = math.gcd(*tokens.stride()[:2])
    per_block, per_token = (stride // step for stride in tokens.stride()[:2])
    count = (num_blocks - 1) * per_block + (block_size - 1) * per_token + 1
    starts = tokens.as_strided((count, *row), (step, *tokens.stride()[2:]))
    index = slots // block_size * per_block + slots % block_size * per_token
    if not real.all():
        rows[real] = starts.index_select(0, index[real]).to(rows.dtype)
    elif rows.dtype == starts.dtype:
        torch.index_select(starts, 0, index, out=rows)
    else:
        # In pieces: fresh memory for all rows at once takes three times as long.
        num_rows = PIECE_BYTES // (math.prod(row) * starts.element_size()) + 1
        for part, places in zip(rows.split(num_rows), index.split(num_rows), strict=True):
            part.copy_(starts.index_select(0, places))


@torch.inference_mode()
def gather_span(source: torch.Tensor, first: int, count: int, out: torch.Tensor) -> None:
    """Copy rows [first, first + count) of a flat tensor, [num_tokens, *row], to ``out``; else as
    ``gather_rows``."""
    row_views(source, out)
    assert source.ndim == out.ndim
    assert count == len(out)
    assert 0 <= first <= first + count <= len(source)
    out.copy_(source[first : first + count])


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy ``rows`` to the places of tokens, which ``gather_rows(destination, slots, rows)`` reads.
    A negative slot is skipped; no other may come twice."""
    tokens, rows = row_views(destination, rows, slots)
    real = slots >= 0
    if not real.all():
        slots, rows = slots[real], rows[real]
    # NumPy assigns in half of the time that index_put_ takes. It knows no bfloat16.
    integer = torch.int16 if tokens.element_size() == 2 else torch.int32
    places = (slots // tokens.shape[1]).numpy(), (slots % tokens.shape[1]).numpy()
    tokens.view(integer).numpy()[places] = rows.to(tokens.dtype).view(integer).numpy()
