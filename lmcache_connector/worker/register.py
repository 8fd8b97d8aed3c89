"""From the tensors an engine registers to the geometry its peers see and the runs it copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import (
    HIDDEN_STATES,
    EngineGroupSpec,
    KVLayerGroupInfo,
    LayerSpec,
    ReuseKind,
    WorkerGeometry,
    engine_group_infos,
    group_layers_by_identity,
    validate_geometry,
)
from lmcache_connector.worker import page_runs
from lmcache_connector.worker.group_edits import PageView, page_view

RegisteredCache = torch.Tensor | Sequence[torch.Tensor]


class RankFacts(NamedTuple):
    """Where this worker stands among the engine's workers: fields of its WorkerGeometry."""

    rank: int = 0
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    backends: tuple[str, ...] = ()


class Registration(NamedTuple):
    """What this rank can copy. ``runs`` is one to one with ``geometry.kernel_groups``."""

    geometry: WorkerGeometry
    runs: tuple[page_runs.PageRuns, ...]


# Kernel group of one layer alone, and its page.
_Layer = tuple[KVLayerGroupInfo, page_runs.LayerRuns]


def register_kv_caches(
    engine_groups: Sequence[EngineGroupSpec],
    kv_caches: Mapping[str, RegisteredCache],
    num_blocks: int,
    chunk_tokens: int,
    ranks: RankFacts,
) -> Registration:
    """Group the registered layers and find their pages.

    A layer's index is its position in ``kv_caches``. Layers of no engine group share another
    layer's cache and those of groups that are not cacheable are scratch: neither is looked at.

    Raises:
        GeometryError: one sentence per layer or group that does not fit its description.
    """
    problems: list[str] = []
    if num_blocks < 1:
        raise GeometryError(f"the engine registered {num_blocks} KV cache blocks")
    layers = _read_layers(engine_groups, kv_caches, num_blocks, problems)
    kernel_groups: list[KVLayerGroupInfo] = []
    runs: list[page_runs.PageRuns] = []
    identities = {index: identity for index, (identity, _) in layers.items()}
    for identity, indices in group_layers_by_identity(identities):
        try:
            merged, order = page_runs.merge_layer_runs([layers[index][1] for index in indices])
        except GeometryError as error:
            problems.append(str(error))
            continue
        runs.append(merged)
        kernel_groups.append(
            msgspec.structs.replace(
                identity,
                layer_indices=indices,
                nl=len(indices),
                num_runs=len(merged.run_addresses),
                run_bytes=merged.run_bytes,
                content_order=order,
            )
        )
    if problems:
        raise GeometryError("\n".join(problems))
    geometry = WorkerGeometry(
        **ranks._asdict(),
        chunk_tokens=chunk_tokens,
        engine_groups=engine_group_infos(kernel_groups),
        kernel_groups=tuple(kernel_groups),
    )
    validate_geometry(geometry)
    return Registration(geometry, tuple(runs))


def _read_layers(
    engine_groups: Sequence[EngineGroupSpec],
    kv_caches: Mapping[str, RegisteredCache],
    num_blocks: int,
    problems: list[str],
) -> dict[int, _Layer]:
    """Layer index -> its page; appends to ``problems`` what cannot be read or overlaps."""
    positions = {name: index for index, name in enumerate(kv_caches)}
    layers: dict[int, _Layer] = {}
    for group in engine_groups:
        if not group.cacheable:
            continue
        members = []
        for spec in group.layers:
            index = positions.get(spec.name)
            if index is None:
                problems.append(
                    f"layer {spec.name} of engine group {group.engine_group_id} has no "
                    "registered KV cache"
                )
            elif index in layers:
                problems.append(f"layer {spec.name} is named by two engine groups")
            else:
                try:
                    view = page_view(spec, kv_caches[spec.name], num_blocks)
                    runs = page_runs.layer_runs(spec.name, view.tensor, spec.page_bytes)
                    layers[index] = _identity(group.engine_group_id, spec, view), runs
                    members.append(runs)
                except GeometryError as error:
                    problems.append(str(error))
        try:
            page_runs.check_disjoint(members)
        except GeometryError as error:
            problems.append(f"engine group {group.engine_group_id}: {error}")
    return layers


def _identity(engine_group_id: int, spec: LayerSpec, view: PageView) -> KVLayerGroupInfo:
    pages = view.tensor
    element_size = pages.element_size()
    cells = view.kv_size * spec.num_heads * spec.slots_per_block * element_size
    return KVLayerGroupInfo(
        engine_group_idx=engine_group_id,
        kv_size=view.kv_size,
        nb=pages.shape[0],
        bs=spec.slots_per_block,
        nh=spec.num_heads,
        hs=spec.page_bytes // cells,
        element_size=element_size,
        block_stride_elems=pages.stride(0),
        dtype=spec.dtype,
        layout=view.layout,
        tokens_per_block=spec.tokens_per_block,
        slots_per_block=spec.slots_per_block,
        sw_size_tokens=spec.rule.tokens + 1 if spec.rule.kind is ReuseKind.WINDOW else -1,
        recurrent_state=spec.rule.kind is ReuseKind.STATE,
        rule=spec.rule,
        num_shards=spec.num_shards,
        extra_object_group_tag=HIDDEN_STATES if spec.family == "hidden" else 0,
    )
