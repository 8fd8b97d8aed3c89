"""Rows of hidden states as they are given, and those whose chunk is not whole yet."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lmcache_connector.keys import Extra
from lmcache_connector.storage.base import GroupShards

# What the scan for NaN and infinities knows.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Rows(NamedTuple):
    """Rows, [n, hidden], of the last n of ``token_ids``, the prefix that the KV is cached for.

    ``extra``: what else identifies the tokens, as ``keys.ChunkChain.extend`` takes it.
    """

    token_ids: Sequence[int]
    hidden_states: torch.Tensor
    layer_idx: int = 0
    token_offset: int = 0
    extra: Extra | None = None

    @property
    def layer(self) -> Layer:
        return Layer(self.layer_idx, self.hidden_states.dtype, self.hidden_states.shape[1])


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
        row_bytes = chunk_tokens * self.width * self.dtype.itemsize
        return GroupShards(self.tag, [[row_bytes]], full=True)


class Partials:
    """Rows of chunks that are not whole yet: [chunk, hidden] each, by a key that names the tokens
    so far. What nobody came back for goes first when they are too many."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        # With the number of calls that left the same: each may go on in its own way.
        self._held: OrderedDict[bytes, tuple[torch.Tensor, int]] = OrderedDict()

    def put(self, key: bytes, rows: torch.Tensor) -> None:
        """Keep ``rows``, which become ours."""
        with self._lock:
            held, owners = self._held.pop(key, (rows, 0))
            self._held[key] = (held, owners + 1)
            self._num_bytes += 0 if owners else rows.nbytes
            while self._num_bytes > self._max_bytes:
                _, (oldest, _) = self._held.popitem(last=False)
                self._num_bytes -= oldest.nbytes

    def take(self, key: bytes) -> torch.Tensor | None:
        """The rows, which are the caller's to go on with."""
        with self._lock:
            held, owners = self._held.pop(key, (None, 0))
            if held is not None and owners > 1:
                self._held[key] = (held, owners - 1)
                return held.clone()
            self._num_bytes -= 0 if held is None else held.nbytes
            return held
