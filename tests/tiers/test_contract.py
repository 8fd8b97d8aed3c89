"""What every tier does, whatever its medium; and the form of values."""

from __future__ import annotations

import random
import threading
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_connector.storage.tiers.base import (
    NAME,
    Tier,
    TierStats,
    header_bytes,
    pack_header,
    unpack_header,
)

MIB = 1 << 20
NAMES = st.from_regex(NAME, fullmatch=True)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [4096],
        [0, 1],
        [4095, 4096, 1],
        [MIB + 7],
        [1, 0, MIB + 7, 4095],
        [4096, 0, 0, 4095, MIB + 7],
    ],
    ids=str,
)
def test_a_value_comes_back_as_it_was_put(tier: Tier, values: ModuleType, sizes: list[int]) -> None:
    name = values.random_name()
    assert values.read_verified(tier, name, sizes) is None
    assert tier.contains([name]) == [False]
    shards = values.put_value(tier, name, sizes)
    assert tier.contains([name]) == [True]
    for _ in range(2):
        assert values.read_verified(tier, name, sizes) == shards
    tier.remove(name)
    assert tier.contains([name]) == [False]
    assert values.read_verified(tier, name, sizes) is None
    tier.remove(name)


def test_buffers_of_a_pool_are_read_and_written_in_place(tier: Tier, values: ModuleType) -> None:
    """And nothing beside them."""
    pool = bytearray(random.Random(1).randbytes(3 * MIB))
    original = bytes(pool)
    memory = memoryview(pool)
    tier.register(memory)
    name = values.random_name()
    places = [(7, 4096), (MIB, 4097), (2 * MIB, MIB - 1)]
    tier.put(name, [memory[start : start + size] for start, size in places])
    for start, size in places:
        memory[start : start + size] = bytes(size)
    assert tier.get(name, [memory[start : start + size] for start, size in places])
    assert pool == original
    tier.remove(name)


def test_another_length_is_a_miss(tier: Tier, values: ModuleType) -> None:
    name = values.random_name()
    tier.put(name, [memoryview(b"x" * 5000)])
    for size in (0, 1, 4999, 5001, 10_000):
        assert not tier.get(name, [memoryview(bytearray(size))])
    assert not tier.get(name, [memoryview(bytearray(4000)), memoryview(bytearray(4000))])
    # How the value is cut into buffers is not stored.
    first, second = bytearray(1), bytearray(4999)
    assert tier.get(name, [memoryview(first), memoryview(second)])
    assert first + second == b"x" * 5000
    tier.remove(name)


def test_the_last_value_of_another_length_stays(tier: Tier, values: ModuleType) -> None:
    name = values.random_name()
    for seed, sizes in enumerate(([1000], [5, 70_000], [0, 2])):
        shards = values.put_value(tier, name, sizes, seed)
        assert values.read_verified(tier, name, sizes) == shards
    assert values.read_verified(tier, name, [1000]) is None
    tier.remove(name)


def test_a_value_put_twice_is_one_of_both(tier: Tier, values: ModuleType) -> None:
    """Names are digests of what they hold: a tier need not write the second."""
    name = values.random_name()
    both = [values.put_value(tier, name, [3000, 10], seed) for seed in (1, 2)]
    assert values.read_verified(tier, name, [3000, 10]) in both
    tier.remove(name)
    assert tier.contains([name]) == [False]


def test_group_tags_are_part_of_the_name(tier: Tier, values: ModuleType) -> None:
    name = values.random_name(group="0")
    stem = name.removesuffix("0")
    tags = ["0", "1", "state", "window-1024", "a" * 64]
    for seed, tag in enumerate(tags):
        values.put_value(tier, stem + tag, [100], seed)
    for seed, tag in enumerate(tags):
        assert values.read_verified(tier, stem + tag, [100]) == values.make_shards([100], seed)
    tier.remove(stem + "1")
    assert tier.contains([stem + tag for tag in tags]) == [True, False, True, True, True]
    tier.clear(name[:16])


def test_clear_forgets_one_namespace(tier: Tier, values: ModuleType) -> None:
    cleared, kept = values.random_namespace(), values.random_namespace()
    gone = [values.random_name(cleared) for _ in range(30)]
    left = [values.random_name(kept) for _ in range(5)]
    for name in gone + left:
        values.put_value(tier, name, [20])
    tier.clear(cleared)
    assert tier.contains(gone + left) == [False] * 30 + [True] * 5
    tier.clear(cleared)
    values.put_value(tier, gone[0], [20])
    assert tier.contains(gone[:2]) == [True, False]
    tier.clear(cleared)
    tier.clear(kept)
    assert tier.contains(gone + left) == [False] * 35


def test_contains_answers_in_order(tier: Tier, values: ModuleType) -> None:
    namespace = values.random_namespace()
    names = [values.random_name(namespace) for _ in range(1000)]
    there = set(random.Random(2).sample(names, 20))
    for name in there:
        values.put_value(tier, name, [10])
    assert tier.contains([]) == []
    assert tier.contains(names) == [name in there for name in names]
    assert tier.contains([names[0]] * 3) == [names[0] in there] * 3
    tier.clear(namespace)


def test_stats_do_not_fail(tier: Tier, values: ModuleType) -> None:
    namespace = values.random_namespace()
    values.put_value(tier, values.random_name(namespace), [10_000])
    stats = tier.stats()
    assert isinstance(stats, TierStats)
    assert stats.used_bytes is None or stats.used_bytes >= 10_000
    assert stats.num_values is None or stats.num_values >= 1
    tier.clear(namespace)


def test_threads_see_whole_values(tier: Tier, values: ModuleType) -> None:
    """Eight threads put, read and remove the same names and some of their own."""
    namespace = values.random_namespace()
    sizes = [100, 50_000]
    shared = [values.random_name(namespace) for _ in range(3)]
    contents = [values.make_shards(sizes, seed) for seed in range(8)]
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        own = values.random_name(namespace)
        values.put_value(tier, own, sizes, seed)
        for _ in range(12):
            name = rng.choice(shared)
            values.put_value(tier, name, sizes, seed)
            if values.read_verified(tier, rng.choice(shared), sizes) not in [None, *contents]:
                failures.append("a value of a shared name was never put")
            if rng.random() < 0.2:
                tier.remove(name)
            if values.read_verified(tier, own, sizes) != contents[seed]:
                failures.append("a value of a name of its own is another")
            if not tier.contains([own, name])[0]:
                failures.append("a value of a name of its own is said not to be there")

    def run(seed: int) -> None:
        try:
            work(seed)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    tier.clear(namespace)


DIGEST = st.integers(0, 2**64 - 1)


@settings(max_examples=100, deadline=None)
@given(name=NAMES, shards=st.lists(st.tuples(DIGEST, DIGEST), max_size=6), data=st.data())
def test_headers_hold_what_they_say_or_nothing(
    name: str, shards: list[tuple[int, int]], data: st.DataObject
) -> None:
    sizes, digests = [size for size, _ in shards], [digest for _, digest in shards]
    header = pack_header(name, sizes, digests)
    assert len(header) == header_bytes(len(sizes))
    assert unpack_header(header, name, sizes) == digests

    bit = data.draw(st.integers(0, 8 * len(header) - 1))
    flipped = bytearray(header)
    flipped[bit // 8] ^= 1 << bit % 8
    assert unpack_header(bytes(flipped), name, sizes) is None

    other = data.draw(NAMES.filter(lambda other: other != name))
    assert unpack_header(header, other, sizes) is None
    assert unpack_header(header, name, [*sizes, 0]) is None
    if sizes:
        assert unpack_header(header, name, [*sizes[:-1], sizes[-1] ^ 1]) is None
    for length in (0, len(header) - 1):
        assert unpack_header(header[:length], name, sizes) is None


def test_every_bit_of_a_header_counts() -> None:
    name = f"{'0' * 16}/{'1' * 64}-full"
    header = pack_header(name, [10, 0, 30], [1, 0, 3])
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert unpack_header(bytes(flipped), name, [10, 0, 30]) is None
