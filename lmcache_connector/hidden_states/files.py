"""Files of hidden states, and how a reader on the same file system gets them.

A file holds ``hidden_states`` [tokens, layers, hidden] in the model's dtype and ``token_ids``
[tokens], int64. Until it is there its writer holds an exclusive flock on ``<path>.lock``;
``<path>.error`` says why it never will be. The lock file stays until ``remove``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states.settings import SUFFIX

LOCK, ERROR = ".lock", ".error"
_WRITER = {"format": "pt", "writer": "lmcache_connector"}
_POLL_SECONDS = 0.01


def load(path: str, timeout: float = 60.0) -> dict[str, torch.Tensor]:
    """Read the file at ``path``; waits up to ``timeout`` seconds while it is being written.

    Raises:
        ExtractionError: the engine gave it up; says why.
        FileNotFoundError: there is no such file, and nobody is writing it.
        TimeoutError: it is still being written.
    """
    with contextlib.suppress(FileNotFoundError), open(path + LOCK) as lock:
        deadline = time.monotonic() + timeout
        while not _try_lock(lock.fileno(), fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not written after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
    if os.path.exists(path + ERROR):
        raise ExtractionError(f"{path}: {Path(path + ERROR).read_text()}")
    return load_file(path)


def remove(path: str, *, keep_hidden_states: bool = False) -> None:
    """Remove the file with its lock and error marker, or the latter two only."""
    for suffix in (LOCK, ERROR) if keep_hidden_states else (LOCK, ERROR, ""):
        Path(path + suffix).unlink(missing_ok=True)


def hold_lock(path: str) -> int:
    """Let readers of ``path`` wait until the descriptor returned is closed.

    Raises:
        OSError: the lock cannot be written, or another writer or a reader holds it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path + LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    if _try_lock(descriptor, fcntl.LOCK_EX):
        return descriptor
    os.close(descriptor)
    raise BlockingIOError(f"{path}{LOCK} is held by another export or a reader")


def _try_lock(descriptor: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False


def write(path: str, rows: torch.Tensor, token_ids: torch.Tensor, layers: str) -> None:
    """The whole file or nothing of it; ``layers`` is kept in its metadata."""
    tensors = {"hidden_states": rows, "token_ids": token_ids}
    with _aside(path) as name:
        save_file(tensors, name, metadata={**_WRITER, "layers": layers})
    Path(path + ERROR).unlink(missing_ok=True)


def write_error(path: str, reason: str) -> None:
    """Say that the file never comes."""
    with _aside(path + ERROR) as name:
        Path(name).write_text(reason)


@contextlib.contextmanager
def _aside(path: str) -> Iterator[str]:
    """A temporary name that takes the place of ``path`` at the end."""
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f".{name}.", directory)
    os.fchmod(descriptor, 0o644)
    os.close(descriptor)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def tidy(directory: str, ttl: float | None) -> int:
    """Bytes of the files in a directory, whoever wrote them, after what this package left there
    more than ``ttl`` seconds ago is removed."""
    oldest = time.time() - ttl if ttl is not None else 0.0
    used_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError, SafetensorError):
                facts = entry.stat()
                if SUFFIX in entry.name and facts.st_mtime < oldest and _is_ours(entry.path):
                    os.unlink(entry.path)
                elif entry.name.endswith(SUFFIX):
                    used_bytes += facts.st_size
    return used_bytes


def _is_ours(path: str) -> bool:
    if path.endswith(SUFFIX):
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("writer") == _WRITER["writer"]
    return path.endswith((LOCK, ERROR, ".tmp"))
