"""The group words: seed examples, wire format, and the rule that ties stores to later hits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import (
    EXCLUDED_ENGINE_GROUP,
    FULL,
    STATE,
    EngineGroupInfo,
    KVLayerGroupInfo,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    engine_group_infos,
    expand_engine_block_ids,
    get_engine_group_indices,
    group_layers_by_identity,
    num_engine_group_infos,
    num_engine_groups,
    num_stored_blocks,
    object_group_tag,
    slice_block_ids_per_group,
    validate_geometry,
)

SEED_INFOS = [
    EngineGroupInfo(0, (0, 2), tokens_per_block=64),
    EngineGroupInfo(1, (1, 3), tokens_per_block=256),
    EngineGroupInfo(0, (4,), tokens_per_block=64),
]


# ---- the seed's examples ------------------------------------------------------------------------


def test_layers_of_two_engine_groups_with_one_odd_shape_make_three_infos() -> None:
    # Engine group 0: layers 0, 2, 4; group 1: layers 1, 3; layer 4 has another shape.
    identities = {0: (0, "a"), 2: (0, "a"), 4: (0, "b"), 1: (1, "a"), 3: (1, "a")}
    groups = group_layers_by_identity(identities)
    assert [(identity[0], layers) for identity, layers in groups] == [
        (0, (0, 2)),
        (1, (1, 3)),
        (0, (4,)),
    ]


def test_block_ids_are_expanded_to_infos_in_info_order() -> None:
    ids = [[10, 11], [20, 21]]
    assert expand_engine_block_ids(SEED_INFOS, ids) == [[10, 11], [20, 21], [10, 11]]
    split_first = [SEED_INFOS[0], SEED_INFOS[2], SEED_INFOS[1]]
    assert expand_engine_block_ids(split_first, ids) == [[10, 11], [10, 11], [20, 21]]


def test_256_tokens_are_four_blocks_of_64_and_one_of_256() -> None:
    ids = [[3, 5, 7, 9, 11], [2, 4]]
    assert slice_block_ids_per_group(SEED_INFOS, ids, 0, 256) == [[3, 5, 7, 9], [2]]


def test_engine_groups_and_infos_are_counted_apart() -> None:
    assert (num_engine_groups(SEED_INFOS), num_engine_group_infos(SEED_INFOS)) == (2, 3)
    assert (num_engine_groups([]), num_engine_group_infos([])) == (1, 1)


# ---- the helpers --------------------------------------------------------------------------------


def test_a_flat_list_stands_for_one_engine_group() -> None:
    assert expand_engine_block_ids([], [7, 8]) == [[7, 8]]
    assert expand_engine_block_ids([], []) == [[]]
    one_engine_group = [EngineGroupInfo(0, (0,)), EngineGroupInfo(0, (1,))]
    assert expand_engine_block_ids(one_engine_group, [7, 8]) == [[7, 8], [7, 8]]


def test_block_id_lists_of_scratch_groups_are_left_out() -> None:
    assert expand_engine_block_ids(SEED_INFOS[:1], [[1], [2]]) == [[1]]


@pytest.mark.parametrize(
    ("infos", "ids"),
    [(SEED_INFOS, [[1]]), (SEED_INFOS, [1, 2]), (SEED_INFOS, []), ([], [[1], [2]])],
)
def test_block_ids_that_do_not_fit_the_groups_are_refused(
    infos: list[EngineGroupInfo], ids: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match="block id lists were given"):
        expand_engine_block_ids(infos, ids)


def test_layers_in_no_group_are_excluded() -> None:
    assert get_engine_group_indices(SEED_INFOS, 7) == [0, 1, 0, 1, 0, *[EXCLUDED_ENGINE_GROUP] * 2]
    assert get_engine_group_indices([], 2) == [0, 0]


@pytest.mark.parametrize(("layers", "message"), [((5,), "outside"), ((0, 0), "in two groups")])
def test_layer_indices_must_be_registered_once(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_engine_group_indices([EngineGroupInfo(0, layers)], 5)


@settings(deadline=None)
@given(
    blocks=st.lists(st.sampled_from([0, 4, 8, 64]), min_size=1, max_size=4),
    start=st.integers(0, 6),
    length=st.integers(0, 6),
    data=st.data(),
)
def test_slices_cover_exactly_the_token_range(
    blocks: list[int], start: int, length: int, data: st.DataObject
) -> None:
    infos = [EngineGroupInfo(i, (i,), tokens_per_block=size) for i, size in enumerate(blocks)]
    start_tokens, end_tokens = start * 64, (start + length) * 64
    ids = [list(range(100 * i, 100 * i + 400)) for i in range(len(blocks))]
    order = data.draw(st.permutations(infos))
    slices = slice_block_ids_per_group(order, ids, start_tokens, end_tokens)
    for group, size in enumerate(blocks):
        owners = [] if size == 0 else range(start_tokens, end_tokens, size)
        assert slices[group] == [ids[group][token // size] for token in owners]


def test_a_list_shorter_than_the_range_gives_what_is_there() -> None:
    infos = [EngineGroupInfo(0, (0,), tokens_per_block=64)]
    assert slice_block_ids_per_group(infos, [[1, 2]], 64, 256) == [[2]]


@pytest.mark.parametrize(("start", "end"), [(0, 100), (32, 256), (64, 256), (256, 0), (-64, 0)])
def test_an_unaligned_or_illegal_token_range_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="range"):
        slice_block_ids_per_group(SEED_INFOS, [[1, 2, 3, 4], [1]], start, end)


def test_contradicting_infos_and_missing_lists_are_refused() -> None:
    torn = [EngineGroupInfo(0, (0,), tokens_per_block=64), EngineGroupInfo(0, (1,), 128)]
    with pytest.raises(ValueError, match="of 64 and of 128 tokens"):
        slice_block_ids_per_group(torn, [[1]], 0, 128)
    with pytest.raises(ValueError, match="1 block id lists were given for 2"):
        slice_block_ids_per_group(SEED_INFOS, [[1]], 0, 256)


def test_scratch_groups_have_no_slice() -> None:
    assert slice_block_ids_per_group([], [[1, 2]], 0, 256) == [[]]


# ---- wire format --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            EngineGroupInfo,
            st.integers(0, 9),
            st.lists(st.integers(0, 99), max_size=5).map(tuple),
            st.integers(0, 4096),
            st.integers(-1, 8192),
            st.integers(0, 3),
            st.booleans(),
        )
    )
)
def test_engine_group_infos_survive_msgpack(infos: list[EngineGroupInfo]) -> None:
    encoded = msgspec.msgpack.encode(infos)
    assert msgspec.msgpack.decode(encoded, type=list[EngineGroupInfo]) == infos


def test_payloads_of_older_peers_decode_to_defaults() -> None:
    encoded = msgspec.msgpack.encode({"engine_group_id": 1, "layer_indices": [2, 3]})
    assert msgspec.msgpack.decode(encoded, type=EngineGroupInfo) == EngineGroupInfo(
        engine_group_id=1,
        layer_indices=(2, 3),
        tokens_per_block=0,
        sw_size_tokens=-1,
        extra_object_group_tag=0,
        recurrent_state=False,
    )


# ---- what a chunk keeps is what later boundaries ask --------------------------------------------

RULES = st.one_of(
    st.just(FULL),
    st.builds(ReuseRule, st.just(ReuseKind.WINDOW), st.integers(0, 100)),
    st.builds(ReuseRule, st.just(ReuseKind.CHUNKED), st.integers(1, 100)),
)


def asked_tokens(rule: ReuseRule, boundary: int) -> range:
    """Tokens that resuming at ``boundary`` reads, said another way than the code does."""
    match rule.kind:
        case ReuseKind.FULL:
            return range(boundary)
        case ReuseKind.WINDOW:
            return range(boundary)[-rule.tokens :] if rule.tokens else range(0)
        case ReuseKind.CHUNKED:
            return range(max((e for e in range(0, boundary + 1, rule.tokens)), default=0), boundary)
        case ReuseKind.STATE:
            return range(0)


@settings(deadline=None)
@given(rule=RULES, tokens_per_block=st.integers(1, 12), blocks_per_chunk=st.integers(1, 6))
def test_a_chunk_keeps_every_block_that_a_boundary_can_ask_and_none_more(
    rule: ReuseRule, tokens_per_block: int, blocks_per_chunk: int
) -> None:
    chunk = tokens_per_block * blocks_per_chunk
    boundaries = range(chunk, 8 * chunk + 1, chunk)
    for end in boundaries:
        asked = {
            token // tokens_per_block
            for boundary in boundaries
            if boundary >= end
            for token in asked_tokens(rule, boundary)
            if end - chunk <= token < end
        }
        count, end_block = (
            num_stored_blocks(rule, tokens_per_block, chunk, end),
            end // tokens_per_block,
        )
        assert set(range(end_block - count, end_block)) == asked


@settings(deadline=None)
@given(rule=RULES, boundary=st.integers(0, 500))
def test_history_is_the_range_before_the_boundary(rule: ReuseRule, boundary: int) -> None:
    assert rule.history_tokens(boundary) == len(asked_tokens(rule, boundary))


def test_a_state_object_is_the_last_block_of_its_chunk() -> None:
    assert num_stored_blocks(STATE, 16, 64, 128) == 1
    assert STATE.history_tokens(640) == 0


# ---- geometry -----------------------------------------------------------------------------------


def kernel_group(
    engine_group: int = 0, layers: tuple[int, ...] = (0, 1), **changes: object
) -> KVLayerGroupInfo:
    facts: dict[str, object] = {
        "kv_size": 1,
        "nl": len(layers),
        "nb": 8,
        "bs": 16,
        "nh": 2,
        "hs": 8,
        "element_size": 2,
        "block_stride_elems": 256,
        "dtype": "bfloat16",
        "layout": "NB,NH,BS,HS",
        "tokens_per_block": 16,
        "slots_per_block": 16,
        "sw_size_tokens": -1,
        "recurrent_state": False,
        "rule": FULL,
        "num_shards": 2,
        "num_runs": len(layers),
        "run_bytes": 512,
    }
    return KVLayerGroupInfo(
        engine_group_idx=engine_group,
        layer_indices=layers,
        **{**facts, **changes},  # type: ignore[arg-type]
    )


def geometry(*groups: KVLayerGroupInfo, **changes: object) -> WorkerGeometry:
    facts: dict[str, object] = {
        "rank": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "tp_rank": 1,
        "tp_size": 2,
        "chunk_tokens": 64,
        "engine_groups": engine_group_infos(groups),
        "kernel_groups": groups,
    }
    return WorkerGeometry(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_consistent_geometry_survives_msgpack_and_validation() -> None:
    window = ReuseRule(ReuseKind.WINDOW, 31)
    good = geometry(
        kernel_group(0, (0, 3)),
        kernel_group(1, (1, 2), rule=window, sw_size_tokens=32),
        kernel_group(0, (4,), dtype="float16"),
        kernel_group(2, (5,), rule=STATE, recurrent_state=True, bs=1, hs=128, slots_per_block=1),
    )
    validate_geometry(good)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=WorkerGeometry)
    assert decoded == good
    assert decoded.fingerprint() == good.fingerprint()


def test_a_stage_without_layers_is_consistent() -> None:
    validate_geometry(geometry())


A, B = kernel_group(0, (0, 2)), kernel_group(1, (1,))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (geometry(A, B, engine_groups=engine_group_infos([A])), "1 engine group infos"),
        (geometry(A, B, engine_groups=engine_group_infos([B, A])), "info 0"),
        (
            geometry(A, engine_groups=engine_group_infos([kernel_group(0, (0, 3))])),
            "info 0",
        ),
        (
            geometry(
                A, engine_groups=engine_group_infos([kernel_group(0, (0, 2), tokens_per_block=32)])
            ),
            "info 0",
        ),
        (geometry(B, A), "by identity"),
        (geometry(A, kernel_group(0, (3,))), "by identity"),
        (geometry(A, kernel_group(1, (2,))), "in two kernel groups"),
        (geometry(kernel_group(bs=12, slots_per_block=12, hs=32, nh=1)), "slots"),
        (geometry(A, chunk_tokens=40), "no multiple"),
        (geometry(kernel_group(num_shards=3)), "shards"),
        (geometry(kernel_group(nl=3)), "layers"),
        (geometry(kernel_group(run_bytes=496)), "runs"),
    ],
)
def test_a_contradictory_geometry_is_refused(broken: WorkerGeometry, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        validate_geometry(broken)


@pytest.mark.parametrize("kind", ReuseKind)
@pytest.mark.parametrize("tokens", [-(2**62), -1, 0, 1, 2**62])
def test_a_rule_has_the_tokens_of_its_kind(kind: ReuseKind, tokens: int) -> None:
    group = kernel_group(
        rule=ReuseRule(kind, tokens),
        sw_size_tokens=tokens + 1 if kind is ReuseKind.WINDOW else -1,
        recurrent_state=kind is ReuseKind.STATE,
    )
    if tokens > 0 if kind in (ReuseKind.WINDOW, ReuseKind.CHUNKED) else tokens == 0:
        validate_geometry(geometry(group))
    else:
        with pytest.raises(GeometryError, match=f"no {kind.value} has {tokens} tokens"):
            validate_geometry(geometry(group))


def test_the_fingerprint_ignores_the_pool_and_nothing_of_the_content() -> None:
    base = geometry(kernel_group()).fingerprint()
    assert geometry(kernel_group(nb=9, block_stride_elems=512)).fingerprint() == base
    assert geometry(kernel_group(), rank=0, tp_rank=0).fingerprint() == base
    for other in (
        geometry(kernel_group(dtype="float16")),
        geometry(kernel_group(layout="NB,BS,NH,HS")),
        geometry(kernel_group(layers=(0, 2))),
        geometry(kernel_group(content_order="other")),
        geometry(kernel_group(rule=ReuseRule(ReuseKind.WINDOW, 31))),
        geometry(kernel_group(), chunk_tokens=128),
        geometry(kernel_group(), tp_size=4),
        geometry(kernel_group(), backends=("flash",)),
    ):
        assert other.fingerprint() != base


def test_object_groups_bucket_kernel_groups_by_rule_and_replication() -> None:
    window = ReuseRule(ReuseKind.WINDOW, 31)
    facts = geometry(
        kernel_group(0, (0,)),
        kernel_group(1, (1,), rule=window),
        kernel_group(2, (2,)),
        kernel_group(3, (3,), num_shards=1),
        kernel_group(1, (4,), rule=window, dtype="float16"),
    )
    buckets = {group.tag: group for group in facts.object_groups()}
    assert {tag: group.kernel_groups for tag, group in buckets.items()} == {
        "full": (0, 2),
        "full-s1": (3,),
        "window-31": (1, 4),
    }
    assert list(buckets) == sorted(buckets)
    # Two tensor-parallel ranks hold the same bytes of a replicated group: the first one stores.
    assert [facts.shard_of(buckets[tag]) for tag in ("full", "full-s1")] == [1, 0]
    assert [facts.owns_shard_of(buckets[tag]) for tag in ("full", "full-s1")] == [True, False]
    assert object_group_tag(STATE, 2, 2) == "state"


def test_an_object_holds_the_kept_blocks_of_its_kernel_groups_one_after_the_other() -> None:
    window = ReuseRule(ReuseKind.WINDOW, 20)
    facts = geometry(
        kernel_group(0, (0, 1), rule=window),
        kernel_group(0, (2,), rule=window, hs=5, num_runs=1, run_bytes=320, dtype="uint8"),
        kernel_group(1, (3,), rule=ReuseRule(ReuseKind.CHUNKED, 64)),
    )
    chunked, tail = facts.object_groups()
    layout = facts.object_layout(tail, 128)
    # 20 tokens touch the last 2 of 4 blocks.
    assert [(r.kernel_group, r.offset, r.num_blocks) for r in layout.regions] == [
        (0, 0, 2),
        (1, 2 * 2 * 512, 2),
    ]
    assert layout.nbytes == 2 * 2 * 512 + 2 * 320
    assert facts.object_layout(chunked, 128).nbytes == 0
