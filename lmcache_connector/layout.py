"""What all ranks together store for one chunk: object sizes by group and shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lmcache_connector.errors import GeometryError
from lmcache_connector.groups import (
    ObjectGroup,
    ReuseKind,
    ReuseRule,
    WorkerGeometry,
    num_stored_blocks,
    validate_geometry,
)
from lmcache_connector.storage.base import GroupShards

_MAX_PERIOD = 4096


@dataclass(eq=False)
class GroupLayout:
    """One object group over all ranks."""

    tag: str
    rule: ReuseRule
    num_shards: int
    chunk_tokens: int
    # Engine group id -> tokens per block.
    tokens_per_block: dict[int, int] = field(default_factory=dict)
    # Rank -> the shard that it stores.
    owned_shard: dict[int, int] = field(default_factory=dict)
    _owners: dict[int, tuple[WorkerGeometry, ObjectGroup]] = field(default_factory=dict)

    def add_rank(self, geometry: WorkerGeometry, group: ObjectGroup) -> None:
        """Account for a rank that holds layers of this group, which is ``group`` there."""
        for index in group.kernel_groups:
            kernel_group = geometry.kernel_groups[index]
            engine_group = kernel_group.engine_group_idx
            known = self.tokens_per_block.setdefault(engine_group, kernel_group.tokens_per_block)
            if known != kernel_group.tokens_per_block:
                raise GeometryError(
                    f"engine group {engine_group} has blocks of {known} and of "
                    f"{kernel_group.tokens_per_block} tokens on different ranks"
                )
        if geometry.owns_shard_of(group):
            shard = geometry.shard_of(group)
            self.owned_shard[geometry.rank] = shard
            self._owners[shard] = geometry, group

    @cached_property
    def sizes_by_position(self) -> list[list[int]]:
        """``shard_bytes`` of the chunks of a prompt, up to where they repeat."""
        period = 1
        if self.rule.kind is ReuseKind.CHUNKED:
            # The kept tail depends on where in an attention chunk the chunk ends.
            period = math.lcm(self.rule.tokens, self.chunk_tokens) // self.chunk_tokens
            if period > _MAX_PERIOD:
                raise GeometryError(
                    f"{self.tag}: objects repeat only after {period} chunks of "
                    f"{self.chunk_tokens} tokens; choose a chunk_size that divides their chunks"
                )
        ends = range(self.chunk_tokens, period * self.chunk_tokens + 1, self.chunk_tokens)
        shards = range(self.num_shards)
        return [[self._object_bytes(shard, end) for shard in shards] for end in ends]

    def shard_bytes(self, end_tokens: int) -> list[int]:
        """Bytes of the object of the chunk that ends at ``end_tokens``, by shard."""
        sizes = self.sizes_by_position
        return sizes[(end_tokens // self.chunk_tokens - 1) % len(sizes)]

    def _object_bytes(self, shard: int, end_tokens: int) -> int:
        if shard not in self._owners:
            return 0  # a pipeline stage without layers of this group
        geometry, group = self._owners[shard]
        return geometry.object_layout(group, end_tokens).nbytes

    def kept_blocks(self, engine_group: int, end_tokens: int) -> range:
        """Positions in the engine group's block table that the chunk's object keeps."""
        tokens_per_block = self.tokens_per_block[engine_group]
        count = num_stored_blocks(self.rule, tokens_per_block, self.chunk_tokens, end_tokens)
        end = end_tokens // tokens_per_block
        return range(end - count, end)


class CacheLayout:
    """All object groups over all ranks, ordered by tag."""

    def __init__(self, geometries: Sequence[WorkerGeometry]) -> None:
        """Raises GeometryError when the ranks contradict each other or themselves."""
        if not geometries:
            raise GeometryError("no rank registered its KV cache")
        ordered = sorted(geometries, key=lambda geometry: geometry.rank)
        self.chunk_tokens = ordered[0].chunk_tokens
        self.num_ranks = len(ordered)
        sizes = ordered[0].pp_size, ordered[0].tp_size
        world = math.prod(sizes)
        ranks = [geometry.rank for geometry in ordered]
        if len(ranks) != world or min(sizes) < 1 or ranks != list(range(len(ranks))):
            raise GeometryError(f"ranks {ranks} registered, expected all of 0..{world - 1}")
        groups: dict[str, GroupLayout] = {}
        for geometry in ordered:
            validate_geometry(geometry)
            place = (geometry.pp_size, geometry.tp_size, geometry.pp_rank, geometry.tp_rank)
            expected = (*sizes, *divmod(geometry.rank, sizes[1]))
            if place != expected:
                raise GeometryError(
                    f"rank {geometry.rank} is in (pp_size, tp_size, pp_rank, tp_rank) {place}, "
                    f"expected {expected}"
                )
            if geometry.chunk_tokens != self.chunk_tokens:
                raise GeometryError(
                    f"rank {geometry.rank} uses chunks of {geometry.chunk_tokens} tokens, rank 0 "
                    f"of {self.chunk_tokens}"
                )
            for group in geometry.object_groups():
                if group.tag not in groups:
                    num_shards = group.num_shards * geometry.pp_size
                    groups[group.tag] = GroupLayout(
                        group.tag, group.rule, num_shards, self.chunk_tokens
                    )
                groups[group.tag].add_rank(geometry, group)
        self.groups = tuple(groups[tag] for tag in sorted(groups))
        self.by_tag = groups
        self.fingerprints = tuple(geometry.fingerprint() for geometry in ordered)

    def shards(self) -> list[GroupShards]:
        """The groups as the store sees them."""
        return [
            GroupShards(group.tag, group.sizes_by_position, group.rule.kind is ReuseKind.FULL)
            for group in self.groups
        ]

    def largest_row_bytes(self) -> int:
        """Bytes of the largest (chunk, object group), all shards together."""
        return max(sum(sizes) for group in self.groups for sizes in group.sizes_by_position)
