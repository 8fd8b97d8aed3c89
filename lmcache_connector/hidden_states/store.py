"""``HiddenStateStore``: hidden states of cached prefixes, found by the chunk keys of their KV.

The [chunk, hidden] rows of one layer are a row of a ``Store``. They are found as long as the KV of
their chunk is there; of a prefix, as far as all layers that are asked for reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import operator
import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Unpack

import torch

from lmcache_connector.hidden_states.client import RowClient
from lmcache_connector.hidden_states.rows import DTYPES, How, Ids, Layer, Partials, Prefix, Rows
from lmcache_connector.hidden_states.staging import RowStaging
from lmcache_connector.keys import ChunkChain, Extra, TokenDatabase, token_array
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.server.client import PoolClient
from lmcache_connector.storage.base import Store

logger = init_logger(__name__)

# Rows whose chunk is not whole: enough for hundreds of requests. What is more is not stored.
_MAX_PARTIAL_BYTES = 1 << 30
# Rows that wait for the helper thread, on each device: those of a few steps.
_STAGING_BYTES = 128 << 20
_HUGE = 2 << 20
_libc = ctypes.CDLL(None)


Attached = tuple[RowClient, TokenDatabase]


class HiddenStateStore:
    """Safe to call from any thread. A store that is lost, full or slow raises nothing: nothing is
    stored then, or found, after ``timeout`` seconds or a little more.

    Args:
        layers: the layer indices that are stored; None: all.
        kept_as: the dtype to keep rows in: "native" (as given) or "float32".
        default: dtype and width of the rows of a layer of which none was given yet.
    """

    def __init__(
        self,
        *,
        layers: Collection[int] | None = None,
        kept_as: str = "native",
        default: tuple[torch.dtype, int] | None = None,
        timeout: float = 2.0,
    ) -> None:
        self._allowed, self._kept_as, self._default = layers, kept_as, default
        self._timeout = timeout
        # By process: a forked child has none of the threads and sockets of its parent.
        self._clients: dict[int, Attached] = {}
        self._layers: dict[int, Layer] = {}
        self._told: dict[str, int] = {}
        self._partials = Partials(_MAX_PARTIAL_BYTES)
        self._staging: dict[torch.device, RowStaging | None] = {}
        # What is staged is handed to the helper thread in the same order.
        self._staging_lock = threading.Lock()
        self._queued: set[Future[None]] = set()
        self._helper = ThreadPoolExecutor(1, "lmcache-hidden")
        self._helper.submit(int)  # It has its thread now: no later call fails for want of one.

    def attach(self, store: Store, memory: PoolClient, database: TokenDatabase) -> None:
        """Begin, or go on with another store, or with the keys of another namespace. Nothing is
        stored before.

        Args:
            store: for this client alone.
            memory: where its slots are.
            database: of the KV's namespace.
        """
        client, _ = self._attached or (None, None)
        if client is None or client.store is not store:
            client = RowClient(store, memory, database.chunk_tokens, self._timeout)
            self._told = {}
        else:
            with client.lock:
                store.clear(database.namespace)
        self._clients[os.getpid()] = client, database

    @property
    def _attached(self) -> Attached | None:
        return self._clients.get(os.getpid())

    # ---- store ----------------------------------------------------------------------------------

    def store_hidden_states(
        self,
        token_ids: Ids,
        hidden_states: torch.Tensor,
        layer_idx: int = 0,
        token_offset: int = 0,
        *,
        extra: Extra | None = None,
        non_blocking: bool = False,
    ) -> int:
        """Store ``hidden_states``, [len(token_ids) - token_offset, hidden], of the tokens from
        ``token_offset`` on; how many of the chunks that end in these are in the store now.

        A chunk may come in pieces, by calls of which each begins where an earlier one for the
        same tokens ended; one whose first rows never came is not stored.

        Raises:
            ValueError: rows of another shape, or of other width or dtype than this layer's.
        """
        item = Rows(token_ids, hidden_states, layer_idx, token_offset, extra)
        return self.store_batch([item], non_blocking=non_blocking)[0]

    def store_batch(self, items: Sequence[Rows], *, non_blocking: bool = False) -> list[int]:
        """``store_hidden_states`` of each. Layers of a prefix that does not fit as a whole end up
        equally long, if they share their ``token_ids`` and ``extra``.

        With ``non_blocking`` rows are copied aside and stored by a helper thread: the answer is 0,
        see ``flush``. Those that never fit there, or are on several devices, are waited for.
        """
        items = [self._checked(item) for item in items]
        nothing, attached = [0] * len(items), self._attached
        if attached is None or (non_blocking and self._store_later(items, attached)):
            return nothing
        return self._store_now(items, attached) if self.flush() else nothing

    def _store_later(self, items: Sequence[Rows], attached: Attached) -> bool:
        """Let the helper thread store copies, or drop what is too much; False when they cannot
        be stored so."""
        items = [item for item in items if len(item.hidden_states)]
        rows = [item.hidden_states for item in items]
        # Theirs may change: a copy for all that share them.
        ids = {id(item[0]): token_array(item[0], len(item[0])) for item in items}
        with self._staging_lock:
            stagings = {self._staging_of(each.device) for each in rows}
            staging = stagings.pop() if len(stagings) == 1 else None
            if staging is None or not staging.has_room(rows):
                return not items
            if (copies := staging.put(rows)) is None:
                warn_every(logger, "queue", 60.0, "hidden states come faster than they are stored")
                return True
            items = [
                item._replace(token_ids=ids[id(item.token_ids)], hidden_states=copy)
                for item, copy in zip(items, copies, strict=True)
            ]
            with contextlib.suppress(RuntimeError):  # closed
                future = self._helper.submit(self._store_staged, items, staging, attached)
                self._queued.add(future)
                future.add_done_callback(self._queued.discard)
        return True

    def _staging_of(self, device: torch.device) -> RowStaging | None:
        if device not in self._staging:
            try:
                self._staging[device] = RowStaging(device, _STAGING_BYTES)
            except RuntimeError as error:
                logger.warning("hidden states on %s are waited for, unstaged: %s", device, error)
                self._staging[device] = None
        return self._staging[device]

    def _store_staged(self, items: list[Rows], staging: RowStaging, attached: Attached) -> None:
        try:
            with torch.cuda.stream(staging.stream):
                self._store_now(items, attached)
        except Exception:
            logger.exception("hidden states could not be stored")
        finally:
            staging.wait()
            with self._staging_lock:
                staging.ring.release_oldest()

    def flush(self, timeout: float | None = None) -> bool:
        """Whether all that was given ``non_blocking`` is dealt with, within ``timeout`` seconds."""
        return not wait(list(self._queued), self._timeout if timeout is None else timeout).not_done

    def _checked(self, item: Rows) -> Rows:
        rows = item.hidden_states.detach().resolve_neg()
        offset, size = item.token_offset, len(item.token_ids)
        item = item._replace(hidden_states=rows, layer_idx=_index(item.layer_idx))
        is_plain = rows.layout is torch.strided and rows.device.type in ("cpu", "cuda")
        if not is_plain or rows.ndim != 2 or rows.dtype not in DTYPES or not rows.shape[1]:
            raise ValueError(
                f"hidden states are [tokens, hidden] of {DTYPES}, dense, on "
                f"the CPU or a GPU, not {list(rows.shape)} of {rows.dtype} on {rows.device}"
            )
        if not 0 <= offset <= size or len(rows) != size - offset:
            raise ValueError(f"{len(rows)} rows were given for the tokens {offset} to {size}")
        if self._allowed is not None and item.layer_idx not in self._allowed:
            text = f"rows of layer {item.layer_idx} are not stored: not in hidden_state_layers"
            warn_every(logger, "layer", 60.0, text)
            return item._replace(token_ids=(), hidden_states=rows[:0], token_offset=0)
        if not len(rows):
            return item  # It says nothing of its layer.
        dtype = torch.float32 if self._kept_as == "float32" else rows.dtype
        layer = Layer(item.layer_idx, dtype, rows.shape[1])
        known = self._layers.setdefault(item.layer_idx, layer)
        if known != layer:
            raise ValueError(f"this layer's rows are {known.tag}, given were {layer.tag}")
        if self._default not in (None, known[1:]):
            text = f"rows are {known.tag}, hits of requests are told by those of {self._default}"
            warn_every(logger, "default", 600.0, text)
        return item

    def _store_now(self, items: Sequence[Rows], attached: Attached) -> list[int]:
        client, database = attached
        prefixes: dict[tuple[int, int], Prefix] = {}
        chunks = []
        for item in items:
            same = (id(item.token_ids), id(item.extra))
            if same not in prefixes:
                prefixes[same] = _names(database, item.token_ids, item.extra), []
            names, pieces = prefixes[same]
            layer, size = self._layers.get(item.layer_idx), database.chunk_tokens
            chunks.append(self._partials.assemble(item, layer, names, size) if layer else [])
            pieces += chunks[-1]
        stored = set(map(id, client.put([prefix for prefix in prefixes.values() if prefix[1]])))
        return [sum(id(piece) in stored for piece in pieces) for pieces in chunks]

    # ---- retrieve -------------------------------------------------------------------------------

    def retrieve_hidden_states(
        self, token_ids: Ids, layer_idx: int = 0, **how: Unpack[How]
    ) -> torch.Tensor | None:
        """The longest prefix of whole chunks that has rows of the layer, [tokens, hidden], as
        float32 on the CPU unless asked for otherwise; None when the first chunk has none."""
        options: How = {"dtype": torch.float32, **how}
        layer_idx = _index(layer_idx)
        out = how.get("out")
        if isinstance(out, torch.Tensor):
            options["out"] = {layer_idx: out}
        found = self.retrieve_layers(token_ids, [layer_idx], **options)
        return None if found is None else found[layer_idx]

    def retrieve_layers(
        self,
        token_ids: Ids,
        layer_idxs: Sequence[int],
        min_rows: int | None = None,
        **how: Unpack[How],
    ) -> dict[int, torch.Tensor] | None:
        """The longest prefix that has rows of all these layers, by layer; None when that is less
        than ``min_rows``.

        Raises:
            ValueError: an ``out`` of another width or without room, or one that cannot hold all
                rows; another dtype than those of rows.
        """
        if how.get("dtype") not in (None, *DTYPES):
            raise ValueError(f"dtype is {how['dtype']}, not one of {DTYPES}")
        if (asked := self._ask(token_ids, layer_idxs, how.get("extra"))) is None:
            return None
        client, layers, hashes, size = asked
        outs = how.get("out")
        if isinstance(outs, torch.Tensor):
            raise ValueError("out of several layers is a mapping, from layer index to tensor")
        outs = {} if outs is None else outs
        given = [(outs[layer.layer_idx], layer) for layer in layers if layer.layer_idx in outs]
        for out, layer in given:
            _check_out(out, len(hashes) * size, layer.width)
        for (one, _), (other, _) in itertools.combinations(given, 2):
            if _overlap(*sorted((one, other), key=torch.Tensor.data_ptr)):
                raise ValueError("out is the same memory for several layers")

        def make(num_tokens: int) -> list[torch.Tensor]:
            return [
                outs[layer.layer_idx][:num_tokens]
                if layer.layer_idx in outs
                else _empty((num_tokens, layer.width), how.get("dtype") or layer.dtype, how)
                for layer in layers
            ]

        found = client.fetch(hashes, layers, max(1, -(-(min_rows or 0) // size)), make)
        if found is None:
            return None
        return {layer.layer_idx: rows for layer, rows in zip(layers, found, strict=True)}

    def coverage(
        self, token_ids: Ids, layer_idxs: Sequence[int] = (0,), extra: Extra | None = None
    ) -> int:
        """How many rows ``retrieve_layers`` would find."""
        if (asked := self._ask(token_ids, layer_idxs, extra)) is None:
            return 0
        client, layers, hashes, size = asked
        return client.reach(hashes, layers) * size

    def has_chunk(self, token_ids: Ids, layer_idx: int = 0, extra: Extra | None = None) -> bool:
        """Whether rows of the last whole chunk of ``token_ids`` are there, the others or not."""
        if (asked := self._ask(token_ids, [layer_idx], extra)) is None:
            return False
        client, layers, hashes, _ = asked
        return client.reach(hashes[-1:], layers) > 0

    def _ask(
        self, token_ids: Ids, layer_idxs: Sequence[int], extra: Extra | None
    ) -> tuple[RowClient, list[Layer], list[bytes], int] | None:
        """Whom to ask for what; None where nothing can be there."""
        layers = []
        for index in dict.fromkeys(map(_index, layer_idxs)):
            layer = self._layers.get(index) or (self._default and Layer(index, *self._default))
            if layer is None or not (self._allowed is None or index in self._allowed):
                return None
            layers.append(layer)
        if (attached := self._attached) is None or not layers:
            return None
        client, database = attached
        hashes = _names(database, token_ids, extra)[1:]
        return (client, layers, hashes, database.chunk_tokens) if hashes else None

    # ---- the rest -------------------------------------------------------------------------------

    @property
    def num_cached_chunks(self) -> int:
        """Rows in the pool: chunks, counted once for each layer, of all that share it."""
        return self.stats().get("rows", 0)

    def stats(self) -> dict[str, int]:
        """Chunks by what became of them, counted by layer, and the use of the pool."""
        if (attached := self._attached) is None:
            return {}
        client, _ = attached
        with client.lock:
            pool = client.store.stats()
            use = {"rows": pool.rows, "used_bytes": pool.used_bytes}
            return {**client.counts, **use, "capacity_bytes": pool.capacity_bytes}

    def take_counts(self) -> dict[str, int]:
        """What became of chunks since the last call, as in ``stats``, without zeros."""
        if (attached := self._attached) is None:
            return {}
        before, self._told = self._told, dict(attached[0].counts)
        return {k: n - before.get(k, 0) for k, n in self._told.items() if n != before.get(k, 0)}

    def close(self) -> None:
        """Store what is queued, then nothing more. Store and memory are their owners' to close."""
        self._helper.shutdown()
        self._clients.clear()


def _index(layer_idx: int) -> int:
    """A plain number: True and 1 would be two layers with rows under one key."""
    index = int(operator.index(layer_idx))
    if abs(index) >> 31:
        raise ValueError(f"layer_idx {index} is no number of 32 bits")
    return index


def _check_out(out: torch.Tensor, num_tokens: int, width: int) -> None:
    if not isinstance(out, torch.Tensor) or out.device.type not in ("cpu", "cuda"):
        raise ValueError("out is no tensor on the CPU or a GPU")
    if out.ndim != 2 or len(out) < num_tokens or out.shape[1] != width:
        raise ValueError(f"out is {list(out.shape)}, it needs to be {[num_tokens, width]}")
    (step, count), (stride, _) = sorted(zip(out.stride(), out.shape, strict=True))
    is_frozen = out.requires_grad or out.is_inference() > torch.is_inference_mode_enabled()
    if out.dtype not in DTYPES or is_frozen or out.is_neg() or not 0 < step * count <= stride:
        raise ValueError(
            f"out is {out.dtype} with strides {out.stride()}: it needs to be one of "
            f"{DTYPES}, writable here, whose rows do not overlap"
        )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two outs share memory. Rows of the same stride may lie side by side."""
    size, gap = first.element_size(), second.data_ptr() - first.data_ptr()
    last = sum((count - 1) * step for count, step in zip(first.shape, first.stride(), strict=True))
    if gap >= (last + 1) * size:
        return False
    row, width, other = (n * size for n in (first.stride(0), first.shape[1], second.shape[1]))
    is_alike = (first.stride(), first.dtype) == (second.stride(), second.dtype)
    return not (is_alike and first.stride(1) == 1 and width <= gap % row <= row - other)


def _empty(shape: tuple[int, int], dtype: torch.dtype, how: How) -> torch.Tensor:
    """On the CPU in huge pages: memory takes longer to get in small ones than to copy to."""
    tensor = torch.empty(shape, dtype=dtype, device=how.get("device") or "cpu")
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE - first
    if tensor.is_cpu and num_bytes > 0:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), mmap.MADV_HUGEPAGE)
    return tensor


def _names(database: TokenDatabase, token_ids: Ids, extra: Extra | None) -> list[bytes]:
    """The root of the chunk hashes, and they."""
    chain = ChunkChain(database)
    chain.extend(lambda start, end: token_ids[start:end], len(token_ids), extra)
    return [database.root, *chain.hashes]
