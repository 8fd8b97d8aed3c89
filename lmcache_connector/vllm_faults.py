"""Faults of vLLM on CPUs that would make its own answers wrong, found by feature at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lmcache_connector.groups import EngineGroupSpec, ReuseKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def lost_block_size(vllm_config: VllmConfig, groups: Sequence[EngineGroupSpec]) -> int | None:
    """The state groups' block size when vLLM's own configuration has lost it, else None.

    The multi-process engine re-runs the configuration's checks after the caches exist; on CPU
    that resets cache_config.block_size to 128. A step may then start inside a state block and
    cross its end, and vLLM takes the state before it for the one at the boundary.
    """
    blocks = {
        layer.tokens_per_block
        for group in groups
        for layer in group.layers
        if layer.rule.kind is ReuseKind.STATE
    }
    if len(blocks) != 1 or vllm_config.cache_config.block_size in blocks:
        return None
    return blocks.pop()


def mla_rope_hint(vllm_config: VllmConfig, groups: Sequence[EngineGroupSpec]) -> str | None:
    """A warning when this build's CPU rotary kernel is wrong on MLA's 3-D queries, else None.

    Seen in 0.32: only the first rows of a batch are rotated, so that the engine's own answers
    depend on how a prompt is cut into steps. Restored bytes are exact all the same.
    """
    from vllm.platforms import current_platform

    is_mla = any(layer.family == "mla" for group in groups for layer in group.layers)
    custom_ops = vllm_config.compilation_config.custom_ops
    if not is_mla or current_platform.device_type != "cpu" or "-rotary_embedding" in custom_ops:
        return None
    from vllm import _custom_ops as ops

    positions = torch.arange(1, 9)
    # Any values do; the engine's random state is not touched.
    cos_sin = torch.linspace(-1.0, 1.0, 9 * 64).reshape(9, 64)
    query = torch.linspace(1.0, 2.0, 8 * 4 * 64).reshape(8, 4, 64)
    key = torch.linspace(1.0, 2.0, 8 * 64).reshape(8, 1, 64)
    batch, alone = query.clone(), query.clone()
    ops.rotary_embedding(positions, batch, key.clone(), 64, cos_sin, False)
    for row in range(8):
        one = slice(row, row + 1)
        ops.rotary_embedding(positions[one], alone[one], key[one].clone(), 64, cos_sin, False)
    if torch.allclose(batch, alone):
        return None
    return (
        "this vLLM's CPU rotary kernel is wrong for MLA: its answers depend on how a prompt is cut "
        "into steps, with or without a cache; start with --compilation-config "
        '\'{"custom_ops":["-rotary_embedding"]}\''
    )
