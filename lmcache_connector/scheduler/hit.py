"""The hit rule: at which boundary may a request resume, and what must be loaded for it.

Pure functions: presence bits in, boundary and token ranges out.

A boundary E is servable iff every object that any group needs for it is there on every shard.
The answer is the largest servable one: an intersection of valid boundaries, never a maximum or
minimum of per-group lengths, because a state or a window is valid at its own boundary only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

from lmcache_connector.groups import ReuseKind, ReuseRule


def first_needed_token(rule: ReuseRule, boundary: int, local_tokens: int) -> int:
    """First token whose KV must be loaded to resume at ``boundary``, given a local hit.

    Tokens before ``local_tokens`` are in the engine already, windows of them included: a window
    or attention chunk that reaches back behind the local hit is held there up to its start.
    STATE needs the one snapshot at the boundary; the range returned ends at it and is empty.
    """
    return max(local_tokens, boundary - rule.history_tokens(boundary))


def needed_chunks(rule: ReuseRule, boundary: int, local_tokens: int, chunk_tokens: int) -> range:
    """Indices of the chunks whose objects are needed to resume at ``boundary``."""
    end_chunk = boundary // chunk_tokens
    if rule.kind is ReuseKind.STATE:
        return range(end_chunk - 1, end_chunk)
    first = first_needed_token(rule, boundary, local_tokens)
    return range(min(first // chunk_tokens, end_chunk), end_chunk)


def servable_boundary(
    rules: Sequence[ReuseRule],
    present: Sequence[Sequence[int]],
    *,
    chunk_tokens: int,
    local_tokens: int,
    num_tokens: int,
) -> int:
    """Largest servable boundary beyond the local hit, or ``local_tokens`` when there is none.

    Args:
        rules: reuse rule of each object group.
        present: ``present[group][shard]``: bit i is set when the object of chunk
            ``local_tokens // chunk_tokens + i`` is there.
        chunk_tokens: chunk size.
        local_tokens: tokens that the engine's own prefix cache serves.
        num_tokens: tokens of the request; at least one of them is left to compute.
    """
    base = local_tokens // chunk_tokens
    last = (num_tokens - 1) // chunk_tokens
    masks = [reduce(and_, shards) for shards in present]
    for rule, mask in zip(rules, masks, strict=True):
        if rule.kind is ReuseKind.FULL:
            # Nothing beyond the first hole of a FULL group is servable.
            last = min(last, base + _trailing_ones(mask))
    for end_chunk in range(last, base, -1):
        boundary = end_chunk * chunk_tokens
        if all(
            _covers(mask, needed_chunks(rule, boundary, local_tokens, chunk_tokens), base)
            for rule, mask in zip(rules, masks, strict=True)
        ):
            return boundary
    return local_tokens


def _covers(mask: int, chunks: range, base: int) -> bool:
    wanted = ((1 << len(chunks)) - 1) << (chunks.start - base)
    return mask & wanted == wanted


def _trailing_ones(mask: int) -> int:
    return (~mask & (mask + 1)).bit_length() - 1
