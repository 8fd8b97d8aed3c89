"""Registered tensors become one entry per logical block, without a copy, or are refused."""

from __future__ import annotations

import math

import pytest
import torch

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import FULL, STATE, LayerSpec
from lmcache_connector.worker.group_edits import page_view

NB, NH, BS, HS = 5, 2, 8, 4


def attention(
    slots: int = BS, heads: int = NH, content: int = 2 * HS, **changes: object
) -> LayerSpec:
    facts: dict[str, object] = {
        "name": "attn",
        "tokens_per_block": slots,
        "slots_per_block": slots,
        "page_bytes": heads * slots * content * 2,
        "dtype": "bfloat16",
        "rule": FULL,
        "num_shards": 1,
        "num_heads": heads,
    }
    return LayerSpec(**{**facts, **changes})  # type: ignore[arg-type]


def state(page_bytes: int) -> LayerSpec:
    return LayerSpec("gdn", 640, 1, page_bytes, "int8", STATE, 1, family="state")


def numbered(shape: tuple[int, ...], block_axis: int, ratio: int = 1) -> torch.Tensor:
    """Every element holds the number of the logical block that it belongs to."""
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    for entry in range(shape[block_axis]):
        tensor.select(block_axis, entry).fill_(entry // ratio)
    return tensor


def check_blocks(pages: torch.Tensor, registered: torch.Tensor, num_blocks: int = NB) -> None:
    assert pages.shape[0] == num_blocks
    for block in range(num_blocks):
        assert (pages[block] == block).all()
    assert pages.numel() == registered.numel()
    registered.fill_(77)
    assert (pages == 77).all(), "a copy, not a view"


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize(
    ("axes", "block_axis", "kv_size"),
    [
        ("B H N CC", 0, 1),
        ("B N H CC", 0, 1),
        ("B 2 N H C", 0, 2),
        ("B 2 H N C", 0, 2),
        ("2 B N H C", 1, 2),
        ("2 B H N C", 1, 2),
    ],
)
def test_every_known_attention_shape_is_paged_by_logical_block(
    axes: str, block_axis: int, kv_size: int, ratio: int
) -> None:
    sizes = {"B": NB * ratio, "H": NH, "N": BS // ratio, "C": HS, "CC": 2 * HS, "2": 2}
    shape = tuple(sizes[axis] for axis in axes.split())
    registered = numbered(shape, block_axis, ratio)
    view = page_view(attention(), registered, NB)
    assert view.kv_size == kv_size
    check_blocks(view.tensor, registered)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks", [3, 4, 8, 64])
def test_sizes_that_coincide_do_not_confuse_the_block_axis(heads: int, blocks: int) -> None:
    # Heads, slots or content as many as blocks or as 2.
    registered = numbered((blocks, heads, 8, 8), 0)
    spec = attention(heads=heads, content=8)
    check_blocks(page_view(spec, registered, blocks).tensor, registered, blocks)
    registered = numbered((2, blocks, 8, heads, 8), 1)
    spec = attention(heads=heads, content=16)
    check_blocks(page_view(spec, registered, blocks).tensor, registered, blocks)
    registered = numbered((blocks, 2, 8, heads, 8), 0)
    check_blocks(page_view(spec, registered, blocks).tensor, registered, blocks)


@pytest.mark.parametrize(
    ("shape", "expected"), [((5, 2, 8, 8), "NB,NH,BS,HS"), ((5, 8, 2, 8), "NB,BS,NH,HS")]
)
def test_the_layout_names_axes_from_the_outermost_in_memory(
    shape: tuple[int, ...], expected: str
) -> None:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    assert page_view(attention(), tensor, NB).layout == expected
    swapped = {"NB,NH,BS,HS": "NB,BS,NH,HS", "NB,BS,NH,HS": "NB,NH,BS,HS"}[expected]
    permuted = torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=torch.bfloat16)
    assert page_view(attention(), permuted.transpose(1, 2), NB).layout == swapped


def test_the_layout_tells_heads_outermost_kernel_blocks_and_planes() -> None:
    heads_outermost = torch.empty(NH, NB, BS, 8, dtype=torch.bfloat16).transpose(0, 1)
    assert page_view(attention(), heads_outermost, NB).layout == "NH,NB,BS,HS"
    planes = torch.empty(2, NB * 4, 2, NH, HS, dtype=torch.bfloat16)
    assert page_view(attention(), planes, NB).layout == "KV,NB,KB4,BS,NH,HS"


@pytest.mark.parametrize(("blocks", "entries"), [(2, 2), (1, 2)])
def test_planes_that_cannot_be_told_from_blocks_are_refused(blocks: int, entries: int) -> None:
    # [2,2,...] with 2 blocks, or with 1 block of two kernel blocks: both readings fit.
    slots = BS * entries // blocks
    tensor = torch.empty(2, entries, BS, NH, HS, dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match=r"attn: .*\[KV,NB.*\[NB,KV.* only . blocks"):
        page_view(attention(slots=slots), tensor, blocks)


def test_one_unsplit_block_is_not_ambiguous() -> None:
    tensor = numbered((2, 1, BS, NH, HS), 1)
    check_blocks(page_view(attention(), tensor, 1).tensor, tensor, 1)


# ---- MLA, compression, indexer ------------------------------------------------------------------


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(
    ("tokens", "slots", "ratio"), [(64, 64, 1), (128, 128, 2), (256, 64, 4), (256, 2, 2)]
)
def test_kernel_paged_mla_keeps_its_declared_compression(
    tokens: int, slots: int, ratio: int, rank: int
) -> None:
    spec = attention(slots=slots, heads=1, content=6, tokens_per_block=tokens)
    shape = (NB * ratio, slots // ratio, 6) if rank == 3 else (NB * ratio, 1, slots // ratio, 6)
    registered = numbered(shape, 0, ratio)
    view = page_view(spec, registered, NB)
    assert view.kv_size == 1
    assert view.tensor[0].numel() * 2 == spec.page_bytes
    check_blocks(view.tensor, registered)


def test_an_indexer_page_is_bytes() -> None:
    spec = attention(slots=64, heads=1, page_bytes=64 * 132, dtype="uint8")
    tensor = torch.empty(NB, 64, 132, dtype=torch.uint8)
    assert page_view(spec, tensor, NB).tensor.shape == (NB, 64, 132)


@pytest.mark.parametrize(
    ("tensor", "spec"),
    [
        # Kernel blocks that do not divide the slots.
        (
            torch.empty(NB * 4, 4, 2, 4, dtype=torch.bfloat16),
            attention(slots=2, heads=4, content=16),
        ),
        (
            torch.empty(NB * 2, 1, 1, 6, dtype=torch.bfloat16),
            attention(slots=3, heads=1, content=4),
        ),
        # As many bytes, but not these heads and slots.
        (torch.empty(NB, NH * 2, BS // 2, 8, dtype=torch.bfloat16), attention()),
        (torch.empty(NB, NH * BS * 8, dtype=torch.bfloat16), attention()),
        (torch.empty(NB, BS, 8 * NH, dtype=torch.bfloat16), attention()),
        # Blocks neither first nor behind the planes of K and V.
        (torch.empty(NH, NB, BS, 8, dtype=torch.bfloat16), attention()),
        (torch.empty(NH, BS, NB, 8, dtype=torch.bfloat16), attention()),
        # A spec whose blocks hold less than one slot.
        (torch.empty(NB, 1, 0, 8, dtype=torch.bfloat16), attention(slots=0, heads=1)),
        # Bytes or dtype of another spec.
        (torch.empty(NB + 1, NH, BS, 8, dtype=torch.bfloat16), attention()),
        (torch.empty(NB, NH, BS, 8, dtype=torch.float16), attention()),
        (torch.empty(NB, NH, BS, 8, dtype=torch.bfloat16), attention(page_bytes=8)),
    ],
)
def test_what_the_spec_does_not_explain_is_refused(tensor: torch.Tensor, spec: LayerSpec) -> None:
    with pytest.raises(GeometryError, match=r"layer attn: .*\[.*\] with strides \["):
        page_view(spec, tensor, NB)


def test_bytes_that_do_not_match_the_spec_are_counted_in_the_message() -> None:
    tensor = torch.empty(NB + 1, NH, BS, 8, dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match=r"holds 1536 bytes, expected 5 blocks x 256 .* 1280"):
        page_view(attention(), tensor, NB)


# ---- recurrent state ----------------------------------------------------------------------------


def test_a_unified_state_page_stays_as_it_is() -> None:
    buffer = torch.empty(NB, 1024, dtype=torch.int8)
    registered = buffer.as_strided((NB, 1, 1, 1000), (1024, 1000, 1000, 1))
    view = page_view(state(1000), registered, NB)
    assert view.tensor.shape == registered.shape
    assert view.tensor.stride() == registered.stride()
    assert view.tensor.data_ptr() == registered.data_ptr()
    assert view.layout == "NB,HS"


CONV, SSM = ((3, 8), torch.bfloat16), ((2, 4, 4), torch.float32)
CONV_BYTES, SSM_BYTES = 48, 128
PAGE, PADDED = CONV_BYTES + SSM_BYTES, 192


def state_view(
    buffer: torch.Tensor,
    kind: tuple[tuple[int, ...], torch.dtype],
    offset: int,
    stride: int = PADDED,
) -> torch.Tensor:
    """[NB, *shape] view whose block b begins at byte ``offset + b * stride`` of the buffer."""
    shape, dtype = kind
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return buffer.view(dtype).as_strided(
        (NB, *shape), (stride // dtype.itemsize, *inner), offset // dtype.itemsize
    )


@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize(
    ("conv_at", "ssm_at", "layout"), [(0, CONV_BYTES, "NB,S0,S1"), (SSM_BYTES, 0, "NB,S1,S0")]
)
def test_states_that_share_a_page_become_one_range_of_bytes(
    first: int, conv_at: int, ssm_at: int, layout: str
) -> None:
    buffer = torch.zeros(64 + NB * PADDED, dtype=torch.int8)
    conv = state_view(buffer, CONV, first + conv_at)
    ssm = state_view(buffer, SSM, first + ssm_at)
    view = page_view(state(PAGE), [conv, ssm], NB)
    assert view.tensor.dtype == torch.int8
    assert (view.tensor.shape, view.tensor.stride()) == ((NB, PAGE), (PADDED, 1))
    assert view.layout == layout
    for block in range(NB):
        conv[block], ssm[block] = 1.0, 2.0
        view.tensor[block] = block + 1
    expected = torch.zeros_like(buffer)
    for block in range(NB):
        begin = first + block * PADDED
        expected[begin : begin + PAGE] = block + 1
    assert torch.equal(buffer, expected)


def refused_states() -> dict[str, list[torch.Tensor]]:
    buffer = torch.zeros(4096, dtype=torch.int8)
    conv, ssm = state_view(buffer, CONV, 0), state_view(buffer, SSM, CONV_BYTES)
    other = torch.zeros(4096, dtype=torch.int8)
    shuffled = state_view(buffer, ((4, 2, 4), torch.float32), CONV_BYTES)
    return {
        "leave a gap of 16 bytes": [conv, state_view(buffer, SSM, CONV_BYTES + 16)],
        "leave a gap of -16 bytes": [conv, state_view(buffer, SSM, CONV_BYTES - 16)],
        "not views of the same pages (storage)": [conv, state_view(other, SSM, CONV_BYTES)],
        "not views of the same pages (stride)": [conv, state_view(buffer, SSM, CONV_BYTES, 256)],
        "state 1 is not contiguous": [conv, shuffled[:, :, :1]],
        "hold 48 bytes": [conv],
        "does not count the blocks": [conv[:3], ssm[:3]],
        "does not count the blocks (none)": [],
    }


@pytest.mark.parametrize("reason", refused_states())
def test_states_that_are_not_one_range_are_refused(reason: str) -> None:
    message = f"layer gdn: .*{reason.split(' (')[0]}.*; expected views.* {PAGE} bytes"
    with pytest.raises(GeometryError, match=message):
        page_view(state(PAGE), refused_states()[reason], NB)


def test_a_list_is_no_attention_cache() -> None:
    halves = [torch.empty(NB, BS, NH, HS, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(GeometryError, match=r"layer attn: 2 tensors .* without state"):
        page_view(attention(), halves, NB)
