"""Block tables -> objects to copy. Pure: which blocks of which chunk, for which group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lmcache_connector.groups import ReuseKind
from lmcache_connector.keys import ChunkChain
from lmcache_connector.layout import CacheLayout, GroupLayout
from lmcache_connector.metadata import ObjectOp
from lmcache_connector.scheduler.hit import first_needed_token, needed_chunks
from lmcache_connector.scheduler.request import StorePart

BlockTables = Sequence[Sequence[int]]


def wanted_rows(
    layout: CacheLayout, chain: ChunkChain, boundary: int, local_tokens: int
) -> list[tuple[bytes, str]]:
    """(chunk hash, group tag) of every row that a load up to ``boundary`` reads."""
    if boundary <= local_tokens:
        return []
    return [
        (chain.hashes[chunk], group.tag)
        for group in layout.groups
        for chunk in needed_chunks(group.rule, boundary, local_tokens, layout.chunk_tokens)
    ]


def load_objects(
    layout: CacheLayout,
    boundary: int,
    local_tokens: int,
    block_ids: BlockTables,
    null_block_id: int,
) -> list[ObjectOp] | None:
    """The copies that bring a request from its local hit to ``boundary``; slots still empty.

    Blocks before the local hit are shared with other requests and never written. None when a
    needed block is missing from the tables or null: the load cannot be done as planned.
    """
    objects = []
    for group in layout.groups:
        is_state = group.rule.kind is ReuseKind.STATE
        first_token = 0 if is_state else first_needed_token(group.rule, boundary, local_tokens)
        for chunk in needed_chunks(group.rule, boundary, local_tokens, layout.chunk_tokens):
            end = (chunk + 1) * layout.chunk_tokens
            blocks = _kept_blocks(group, end, block_ids, null_block_id, first_token, {})
            if blocks is None:
                return None
            objects.append(ObjectOp(group.tag, end, blocks, [], []))
    return objects


def store_objects(
    layout: CacheLayout,
    hashes: Sequence[bytes],
    chunks: range,
    *,
    step_end: int,
    block_ids: BlockTables,
    null_block_id: int,
    boundary_states: Sequence[tuple[int, int, int]],
    wanted: Callable[[bytes, str], bool],
) -> tuple[list[ObjectOp], list[StorePart]]:
    """The objects of ``chunks`` that can be stored in the step that computes up to ``step_end``.

    An object is left out when a block it needs is null (out of the window already), when its
    state was not left at the boundary, or when ``wanted`` says that it is kept already. Chunks
    beyond ``hashes`` have unconfirmed tokens; their parts carry no key yet.
    """
    states = {(group, boundary): block for group, block, boundary in boundary_states}
    objects: list[ObjectOp] = []
    parts: list[StorePart] = []
    for chunk in chunks:
        end = (chunk + 1) * layout.chunk_tokens
        chunk_hash = hashes[chunk] if chunk < len(hashes) else None
        parent = hashes[chunk - 1] if 0 < chunk <= len(hashes) else None
        for group in layout.groups:
            sizes = group.shard_bytes(end)
            if not any(sizes) or (chunk_hash is not None and not wanted(chunk_hash, group.tag)):
                continue
            is_state = group.rule.kind is ReuseKind.STATE
            # A table's entry is the state at ``end`` only when the step ends exactly there. Any
            # other entry may be a state of another boundary.
            tables = () if is_state and step_end != end else block_ids
            handed_off = states if is_state else {}
            blocks = _kept_blocks(group, end, tables, null_block_id, 0, handed_off)
            if blocks is None:
                continue
            objects.append(ObjectOp(group.tag, end, blocks, [], []))
            parts.append(StorePart(len(parts), chunk, group.tag, sizes, chunk_hash, parent))
    return objects, parts


def tokens_by_group(
    layout: CacheLayout, rows: Sequence[tuple[bytes, str]], num_tokens: int
) -> dict[str, int]:
    """Tokens that each group's objects of a load stand for (a state stands for all of them)."""
    counts = Counter(tag for _, tag in rows)
    return {
        tag: num_tokens
        if layout.by_tag[tag].rule.kind is ReuseKind.STATE
        else min(num_tokens, count * layout.chunk_tokens)
        for tag, count in counts.items()
    }


def _kept_blocks(
    group: GroupLayout,
    end: int,
    block_ids: BlockTables,
    null_block_id: int,
    first_token: int,
    states: Mapping[tuple[int, int], int],
) -> dict[int, list[int]] | None:
    """Of the blocks kept those that reach beyond ``first_token``; None when one is missing.

    ``states``: (engine group, boundary) -> the block that vLLM handed off with the state there.
    """
    blocks = {}
    for engine_group, tokens_per_block in group.tokens_per_block.items():
        handed_off = states.get((engine_group, end), null_block_id)
        if handed_off != null_block_id:
            blocks[engine_group] = [handed_off]
            continue
        kept = group.kept_blocks(engine_group, end)
        if engine_group >= len(block_ids) or kept.stop > len(block_ids[engine_group]):
            return None
        first = max(kept.start, first_token // tokens_per_block)
        blocks[engine_group] = list(block_ids[engine_group][first : kept.stop])
        if null_block_id in blocks[engine_group]:
            return None
    return blocks
