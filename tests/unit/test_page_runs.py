"""Runs of pages against maps of single bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.errors import GeometryError
from lmcache_connector.worker.page_runs import (
    MAX_RUNS_PER_BLOCK,
    LayerRuns,
    PageRuns,
    check_disjoint,
    contiguous_pieces,
    layer_runs,
    merge_layer_runs,
)


@st.composite
def strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view with permuted axes, gaps at any axis, and an offset into its storage."""
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(sizes))))
    strides = [0] * len(sizes)
    span = 1
    for axis in order:
        strides[axis] = span
        span = span * sizes[axis] + draw(st.sampled_from([0, 0, 1, 3]))
    offset = draw(st.integers(0, 3))
    return torch.empty(offset + span, dtype=dtype).as_strided(sizes, strides, offset)


def byte_set(tensor: torch.Tensor) -> set[int]:
    """Addresses of all bytes of a tensor, one element at a time."""
    item = tensor.element_size()
    return {
        tensor[index].data_ptr() + byte
        for index in np.ndindex(*tensor.shape)
        for byte in range(item)
    }


def run_bytes_set(runs: PageRuns, block: int) -> list[int]:
    return [
        int(address) + block * runs.block_stride + byte
        for address in runs.run_addresses
        for byte in range(runs.run_bytes)
    ]


@settings(deadline=None)
@given(strided_tensors())
def test_pieces_are_the_bytes_of_the_tensor_in_address_order(tensor: torch.Tensor) -> None:
    offsets, piece_bytes = contiguous_pieces("a", tensor)
    covered = [
        tensor.data_ptr() + int(offset) + byte for offset in offsets for byte in range(piece_bytes)
    ]
    assert covered == sorted(byte_set(tensor))


@settings(deadline=None)
@given(strided_tensors())
def test_every_block_of_a_layer_is_found_by_its_stride(tensor: torch.Tensor) -> None:
    page_bytes = tensor[0].numel() * tensor.element_size()
    runs, _ = merge_layer_runs([layer_runs("a", tensor, page_bytes)])
    for block in range(tensor.shape[0]):
        assert sorted(run_bytes_set(runs, block)) == sorted(byte_set(tensor[block]))


def test_inner_axes_merge_into_one_run() -> None:
    pages = torch.empty(4, 2, 8, 16, dtype=torch.bfloat16)
    runs, _ = merge_layer_runs([layer_runs("a", pages, 512)])
    assert runs.run_addresses.tolist() == [pages.data_ptr()]
    assert (runs.run_bytes, runs.block_stride) == (512, 512)


def test_the_pitch_in_an_object_is_a_multiple_of_16_bytes() -> None:
    runs, _ = merge_layer_runs([layer_runs("a", torch.empty(4, 132, dtype=torch.uint8), 132)])
    assert (runs.run_bytes, runs.run_pitch) == (132, 144)


def test_page_runs_cannot_be_changed() -> None:
    runs, _ = merge_layer_runs([layer_runs("a", torch.empty(4, 16), 64)])
    with pytest.raises(AttributeError):
        runs.run_bytes = 1  # type: ignore[misc]


def test_a_page_of_another_size_than_its_spec_is_refused() -> None:
    with pytest.raises(GeometryError, match=r"layer a: .*\[4, 16\].* holds 64 bytes, .* 60"):
        layer_runs("a", torch.empty(4, 16), 60)


def test_a_page_outside_its_storage_is_refused() -> None:
    pages = torch.empty(4, 16)
    pages.untyped_storage().resize_(255)
    with pytest.raises(GeometryError, match=r"layer a: .* leaves its storage"):
        layer_runs("a", pages, 64)


def test_a_page_in_too_many_pieces_is_refused_with_the_layouts_that_help() -> None:
    pages = torch.empty(2, MAX_RUNS_PER_BLOCK + 1, 2, dtype=torch.uint8)[:, :, :1]
    with pytest.raises(GeometryError, match=r"layer a: .*4097 pieces of 1 bytes.*LBNHC"):
        layer_runs("a", pages, MAX_RUNS_PER_BLOCK + 1)


def test_a_group_of_too_many_runs_is_refused() -> None:
    pages = torch.empty(2, MAX_RUNS_PER_BLOCK, 2, dtype=torch.uint8)
    layers = [
        layer_runs("a", pages[:, :, :1], MAX_RUNS_PER_BLOCK),
        layer_runs("b", torch.empty_like(pages)[:, :, :1], MAX_RUNS_PER_BLOCK),
    ]
    merge_layer_runs(layers[:1])
    with pytest.raises(GeometryError, match="a to b is 8192 runs of 1 bytes"):
        merge_layer_runs(layers)


def test_addresses_above_the_signed_range_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = torch.empty(2, 16)
    high = 0xFF00_0000_0020_0000
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: high)
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda self: high)
    runs = layer_runs("a", pages, 64)
    assert runs.addresses.view(np.uint64).tolist() == [high]


# ---- merging layers -----------------------------------------------------------------------------


def packed(num_blocks: int, page: int, slots: str) -> dict[str, torch.Tensor]:
    """One page per letter side by side in each block; "." is a page of padding."""
    blocks = torch.empty(num_blocks, len(slots), page, dtype=torch.uint8)
    return {name: blocks[:, index] for index, name in enumerate(slots) if name != "."}


def merged(views: dict[str, torch.Tensor], names: str) -> tuple[PageRuns, str]:
    return merge_layer_runs([layer_runs(name, views[name], views[name].shape[1]) for name in names])


def test_a_whole_block_of_all_layers_is_one_run() -> None:
    views = packed(4, 32, "abcd")
    runs, _ = merged(views, "abcd")
    assert runs.run_addresses.tolist() == [views["a"].data_ptr()]
    assert (runs.run_bytes, runs.block_stride) == (128, 128)


@pytest.mark.parametrize(
    ("slots", "names", "run_pages"),
    [
        ("ab.", "ab", [("a", 2)]),
        (".a.b.", "ab", [("a", 1), ("b", 1)]),
        ("abxcdx", "abcd", [("a", 2), ("c", 2)]),
        # Runs have one length: two pages and one page become three single ones.
        ("abxc", "abc", [("a", 1), ("b", 1), ("c", 1)]),
        ("abcdxef", "abcdef", [("a", 2), ("c", 2), ("e", 2)]),
        ("abcdxefghij", "abcdefghij", [("a", 2), ("c", 2), ("e", 2), ("g", 2), ("i", 2)]),
        # The order is the layers', not the addresses'.
        ("b.a", "ab", [("a", 1), ("b", 1)]),
        ("ba", "ab", [("b", 2)]),
    ],
)
def test_adjacent_layers_merge_and_neither_padding_nor_other_layers_are_copied(
    slots: str, names: str, run_pages: list[tuple[str, int]]
) -> None:
    views = packed(3, 16, slots)
    runs, _ = merged(views, names)
    assert runs.run_addresses.tolist() == [views[name].data_ptr() for name, _ in run_pages]
    assert {runs.run_bytes} == {16 * pages for _, pages in run_pages}


def test_neighbours_in_two_allocations_do_not_merge() -> None:
    # Whether two allocations touch is chance; what an object holds must not depend on it.
    one = LayerRuns("a", np.array([4096]), 64, 64, 1, storage_address=4096)
    two = LayerRuns("b", np.array([4160]), 64, 64, 1, storage_address=4160)
    runs, _ = merge_layer_runs([one, two])
    assert runs.run_addresses.tolist() == [4096, 4160]
    same = two._replace(storage_address=4096)
    assert merge_layer_runs([one, same])[0].run_addresses.tolist() == [4096]


def test_the_digest_tells_content_orders_apart_and_nothing_else() -> None:
    digest = merged(packed(3, 16, "ab"), "ab")[1]
    assert merged(packed(9, 16, "ab."), "ab")[1] == digest
    others = [
        merged(packed(3, 16, "ba"), "ab")[1],  # b's page first inside the run
        merged(packed(3, 16, "a.b"), "ab")[1],  # two runs, each with its own padding
        merged(packed(3, 32, "ab"), "ab")[1],
        merged(packed(3, 16, "ac"), "ac")[1],  # another layer
    ]
    assert len({digest, *others}) == 5


def test_pages_that_are_cut_differently_cannot_be_one_group() -> None:
    storage = torch.empty(4096, dtype=torch.uint8)
    whole = layer_runs("a", storage.as_strided((2, 2, 8), (64, 8, 1), 0), 16)
    split = layer_runs("b", storage.as_strided((2, 2, 8), (64, 16, 1), 256), 16)
    with pytest.raises(GeometryError, match="layer a into 1 of 16 bytes, layer b into 2 of 8"):
        merge_layer_runs([whole, split])


# ---- no two pages share a byte ------------------------------------------------------------------


@st.composite
def layers_in_one_buffer(draw: st.DrawFn) -> list[LayerRuns]:
    layers = []
    for index in range(draw(st.integers(1, 3))):
        num_blocks, pieces = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        run_bytes, stride = draw(st.integers(1, 6)), draw(st.sampled_from([4, 6, 12]))
        addresses = sorted(draw(st.integers(0, 60)) for _ in range(pieces))
        layers.append(LayerRuns(str(index), np.array(addresses), run_bytes, stride, num_blocks, 0))
    return layers


def bytes_of(layer: LayerRuns) -> list[int]:
    return [
        int(address) + block * layer.block_stride + byte
        for address in layer.addresses
        for block in range(layer.num_blocks)
        for byte in range(layer.run_bytes)
    ]


@settings(deadline=None)
@given(layers_in_one_buffer())
def test_layers_that_share_a_byte_never_pass(layers: list[LayerRuns]) -> None:
    touched = [byte for layer in layers for byte in bytes_of(layer)]
    if len(touched) != len(set(touched)):
        with pytest.raises(GeometryError, match="overlap"):
            check_disjoint(layers)


@settings(deadline=None)
@given(
    slots=st.permutations("abcde.."),
    outer=st.booleans(),
    num_blocks=st.integers(1, 4),
    page=st.integers(1, 5),
)
def test_layers_side_by_side_pass_in_block_and_layer_order(
    slots: list[str], outer: bool, num_blocks: int, page: int
) -> None:
    buffer = torch.empty(num_blocks * len(slots) * page, dtype=torch.uint8)
    shape = (num_blocks, len(slots), page) if outer else (len(slots), num_blocks, page)
    views = buffer.view(shape) if outer else buffer.view(shape).transpose(0, 1)
    check_disjoint(
        [layer_runs(name, views[:, index], page) for index, name in enumerate(slots) if name != "."]
    )


def test_layers_of_several_page_sizes_pass_in_regions_of_their_own() -> None:
    # [a a a][b b b][c c c], where a and c have one size and b another.
    views = [LayerRuns(n, np.array([a]), p, p, 3, 0) for n, a, p in [("a", 0, 8), ("b", 24, 4)]]
    check_disjoint([*views, LayerRuns("c", np.array([36]), 8, 8, 3, 0)])
    with pytest.raises(GeometryError, match="layers b and c overlap"):
        check_disjoint([*views, LayerRuns("c", np.array([35]), 8, 8, 3, 0)])


def test_layers_that_meet_in_later_blocks_only_are_refused() -> None:
    long = LayerRuns("a", np.array([0]), 2, 8, 4, 0)
    with pytest.raises(GeometryError, match="layers a and b overlap: blocks of 6 bytes"):
        check_disjoint([long, LayerRuns("b", np.array([4]), 2, 6, 4, 0)])  # at byte 16
    short = LayerRuns("b", np.array([4]), 2, 8, 1, 0)
    check_disjoint([long, short])
    with pytest.raises(GeometryError, match="layers b and c overlap"):
        check_disjoint([long, short, LayerRuns("c", np.array([8]), 2, 8, 1, 0)])


def test_blocks_that_overlap_the_next_block_are_refused() -> None:
    with pytest.raises(GeometryError, match="overlap"):
        check_disjoint([LayerRuns("a", np.array([0]), 16, 8, 2, 0)])
    check_disjoint([LayerRuns("a", np.array([0]), 16, 8, 1, 0)])
