"""``RowClient``: rows of tensors in a ``Store``, put and found from any thread."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
import xxhash

from lmcache_connector.errors import ProtocolError
from lmcache_connector.hidden_states.rows import Layer, Piece, Prefix
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server.client import PoolClient
from lmcache_connector.storage.base import Commit, LookupState, NewRow, Row, RowKey, Store

_POLL_SECONDS = 0.001
# torch converts as many elements without its threads: ATen's GRAIN_SIZE.
_ONE_THREAD_ELEMENTS = 32768
_T = TypeVar("_T")
# Memory is copied faster by several threads, which hold no lock of Python's meanwhile.
_COPIES_AT_ONCE = min(4, os.cpu_count() or 1)


class RowClient:
    """The only user of ``store``, whose slots are in ``memory``. ``timeout``: of each wait."""

    def __init__(self, store: Store, memory: PoolClient, chunk_tokens: int, timeout: float) -> None:
        self.store = store
        # Held for a verb at a time, never while rows are copied.
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(("stored", "dropped", "not_finite", "read", "corrupt"), 0)
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._timeout = timeout
        self._ids = itertools.count(1)
        self._copiers = ThreadPoolExecutor(_COPIES_AT_ONCE, "lmcache-rows")
        # The store's groups, in its order.
        self._tags: list[str] = []

    def _know(self, layers: Collection[Layer]) -> None:
        for layer in layers:
            if layer.tag not in self._tags:
                self.store.add_groups([layer.group(self._chunk_tokens)])
                self._tags.append(layer.tag)

    # ---- put ------------------------------------------------------------------------------------

    def put(self, prefixes: Sequence[Prefix]) -> list[Piece]:
        """Store what is not there yet; what is there then. Of a prefix that does not fit, the
        head, and of its last chunk all layers or none."""
        slots: dict[int, tuple[Prefix, list[list[SlotRef]], str]] = {}
        commits: dict[int, list[Commit]] = {}
        there: dict[int, list[Piece]] = {}
        try:
            with self.lock:
                # All before any is published: none makes room for another.
                for names, pieces in prefixes:
                    self._know({piece.layer for piece in pieces})
                    pieces.sort(key=lambda piece: piece[:2])
                    keys = [(names[piece.position], piece.layer.tag) for piece in pieces]
                    sizes = [[piece.layer.row_bytes(self._chunk_tokens)] for piece in pieces]
                    rows = list(map(NewRow, sizes, keys))
                    store_id, prefix = next(self._ids), names[: pieces[-1].position + 1]
                    reserved = self.store.prepare_store(store_id, rows, prefix)
                    incarnation = self.store.pool_ref.incarnation
                    slots[store_id] = (names, pieces), reserved, incarnation
            for store_id, (prefix_rows, reserved, incarnation) in slots.items():
                if self._memory.hold(incarnation):
                    try:
                        there[store_id], commits[store_id] = self._fill(*prefix_rows, reserved)
                    finally:
                        self._memory.drop()
        finally:
            with self.lock:
                for store_id, (_, reserved, _) in slots.items():
                    if any(reserved):
                        self.store.complete_store(store_id, commits.get(store_id, []))
                if any(commits.values()):
                    # An answer: what was told before it is done.
                    self.store.prepare_store(next(self._ids), [], [])
                for store_id, (_, _, incarnation) in slots.items():
                    if self.store.pool_ref.incarnation != incarnation:
                        there.pop(store_id, None)
                stored = [piece for pieces in there.values() for piece in pieces]
                self.counts["stored"] += len(stored)
                self.counts["dropped"] += sum(len(rows) for _, rows in prefixes) - len(stored)
        return stored

    def _fill(
        self, names: list[bytes], pieces: list[Piece], slots: list[list[SlotRef]]
    ) -> tuple[list[Piece], list[Commit]]:
        """Copy to the slots: what is there then, and what of it is new."""
        end = pieces[len(slots)].position if len(slots) < len(pieces) else len(names)
        there, commits = [], []
        for index, (piece, slot) in enumerate(zip(pieces, slots, strict=False)):
            if piece.position >= end:
                break
            if slot:
                try:
                    view = self._memory.view(slot[0])
                except ProtocolError:  # not all of the pool is mapped here
                    continue
                content = _rows(view, piece.layer)
                _copy(content, piece.content)
                low, high = torch.aminmax(content)
                if not (low.isfinite() and high.isfinite()):
                    self.counts["not_finite"] += 1
                    continue
                parent = names[piece.position - 1] if piece.position > 1 else None
                key = names[piece.position], parent, piece.layer.tag
                commits.append(Commit(index, *key, [xxhash.xxh3_64_intdigest(view)]))
            there.append(piece)
        return there, commits

    # ---- find -----------------------------------------------------------------------------------

    def reach(self, hashes: Sequence[bytes], layers: Sequence[Layer]) -> int:
        """How many leading chunks have rows of all layers."""
        lookup_id = next(self._ids)
        count = self._until(lambda: self._reach(lookup_id, hashes, layers))
        with self.lock:
            self.store.release(lookup_id)
        return count or 0

    def _reach(
        self, lookup_id: int, hashes: Sequence[bytes], layers: Sequence[Layer]
    ) -> int | None:
        self._know(layers)
        reply = self.store.lookup(lookup_id, hashes, 0)
        if reply.state is LookupState.PENDING:
            return None
        masks = [reply.present[self._tags.index(layer.tag)][0] for layer in layers]
        return min((~mask & (mask + 1)).bit_length() - 1 for mask in masks)

    def _until(self, ask: Callable[[], _T | None]) -> _T | None:
        """The first answer, or None when there is none in time."""
        deadline = time.monotonic() + self._timeout
        while True:
            with self.lock:
                answer = ask()
            if answer is not None or time.monotonic() > deadline:
                return answer
            time.sleep(_POLL_SECONDS)

    def fetch(
        self,
        hashes: Sequence[bytes],
        layers: Sequence[Layer],
        least: int,
        make: Callable[[int], list[torch.Tensor]],
    ) -> list[torch.Tensor] | None:
        """Rows of as many leading chunks as have those of all layers, at least ``least``, by layer
        in what ``make`` gives for so many tokens. None: not there, or damaged and removed."""
        load_id = next(self._ids)
        keys: list[RowKey] = []

        def pin() -> tuple[list[Row], str] | None:
            if not keys:
                count = self._reach(load_id, hashes, layers)
                if count is None or count < least:
                    return None if count is None else ([], "")
                keys.extend((name, layer.tag) for name in hashes[:count] for layer in layers)
            state = self.store.narrow(load_id, keys)
            if state is LookupState.READY:
                rows = self.store.prepare_load(load_id, load_id, keys)
                if rows is not None:
                    return rows, self.store.pool_ref.incarnation
            if state is not LookupState.PENDING:
                keys.clear()  # one of them is gone by now
            return None

        rows, incarnation = self._until(pin) or ([], "")
        if not rows:
            with self.lock:
                self.store.release(load_id)
            return None
        outs, damaged = None, list[int]()
        try:
            if self._memory.hold(incarnation):
                try:
                    outs = make(len(rows) // len(layers) * self._chunk_tokens)
                    damaged = self._read(rows, layers, outs)
                except ProtocolError:  # not all of the pool is mapped here
                    outs = None
                finally:
                    self._memory.drop()
        finally:
            with self.lock:
                self.store.complete_load(load_id, [keys[index] for index in damaged])
                self.counts["read"] += len(rows)
                self.counts["corrupt"] += len(damaged)
        return None if damaged else outs

    def _read(
        self, rows: Sequence[Row], layers: Sequence[Layer], outs: Sequence[torch.Tensor]
    ) -> list[int]:
        """Copy rows, by chunk and layer, to ``outs``; the indices of those that are damaged."""
        damaged: list[int] = []
        todo = iter(range(len(rows)))

        @torch.inference_mode(torch.is_inference_mode_enabled())  # the caller's
        def copy() -> None:
            for index in todo:
                chunk, turn = divmod(index, len(layers))
                first, view = chunk * self._chunk_tokens, self._memory.view(rows[index].slots[0])
                target = outs[turn][first : first + self._chunk_tokens]
                _copy(target, _rows(view, layers[turn]))
                if xxhash.xxh3_64_intdigest(view) != rows[index].digests[0]:
                    damaged.append(index)

        copies: list[Future[None]] = []
        # To a device all are copied in the order of the caller's stream.
        helpers = min(_COPIES_AT_ONCE, len(rows)) - 1 if all(out.is_cpu for out in outs) else 0
        try:
            for _ in range(helpers):
                copies.append(self._copiers.submit(copy))
        except RuntimeError:  # no more threads, but what was to run may be in the queue
            self._copiers.shutdown()
            self._copiers = ThreadPoolExecutor(_COPIES_AT_ONCE, "lmcache-rows")
        try:
            copy()
            for done in copies:
                done.result()
        finally:
            list(todo)  # nobody begins another
            wait(copies)
        return damaged


def _rows(view: memoryview, layer: Layer) -> torch.Tensor:
    return torch.frombuffer(view, dtype=layer.dtype).view(-1, layer.width)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the CPU without torch's threads: waking them for every chunk takes longer than it."""
    if not (target.is_cpu and source.is_cpu):
        target.copy_(source)
    elif target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        to, what = (tensor.view(torch.uint8).numpy() for tensor in (target, source))
        to[:] = what
    else:
        num_rows = max(1, _ONE_THREAD_ELEMENTS // source.shape[1])
        for to_rows, rows in zip(target.split(num_rows), source.split(num_rows), strict=True):
            to_rows.copy_(rows)
