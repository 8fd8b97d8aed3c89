"""Rows of vLLM's extracted hidden states, from the blocks of finished requests to files or a tier.

vLLM keeps them in the blocks of one more layer, which is cached and restored like KV: a prefix
that was restored has its rows too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence

import torch

from lmcache_connector.groups import LayerSpec
from lmcache_connector.hidden_states import files
from lmcache_connector.hidden_states.settings import URL, ExtractSettings
from lmcache_connector.hidden_states.writer import Export, ExportWriter
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import ExportOp, ExtractStep
from lmcache_connector.triton_kernels import gather_rows

logger = init_logger(__name__)


class Extractor:
    """One rank's rows: the registered cache of ``layer``, [blocks, taps, tokens, hidden].

    All tensor-parallel ranks hold the same rows. One ``writes`` them, the others let go of a
    request's blocks at once.
    """

    def __init__(
        self,
        settings: ExtractSettings,
        taps: Sequence[int],
        layer: LayerSpec,
        rows: torch.Tensor,
        writes: bool,
    ) -> None:
        self._block_tokens = layer.tokens_per_block
        self._taps = taps
        self._rows = rows
        # None: another rank's part.
        self.writer = ExportWriter(settings) if writes else None
        self._uses_locks = settings.use_synchronization_lock
        self._stream = torch.cuda.Stream(rows.device) if rows.is_cuda else None
        # By request: its path and lock, if there is one; its copy, and the slots that it reads.
        self._begun: dict[str, tuple[str, int | None]] = {}
        self._copies: dict[str, tuple[Export, torch.cuda.Event, torch.Tensor]] = {}
        self._sent: set[str] = set()

    def start(self, step: ExtractStep) -> None:
        """Do what the scheduler side says. The blocks named stay as they are until the request
        is among ``take_sent``."""
        if self.writer is None:
            self._sent.update(op.request_id for op in step.finished)
            return
        for request_id in step.dropped:
            self._drop(request_id)
        for op in step.finished:
            self._export(op, self.writer)
        # Last: an id may be used again.
        for request_id, path in step.begun.items():
            self._begun[request_id] = (path, self._hold(path))

    def _hold(self, path: str) -> int | None:
        if self._uses_locks and not URL.fullmatch(path):
            try:
                # What another request left there is not this one's.
                files.remove(path)
                return files.hold_lock(path)
            except (OSError, ValueError) as error:
                warn_every(logger, "lock", 60.0, "readers of %s will not wait: %s", path, error)
        return None

    def _drop(self, request_id: str) -> None:
        path, lock = self._begun.pop(request_id, ("", None))
        if lock is not None:  # without one nobody waits: the place was not told
            with contextlib.suppress(OSError):  # nobody holds it, whether it goes or stays
                files.remove(path, keep_hidden_states=True)
            os.close(lock)

    def _export(self, op: ExportOp, writer: ExportWriter) -> None:
        token_ids = torch.frombuffer(bytearray(op.token_ids), dtype=torch.int64)
        shape = (len(token_ids), len(op.layers), self._rows.shape[-1])
        _, lock = self._begun.pop(op.request_id, (None, None))
        export = Export(op.path, op.layers, lock, token_ids)
        nbytes, pinned = math.prod(shape) * self._rows.element_size(), self._stream is not None
        refusal = "too many rows wait to be written (max_queued_size)"
        if is_admitted := writer.admit(nbytes):
            try:
                export.rows = torch.empty(shape, dtype=self._rows.dtype, pin_memory=pinned)
            except RuntimeError as error:
                is_admitted, refusal = False, f"no memory for its rows: {error}"
                writer.give_back(nbytes)
        if not is_admitted:
            writer.refuse(export, refusal)
            self._sent.add(op.request_id)
            return
        firsts = torch.tensor(op.block_ids, dtype=torch.int64)[:, None] * self._block_tokens
        slots = (firsts + torch.arange(self._block_tokens)).flatten()[: shape[0]]
        if self._stream is None:
            self._gather(slots, export)
            self._sent.add(op.request_id)
            writer.submit(export)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))
        with torch.cuda.stream(self._stream):
            slots = slots.pin_memory().to(self._rows.device, non_blocking=True)
            self._gather(slots, export)
            self._copies[op.request_id] = (export, self._stream.record_event(), slots)

    def _gather(self, slots: torch.Tensor, export: Export) -> None:
        for index, layer in enumerate(export.layers):
            gather_rows(self._rows[:, self._taps.index(layer)], slots, export.rows[:, index])

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not needed any more, since the last call."""
        for request_id, (export, copied, _) in list(self._copies.items()):
            if copied.query():
                del self._copies[request_id]
                self._sent.add(request_id)
                assert self.writer is not None
                self.writer.submit(export)
        sent, self._sent = self._sent, set()
        return sent

    def close(self) -> None:
        """Write what was begun to be copied; nobody waits for anything else any longer."""
        if self._stream is not None:
            self._stream.synchronize()
        self.take_sent()
        if self.writer is not None:
            for request_id in list(self._begun):
                self._drop(request_id)
            self.writer.close()
