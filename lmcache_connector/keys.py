"""Names of cached content: what goes in, and nothing that differs between two processes.

    chunk_hash_i = SHA-256(chunk_hash_{i-1} || tokens_i || extra_i)

chained from a root that holds the namespace and the chunk size. Every field before ``extra_i``
has a fixed length and ``extra_i`` is tagged, so that no two inputs read alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec

# Enters every key. Raise it when the same key could mean other bytes than before.
FORMAT_VERSION = 1
UNRESOLVED_PREFIX = "unresolved:"

_CODE_SUFFIX = ".py"
_CONFIG_FILES = ("config.json", "hf_quant_config.json", "params.json", "quantize_config.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_MIB = 1 << 20
# Larger files are sampled: reading all weights would double the time of a start.
_WHOLE_FILE_BYTES = 64 * _MIB
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_WHOLE_TENSOR_BYTES = 1 << 16
# safetensors itself refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000


class _TensorInfo(msgspec.Struct):
    """One entry of a safetensors header; its metadata has no offsets."""

    data_offsets: tuple[int, int] = (0, 0)


AdapterStamp = tuple[tuple[str, int, int], ...]
Tokens = Callable[[int, int], Sequence[int]]
Extra = Callable[[int, int], object | None]


def encode_extra(fields: object) -> bytes:
    """Canonical bytes of nested sequences and mappings of str, bytes, int, float, bool and None.

    Two values encode alike only if they are equal in type and content at every level; list and
    tuple count as one type. Mappings are encoded in an order of their own.

    Raises:
        ValueError: a value of another type, which has no canonical form.
    """
    parts: list[bytes] = []
    _encode(fields, parts)
    return b"".join(parts)


def _encode(value: object, parts: list[bytes]) -> None:
    match value:
        case None:
            parts.append(b"N")
        case bool():
            parts.append(b"T" if value else b"F")
        case int():
            _encode_sized(b"i", str(int(value)).encode(), parts)
        case float():
            parts.append(struct.pack(">cd", b"f", value))
        case str():
            _encode_sized(b"s", value.encode("utf-8", "surrogatepass"), parts)
        case bytes():
            _encode_sized(b"b", value, parts)
        case list() | tuple():
            parts.append(struct.pack(">cQ", b"(", len(value)))
            for item in value:
                _encode(item, parts)
        case Mapping():
            parts.append(struct.pack(">cQ", b"{", len(value)))
            parts.extend(sorted(encode_extra(key) + encode_extra(value[key]) for key in value))
        case _:
            raise ValueError(f"a value of type {type(value).__name__} cannot be part of a key")


def _encode_sized(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts.append(struct.pack(">cQ", tag, len(content)))
    parts.append(content)


def namespace_digest(facts: Mapping[str, object]) -> bytes:
    """32 bytes that differ whenever any fact differs, is missing, or has another type.

    Raises:
        ValueError: a fact that has no canonical form.
    """
    return hashlib.sha256(encode_extra(("namespace", FORMAT_VERSION, facts))).digest()


class TokenDatabase:
    """Where chains of one namespace and chunk size start. ``chunk_tokens``: tokens per chunk."""

    def __init__(self, namespace: bytes, chunk_tokens: int) -> None:
        assert chunk_tokens > 0
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.root = hashlib.sha256(encode_extra(("chunks", namespace, chunk_tokens))).digest()


class ChunkChain:
    """The chunk hashes of one request, computed once. Tokens are read and never kept.

    ``hashes[i]`` (32 bytes) names tokens ``[0, (i + 1) * chunk_tokens)``.
    """

    __slots__ = ("_database", "hashes")

    def __init__(self, database: TokenDatabase) -> None:
        self._database = database
        self.hashes: list[bytes] = []

    def extend(self, tokens: Tokens, num_tokens: int, extra: Extra | None = None) -> None:
        """Hash the whole chunks within ``num_tokens`` that are not hashed yet.

        ``tokens(start, end)`` gives the ids of a token range, once for all of them;
        ``extra(start, end)`` what else identifies the content of one chunk, or None.

        Raises:
            ValueError: token ids that are no unsigned 32-bit numbers, too few of them, or an
                extra that has no canonical form. Nothing was added.
        """
        size = self._database.chunk_tokens
        start = len(self.hashes) * size
        end = num_tokens // size * size
        if end <= start:
            return
        ids = token_array(tokens(start, end), end - start)
        if sys.byteorder == "big":
            ids.byteswap()
        content = memoryview(ids).cast("B")
        previous = self.hashes[-1] if self.hashes else self._database.root
        added = []
        for first in range(start, end, size):
            offset = (first - start) * 4
            digest = hashlib.sha256(previous)
            digest.update(content[offset : offset + size * 4])
            if extra is not None and (fields := extra(first, first + size)) is not None:
                digest.update(encode_extra(fields))
            previous = digest.digest()
            added.append(previous)
        self.hashes += added

    def truncate(self, num_tokens: int) -> None:
        """Forget chunks that reach beyond ``num_tokens``, or whose tokens changed from there on."""
        del self.hashes[num_tokens // self._database.chunk_tokens :]


def token_array(tokens: Sequence[int], expected: int) -> array[int]:
    """A copy of them.

    Raises:
        ValueError: they are no token ids, or not as many.
    """
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        # Requests that hold embeddings in place of ids have None or negative ones.
        raise ValueError("token ids must be whole numbers from 0 to 4294967295") from None
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} token ids were given for {expected} tokens")
    return ids


def model_digest(model: str, commit: str | None) -> str:
    """Identity of the weights that an engine loads; read once, at start.

    A local directory or file: a digest of its configuration, code and weights. A hub id: the id
    with its resolved ``commit`` (40 hex digits). Anything else (a branch name, a bucket, a
    directory without weights) may hold other weights tomorrow: its identity is a random one that
    starts with ``UNRESOLVED_PREFIX``, so that nothing is reused beyond this process.

    Raises:
        OSError: a local file cannot be read.
    """
    if os.path.isfile(model):
        return f"local:{_digest_files([model])}"
    if os.path.isdir(model):
        paths = [
            path
            for path in _files_of(model)
            if path.endswith((*_WEIGHT_SUFFIXES, _CODE_SUFFIX))
            or os.path.basename(path) in _CONFIG_FILES
        ]
        if any(path.endswith(_WEIGHT_SUFFIXES) for path in paths):
            return f"local:{_digest_files(paths)}"
    elif commit is not None and re.fullmatch(r"[0-9a-f]{40}", commit):
        return f"hub:{model}@{commit}"
    return UNRESOLVED_PREFIX + secrets.token_hex(16)


def adapter_digest(path: str) -> str:
    """Digest of the files in a LoRA adapter's directory. Reads them anew at each call: callers
    keep the answer for as long as the engine keeps the adapter loaded.

    Raises:
        OSError: the directory or a file cannot be read, or there is none: requests of this
            adapter cannot be keyed.
    """
    paths = _files_of(os.path.expanduser(path))
    if not paths:
        raise FileNotFoundError(f"LoRA adapter directory {path} is empty")
    return _digest_files(paths)


def adapter_stamp(path: str) -> AdapterStamp:
    """Names, sizes and times (ns) of the files in a LoRA adapter's directory: other ones mean that
    its digest may be another. Raises OSError as ``adapter_digest`` does."""
    facts = [(name, os.stat(name)) for name in _files_of(os.path.expanduser(path))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)


def _files_of(directory: str) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(entry.path for entry in entries if entry.is_file())


def _digest_files(paths: Sequence[str]) -> str:
    """Hex digest over name, size and content; samples of the content where a file is large.

    A large file gives its first MiB (for safetensors the whole header), its last MiB, evenly
    spaced pages between and, for safetensors, a page of each tensor and all of small ones: a
    change of some layers, or of norms only, is seen too.
    """
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(encode_extra((os.path.basename(path), size)))
            for offset, length in _ranges_to_read(file, path, size):
                file.seek(offset)
                digest.update(file.read(length))
    return digest.hexdigest()


def _of_each_tensor(header: bytes) -> Iterator[tuple[int, int]]:
    """A page in the middle of each tensor of a safetensors file, and all of one that is small."""
    with contextlib.suppress(ValueError):
        tensors = msgspec.json.decode(header, type=dict[str, _TensorInfo])
        for begin, end in sorted(info.data_offsets for info in tensors.values()):
            first = 8 + len(header) + begin
            if end - begin <= _WHOLE_TENSOR_BYTES:
                yield first, end - begin
            else:
                yield first + (end - begin) // 2, _SAMPLE_BYTES


def _ranges_to_read(file: BinaryIO, path: str, size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE_FILE_BYTES:
        yield from ((offset, _MIB) for offset in range(0, size, _MIB))
        return
    head = _MIB
    if path.endswith(".safetensors"):
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        head = max(head, min(8 + header_bytes, _MAX_HEADER_BYTES, size - _MIB))
        yield from _of_each_tensor(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
    yield 0, head
    step = (size - head - _MIB) // _SAMPLES
    yield from ((head + index * step, _SAMPLE_BYTES) for index in range(_SAMPLES))
    yield size - _MIB, _MIB
