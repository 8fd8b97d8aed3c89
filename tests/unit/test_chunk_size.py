from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.chunk_size import ChunkChoice, choose_chunk_size
from lmcache_connector.errors import ConfigError, UnsupportedModelError
from lmcache_connector.groups import FULL, STATE, EngineGroupSpec, LayerSpec, ReuseRule


def group(
    index: int, tokens_per_block: int, rule: ReuseRule = FULL, *, cacheable: bool = True
) -> EngineGroupSpec:
    layer = LayerSpec(f"layer.{index}", tokens_per_block, 1, 64, "int8", rule, 1)
    return EngineGroupSpec(index, cacheable, (layer,))


@pytest.mark.parametrize(
    ("blocks", "chunk"),
    [
        ((16,), 256),
        ((16, 128), 256),
        ((100,), 300),
        ((640,), 640),
        ((256, 64, 8, 4), 256),
        ((96, 64), 384),
    ],
)
def test_the_default_is_the_smallest_legal_multiple_from_256(
    blocks: tuple[int, ...], chunk: int
) -> None:
    groups = [group(i, size) for i, size in enumerate(blocks)]
    assert choose_chunk_size(groups) == ChunkChoice(chunk)


def test_with_state_groups_the_default_is_the_least_common_multiple() -> None:
    assert choose_chunk_size([group(0, 64, STATE), group(1, 16)]) == ChunkChoice(64)
    assert choose_chunk_size([group(0, 640, STATE), group(1, 640)]) == ChunkChoice(640)


def test_scratch_groups_have_no_say() -> None:
    groups = [group(0, 16), group(1, 7, STATE, cacheable=False)]
    assert choose_chunk_size(groups) == ChunkChoice(256)


def test_a_stage_that_holds_none_of_a_groups_layers_chooses_as_the_others_do() -> None:
    whole = [group(0, 48), group(1, 640, STATE)]
    stage = [whole[0], EngineGroupSpec(1, True, (), tokens_per_block=640, recurrent_state=True)]
    assert choose_chunk_size(stage) == choose_chunk_size(whole) == ChunkChoice(1920)


def test_an_illegal_size_is_refused_with_the_nearest_legal_ones() -> None:
    with pytest.raises(ConfigError, match=r"chunk_size 1000 .*use 896 or 1024$"):
        choose_chunk_size([group(0, 64), group(1, 128)], 1000)
    with pytest.raises(ConfigError, match=r"blocks of all groups \(64, 128\).*use 128$"):
        choose_chunk_size([group(0, 64), group(1, 128)], 64)


@pytest.mark.parametrize("size", [0, -256])
def test_a_size_that_is_not_positive_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"use 16$"):
        choose_chunk_size([group(0, 16)], size)


def test_a_larger_multiple_with_state_groups_warns_of_lost_hits() -> None:
    groups = [group(0, 640, STATE), group(1, 640)]
    choice = choose_chunk_size(groups, 2560)
    assert choice.chunk_tokens == 2560
    assert choice.warning is not None
    assert "about 3 of 4 hits are lost; 640 keeps them" in choice.warning
    assert choose_chunk_size(groups, 640) == ChunkChoice(640)
    assert choose_chunk_size(groups[1:], 2560) == ChunkChoice(2560)


@pytest.mark.parametrize(
    "groups", [[], [group(0, 16, cacheable=False)], [EngineGroupSpec(0, True, ())]]
)
def test_a_model_without_cacheable_groups_is_refused(groups: list[EngineGroupSpec]) -> None:
    with pytest.raises(UnsupportedModelError, match="no KV cache group"):
        choose_chunk_size(groups)


@settings(deadline=None)
@given(
    blocks=st.lists(st.integers(1, 96), min_size=1, max_size=4),
    configured=st.integers(1, 4096),
    has_state=st.booleans(),
)
def test_whatever_is_chosen_every_block_divides_it(
    blocks: list[int], configured: int, has_state: bool
) -> None:
    groups = [group(i, size, STATE if has_state else FULL) for i, size in enumerate(blocks)]
    unit = math.lcm(*blocks)
    default = choose_chunk_size(groups).chunk_tokens
    assert default % unit == 0
    assert default == unit if has_state else 256 <= default < 256 + unit
    if configured % unit == 0:
        assert choose_chunk_size(groups, configured).chunk_tokens == configured
    else:
        with pytest.raises(ConfigError):
            choose_chunk_size(groups, configured)
