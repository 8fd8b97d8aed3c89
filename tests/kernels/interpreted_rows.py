"""The kernel of hidden rows under Triton's interpreter; see ``interpreted.py``."""

from __future__ import annotations

import mmap

import pytest
import torch

from lmcache_connector.triton_kernels import hidden_rows, reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def check(name: str, case, tokens, rows) -> None:
    now, expected = (tokens.copy(), rows.copy()), (tokens.copy(), rows.copy())
    slots = case.slots(unique=name == "scatter_rows")
    case.call(reference, name, *expected, slots)
    case.call(hidden_rows, name, *now, slots)
    assert now[0].equals(expected[0])
    assert now[1].equals(expected[1])
    assert now[0].equals(tokens) == (name != "scatter_rows")
    assert now[1].equals(rows) == (name == "scatter_rows")


@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows"])
def test_copies_as_the_reference_does(row_case, name: str) -> None:
    tokens, rows = row_case.tokens(BF16), row_case.rows(BF16)
    width = hidden_rows.width_of(*reference.row_views(tokens.view, rows.view))
    assert width == (8 if row_case.wide else 1)
    check(name, row_case, tokens, rows)


@pytest.mark.parametrize("row", [(7,), (64,), (3, 64)])
def test_copies_a_span(cast_case, row: tuple[int, ...]) -> None:
    case = cast_case._replace(layout="flat", row=row)
    check("gather_span", case, case.tokens(BF16), case.rows(BF16))


@pytest.mark.parametrize(
    ("token_dtype", "row_dtype"),
    [(F32, F32), (BF16, F32), (F32, BF16), (F16, BF16), (F32, F16)],
)
@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows"])
def test_casts_as_the_reference_does(
    cast_case, name: str, token_dtype: torch.dtype, row_dtype: torch.dtype
) -> None:
    tokens, rows = cast_case.tokens(token_dtype), cast_case.rows(row_dtype)
    # Numbers that all dtypes have: the interpreter does not round as devices do.
    random = torch.Generator().manual_seed(2)
    for memory in (tokens, rows):
        values = torch.randint(-128, 129, memory.whole.shape, generator=random)
        memory.whole.copy_(values / 8)
    check(name, cast_case, tokens, rows)


FAR = (1 << 31) + 4096  # elements


@pytest.mark.parametrize(
    ("shape", "strides", "slots"),
    [
        ((2, 1, 1, 8), (FAR, 8, 8, 1), [0, 1]),
        ((1, 2, 1, 8), (8, FAR, 8, 1), [0, 1]),
        ((1, 1, 2, 8), (8, 8, FAR, 1), [0]),
    ],
    ids=["block", "token", "tap"],
)
def test_strides_beyond_32_bits(
    shape: tuple[int, ...], strides: tuple[int, ...], slots: list[int]
) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: little is touched
    with mmap.mmap(-1, 2 * FAR + 4096, flags=flags) as mapping:
        memory = torch.frombuffer(mapping, dtype=BF16)
        memory[:8], memory[FAR : FAR + 8] = 1, 2
        far = memory.as_strided(shape, strides)
        rows = torch.zeros(len(slots), shape[2], 8, dtype=BF16)
        hidden_rows.gather_rows(far, torch.tensor(slots), rows)
        assert rows.view(2, 8).tolist() == [[1] * 8, [2] * 8]
        hidden_rows.scatter_rows(rows + 2, torch.tensor(slots), far)
        assert memory[:8].tolist() == [3] * 8
        assert memory[FAR : FAR + 8].tolist() == [4] * 8
        del memory, far


def test_nothing_to_copy() -> None:
    pages, rows = torch.zeros(3, 4, 8), torch.zeros(0, 8)
    slots = torch.empty(0, dtype=torch.int64)
    hidden_rows.gather_rows(pages, slots, rows)
    hidden_rows.gather_span(pages[0], 4, 0, rows)
    hidden_rows.scatter_rows(rows, slots, pages)
    hidden_rows.gather_rows(pages[:0], slots, rows)


FLAT, PAGES = torch.zeros(12, 2, 8), torch.zeros(6, 4, 2, 8)
SLOTS, ROWS = torch.full((5,), -1), torch.zeros(5, 2, 8)


@pytest.mark.parametrize(
    ("source", "slots", "rows"),
    [
        (PAGES, SLOTS.int(), ROWS),
        (PAGES, SLOTS[:4], ROWS),
        (PAGES, SLOTS.repeat(2)[::2], ROWS),
        (PAGES, SLOTS, ROWS.double()),
        (PAGES.long(), SLOTS, ROWS.long()),
        (PAGES.transpose(1, 2), SLOTS, ROWS),  # as vLLM has it
        (PAGES[..., :1], SLOTS, ROWS),
        (PAGES[..., ::2], SLOTS, ROWS[..., :4]),
        (PAGES[..., :4], SLOTS, ROWS[..., ::2]),
        (PAGES[None], SLOTS, ROWS),
        (PAGES[:, 0, 0, 0], SLOTS, ROWS[:, 0, 0]),
    ],
)
def test_launchers_refuse_what_the_kernel_does_not_check(
    source: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    hidden_rows.gather_rows(PAGES, SLOTS, ROWS)
    with pytest.raises(AssertionError):
        hidden_rows.gather_rows(source, slots, rows)
    with pytest.raises(AssertionError):
        hidden_rows.scatter_rows(rows, slots, source)


@pytest.mark.parametrize(
    ("source", "first", "count"), [(FLAT, 8, 5), (FLAT, -1, 5), (FLAT, 0, 4), (PAGES, 0, 5)]
)
def test_spans_end_within_a_flat_tensor(source: torch.Tensor, first: int, count: int) -> None:
    hidden_rows.gather_span(FLAT, 7, 5, ROWS)
    with pytest.raises(AssertionError):
        hidden_rows.gather_span(source, first, count, ROWS)
