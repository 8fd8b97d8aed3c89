"""Keys: equal where the content is equal, in any process; different wherever it may differ."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_connector import keys
from lmcache_connector.keys import (
    UNRESOLVED_PREFIX,
    ChunkChain,
    TokenDatabase,
    adapter_digest,
    encode_extra,
    model_digest,
    namespace_digest,
)

CHUNK = 4
NAMESPACE = namespace_digest({"model": "hub:x@1"})
COMMIT = "0123456789abcdef0123456789abcdef01234567"

FACTS = {
    "model": f"hub:org/model@{COMMIT}",
    "text_config": '{"sliding_window": 256}',
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "backends": ("FLASH_ATTN", "cpu/avx512"),
    "geometry": "a1b2",
    "tensor_parallel": 2,
    "generation": "",
}


def reader(tokens: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    return lambda start, end: tokens[start:end]


def hashes_of(
    tokens: Sequence[int],
    extra: Callable[[int, int], object | None] | None = None,
    namespace: bytes = NAMESPACE,
    chunk_tokens: int = CHUNK,
) -> list[bytes]:
    chain = ChunkChain(TokenDatabase(namespace, chunk_tokens))
    chain.extend(reader(tokens), len(tokens), extra)
    return chain.hashes


# ---- chains ---------------------------------------------------------------------------------


def test_only_whole_chunks_have_a_hash():
    assert [len(hashes_of(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_all_tokens_before_it():
    base = hashes_of(range(12))
    assert hashes_of([*range(12), 99])[:3] == base
    assert hashes_of([*range(8), 0, 0, 0, 0])[:2] == base[:2]
    other = hashes_of([7, *range(1, 12)])
    assert not set(other) & set(base)


def test_order_and_position_of_tokens_matter():
    assert hashes_of([1, 2, 3, 4]) != hashes_of([2, 1, 3, 4])
    first, second = hashes_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_namespace_and_chunk_size_separate():
    tokens = range(16)
    base = hashes_of(tokens)
    assert not set(hashes_of(tokens, namespace=namespace_digest({"model": "y"}))) & set(base)
    assert not set(hashes_of(tokens, chunk_tokens=8)) & set(base)


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_each_fact_enters_the_namespace(fact):
    base = namespace_digest(FACTS)
    assert namespace_digest({**FACTS, fact: "other"}) != base
    assert namespace_digest({key: value for key, value in FACTS.items() if key != fact}) != base
    assert namespace_digest({**FACTS, fact: str(FACTS[fact]) + " "}) != base


def test_facts_have_no_order_and_do_have_types():
    assert namespace_digest(dict(reversed(FACTS.items()))) == namespace_digest(FACTS)
    assert namespace_digest({"tp": 1}) != namespace_digest({"tp": "1"})
    assert namespace_digest({"ab": "c"}) != namespace_digest({"a": "bc"})


def test_the_format_version_enters_the_namespace(monkeypatch):
    base = namespace_digest(FACTS)
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert namespace_digest(FACTS) != base


EXTRAS: dict[str, object | None] = {
    "none": None,
    "lora": (("lora", "x", "/a"),),
    "other lora": (("lora", "y", "/a"),),
    "lora at another path": (("lora", "x", "/b"),),
    "reloaded lora": ((("lora", "x", "/a"),), "digest of the files"),
    "salt": (("cache_salt", "x"),),
    "other salt": (("cache_salt", "y"),),
    "image": (("mm", "hash", 0),),
    "other image": (("mm", "hash2", 0),),
    "image at another offset": (("mm", "hash", -3),),
    "embeds": (("prompt_embeds", b"hash"),),
    "embeds digest as text": (("prompt_embeds", "hash"),),
    "token kinds": ((), None, b"\x01\x01\x01\x01"),
    "other token kinds": ((), None, b"\x01\x00\x01\x01"),
    "nothing, said twice": (None, None),
}


def test_equal_tokens_with_other_identities_share_no_key():
    all_hashes = [hashes_of(range(8), lambda a, b, x=extra: x) for extra in EXTRAS.values()]
    assert len({chunk_hash for hashes in all_hashes for chunk_hash in hashes}) == 2 * len(EXTRAS)


def test_no_extra_and_extras_of_none_are_the_same():
    assert hashes_of(range(8), lambda start, end: None) == hashes_of(range(8))


def test_an_extra_of_one_chunk_changes_that_chunk_and_those_after_it():
    base = hashes_of(range(12))
    salted = hashes_of(range(12), lambda start, end: ("image",) if start == 4 else None)
    assert [left == right for left, right in zip(base, salted, strict=True)] == [True, False, False]


def test_extras_are_asked_for_each_new_chunk_once_and_tokens_for_all_at_once():
    asked: list[tuple[str, int, int]] = []

    def tokens(start: int, end: int) -> Sequence[int]:
        asked.append(("tokens", start, end))
        return range(start, end)

    def extra(start: int, end: int) -> object:
        asked.append(("extra", start, end))
        return None

    chain = ChunkChain(TokenDatabase(NAMESPACE, CHUNK))
    chain.extend(tokens, 9, extra)
    chain.extend(tokens, 11, extra)
    chain.extend(tokens, 12, extra)
    assert asked == [
        ("tokens", 0, 8),
        ("extra", 0, 4),
        ("extra", 4, 8),
        ("tokens", 8, 12),
        ("extra", 8, 12),
    ]


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=12),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_any_course_of_growth_and_shrinkage_equals_hashing_from_scratch(
    tokens: list[int], steps: list[tuple[bool, int]], size: int, rng: random.Random
):
    def extra(start: int, end: int) -> object | None:
        return ("image", start) if start % 3 else None

    chain = ChunkChain(TokenDatabase(NAMESPACE, size))
    for grow, number in steps:
        if grow:
            chain.extend(reader(tokens), min(number, len(tokens)), extra)
        else:
            # The request is cut back, and other tokens follow.
            chain.truncate(number)
            tokens = tokens[:number] + [rng.randrange(2**32) for _ in tokens[number:]]
    chain.truncate(len(tokens))
    chain.extend(reader(tokens), len(tokens), extra)
    assert chain.hashes == hashes_of(tokens, extra, chunk_tokens=size)


def test_truncation_keeps_whole_confirmed_chunks_only():
    chain = ChunkChain(TokenDatabase(NAMESPACE, CHUNK))
    chain.extend(reader(range(12)), 12)
    full = list(chain.hashes)
    chain.truncate(100)
    assert chain.hashes == full
    chain.truncate(11)
    assert chain.hashes == full[:2]
    chain.truncate(0)
    assert chain.hashes == []


@pytest.mark.parametrize(
    "bad", [-1, 2**32, None, 1.0, "1"], ids=["negative", "too big", "none", "float", "text"]
)
def test_ids_that_are_no_token_ids_are_refused_and_change_nothing(bad):
    chain = ChunkChain(TokenDatabase(NAMESPACE, CHUNK))
    chain.extend(reader(range(4)), 4)
    before = list(chain.hashes)
    with pytest.raises(ValueError, match="token ids"):
        chain.extend(reader([0, 1, 2, 3, 4, bad, 6, 7]), 8)
    assert chain.hashes == before


@pytest.mark.parametrize("given_tokens", [range(3), range(5), bytes(4)])
def test_a_wrong_number_of_tokens_is_refused(given_tokens):
    with pytest.raises(ValueError, match="4 tokens"):
        ChunkChain(TokenDatabase(NAMESPACE, CHUNK)).extend(lambda start, end: given_tokens, 4)


def test_an_extra_without_canonical_form_changes_nothing():
    chain = ChunkChain(TokenDatabase(NAMESPACE, CHUNK))
    with pytest.raises(ValueError, match="type object"):
        chain.extend(reader(range(8)), 8, lambda start, end: object() if start else None)
    assert chain.hashes == []


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_with_another_hash_seed_finds_the_same_keys(seed):
    code = (
        "import json; from lmcache_connector.keys import *;"
        f"chain = ChunkChain(TokenDatabase(namespace_digest({FACTS!r}), 4));"
        "extra = lambda a, b: {'x': ('lora', b'y', a), 'z': 1.5};"
        "chain.extend(lambda a, b: range(a, b), 9, extra);"
        "print(json.dumps([chunk_hash.hex() for chunk_hash in chain.hashes]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
        text=True,
    )
    here = hashes_of(
        range(9), lambda a, b: {"z": 1.5, "x": ["lora", b"y", a]}, namespace_digest(FACTS)
    )
    assert json.loads(done.stdout) == [chunk_hash.hex() for chunk_hash in here]


def test_keys_of_this_format_version_do_not_drift():
    """Change the literal only together with FORMAT_VERSION."""
    assert keys.FORMAT_VERSION == 1
    assert (
        hashes_of(range(8), lambda start, end: ("salt", start))[-1].hex()
        == "052585bba7314c8c6ae3b74c2328f8a0eda7b5c5aa466eb1047f162355645567"
    )


# ---- encoding -------------------------------------------------------------------------------

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.sampled_from(["N", b"N", "1", b"1", "", b"", 0.0, -0.0, 1.0, "\ud800"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def shape(value: object) -> object:
    """A value that compares equal exactly where two encodings may be equal."""
    match value:
        case list() | tuple():
            return ("sequence", *(shape(item) for item in value))
        case dict():
            return ("mapping", *sorted((key, repr(shape(item))) for key, item in value.items()))
        case float():
            return ("float", struct.pack(">d", value))
        case _:
            return (type(value).__name__, value)


@given(VALUES, VALUES)
def test_two_values_encode_alike_only_if_they_are_alike(left: object, right: object):
    assert (encode_extra(left) == encode_extra(right)) == (shape(left) == shape(right))


@given(st.lists(VALUES, max_size=4), st.integers(0, 4), st.integers(0, 4))
def test_moving_a_border_between_fields_shows(values: list[object], left: int, right: int):
    one = (values[:left], values[left:])
    two = (values[:right], values[right:])
    assert (encode_extra(one) == encode_extra(two)) == (shape(one) == shape(two))


def test_values_that_python_or_a_printer_takes_for_equal_are_not():
    values = [None, False, 0, 0.0, -0.0, "", b"", (), {}, True, 1, 1.0, "1", b"1", (1,), ((1,),)]
    values += ["None", "True", ("1",), ("", ""), {"1": None}, (None,), (("1", None),), {"": "1"}]
    assert len({encode_extra(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, [1, [bytearray(b"x")]], {"a": object()}])
def test_values_without_canonical_form_are_refused(value):
    with pytest.raises(ValueError, match="cannot be part of a key"):
        encode_extra(value)


# ---- models and adapters --------------------------------------------------------------------


def safetensors(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text('{"hidden_size": 8}')
    (root / "tokenizer.json").write_text("{}")
    (root / "model-1.safetensors").write_bytes(safetensors(b'{"a": 1}', b"weights 1"))
    (root / "model-2.safetensors").write_bytes(safetensors(b'{"b": 1}', b"weights 2"))
    return root


def test_a_model_directory_is_known_by_its_content(model_dir, tmp_path):
    digest = model_digest(str(model_dir), None)
    assert digest.startswith("local:")
    moved = tmp_path / "elsewhere"
    model_dir.rename(moved)
    assert model_digest(str(moved), "main") == digest
    (moved / "tokenizer.json").write_text('{"other": 1}')
    assert model_digest(str(moved), None) == digest


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"hidden_size": 16}'),
        ("model-2.safetensors", safetensors(b'{"b": 1}', b"weights 3")),
        ("model-2.safetensors", safetensors(b'{"c": 1}', b"weights 2")),
        ("model-2.safetensors", b""),
        ("model-3.safetensors", b"more"),
        ("pytorch_model.bin", b"x"),
        ("modeling_custom.py", b"pass"),
        ("params.json", b"{}"),
    ],
)
def test_other_files_at_the_same_path_are_another_model(model_dir, name, content):
    before = model_digest(str(model_dir), None)
    (model_dir / name).write_bytes(content)
    assert model_digest(str(model_dir), None) != before


def test_a_renamed_weight_file_is_another_model(model_dir):
    before = model_digest(str(model_dir), None)
    (model_dir / "model-1.safetensors").rename(model_dir / "model-0.safetensors")
    assert model_digest(str(model_dir), None) != before


def test_swapped_weight_files_are_another_model(model_dir):
    before = model_digest(str(model_dir), None)
    first, second = model_dir / "model-1.safetensors", model_dir / "model-2.safetensors"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert model_digest(str(model_dir), None) != before


LARGE = 65 << 20


def sparse(path: Path, header_bytes: int) -> Path:
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", header_bytes))
        file.truncate(LARGE)
    return path


@pytest.mark.parametrize(
    "offset", [0, 100, 1 << 20, (3 << 20) - 1, LARGE - (1 << 20), LARGE - 1], ids=str
)
def test_large_files_are_read_at_both_ends_and_over_the_whole_header(model_dir, offset):
    weights = sparse(model_dir / "large.safetensors", (3 << 20) - 8)
    before = model_digest(str(model_dir), None)
    with open(weights, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff")
    assert model_digest(str(model_dir), None) != before


def test_a_change_of_one_layer_in_the_middle_of_a_large_file_is_seen(model_dir):
    weights = sparse(model_dir / "large.safetensors", 8)
    before = model_digest(str(model_dir), None)
    with open(weights, "r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"\xff" * (LARGE // 40))
    assert model_digest(str(model_dir), None) != before


@pytest.mark.parametrize("tensor", ["norm", "layer"])
def test_a_change_of_one_tensor_of_a_large_file_is_seen(model_dir, tensor):
    """Wherever a small one lies; a large one is taken to change as a whole."""
    sizes = {"norm": 8192, "layer": 1 << 19}
    offsets, end = {}, 0
    for index in range(100):
        for name, size in sizes.items():
            offsets[f"{index}.{name}"] = [end, end + size]
            end += size
    header = {name: {"dtype": "U8", "data_offsets": pair} for name, pair in offsets.items()}
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path = model_dir / "large.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(max(LARGE, 8 + len(encoded) + end))
    before = model_digest(str(model_dir), None)
    assert model_digest(str(model_dir), None) == before
    for index in (1, 37, 98):
        first, last = offsets[f"{index}.{tensor}"]
        place = 8 + len(encoded) + first
        change = slice(5000, 5001) if tensor == "norm" else slice(0, last - first)
        with open(path, "r+b") as file:
            file.seek(place + change.start)
            file.write(b"\xff" * (change.stop - change.start))
        assert model_digest(str(model_dir), None) != before
        with open(path, "r+b") as file:
            file.seek(place + change.start)
            file.write(bytes(change.stop - change.start))
        assert model_digest(str(model_dir), None) == before


@pytest.mark.parametrize("header_bytes", [LARGE * 2, 2**64 - 1])
def test_a_header_length_that_cannot_be_true_does_no_harm(model_dir, header_bytes):
    sparse(model_dir / "large.safetensors", header_bytes)
    assert model_digest(str(model_dir), None) == model_digest(str(model_dir), None)


def test_a_single_weight_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF one")
    before = model_digest(str(path), None)
    path.write_bytes(b"GGUF two")
    assert before.startswith("local:")
    assert model_digest(str(path), None) != before


def test_a_hub_model_is_known_by_its_resolved_commit():
    assert model_digest("org/model", COMMIT) == f"hub:org/model@{COMMIT}"
    assert model_digest("org/model", COMMIT) != model_digest("org/model", COMMIT[::-1])
    assert model_digest("org/other", COMMIT) != model_digest("org/model", COMMIT)


@pytest.mark.parametrize("commit", [None, "main", "v1.0", COMMIT[:7], COMMIT + "\n"])
def test_a_model_that_may_change_under_its_name_is_never_the_same_twice(commit):
    first, second = model_digest("org/model", commit), model_digest("org/model", commit)
    assert first.startswith(UNRESOLVED_PREFIX)
    assert first != second


def test_a_directory_without_weights_identifies_no_model(model_dir):
    for path in model_dir.glob("*.safetensors"):
        path.unlink()
    assert model_digest(str(model_dir), COMMIT).startswith(UNRESOLVED_PREFIX)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    root = tmp_path / "adapter"
    root.mkdir()
    (root / "adapter_config.json").write_text('{"r": 8}')
    (root / "adapter_model.safetensors").write_bytes(safetensors(b"{}", bytes(3 << 20)))
    return root


def test_an_adapter_reloaded_unchanged_is_the_same(adapter):
    assert adapter_digest(str(adapter)) == adapter_digest(str(adapter))


@pytest.mark.parametrize("offset", [0, 10, (3 << 19) + 5000, 3 << 20])
def test_one_changed_byte_of_an_adapter_is_another_adapter(adapter, offset):
    before = adapter_digest(str(adapter))
    with open(adapter / "adapter_model.safetensors", "r+b") as file:
        file.seek(offset)
        file.write(b"\x7f")
    assert adapter_digest(str(adapter)) != before


def test_a_changed_adapter_config_is_another_adapter(adapter):
    before = adapter_digest(str(adapter))
    (adapter / "adapter_config.json").write_text('{"r": 9}')
    assert adapter_digest(str(adapter)) != before


@pytest.mark.parametrize("path", ["no/such/adapter", "", "file", "empty"])
def test_an_adapter_that_cannot_be_read_raises(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"adapter|file|directory"):
        adapter_digest(path)
