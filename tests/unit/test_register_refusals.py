"""Registrations that do not fit their description are refused, all problems at once."""

from __future__ import annotations

import pytest
import torch

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import FULL, EngineGroupSpec, LayerSpec
from lmcache_connector.worker.register import RankFacts, register_kv_caches

NUM_BLOCKS, CHUNK = 4, 64


def group(group_id: int, *names: str) -> EngineGroupSpec:
    layers = (LayerSpec(name, 16, 16, 512, "bfloat16", FULL, 1, num_heads=2) for name in names)
    return EngineGroupSpec(group_id, True, tuple(layers))


def cache(slots: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, 2, slots, 8, dtype=dtype)


def test_all_problems_come_at_once() -> None:
    caches = {"b": cache(dtype=torch.float16), "c": cache(slots=15), "d": cache()}
    with pytest.raises(GeometryError) as caught:
        register_kv_caches(
            [group(0, "a", "b"), group(1, "c", "d")], caches, NUM_BLOCKS, CHUNK, RankFacts()
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "layer a of engine group 0 has no registered KV cache" in lines[0]
    assert "layer b: float16 [4, 2, 16, 8]" in lines[1]
    assert "layer c: bfloat16 [4, 2, 15, 8]" in lines[2]


def test_two_layers_of_a_group_at_one_address_are_refused() -> None:
    shared = cache()
    caches = {"a": shared, "b": shared}
    with pytest.raises(GeometryError, match=r"engine group 3: pages of layers a and b overlap"):
        register_kv_caches([group(3, "a", "b")], caches, NUM_BLOCKS, CHUNK, RankFacts())


def test_a_layer_of_two_engine_groups_is_refused() -> None:
    with pytest.raises(GeometryError, match="layer a is named by two engine groups"):
        register_kv_caches(
            [group(0, "a"), group(1, "a")], {"a": cache()}, NUM_BLOCKS, CHUNK, RankFacts()
        )


def test_a_group_of_too_many_runs_is_refused() -> None:
    # Heads outermost: one run per head, 3 x 2048 of them.
    caches = {
        name: torch.zeros(2048, NUM_BLOCKS, 2, 1, dtype=torch.uint8).transpose(0, 1)
        for name in "abc"
    }
    layers = (LayerSpec(name, 2, 2, 4096, "uint8", FULL, 1, num_heads=2048) for name in "abc")
    groups = [EngineGroupSpec(0, True, tuple(layers))]
    with pytest.raises(GeometryError, match=r"a to c is 6144 runs of 2 bytes, more than 4096"):
        register_kv_caches(groups, caches, NUM_BLOCKS, CHUNK, RankFacts())


def test_an_engine_without_blocks_is_refused() -> None:
    with pytest.raises(GeometryError, match="0 KV cache blocks"):
        register_kv_caches([], {}, 0, CHUNK, RankFacts())


def test_a_chunk_that_the_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(GeometryError, match="no multiple of its 16-token blocks"):
        register_kv_caches([group(0, "a")], {"a": cache()}, NUM_BLOCKS, 24, RankFacts())
