"""Tokens and rows of hidden states, in memory of which every bit is known."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

BITS = {2: torch.int16, 4: torch.int32}
MARGIN = 64  # elements in front and behind, which must not change
BLOCK_SIZE = 12


class Memory(NamedTuple):
    whole: torch.Tensor
    view: torch.Tensor

    def copy(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> Memory:
        """The same bits, strides and alignment elsewhere."""
        whole = self.whole.to(device, copy=True)
        whole = whole.pin_memory() if pinned else whole
        view = self.view
        return Memory(whole, whole.as_strided(view.shape, view.stride(), view.storage_offset()))

    def equals(self, other: Memory, *, cast: bool = False) -> bool:
        """Whether all bits are the same, around the view too. A cast makes any NaN of a NaN."""
        a, b = self.whole.cpu(), other.whole.cpu()
        same = a.view(BITS[a.itemsize]) == b.view(BITS[b.itemsize])
        if cast:
            same |= a.isnan() & b.isnan()
        return bool(same.all())


class RowCase(NamedTuple):
    """How rows of hidden states lie in memory: all lengths in elements."""

    # Tokens are "flat", "paged" (a page is token after token) or "by tap" (as vLLM's pages).
    layout: str
    num_rows: int
    row: tuple[int, ...]  # [hidden] or [taps, hidden]
    token_pad: int = 0  # between tokens if they are flat, else between pages
    row_pad: int = 0
    shift: int = 0  # of the tokens' address
    wide: bool = True  # 16-byte words fit

    def tokens(self, dtype: torch.dtype) -> Memory:
        """[num_tokens, *row] or [num_blocks, BLOCK_SIZE, *row], nine tokens or more than rows."""
        num_tokens = self.num_rows + 9
        shape = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, *self.row)
        size, hidden = math.prod(self.row), self.row[-1]
        page = BLOCK_SIZE * size + self.token_pad
        if self.layout == "by tap":
            return _memory(shape, (page, hidden, BLOCK_SIZE * hidden, 1), dtype, self.shift)
        within = (hidden, 1)[-len(self.row) :]
        if self.layout == "paged":
            return _memory(shape, (page, size, *within), dtype, self.shift)
        strides = (size + self.token_pad, *within)
        return _memory((num_tokens, *self.row), strides, dtype, self.shift)

    def rows(self, dtype: torch.dtype) -> Memory:
        """[num_rows, *row]"""
        strides = (math.prod(self.row) + self.row_pad, self.row[-1], 1)
        strides = strides if len(self.row) == 2 else strides[::2]
        return _memory((self.num_rows, *self.row), strides, dtype, 0, seed=1)

    def slots(self, *, unique: bool, skip: bool = True) -> torch.Tensor:
        """Tokens in no order. Some come twice unless ``unique``, some are -1 if ``skip``."""
        random = torch.Generator().manual_seed(self.num_rows)
        slots = torch.randperm(self.num_rows + 9, generator=random)[: self.num_rows]
        if not unique:
            slots[1::3] = slots[::3][: len(slots[1::3])]
        if skip:
            slots[5::7] = -1
        return slots

    def call(
        self, module: ModuleType, name: str, tokens: Memory, rows: Memory, slots: torch.Tensor
    ) -> None:
        """Run one of the three operations; a span starts at token 5."""
        if name == "gather_rows":
            module.gather_rows(tokens.view, slots, rows.view)
        elif name == "scatter_rows":
            module.scatter_rows(rows.view, slots, tokens.view)
        else:
            module.gather_span(tokens.view, 5, self.num_rows, rows.view)


def _memory(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    shift: int,
    seed: int = 0,
) -> Memory:
    """Random bits: all kinds of NaN, infinities and subnormal numbers are among them."""
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    count = MARGIN + shift + extent + MARGIN
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=random)
    whole = bits.to(BITS[dtype.itemsize]).view(dtype)
    return Memory(whole, whole.as_strided(shape, strides, MARGIN + shift))


ROW_CASES = [
    RowCase("flat", 1, (1,), wide=False),
    RowCase("flat", 500, (7,), wide=False),
    RowCase("flat", 63, (64,)),
    RowCase("flat", 17, (64,), token_pad=8, row_pad=16),
    RowCase("flat", 17, (64,), token_pad=1, wide=False),
    RowCase("flat", 17, (64,), row_pad=1, wide=False),
    RowCase("flat", 17, (64,), shift=1, wide=False),
    RowCase("flat", 63, (2056,)),
    RowCase("flat", 9, (3, 2056), token_pad=8),
    RowCase("flat", 9, (5001,), wide=False),  # several tiles
    RowCase("paged", 63, (64,)),
    RowCase("paged", 17, (2, 7), token_pad=3, wide=False),
    RowCase("paged", 17, (2, 64), token_pad=64, row_pad=8),
    RowCase("by tap", 1, (2, 1), token_pad=5, wide=False),
    RowCase("by tap", 63, (1, 7), wide=False),
    RowCase("by tap", 17, (3, 64)),
    RowCase("by tap", 17, (3, 2056), token_pad=4096, row_pad=24),
    RowCase("by tap", 9, (4, 5000)),
]


@pytest.fixture(params=ROW_CASES, ids=lambda case: f"{case.layout}-{case.num_rows}x{case.row}")
def row_case(request: pytest.FixtureRequest) -> RowCase:
    return request.param


@pytest.fixture(params=[8, 1], ids=["wide", "narrow"])
def cast_case(request: pytest.FixtureRequest) -> RowCase:
    return RowCase("by tap", 15, (2, 200), token_pad=16, row_pad=request.param)
