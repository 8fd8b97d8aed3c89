"""The hit rule against brute force over single tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.groups import FULL, STATE, ReuseKind, ReuseRule, num_stored_blocks
from lmcache_connector.scheduler.hit import (
    first_needed_token,
    needed_chunks,
    servable_boundary,
)

BLOCK = 4

rules = st.one_of(
    st.just(FULL),
    st.just(STATE),
    st.builds(ReuseRule, st.just(ReuseKind.WINDOW), st.integers(0, 70)),
    st.builds(ReuseRule, st.just(ReuseKind.CHUNKED), st.integers(1, 70)),
)


@st.composite
def cases(draw):
    chunk = BLOCK * draw(st.integers(1, 4))
    num_chunks = draw(st.integers(0, 9))
    num_tokens = num_chunks * chunk + draw(st.integers(1, chunk))
    local = BLOCK * draw(st.integers(0, (num_tokens - 1) // BLOCK))
    groups = draw(st.lists(rules, min_size=1, max_size=4))
    width = max(0, num_chunks - local // chunk)
    dense = draw(st.booleans())
    present = []
    for _ in groups:
        shards = []
        for _ in range(draw(st.integers(1, 3))):
            mask = draw(st.integers(0, (1 << width) - 1))
            # Mostly full masks: otherwise nearly every case is a miss.
            shards.append(mask | draw(st.integers(0, (1 << width) - 1)) if dense else mask)
        present.append(shards)
    return groups, present, chunk, local, num_tokens


def token_is_read(rule: ReuseRule, boundary: int, token: int) -> bool:
    """Does computing the token at ``boundary`` (or a later one) read this earlier token's KV?"""
    match rule.kind:
        case ReuseKind.FULL:
            return True
        case ReuseKind.WINDOW:
            return token >= boundary - rule.tokens
        case ReuseKind.CHUNKED:
            return token // rule.tokens == boundary // rule.tokens
        case ReuseKind.STATE:
            return False


def brute_force(groups, present, chunk, local, num_tokens) -> int:
    base = local // chunk
    best = local
    for boundary in range(chunk, num_tokens, chunk):
        if boundary <= local:
            continue
        good = True
        for rule, shards in zip(groups, present, strict=True):
            needed = {
                token // chunk
                for token in range(local, boundary)
                if token_is_read(rule, boundary, token)
            }
            if rule.kind is ReuseKind.STATE:
                needed = {boundary // chunk - 1}
            good &= all(mask >> (index - base) & 1 for mask in shards for index in needed)
        if good:
            best = boundary
    return best


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_boundary_is_the_largest_that_every_group_and_shard_can_serve(case):
    groups, present, chunk, local, num_tokens = case
    found = servable_boundary(
        groups, present, chunk_tokens=chunk, local_tokens=local, num_tokens=num_tokens
    )
    assert found == brute_force(groups, present, chunk, local, num_tokens)
    assert found < num_tokens or found == local


@settings(max_examples=1200, deadline=None)
@given(rules, st.integers(1, 4), st.integers(1, 12), st.integers(0, 11))
def test_what_is_stored_satisfies_what_is_asked(rule, blocks_per_chunk, end_chunk, local_blocks):
    """Every block that a load names is a block that its object keeps."""
    chunk = BLOCK * blocks_per_chunk
    boundary = end_chunk * chunk
    local = min(local_blocks * BLOCK, boundary - 1) // BLOCK * BLOCK
    first_token = first_needed_token(rule, boundary, local)
    for index in needed_chunks(rule, boundary, local, chunk):
        end = (index + 1) * chunk
        kept = range(end // BLOCK - num_stored_blocks(rule, BLOCK, chunk, end), end // BLOCK)
        assert kept.start >= index * blocks_per_chunk
        if rule.kind is ReuseKind.STATE:
            assert len(kept) == 1
            continue
        asked = range(max(first_token // BLOCK, index * blocks_per_chunk), end // BLOCK)
        assert len(asked) > 0
        assert kept.start <= asked.start


def test_a_prompt_of_whole_chunks_resumes_at_the_boundary_before():
    for length, expected in ((511, 256), (512, 256), (513, 512)):
        found = servable_boundary(
            [FULL, STATE], [[0b11], [0b11]], chunk_tokens=256, local_tokens=0, num_tokens=length
        )
        assert found == expected


def test_a_state_is_never_paired_with_attention_of_another_length():
    found = servable_boundary(
        [FULL, STATE], [[0b111], [0b001]], chunk_tokens=256, local_tokens=0, num_tokens=800
    )
    assert found == 256
    assert (
        servable_boundary(
            [FULL, STATE], [[0b011], [0b100]], chunk_tokens=256, local_tokens=0, num_tokens=800
        )
        == 0
    )


def test_a_hole_behind_the_window_does_not_matter():
    window = ReuseRule(ReuseKind.WINDOW, 255)
    found = servable_boundary(
        [FULL, window], [[0b1111], [0b1000]], chunk_tokens=256, local_tokens=0, num_tokens=1100
    )
    assert found == 1024


def test_one_shard_without_its_object_is_a_miss():
    found = servable_boundary(
        [FULL], [[0b111, 0b101]], chunk_tokens=256, local_tokens=0, num_tokens=800
    )
    assert found == 256


def test_an_attention_chunk_that_ends_at_the_boundary_asks_for_nothing():
    chunked = ReuseRule(ReuseKind.CHUNKED, 256)
    found = servable_boundary(
        [FULL, chunked], [[0b111], [0]], chunk_tokens=256, local_tokens=0, num_tokens=800
    )
    assert found == 768
