"""The one rule for the size of a chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_connector.buffers import align_up
from lmcache_connector.errors import ConfigError, UnsupportedModelError
from lmcache_connector.groups import EngineGroupSpec, ReuseKind

DEFAULT_CHUNK_TOKENS = 256


class ChunkChoice(NamedTuple):
    """Chunk size in tokens, and a sentence to log about it or None."""

    chunk_tokens: int
    warning: str | None = None


def choose_chunk_size(
    engine_groups: Sequence[EngineGroupSpec], configured: int | None = None
) -> ChunkChoice:
    """The configured chunk size if it is legal, else the smallest legal one >= 256.

    Legal is what all cacheable groups' blocks divide. With state groups the default is exactly
    their least common multiple: an engine leaves states at the ends of prefill steps only.

    Raises:
        ConfigError: the configured size is not legal; names the nearest ones that are.
        UnsupportedModelError: no group can be cached.
    """
    blocks: set[int] = set()
    has_state = False
    for group in engine_groups:
        if group.cacheable:
            blocks.update(layer.tokens_per_block for layer in group.layers)
            blocks.add(group.tokens_per_block)
            has_state |= group.recurrent_state
            has_state |= any(layer.rule.kind is ReuseKind.STATE for layer in group.layers)
    blocks.discard(0)
    if not blocks:
        raise UnsupportedModelError(
            "no KV cache group of this model can be cached by prefix; start without a connector"
        )
    unit = math.lcm(*blocks)
    if configured is None:
        return ChunkChoice(unit if has_state else align_up(DEFAULT_CHUNK_TOKENS, unit))
    if configured <= 0 or configured % unit:
        below = configured // unit * unit
        nearest = f"{below} or {below + unit}" if below > 0 else str(unit)
        raise ConfigError(
            f"chunk_size {configured} is not a multiple of {unit} tokens, which the blocks of "
            f"all groups ({', '.join(map(str, sorted(blocks)))}) divide: use {nearest}"
        )
    if has_state and configured > unit:
        steps = configured // unit
        return ChunkChoice(
            configured,
            f"chunk_size {configured} is {steps} blocks of a model with recurrent state: states "
            f"exist where a prefill step ends only, so that about {steps - 1} of {steps} hits are "
            f"lost; {unit} keeps them",
        )
    return ChunkChoice(configured)
