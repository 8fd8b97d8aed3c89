"""From tensors to runs of bytes: pure arithmetic on strides and addresses.

The page of a layer is a few contiguous runs at the same distance in every block. Runs of the
layers of one kernel group that touch each other become one run, so a block-outermost layout is
copied a whole block at a time. Padding belongs to no run.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lmcache_connector.buffers import PAGE_ALIGNMENT, align_up
from lmcache_connector.errors import GeometryError

# Every run costs the kernel an address to read and the CPU path a copy call of its own. 4096
# leave room for 128 layers x 32 heads; beyond that a block falls into pieces so small that
# copying it is slower than computing it again.
MAX_RUNS_PER_BLOCK = 4096
_USE_WHOLE_PAGES = "choose a layout with whole pages, VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC"


class LayerRuns(NamedTuple):
    """One layer's page as runs, before layers are merged. Addresses are of block 0, ascending."""

    name: str
    addresses: npt.NDArray[np.int64]
    run_bytes: int
    # Bytes from a block to the next one.
    block_stride: int
    num_blocks: int
    # Start of the allocation that the tensor views.
    storage_address: int


class PageRuns(NamedTuple):
    """One block of a kernel group: run r of block b is the ``run_bytes`` bytes at
    ``run_addresses[r] + b * block_stride``. The order of runs is their order in an object."""

    # int64 [num_runs], absolute addresses of block 0.
    run_addresses: npt.NDArray[np.int64]
    block_stride: int
    run_bytes: int
    # Distance between two runs inside an object.
    run_pitch: int


def describe(tensor: torch.Tensor) -> str:
    """Shape, strides and dtype of a tensor for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


def contiguous_pieces(name: str, tensor: torch.Tensor) -> tuple[npt.NDArray[np.int64], int]:
    """Byte offsets (ascending, from the tensor's start) and size of its contiguous pieces.

    Raises:
        GeometryError: more pieces than ``MAX_RUNS_PER_BLOCK``; ``name`` is the layer's.
    """
    item = tensor.element_size()
    axes = sorted(
        (stride * item, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    piece_bytes = item
    while axes and axes[0][0] == piece_bytes:
        piece_bytes *= axes.pop(0)[1]
    num_pieces = math.prod(size for _, size in axes)
    if num_pieces > MAX_RUNS_PER_BLOCK:
        raise GeometryError(
            f"layer {name}: a page of {describe(tensor)} falls into {num_pieces} pieces of "
            f"{piece_bytes} bytes, more than {MAX_RUNS_PER_BLOCK}; {_USE_WHOLE_PAGES}"
        )
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        offsets = np.add.outer(np.arange(size, dtype=np.int64) * stride, offsets).ravel()
    return offsets, piece_bytes


def layer_runs(name: str, pages: torch.Tensor, page_bytes: int) -> LayerRuns:
    """Runs of one layer from ``pages`` [num_blocks, ...], any strides.

    Raises:
        GeometryError: the page does not hold ``page_bytes`` bytes, leaves its storage, or is
            scattered over too many pieces.
    """
    offsets, run_bytes = contiguous_pieces(name, pages[0])
    if len(offsets) * run_bytes != page_bytes:
        raise GeometryError(
            f"layer {name}: a page of {describe(pages)} holds {len(offsets) * run_bytes} bytes, "
            f"its spec says {page_bytes}"
        )
    storage = pages.untyped_storage()
    in_storage = pages.data_ptr() - storage.data_ptr()
    block_stride = pages.stride(0) * pages.element_size()
    end = in_storage + int(offsets[-1]) + run_bytes + (pages.shape[0] - 1) * block_stride
    if in_storage < 0 or end > storage.nbytes():
        raise GeometryError(f"layer {name}: {describe(pages)} leaves its storage")
    # Some devices' addresses have the highest bit set: the same 64 bits as a signed number.
    storage_address = ctypes.c_int64(storage.data_ptr()).value
    return LayerRuns(
        name=name,
        addresses=offsets + (storage_address + in_storage),
        run_bytes=run_bytes,
        block_stride=block_stride,
        num_blocks=pages.shape[0],
        storage_address=storage_address,
    )


def check_disjoint(layers: Sequence[LayerRuns]) -> None:
    """Require that no two pages of the layers, over all their blocks, share a byte.

    Sweeps over all runs by address. Runs that are spread among each other's blocks must repeat
    at one stride and fit into it together; all others must lie clear of each other.

    Raises:
        GeometryError: names the layers.
    """
    runs = sorted(
        (address, layer.name, layer.block_stride, layer.run_bytes, layer.num_blocks)
        for layer in layers
        for address in layer.addresses.tolist()
    )
    start = stride = extent_end = last_end = -(1 << 63)
    last_name = ""
    for address, name, block_stride, run_bytes, num_blocks in runs:
        end = address + run_bytes
        alone = address >= extent_end
        if alone:
            start, stride, last_name = address, block_stride, name
        fits = end <= start + stride or (alone and num_blocks == 1)
        if address < last_end or block_stride != stride or not fits:
            raise GeometryError(
                f"pages of layers {last_name} and {name} overlap: blocks of {block_stride} bytes "
                f"at address {address:#x}, blocks of {stride} bytes at {start:#x}"
            )
        extent_end = max(extent_end, end + (num_blocks - 1) * block_stride)
        last_end, last_name = end, name


def merge_layer_runs(layers: Sequence[LayerRuns]) -> tuple[PageRuns, str]:
    """Runs of a kernel group, and a digest of what stands where in a block of an object.

    All layers have pages of one shape and stride. Runs are ordered by the layer and place in
    the page that they begin with, never by absolute address, and merge inside one storage only:
    the order is the same in every process. Equal digests mean interchangeable objects.

    Raises:
        GeometryError: more than ``MAX_RUNS_PER_BLOCK`` runs, or pages that are cut differently.
    """
    head = layers[0]
    for layer in layers:
        assert layer.block_stride == head.block_stride, (layer.name, head.name)
        if layer.run_bytes != head.run_bytes:
            raise GeometryError(
                f"pages of one shape fall into different pieces: layer {head.name} into "
                f"{len(head.addresses)} of {head.run_bytes} bytes, layer {layer.name} into "
                f"{len(layer.addresses)} of {layer.run_bytes}"
            )
    addresses = np.concatenate([layer.addresses for layer in layers])
    storages = np.repeat([one.storage_address for one in layers], len(head.addresses))
    order = np.argsort(addresses, kind="stable")
    touching = (np.diff(addresses[order]) == head.run_bytes) & (np.diff(storages[order]) == 0)
    starts = np.flatnonzero(np.concatenate(([True], ~touching)))
    lengths = np.diff(np.append(starts, len(order)))
    # Runs of one size only: the greatest that divides all of them.
    pieces_per_run = int(np.gcd.reduce(lengths))
    members = order.reshape(-1, pieces_per_run)
    members = members[np.argsort(members[:, 0], kind="stable")]
    if len(members) > MAX_RUNS_PER_BLOCK:
        raise GeometryError(
            f"one block of layers {head.name} to {layers[-1].name} is {len(members)} runs of "
            f"{pieces_per_run * head.run_bytes} bytes, more than {MAX_RUNS_PER_BLOCK}; "
            + _USE_WHOLE_PAGES
        )
    run_bytes = pieces_per_run * head.run_bytes
    facts = ([layer.name for layer in layers], head.run_bytes, members.tolist())
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    runs = PageRuns(
        run_addresses=addresses[members[:, 0]],
        block_stride=head.block_stride,
        run_bytes=run_bytes,
        run_pitch=align_up(run_bytes, PAGE_ALIGNMENT),
    )
    return runs, digest
