from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.shape_spec import (
    KVCacheShape,
    format_kvcache_shape_spec,
    parse_kvcache_shape_spec,
)

SEED = "(2,1024,16,8,128):float16:30;(1,1024,16,4,64):bfloat16:2"


def test_the_seed_spec_is_read_and_written() -> None:
    shapes = parse_kvcache_shape_spec(SEED)
    assert shapes == (
        KVCacheShape(kv_size=2, nb=1024, bs=16, nh=8, hs=128, dtype="float16", num_layers=30),
        KVCacheShape(kv_size=1, nb=1024, bs=16, nh=4, hs=64, dtype="bfloat16", num_layers=2),
    )
    assert format_kvcache_shape_spec(shapes) == SEED
    assert parse_kvcache_shape_spec(" (2, 1024,16,8,128) : float16 : 30 ") == shapes[:1]


SIZES = st.integers(1, 1 << 20)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            KVCacheShape,
            st.integers(1, 2),
            SIZES,
            SIZES,
            SIZES,
            SIZES,
            st.sampled_from(["float16", "bfloat16", "uint8"]),
            SIZES,
        ),
        min_size=1,
    )
)
def test_any_spec_round_trips(shapes: list[KVCacheShape]) -> None:
    assert parse_kvcache_shape_spec(format_kvcache_shape_spec(shapes)) == tuple(shapes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        SEED + ";",
        "2,1024,16,8,128:float16:30",
        "(2,1024,16,8):float16:30",
        "(2,1024,16,8,x):float16:30",
        "(2,1024,16,8,128):float16",
        "(2,1024,16,8,128):float16:30:1",
        "(2,1024,16,8,128)::30",
        "(3,1024,16,8,128):float16:30",
        "(2,0,16,8,128):float16:30",
        "(2,1024,16,8,128):float16:-1",
    ],
)
def test_a_part_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read|sizes must be positive"):
        parse_kvcache_shape_spec(text)
