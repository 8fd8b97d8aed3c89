"""What all ranks together store: shards, replicas, pipeline stages, contradictions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import (
    FULL,
    STATE,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
)
from lmcache_connector.layout import CacheLayout

CHUNK = 256


def kernel_group(
    engine_group: int, rule: ReuseRule = FULL, *, shards: int = 1, tokens: int = 64, slot: int = 16
) -> KVLayerGroupInfo:
    slots = 1 if rule.kind is ReuseKind.STATE else tokens
    page = tokens * slot
    return KVLayerGroupInfo(
        engine_group_idx=engine_group,
        layer_indices=(engine_group,),
        kv_size=1,
        nl=1,
        nb=8,
        bs=slots,
        nh=1,
        hs=page // slots,
        element_size=1,
        block_stride_elems=page,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=tokens,
        slots_per_block=slots,
        sw_size_tokens=rule.tokens + 1 if rule.kind is ReuseKind.WINDOW else -1,
        recurrent_state=rule.kind is ReuseKind.STATE,
        rule=rule,
        num_shards=shards,
        num_runs=1,
        run_bytes=page,
    )


def geometry(
    groups: list[KVLayerGroupInfo], *, tp_rank: int = 0, tp: int = 1, pp_rank: int = 0, pp: int = 1
) -> WorkerGeometry:
    return WorkerGeometry(
        rank=pp_rank * tp + tp_rank,
        pp_rank=pp_rank,
        pp_size=pp,
        tp_rank=tp_rank,
        tp_size=tp,
        chunk_tokens=CHUNK,
        engine_groups=engine_group_infos(groups),
        kernel_groups=tuple(groups),
    )


def by_tag(layout: CacheLayout) -> dict[str, Any]:
    return {group.tag: group for group in layout.groups}


def test_replicas_are_stored_once_and_shards_by_each_rank() -> None:
    groups = [kernel_group(0, shards=1), kernel_group(1, STATE, shards=4)]
    layout = CacheLayout([geometry(groups, tp_rank=rank, tp=4) for rank in range(4)])
    latent, state = by_tag(layout)["full-s1"], by_tag(layout)["state"]
    assert latent.shard_bytes(CHUNK) == [4 * 64 * 16]
    assert latent.owned_shard == {0: 0}
    assert state.shard_bytes(CHUNK) == [64 * 16] * 4
    assert state.owned_shard == {0: 0, 1: 1, 2: 2, 3: 3}


def test_consecutive_ranks_are_the_replicas() -> None:
    groups = [kernel_group(0, shards=2)]
    ranks = [geometry(groups, tp_rank=rank, tp=4) for rank in range(4)]
    layout = CacheLayout(ranks)
    assert layout.groups[0].owned_shard == {0: 0, 2: 1}
    assert [rank.shard_of(rank.object_groups()[0]) for rank in ranks] == [0, 0, 1, 1]


def test_pipeline_stages_are_shards_and_may_lack_a_group() -> None:
    first = geometry([kernel_group(0)], pp_rank=0, pp=2)
    second = geometry([kernel_group(0), kernel_group(1, STATE)], pp_rank=1, pp=2)
    layout = CacheLayout([second, first])
    assert by_tag(layout)["full"].shard_bytes(CHUNK) == [4096, 4096]
    assert by_tag(layout)["state"].shard_bytes(CHUNK) == [0, 1024]
    assert by_tag(layout)["state"].owned_shard == {1: 1}
    assert [shards.num_shards for shards in layout.shards()] == [2, 2]
    assert layout.largest_row_bytes() == 8192


def test_an_attention_chunk_makes_sizes_depend_on_the_position() -> None:
    chunked = ReuseRule(ReuseKind.CHUNKED, 384)
    layout = CacheLayout([geometry([kernel_group(0, chunked)])])
    sizes = [layout.groups[0].shard_bytes(end)[0] for end in range(256, 256 * 7, 256)]
    # Ends at 256 of 384, at 128, at a border; then again.
    assert sizes == [4096, 2048, 0, 4096, 2048, 0]
    assert layout.groups[0].kept_blocks(0, 512) == range(6, 8)


@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_context_parallel_ranks_cover_wider_blocks_with_the_same_slots(dcp: int) -> None:
    attention = msgspec.structs.replace(
        kernel_group(0, tokens=16, shards=4), tokens_per_block=16 * dcp
    )
    ranks = [geometry([attention], tp_rank=rank, tp=4) for rank in range(4)]
    layout = CacheLayout(ranks)
    assert layout.groups[0].kept_blocks(0, 512) == range(256 // (16 * dcp), 512 // (16 * dcp))
    # All ranks together hold each token once.
    assert sum(layout.groups[0].shard_bytes(256)) * dcp == 4 * 256 * 16


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "no rank"),
        ([geometry([kernel_group(0, shards=2)], tp_rank=1, tp=2)], "ranks"),
        (
            [
                geometry([kernel_group(0, shards=2)], tp_rank=0, tp=2),
                msgspec.structs.replace(
                    geometry([kernel_group(0, shards=2)], tp_rank=1, tp=2), chunk_tokens=512
                ),
            ],
            "chunks of 512",
        ),
        (
            [
                geometry([kernel_group(0, shards=2)], tp_rank=0, tp=2),
                geometry([kernel_group(0, shards=2, tokens=128)], tp_rank=1, tp=2),
            ],
            "128",
        ),
    ],
    ids=["none", "a missing rank", "another chunk", "other blocks"],
)
def test_contradictions_are_refused(ranks: list[WorkerGeometry], words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        CacheLayout(ranks)
