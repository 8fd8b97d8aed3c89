"""Rows of hidden states as they are given, and those whose chunk is not whole yet."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch

from lmcache_connector.keys import Extra, encode_extra
from lmcache_connector.storage.base import GroupShards

# What the scan for NaN and infinities knows.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Ids = Sequence[int]


class How(TypedDict, total=False):
    """``extra``: what else identifies the tokens, as ``keys.ChunkChain.extend`` takes it."""

    extra: Extra | None
    # None: the one that the rows are kept in.
    dtype: torch.dtype | None
    device: torch.device | str
    # Where to put them, one or by layer: with room for all whole chunks. Views come back.
    out: torch.Tensor | Mapping[int, torch.Tensor] | None


class Rows(NamedTuple):
    """Rows, [n, hidden], of the last n of ``token_ids``, the prefix that the KV is cached for.

    ``extra``: as in ``How``.
    """

    token_ids: Ids
    hidden_states: torch.Tensor
    layer_idx: int = 0
    token_offset: int = 0
    extra: Extra | None = None


class Layer(NamedTuple):
    """How the rows of a layer look."""

    layer_idx: int
    dtype: torch.dtype
    width: int

    @property
    def tag(self) -> str:
        """Of the store's group for its rows."""
        name = str(self.layer_idx).replace("-", "m")
        return f"hs{name}-{str(self.dtype).removeprefix('torch.')}-{self.width}"

    def group(self, chunk_tokens: int) -> GroupShards:
        """Its rows in a store, one for a chunk."""
        return GroupShards(self.tag, [[self.row_bytes(chunk_tokens)]], full=True)

    def row_bytes(self, chunk_tokens: int) -> int:
        return chunk_tokens * self.width * self.dtype.itemsize


class Piece(NamedTuple):
    """A row to put: ``content``, [chunk, hidden], of the chunk that ``names[position]`` names. It
    becomes the dtype of ``layer``."""

    position: int
    layer: Layer
    content: torch.Tensor


# Rows of a prompt, whose chunk i is ``names[i + 1]``.
Prefix = tuple[list[bytes], list[Piece]]


class Partials:
    """Rows of chunks that are not whole yet: [chunk, hidden] each, by a key that names the tokens
    so far. What nobody came back for goes first when they are too many."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        # With the number of calls that left the same: each may go on in its own way.
        self._held: OrderedDict[bytes, tuple[torch.Tensor, int]] = OrderedDict()

    # What one call leaves another writes to, whichever mode it runs in.
    @torch.inference_mode(False)
    def assemble(self, item: Rows, layer: Layer, names: Sequence[bytes], size: int) -> list[Piece]:
        """The chunks that are whole with these rows; the rest of them waits for more, as rows of
        ``layer``."""
        rows, start, end = item.hidden_states, item.token_offset, len(item.token_ids)

        def key(end: int) -> bytes:
            first = end // size * size
            extra = item.extra(first, end) if item.extra is not None else None
            tokens = array("q", item.token_ids[first:end]).tobytes()
            fields = encode_extra((names[first // size], layer.tag, tokens, extra))
            return hashlib.sha256(fields).digest()

        pieces = []
        for first in range(start // size * size, end, size):
            chunk = rows[max(0, first - start) : first + size - start]
            if len(chunk) < size:
                # Its first rows are in a call before this, its last ones in one behind, or both.
                if first < start:
                    partial = self._take(key(start))
                else:
                    partial = torch.empty((size, layer.width), dtype=layer.dtype, device="cpu")
                if partial is None:
                    continue
                partial[max(0, start - first) :][: len(chunk)] = chunk
                if end - first < size:
                    self._put(key(end), partial)
                    continue
                chunk = partial
            pieces.append(Piece(first // size + 1, layer, chunk))
        return pieces

    def _put(self, key: bytes, rows: torch.Tensor) -> None:
        with self._lock:
            held, owners = self._held.pop(key, (rows, 0))
            self._held[key] = (held, owners + 1)
            self._num_bytes += 0 if owners else rows.nbytes
            while self._num_bytes > self._max_bytes:
                _, (oldest, _) = self._held.popitem(last=False)
                self._num_bytes -= oldest.nbytes

    def _take(self, key: bytes) -> torch.Tensor | None:
        with self._lock:
            held, owners = self._held.pop(key, (None, 0))
            if held is not None and owners > 1:
                self._held[key] = (held, owners - 1)
                return held.clone()
            self._num_bytes -= 0 if held is None else held.nbytes
            return held
