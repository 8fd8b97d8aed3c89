"""Triton kernel that moves rows of hidden states between tokens, paged or flat, and a batch of
rows, with a cast where their dtypes differ. What it does is defined by ``reference.py``.

The batch may lie in device memory or in pinned host memory that the device can address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lmcache_connector.triton_kernels.paged_copy import MAX_PROGRAMS, NUM_WARPS, TILE_BYTES
from lmcache_connector.triton_kernels.reference import row_views

WIDE_BYTES = 16  # the widest word of one thread
MAX_PROGRAMS_YZ = (1 << 16) - 1  # CUDA's limit of the other dimensions
# Rows that are not cast are copied as these: a NaN stays the one it was.
_INTEGERS = {2: torch.int16, 4: torch.int32}
_SCALARS = [
    *("first", "block_size", "hidden"),
    *("block_stride", "token_stride", "tap_stride", "row_stride", "row_tap_stride"),
]


# Nothing is specialised, not even pointers: a step must not wait for the compiler.
@triton.jit(do_not_specialize=["tokens", "rows", "slots", *_SCALARS])
def copy_rows_kernel(
    tokens,  # [num_blocks, block_size, taps, hidden]
    rows,  # [n, taps, hidden]
    slots,  # *int64 [n], or None: row i is that of slot first + i
    first: tl.int64,
    block_size: tl.int64,
    hidden: tl.int64,
    block_stride: tl.int64,  # strides in elements
    token_stride: tl.int64,
    tap_stride: tl.int64,
    row_stride: tl.int64,
    row_tap_stride: tl.int64,
    WIDTH: tl.constexpr,  # elements of which both sides are whole numbers of wide words, or 1
    ALIGNMENT: tl.constexpr,  # bytes, of both sides, if WIDTH is not 1
    TILE: tl.constexpr,  # elements per program
    TO_ROWS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_tap = tl.program_id(1).to(tl.int64)
    i_tile = tl.program_id(2).to(tl.int64)
    slot = first + i_row if slots is None else tl.load(slots + i_row)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        p_token = tokens + block * block_stride + offset * token_stride + i_tap * tap_stride
        p_row = rows + i_row * row_stride + i_tap * row_tap_stride
        if WIDTH > 1:
            p_token = tl.multiple_of(p_token, ALIGNMENT)
            p_row = tl.multiple_of(p_row, ALIGNMENT)
        o_element = i_tile * TILE + tl.arange(0, TILE)
        # Written so that the mask is known to be constant within a word.
        mask = o_element < (hidden // WIDTH) * WIDTH
        if TO_ROWS:
            values = tl.load(p_token + o_element, mask=mask)
            tl.store(p_row + o_element, values.to(rows.dtype.element_ty), mask=mask)
        else:
            values = tl.load(p_row + o_element, mask=mask)
            tl.store(p_token + o_element, values.to(tokens.dtype.element_ty), mask=mask)


def gather_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """As ``reference.gather_rows``, on the current stream; slots are not checked."""
    tokens, rows = row_views(source, out, slots)
    _launch(tokens, rows, slots, 0, to_rows=True)


def gather_span(source: torch.Tensor, first: int, count: int, out: torch.Tensor) -> None:
    """As ``reference.gather_span``, on the current stream."""
    tokens, rows = row_views(source, out)
    assert source.ndim == out.ndim
    assert count == len(out)
    assert 0 <= first <= first + count <= len(source)
    _launch(tokens, rows, None, first, to_rows=True)


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, destination: torch.Tensor) -> None:
    """As ``reference.scatter_rows``, on the current stream; slots are not checked."""
    tokens, rows = row_views(destination, rows, slots)
    _launch(tokens, rows, slots, 0, to_rows=False)


def width_of(tokens: torch.Tensor, rows: torch.Tensor) -> int:
    """Elements that one thread may move at a time: of them, every address, stride and row of
    either side is a multiple, in words of 16 bytes. 1 if there is no such number."""
    for side in (tokens, rows):
        bits = side.shape[-1] * side.element_size() | side.data_ptr()
        for stride in side.stride()[:-1]:
            bits |= stride * side.element_size()
        if bits % WIDE_BYTES:
            return 1
    return WIDE_BYTES // min(tokens.element_size(), rows.element_size())


def kernel_constants(
    width: int, hidden: int, element_bytes: int, *, to_rows: bool
) -> dict[str, object]:
    """The kernel's compile-time arguments; ``element_bytes`` is that of the wider dtype."""
    return {
        "WIDTH": width,
        "ALIGNMENT": WIDE_BYTES,
        "TILE": min(triton.next_power_of_2(hidden), TILE_BYTES // element_bytes),
        "TO_ROWS": to_rows,
    }


def _launch(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor | None,
    first: int,
    *,
    to_rows: bool,
) -> None:
    """``tokens`` and ``rows`` are ``row_views``."""
    num_rows, taps, hidden = rows.shape
    assert rows.device == tokens.device or rows.is_pinned()
    assert hidden <= 1 or tokens.stride(-1) == rows.stride(-1) == 1
    assert slots is None or (slots.device == tokens.device and slots.is_contiguous())
    if rows.numel() == 0:
        return
    element_bytes = max(tokens.element_size(), rows.element_size())
    constants = kernel_constants(width_of(tokens, rows), hidden, element_bytes, to_rows=to_rows)
    if tokens.dtype == rows.dtype:
        integer = _INTEGERS[element_bytes]
        tokens, rows = tokens.view(integer), rows.view(integer)
    grid = (num_rows, taps, triton.cdiv(hidden, constants["TILE"]))
    assert num_rows <= MAX_PROGRAMS
    assert max(grid[1:]) <= MAX_PROGRAMS_YZ
    copy_rows_kernel[grid](
        tokens,
        rows,
        slots,
        first,
        tokens.shape[1],
        hidden,
        *tokens.stride()[:-1],
        *rows.stride()[:-1],
        **constants,
        num_warps=NUM_WARPS,
    )
