"""From a registered KV tensor to one page per logical block.

Every result is a view of the registered storage, never a copy, whose dim 0 counts the engine's
logical blocks. Bytes of a page are opaque from here on. Axes are told apart by their sizes: a
shape is accepted where the spec (heads, slots, page bytes) and the number of blocks explain all
of it, and there is one way only to find its blocks.

Axis names: NB blocks, KB kernel blocks inside a logical block, KV planes of K and V, NH heads,
BS slots, HS content of one slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import LayerSpec, ReuseKind
from lmcache_connector.worker.page_runs import contiguous_pieces, describe

# Shapes that engines register. Packed content [K|V], MLA, indexer and unified state pages have
# no KV axis. The first that fits names the axes where heads and slots are equally many.
_AXES = (
    ("NB", "NH", "BS", "HS"),
    ("NB", "BS", "NH", "HS"),
    ("NB", "BS", "HS"),
    ("NB", "KV", "BS", "NH", "HS"),
    ("NB", "KV", "NH", "BS", "HS"),
    ("KV", "NB", "BS", "NH", "HS"),
    ("KV", "NB", "NH", "BS", "HS"),
)


class PageView(NamedTuple):
    """``tensor[b]`` is the page of logical block b, whatever its axes are."""

    tensor: torch.Tensor
    # Axes longer than 1 from the outermost to the innermost in memory, e.g. "NB,NH,BS,HS".
    layout: str
    # 2 where K and V are separate planes, else 1.
    kv_size: int


def page_view(
    spec: LayerSpec, registered: torch.Tensor | Sequence[torch.Tensor], num_blocks: int
) -> PageView:
    """View of what was registered for a layer with ``num_blocks`` logical blocks as dim 0.

    Raises:
        GeometryError: names the layer, its shape and strides, and what was expected.
    """
    if not isinstance(registered, torch.Tensor):
        return _state_list_view(spec, registered, num_blocks)
    _check_bytes(spec, registered, num_blocks)
    fits = [axes for axes in _AXES if _explains(axes, spec, registered, num_blocks)]
    if not fits:
        raise GeometryError(
            f"layer {spec.name}: cannot read {describe(registered)} as {num_blocks} blocks (or "
            f"kernel blocks that divide them) of {spec.num_heads} heads, {spec.slots_per_block} "
            f"slots and {spec.page_bytes} bytes; known shapes are "
            + ", ".join(f"[{','.join(axes)}]" for axes in _AXES)
        )
    if len({axes.index("NB") for axes in fits}) > 1:
        raise GeometryError(
            f"layer {spec.name}: {describe(registered)} can be read as [KV,NB,...] and as "
            f"[NB,KV,...] because it has only {num_blocks} blocks; give the engine more KV "
            "cache memory"
        )
    axes = fits[0]
    block_axis = axes.index("NB")
    pages = registered.movedim(block_axis, 0)
    names = ["NB", *axes[:block_axis], *axes[block_axis + 1 :]]
    ratio = pages.shape[0] // num_blocks
    if ratio > 1:
        pages = pages.view(num_blocks, ratio, *pages.shape[1:])
        names.insert(1, f"KB{ratio}")
    return PageView(pages, _layout(names, pages), 2 if "KV" in axes else 1)


def _check_bytes(spec: LayerSpec, tensor: torch.Tensor, num_blocks: int) -> None:
    if min(spec.num_heads, spec.slots_per_block, spec.page_bytes) < 1:
        raise GeometryError(
            f"layer {spec.name}: a spec of {spec.num_heads} heads, {spec.slots_per_block} slots "
            f"and {spec.page_bytes} bytes in a block holds nothing ({describe(tensor)})"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != spec.dtype:
        raise GeometryError(
            f"layer {spec.name}: {describe(tensor)} was registered for a spec of {spec.dtype}"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes != num_blocks * spec.page_bytes:
        raise GeometryError(
            f"layer {spec.name}: {describe(tensor)} holds {nbytes} bytes, expected "
            f"{num_blocks} blocks x {spec.page_bytes} bytes = {num_blocks * spec.page_bytes}"
        )


def _explains(
    axes: tuple[str, ...], spec: LayerSpec, tensor: torch.Tensor, num_blocks: int
) -> bool:
    """Whether the spec accounts for every axis of the tensor read as ``axes``.

    The tensor has as many bytes as the spec's pages, so that a size that is not said here (heads
    in ``[NB,BS,HS]``) or does not divide (slots by kernel blocks) shows in another axis.
    """
    if len(axes) != tensor.dim():
        return False
    entries = tensor.shape[axes.index("NB")]
    ratio = entries // num_blocks
    if ratio == 0 or entries % num_blocks:
        return False
    planes = 2 if "KV" in axes else 1
    cells = planes * spec.num_heads * spec.slots_per_block
    sizes = {
        "NB": entries,
        "KV": planes,
        "NH": spec.num_heads,
        "BS": spec.slots_per_block // ratio,
        "HS": spec.page_bytes // tensor.element_size() // cells,
    }
    return tuple(tensor.shape) == tuple(sizes[name] for name in axes)


def _layout(names: Sequence[str], pages: torch.Tensor) -> str:
    axes = zip(pages.stride(), names, pages.shape, strict=True)
    kept = [(stride, name) for stride, name, size in axes if size > 1 or name == "NB"]
    return ",".join(name for _, name in sorted(kept, key=lambda axis: -axis[0]))


def _state_list_view(spec: LayerSpec, states: Sequence[torch.Tensor], num_blocks: int) -> PageView:
    """Byte view [num_blocks, page_bytes] over the states [conv, ssm, ...] that share pages."""
    shapes = "; ".join(describe(state) for state in states)
    expected = (
        f"expected views [{num_blocks}, ...] of one storage whose bytes in a block are one range "
        f"of {spec.page_bytes} bytes, without gap or overlap"
    )

    def refuse(reason: str) -> GeometryError:
        return GeometryError(f"layer {spec.name}: {reason} ({shapes}); {expected}")

    if spec.rule.kind is not ReuseKind.STATE:
        raise refuse(f"{len(states)} tensors were registered for a layer without state")
    if not states or any(state.dim() < 1 or state.shape[0] != num_blocks for state in states):
        raise refuse("dim 0 of the states does not count the blocks")
    storage = states[0].untyped_storage()
    strides = {state.stride(0) * state.element_size() for state in states}
    if len(strides) > 1 or any(
        state.untyped_storage().data_ptr() != storage.data_ptr() for state in states
    ):
        raise refuse("the states are not views of the same pages")
    ranges = []
    for index, state in enumerate(states):
        offsets, nbytes = contiguous_pieces(spec.name, state[0])
        if len(offsets) > 1:
            raise refuse(f"state {index} is not contiguous inside a block")
        ranges.append((state.data_ptr(), nbytes, index))
    ranges.sort()
    for (first, nbytes, _), (second, _, _) in itertools.pairwise(ranges):
        if first + nbytes != second:
            raise refuse(f"the states leave a gap of {second - first - nbytes} bytes")
    total = sum(nbytes for _, nbytes, _ in ranges)
    if total != spec.page_bytes:
        raise refuse(f"the states hold {total} bytes in a block")
    block_stride = strides.pop()
    offset = ranges[0][0] - storage.data_ptr()
    assert offset + (num_blocks - 1) * block_stride + total <= storage.nbytes()
    pages = torch.empty(0, dtype=torch.int8, device=states[0].device)
    pages.set_(storage, offset, (num_blocks, total), (block_stride, 1))
    return PageView(pages, ",".join(["NB", *(f"S{index}" for _, _, index in ranges)]), 1)
