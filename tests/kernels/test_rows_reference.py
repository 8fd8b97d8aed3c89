"""Rows of hidden states on the CPU, against copies one row at a time."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from lmcache_connector import triton_kernels  # noqa: E402
from lmcache_connector.triton_kernels import reference  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def copy_row(target: torch.Tensor, source: torch.Tensor) -> None:
    """Bit by bit if the dtypes are the same."""
    if target.dtype == source.dtype:
        bits = torch.int16 if target.itemsize == 2 else torch.int32
        target, source = target.view(bits), source.view(bits)
    target.copy_(source)


def copy_one_by_one(name: str, case, tokens, rows, slots: torch.Tensor) -> None:
    for row, slot in zip(rows.view, slots.tolist(), strict=True):
        if slot >= 0:
            flat = case.layout == "flat"
            token = tokens.view[slot if flat else divmod(slot, tokens.view.shape[1])]
            copy_row(*((row, token) if name == "gather_rows" else (token, row)))


def check(name: str, case, tokens, rows, slots: torch.Tensor) -> None:
    now, expected = (tokens.copy(), rows.copy()), (tokens.copy(), rows.copy())
    copy_one_by_one(name, case, *expected, slots)
    case.call(reference, name, *now, slots)
    cast = tokens.whole.dtype != rows.whole.dtype
    assert now[0].equals(expected[0], cast=cast)
    assert now[1].equals(expected[1], cast=cast)
    assert now[0].equals(tokens) == (name == "gather_rows")
    assert now[1].equals(rows) == (name == "scatter_rows")


@pytest.mark.parametrize("skip", [True, False], ids=["some skipped", "all"])
@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows"])
def test_copies_the_rows_and_nothing_else(row_case, name: str, skip: bool) -> None:
    slots = row_case.slots(unique=name == "scatter_rows", skip=skip)
    check(name, row_case, row_case.tokens(BF16), row_case.rows(BF16), slots)


@pytest.mark.parametrize("token_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("row_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("piece_bytes", [reference.PIECE_BYTES, 3000])
@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows"])
def test_casts(
    cast_case, name: str, token_dtype: torch.dtype, row_dtype: torch.dtype, piece_bytes: int
) -> None:
    tokens, rows = cast_case.tokens(token_dtype), cast_case.rows(row_dtype)
    with mock.patch.object(reference, "PIECE_BYTES", piece_bytes):
        for skip in (True, False):
            slots = cast_case.slots(unique=name == "scatter_rows", skip=skip)
            check(name, cast_case, tokens, rows, slots)


@pytest.mark.parametrize("row", [(7,), (3, 64)])
@pytest.mark.parametrize("row_dtype", [BF16, F32])
def test_copies_a_span(cast_case, row: tuple[int, ...], row_dtype: torch.dtype) -> None:
    case = cast_case._replace(layout="flat", row=row)
    tokens, rows = case.tokens(BF16), case.rows(row_dtype)
    now, expected = rows.copy(), rows.copy()
    copy_one_by_one("gather_rows", case, tokens, expected, torch.arange(5, 5 + case.num_rows))
    case.call(reference, "gather_span", tokens, now, torch.empty(0))
    assert now.equals(expected, cast=row_dtype != BF16)


def test_casts_round_to_nearest_even() -> None:
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001], dtype=torch.int32)
    out = torch.zeros(1, 3, dtype=BF16)
    reference.gather_rows(halfway.view(F32)[None], torch.tensor([0]), out)
    assert out.view(torch.int16).tolist() == [[0x3F80, 0x3F82, 0x3F81]]


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_nothing_to_copy(slots: list[int]) -> None:
    pages, rows = torch.zeros(3, 4, 8), torch.full((len(slots), 8), 7.0)
    table = torch.tensor(slots, dtype=torch.int64)
    reference.gather_rows(pages, table, rows)
    reference.gather_rows(pages[:0], table, rows)
    reference.scatter_rows(rows, table, pages)
    reference.gather_span(pages[0], 4, 0, rows[:0])
    assert (rows == 7).all()
    assert (pages == 0).all()


@pytest.mark.parametrize("slot", [12, 1 << 40])
def test_refuses_slots_beyond_the_pages(slot: int) -> None:
    # Room behind the pages: an index past them would find memory.
    pages = torch.zeros(4, 4, 8)[:3]
    with pytest.raises(AssertionError):
        reference.gather_rows(pages, torch.tensor([0, slot]), torch.zeros(2, 8))
    with pytest.raises((AssertionError, IndexError)):
        reference.scatter_rows(torch.zeros(2, 8), torch.tensor([0, slot]), pages)


def test_refuses_tensors_that_do_not_fit() -> None:
    pages, slots, rows = torch.zeros(6, 4, 2, 8), torch.zeros(5, dtype=torch.int64), torch.ones(5)
    rows = rows[:, None, None].expand(5, 2, 8)
    for wrong in (
        (pages.transpose(1, 2), slots, rows),  # as vLLM has it
        (pages, slots[:4], rows),
        (pages, slots.int(), rows),
        (pages.double(), slots, rows.double()),
        (pages[None], slots, rows),
        (pages[0, :, 0, 0], slots, rows[:, 0, 0]),
    ):
        with pytest.raises(AssertionError):
            reference.gather_rows(*wrong)
        with pytest.raises(AssertionError):
            reference.scatter_rows(*reversed(wrong))
    for source, first, count in ((pages, 0, 5), (pages[0], 0, 5), (pages[0], -1, 5)):
        with pytest.raises(AssertionError):
            reference.gather_span(source, first, count, rows)


def test_inference_tensors_are_written_to_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        pages = torch.zeros(3, 4, 8)
        out, span = torch.zeros(1, 8), torch.zeros(1, 8)
    reference.scatter_rows(torch.ones(1, 8), torch.tensor([5]), pages)
    reference.gather_rows(pages, torch.tensor([5]), out)
    reference.gather_span(pages[1], 1, 1, span)
    assert (out == 1).all()
    assert (span == 1).all()
    assert pages.sum() == 8


def test_the_tensors_device_decides_what_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    names = ("gather_rows", "gather_span", "scatter_rows")
    kernels = {name: lambda *args, name=name: calls.append((name, args)) for name in names}
    full_name = "lmcache_connector.triton_kernels.hidden_rows"
    monkeypatch.setitem(sys.modules, full_name, SimpleNamespace(**kernels))
    monkeypatch.setattr(triton_kernels, "hidden_rows", sys.modules[full_name], raising=False)
    host, device = torch.ones(4, 8), torch.ones(4, 8, device="meta")
    slots, out = torch.tensor([3, 0]), torch.zeros(2, 8)
    triton_kernels.gather_rows(host, slots, out)
    assert (out == 1).all()
    triton_kernels.gather_span(host, 0, 2, out.zero_())
    assert (out == 1).all()
    triton_kernels.scatter_rows(out + 1, slots, host)
    assert host[:, 0].tolist() == [2, 1, 1, 2]
    assert not calls
    triton_kernels.gather_rows(device, slots, out)
    triton_kernels.gather_span(device, 0, 2, out)
    triton_kernels.scatter_rows(out, slots, device)
    assert calls == [
        ("gather_rows", (device, slots, out)),
        ("gather_span", (device, 0, 2, out)),
        ("scatter_rows", (out, slots, device)),
    ]
