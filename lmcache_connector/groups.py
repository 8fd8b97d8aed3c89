"""The words for KV cache groups that all parts share, and the geometry derived from them.

An *engine group* is one vLLM KV cache group: one block-id address space. A *kernel group* is
the layers of one engine group whose pages have the same shape: one kernel launch. An *object
group* is the kernel groups with the same reuse rule: one stored object per chunk and shard.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar, cast

import msgspec

from lmcache_connector.buffers import PAGE_ALIGNMENT, align_up
from lmcache_connector.errors import GeometryError

EXCLUDED_ENGINE_GROUP = -1
# EngineGroupInfo.extra_object_group_tag of rows of hidden states, which are objects of their own:
# KV without its rows is then no hit, by the hit rule. Their group's tag begins with the prefix.
HIDDEN_STATES = 1
HIDDEN_PREFIX = "hidden-"

_Identity = TypeVar("_Identity", bound=Hashable)


class ReuseKind(enum.Enum):
    """What must be restored at a boundary E for layers of a group."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    STATE = "state"


class ReuseRule(msgspec.Struct, frozen=True):
    """How far back from a boundary a group's layers still read.

    ``tokens``: WINDOW: tokens kept before the boundary (window - 1 + extra retained tokens);
    CHUNKED: the attention chunk; FULL and STATE: 0.
    """

    kind: ReuseKind
    tokens: int = 0

    def history_tokens(self, boundary: int) -> int:
        """Number of tokens before ``boundary`` whose KV must be there to resume at it.

        The one function behind both sides: the hit rule asks for the objects that this range
        touches, and a chunk that ends at ``boundary`` stores ``min(chunk, history)`` tokens. It
        holds what every later boundary asks of that chunk, because ``boundary - history`` never
        decreases. STATE keeps a snapshot instead of tokens; its answer is 0.
        """
        match self.kind:
            case ReuseKind.FULL:
                return boundary
            case ReuseKind.WINDOW:
                return min(boundary, self.tokens)
            case ReuseKind.CHUNKED:
                return boundary % self.tokens
            case ReuseKind.STATE:
                return 0


FULL = ReuseRule(ReuseKind.FULL)
STATE = ReuseRule(ReuseKind.STATE)


class EngineGroupInfo(msgspec.Struct, frozen=True):
    """Protocol-visible description of one kernel group, in list order.

    Several infos may share an ``engine_group_id``. An empty list of infos means one plain group.
    Defaults make payloads of older peers decodable.
    """

    engine_group_id: int
    layer_indices: tuple[int, ...]
    # Tokens covered by one block id; 0 = unknown (scratch group).
    tokens_per_block: int = 0
    # Sliding window in tokens; -1 = none.
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer's KV cache spec in neutral words (vllm_view.py fills it)."""

    name: str
    # Tokens that one block id covers over all context-parallel ranks.
    tokens_per_block: int
    # Physical slots in one page; tokens_per_block / slots is the compression. STATE: 1.
    slots_per_block: int
    # Content bytes of one page, without padding.
    page_bytes: int
    # torch dtype name, "bfloat16"; STATE: "int8".
    dtype: str
    rule: ReuseRule
    # Number of different pages over the tensor-parallel ranks: tp size, or 1 when replicated.
    num_shards: int
    # Heads axis of the registered tensor: head slots where a backend packs heads.
    num_heads: int = 1
    # "attention", "mla", "state", "hidden" (rows of hidden states) or "scratch".
    family: str = "attention"


class EngineGroupSpec(msgspec.Struct, frozen=True):
    """One vLLM KV cache group in neutral words."""

    engine_group_id: int
    # False: scratch (vLLM's prefix_cacheable is False) or not part of the transferable state.
    cacheable: bool
    # Empty where another pipeline stage holds them all.
    layers: tuple[LayerSpec, ...]
    # As its layers say; here for stages that hold none of them (0: the layers are enough).
    tokens_per_block: int = 0
    recurrent_state: bool = False


class KVLayerGroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel group, derived from the real tensors.

    The eight shape fields are kv_size, nl, nb, bs, nh, hs, element_size, block_stride_elems.
    ``kv_size`` counts planes: where K and V lie together in a slot it is 1 and ``hs`` spans both.
    ``bs`` counts physical slots and equals ``slots_per_block``.
    """

    engine_group_idx: int
    # Neither layers nor runs: what one layer has in common with others (see ``identity``).
    layer_indices: tuple[int, ...] = ()
    kv_size: int
    nl: int = 0
    nb: int
    bs: int
    nh: int
    hs: int
    element_size: int
    block_stride_elems: int
    dtype: str
    # Axes from the outermost to the innermost in memory, e.g. "NB,NH,BS,HS".
    layout: str
    tokens_per_block: int
    slots_per_block: int
    sw_size_tokens: int
    recurrent_state: bool
    rule: ReuseRule
    num_shards: int
    # One block of the whole group is num_runs contiguous runs of run_bytes each.
    num_runs: int = 0
    run_bytes: int = 0
    # Digest of which part of which layer stands where in a block of an object.
    content_order: str = ""
    extra_object_group_tag: int = 0

    @property
    def page_bytes(self) -> int:
        """Content bytes of one block in one layer."""
        return self.kv_size * self.bs * self.nh * self.hs * self.element_size

    def identity(self) -> KVLayerGroupInfo:
        """What a single layer must share with the others to be copied by the same launch."""
        return msgspec.structs.replace(
            self, layer_indices=(), nl=0, num_runs=0, run_bytes=0, content_order=""
        )

    @property
    def run_pitch(self) -> int:
        """Distance between the runs of one block inside a stored object, in bytes."""
        return align_up(self.run_bytes, PAGE_ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers of the group inside a stored object."""
        return self.num_runs * self.run_pitch


class ObjectGroup(msgspec.Struct, frozen=True):
    """Kernel groups with one reuse rule. ``tag`` names it in keys, logs and metrics."""

    tag: str
    rule: ReuseRule
    num_shards: int
    # Indices into WorkerGeometry.kernel_groups of the rank that this was built for.
    kernel_groups: tuple[int, ...]


class Region(msgspec.Struct, frozen=True):
    """The blocks of one kernel group inside a stored object, block-major."""

    kernel_group: int
    offset: int
    # How many of the chunk's blocks are kept: always the last ones.
    num_blocks: int
    block_bytes: int


class ObjectLayout(msgspec.Struct, frozen=True):
    """Where everything lies in one stored object."""

    regions: tuple[Region, ...]
    nbytes: int


class WorkerGeometry(msgspec.Struct, frozen=True):
    """What one rank registered. Travels in vLLM's handshake to the scheduler side."""

    rank: int
    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int
    chunk_tokens: int
    engine_groups: tuple[EngineGroupInfo, ...]
    kernel_groups: tuple[KVLayerGroupInfo, ...]
    # Attention backend of each engine group and, on CPU, its instruction set: page content
    # order differs between them at equal strides.
    backends: tuple[str, ...] = ()

    def shard_of(self, group: ObjectGroup) -> int:
        """Index of this rank's shard of ``group`` among all shards of all pipeline stages."""
        return self.pp_rank * group.num_shards + self.tp_rank * group.num_shards // self.tp_size

    def owns_shard_of(self, group: ObjectGroup) -> bool:
        """Whether this rank is the one that stores its shard: the lowest of its replicas."""
        return self.tp_rank % (self.tp_size // group.num_shards) == 0

    def object_groups(self) -> tuple[ObjectGroup, ...]:
        """Kernel groups bucketed by reuse rule, replication and extra tag, ordered by tag."""
        buckets: dict[tuple[ReuseRule, int, int], list[int]] = {}
        for index, group in enumerate(self.kernel_groups):
            bucket = (group.rule, group.num_shards, group.extra_object_group_tag)
            buckets.setdefault(bucket, []).append(index)
        groups = [
            ObjectGroup(
                tag=object_group_tag(rule, num_shards, self.tp_size, extra_tag),
                rule=rule,
                num_shards=num_shards,
                kernel_groups=tuple(members),
            )
            for (rule, num_shards, extra_tag), members in buckets.items()
        ]
        return tuple(sorted(groups, key=lambda group: group.tag))

    def object_layout(self, group: ObjectGroup, end_tokens: int) -> ObjectLayout:
        """Layout of the object of the chunk that ends at ``end_tokens``.

        Empty (``nbytes == 0``) where no boundary ever asks for it: a CHUNKED group whose
        attention chunk ends there.
        """
        regions = []
        offset = 0
        for index in group.kernel_groups:
            kernel_group = self.kernel_groups[index]
            num_blocks = num_stored_blocks(
                group.rule, kernel_group.tokens_per_block, self.chunk_tokens, end_tokens
            )
            if num_blocks:
                regions.append(Region(index, offset, num_blocks, kernel_group.block_bytes))
                offset += num_blocks * kernel_group.block_bytes
        return ObjectLayout(tuple(regions), offset)

    def fingerprint(self) -> str:
        """Hex digest of everything that decides what bytes an object holds on this rank."""
        kernel_groups = [
            # The pool size of the engine (nb) and where blocks lie do not reach the bytes.
            msgspec.structs.replace(group, nb=0, block_stride_elems=0)
            for group in self.kernel_groups
        ]
        facts = (self.pp_rank, self.pp_size, self.tp_size, self.chunk_tokens, self.backends)
        encoded = msgspec.json.encode((facts, self.engine_groups, kernel_groups))
        return hashlib.sha256(encoded).hexdigest()[:32]


def object_group_tag(rule: ReuseRule, num_shards: int, tp_size: int, extra_tag: int = 0) -> str:
    """Stable short name of an object group: "full", "window-255", "full-s1", "hidden-full"."""
    tag = f"{rule.kind.value}-{rule.tokens}" if rule.tokens else rule.kind.value
    tag = HIDDEN_PREFIX + tag if extra_tag == HIDDEN_STATES else tag
    return f"{tag}-s{num_shards}" if num_shards != tp_size else tag


@lru_cache(maxsize=4096)
def num_stored_blocks(
    rule: ReuseRule, tokens_per_block: int, chunk_tokens: int, end_tokens: int
) -> int:
    """How many blocks the object of the chunk that ends at ``end_tokens`` keeps: its last ones.

    0 where nothing is ever asked.
    """
    if rule.kind is ReuseKind.STATE:
        return 1
    return -(-min(chunk_tokens, rule.history_tokens(end_tokens)) // tokens_per_block)


def group_layers_by_identity(
    identities: Mapping[int, _Identity],
) -> list[tuple[_Identity, tuple[int, ...]]]:
    """Layer index -> identity becomes (identity, its layer indices), ordered by first layer."""
    members: dict[_Identity, list[int]] = {}
    for layer in sorted(identities):
        members.setdefault(identities[layer], []).append(layer)
    return [(identity, tuple(layers)) for identity, layers in members.items()]


def num_engine_groups(infos: Sequence[EngineGroupInfo]) -> int:
    """Number of block-id lists the engine reports; 1 for an empty list."""
    return max((info.engine_group_id for info in infos), default=0) + 1


def num_engine_group_infos(infos: Sequence[EngineGroupInfo]) -> int:
    """Number of protocol-visible groups; 1 for an empty list."""
    return len(infos) or 1


def expand_engine_block_ids(
    infos: Sequence[EngineGroupInfo], block_ids: Sequence[Sequence[int]] | Sequence[int]
) -> list[list[int]]:
    """Engine-group-indexed block ids -> one list per info, in info order.

    A flat list of ids stands for a single engine group (payloads of non-hybrid callers). Lists
    beyond the last info's group belong to scratch groups.

    Raises:
        ValueError: fewer lists than engine groups, or several where there are no infos.
    """
    is_flat = not block_ids or isinstance(block_ids[0], int)
    per_group = cast("list[Sequence[int]]", [block_ids] if is_flat else block_ids)
    expected = num_engine_groups(infos)
    if len(per_group) < expected or (not infos and len(per_group) > 1):
        raise ValueError(f"{len(per_group)} block id lists were given for {expected} engine groups")
    group_ids = [info.engine_group_id for info in infos] or [0]
    return [list(per_group[group_id]) for group_id in group_ids]


def get_engine_group_indices(infos: Sequence[EngineGroupInfo], num_layers: int) -> list[int]:
    """Engine group id of each registered layer; EXCLUDED_ENGINE_GROUP for layers in no group.

    Raises:
        ValueError: a layer index out of range, or in two infos.
    """
    if not infos:
        return [0] * num_layers
    indices = [EXCLUDED_ENGINE_GROUP] * num_layers
    for info in infos:
        for layer in info.layer_indices:
            if not 0 <= layer < num_layers:
                raise ValueError(f"layer index {layer} is outside 0..{num_layers - 1}")
            if indices[layer] != EXCLUDED_ENGINE_GROUP:
                raise ValueError(f"layer index {layer} is in two groups")
            indices[layer] = info.engine_group_id
    return indices


def slice_block_ids_per_group(
    infos: Sequence[EngineGroupInfo],
    block_ids: Sequence[Sequence[int]],
    start_tokens: int,
    end_tokens: int,
) -> list[list[int]]:
    """Cut each engine group's block ids to ``[start_tokens, end_tokens)``, counted in tokens.

    Scratch groups (tokens_per_block 0) give []. Lists shorter than the range give what is there.

    Raises:
        ValueError: the range is not aligned to a group's block, or is negative; a group without
            a list, or with infos that contradict each other.
    """
    if not 0 <= start_tokens <= end_tokens:
        raise ValueError(f"illegal token range {start_tokens}..{end_tokens}")
    if infos and len(block_ids) < num_engine_groups(infos):
        raise ValueError(
            f"{len(block_ids)} block id lists were given for {num_engine_groups(infos)} "
            "engine groups"
        )
    tokens_per_block = dict.fromkeys(range(len(block_ids)), 0)
    for info in infos:
        known = tokens_per_block[info.engine_group_id]
        if known not in (0, info.tokens_per_block):
            raise ValueError(
                f"engine group {info.engine_group_id} has blocks of {known} and of "
                f"{info.tokens_per_block} tokens"
            )
        tokens_per_block[info.engine_group_id] = info.tokens_per_block
    result: list[list[int]] = []
    for group_id, ids in enumerate(block_ids):
        size = tokens_per_block[group_id]
        if size and (start_tokens % size or end_tokens % size):
            raise ValueError(
                f"token range {start_tokens}..{end_tokens} is not aligned to the "
                f"{size}-token blocks of engine group {group_id}"
            )
        result.append(list(ids[start_tokens // size : end_tokens // size]) if size else [])
    return result


def engine_group_infos(kernel_groups: Iterable[KVLayerGroupInfo]) -> tuple[EngineGroupInfo, ...]:
    """The protocol-visible list, one to one with the kernel groups and in their order."""
    return tuple(
        EngineGroupInfo(
            engine_group_id=group.engine_group_idx,
            layer_indices=group.layer_indices,
            tokens_per_block=group.tokens_per_block,
            sw_size_tokens=group.sw_size_tokens,
            extra_object_group_tag=group.extra_object_group_tag,
            recurrent_state=group.recurrent_state,
        )
        for group in kernel_groups
    )


def validate_geometry(geometry: WorkerGeometry) -> None:
    """Require that a peer's infos and kernel groups describe one and the same grouping.

    Raises:
        GeometryError: names the difference.
    """
    infos, groups = geometry.engine_groups, geometry.kernel_groups
    if len(infos) != len(groups):
        raise GeometryError(
            f"rank {geometry.rank} registered {len(infos)} engine group infos for "
            f"{len(groups)} kernel groups"
        )
    expected_infos = engine_group_infos(groups)
    for index, (info, expected) in enumerate(zip(infos, expected_infos, strict=True)):
        if info != expected:
            raise GeometryError(
                f"info {index} of rank {geometry.rank} is {info}, its kernel group says {expected}"
            )
    layers = [layer for group in groups for layer in group.layer_indices]
    if len(layers) != len(set(layers)):
        raise GeometryError(f"rank {geometry.rank} names a layer in two kernel groups: {layers}")
    identities = {layer: group.identity() for group in groups for layer in group.layer_indices}
    regrouped = [indices for _, indices in group_layers_by_identity(identities)]
    if regrouped != [group.layer_indices for group in groups]:
        raise GeometryError(
            f"rank {geometry.rank} grouped its layers as "
            f"{[group.layer_indices for group in groups]}, by identity they are {regrouped}"
        )
    for index, group in enumerate(groups):
        _validate_kernel_group(f"kernel group {index} of rank {geometry.rank}", group, geometry)


def _validate_kernel_group(where: str, group: KVLayerGroupInfo, geometry: WorkerGeometry) -> None:
    if group.slots_per_block <= 0 or group.tokens_per_block % group.slots_per_block:
        raise GeometryError(
            f"{where}: {group.tokens_per_block} tokens per block are no multiple of its "
            f"{group.slots_per_block} slots"
        )
    if group.tokens_per_block <= 0 or geometry.chunk_tokens % group.tokens_per_block:
        raise GeometryError(
            f"{where}: a chunk of {geometry.chunk_tokens} tokens is no multiple of its "
            f"{group.tokens_per_block}-token blocks"
        )
    is_bounded = group.rule.kind in (ReuseKind.WINDOW, ReuseKind.CHUNKED)
    if group.rule.tokens < 0 or bool(group.rule.tokens) != is_bounded:
        raise GeometryError(f"{where}: no {group.rule.kind.value} has {group.rule.tokens} tokens")
    if group.num_shards < 1 or geometry.tp_size % group.num_shards:
        raise GeometryError(
            f"{where}: {group.num_shards} shards do not divide {geometry.tp_size} "
            "tensor-parallel ranks"
        )
    content = len(group.layer_indices) * group.page_bytes
    if group.nl != len(group.layer_indices) or group.num_runs * group.run_bytes != content:
        raise GeometryError(
            f"{where}: {group.num_runs} runs of {group.run_bytes} bytes do not hold "
            f"{group.nl} layers, {len(group.layer_indices)} of them named, of {group.page_bytes} "
            "bytes"
        )
