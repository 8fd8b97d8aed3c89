"""Writes hidden states to files or a tier on threads of its own, within bounds of memory and disk.

Whatever becomes of an export, its reader hears of it: there are rows or an error marker, and then
the lock is released.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lmcache_connector.counters import count_group
from lmcache_connector.errors import ConnectorError
from lmcache_connector.hidden_states import files, values
from lmcache_connector.hidden_states.settings import ExtractSettings
from lmcache_connector.log import init_logger, warn_every

logger = init_logger(__name__)

# Rows are screened in pieces of about this many elements.
_PIECE_ELEMENTS = 1 << 22


@dataclass(slots=True)
class Export:
    """Rows on their way."""

    # Or URL.
    path: str
    layers: tuple[int, ...]
    # Held until it ends; None: no lock is used.
    lock: int | None
    # [tokens], int64.
    token_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    # [tokens, layers, hidden] on the CPU.
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def end(self, refusal: str | None) -> None:
        """Release the reader, to what was written or to why there is nothing."""
        try:
            if refusal is not None:
                warn_every(logger, "refused", 60.0, "no export %s: %s", self.path, refusal)
                # It may quote what no file can hold.
                files.write_error(self.path, refusal.encode(errors="backslashreplace").decode())
        except (OSError, ValueError, ConnectorError) as error:
            warn_every(logger, "marker", 60.0, "no error marker for %s: %s", self.path, error)
        finally:
            if self.lock is not None:
                os.close(self.lock)


class ExportWriter:
    """``admit``, ``submit`` and ``refuse`` are called by one thread and do not wait."""

    def __init__(self, settings: ExtractSettings) -> None:
        self._settings = settings
        if settings.shared_storage_path.startswith("/"):
            os.makedirs(settings.shared_storage_path, exist_ok=True)
        else:
            values.open_outlet(settings.shared_storage_path)
        self._threads = ThreadPoolExecutor(settings.num_writer_threads, "lmcache-export")
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._counts: dict[str, int] = {}
        self._written_bytes = 0
        # Held while the directory is counted.
        self._disk_lock = threading.Lock()
        self._writing_bytes = 0

    def admit(self, nbytes: int) -> bool:
        """Whether memory may be taken for so many bytes of rows, which are submitted then."""
        with self._lock:
            queued = self._queued_bytes + nbytes
            if self._queued_bytes and queued > self._settings.max_queued_size:
                return False
            self._queued_bytes = queued
        return True

    def give_back(self, nbytes: int) -> None:
        """What was admitted is not in memory any more."""
        with self._lock:
            self._queued_bytes -= nbytes

    def submit(self, export: Export) -> None:
        """Write rows that were admitted."""
        self._threads.submit(self._run, export)

    def refuse(self, export: Export, reason: str) -> None:
        """Tell its reader that it never comes."""
        self._threads.submit(self._end, export, reason)

    def close(self) -> None:
        """Write what was submitted."""
        self._threads.shutdown()

    def _run(self, export: Export) -> None:
        try:
            refusal = self._write(export)
        except Exception as error:  # a thread's outermost frame: the reader must hear of it
            refusal = f"not written: {error}"
        self.give_back(export.rows.nbytes)
        self._end(export, refusal)

    def _end(self, export: Export, refusal: str | None) -> None:
        with self._lock:
            count_group(self._counts, "refused" if refusal else "written")
            self._written_bytes += 0 if refusal else export.rows.nbytes
        export.end(refusal)

    def take_counts(self) -> tuple[dict[str, int], int]:
        """Exports by outcome and bytes written, since the last call."""
        with self._lock:
            taken = self._counts, self._written_bytes
            self._counts, self._written_bytes = {}, 0
        return taken

    def _write(self, export: Export) -> str | None:
        # Embeddings alone may be zero.
        refusal = screen(export.rows, may_be_zero=export.layers == (0,))
        nbytes = export.rows.nbytes + export.token_ids.nbytes + 1024  # its header
        refusal = refusal or self._reserve(nbytes)
        if refusal is not None:
            return refusal
        try:
            layers = ",".join(map(str, export.layers))
            files.write(export.path, export.rows, export.token_ids, layers)
        finally:
            with self._disk_lock:
                self._writing_bytes -= nbytes
        return None

    def _reserve(self, nbytes: int) -> str | None:
        """Account for a file to be written; or why it may not be."""
        ttl, max_size = self._settings.ttl, self._settings.max_size
        with self._disk_lock:
            if ttl is not None or max_size is not None:
                used_bytes = files.tidy(self._settings.shared_storage_path, ttl)
                if max_size is not None and used_bytes + self._writing_bytes + nbytes > max_size:
                    return f"max_size {max_size} is reached: remove files that were read"
            self._writing_bytes += nbytes
        return None


def screen(rows: torch.Tensor, *, may_be_zero: bool) -> str | None:
    """Why [tokens, layers, hidden] cannot be what a model computed, or None.

    Rows that were never written are zero, or NaN where the worker knew about it.
    """
    step = _PIECE_ELEMENTS // rows[0].numel() + 1
    for first in range(0, len(rows), step):
        peaks = rows[first : first + step].abs().amax(dim=(1, 2))
        bad = ~peaks.isfinite() if may_be_zero else ~(peaks.isfinite() & (peaks > 0))
        if bad.any():
            return f"the row of token {first + int(bad.int().argmax())} is zero or not finite"
    return None
