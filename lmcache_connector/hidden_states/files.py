"""Hidden states that were exported, and how a reader gets them.

A file holds ``hidden_states`` [tokens, layers, hidden] in the model's dtype and ``token_ids``
[tokens], int64. Until it is there its writer holds an exclusive flock on ``<path>.lock``;
``<path>.error`` says why it never will be. The lock file stays until ``remove``. Instead of a path
there may be the URL of rows in a tier.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lmcache_connector.errors import ExtractionError
from lmcache_connector.hidden_states import values
from lmcache_connector.hidden_states.settings import ERROR, LOCK, SUFFIX, URL

_WRITER = {"format": "pt", "writer": "lmcache_connector"}
# Rows [tokens, layers, hidden] and as many token ids.
_FORM = re.compile(r"(BF16|F16|F32|F64) \[([1-9]\d*), [1-9]\d*, [1-9]\d*\] I64 \[\2\]")
_POLL_SECONDS = 0.01
_MAX_REASON = 500


def load(path: str, timeout: float = 60.0) -> dict[str, torch.Tensor]:
    """Read the rows at a path or URL; waits up to ``timeout`` seconds while they are written.

    Raises:
        ExtractionError: the engine gave them up, or what is there is damaged; says why.
        FileNotFoundError: there is no such file, and nobody is writing it.
        TierError: the tier does not answer.
        TimeoutError: they are still being written.
    """
    return load_with_layers(path, timeout)[0]


def load_with_layers(path: str, timeout: float = 60.0) -> tuple[dict[str, torch.Tensor], str]:
    """As ``load``; and their layers with commas between, "" where the writer did not say."""
    if URL.fullmatch(path):
        return values.load(path, timeout)
    with contextlib.suppress(FileNotFoundError), _open(path + LOCK) as lock:
        deadline = time.monotonic() + timeout
        while not _try_lock(lock.fileno(), fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not written after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
    with open_rows(path) as file:
        # Copies: those of the file would change with it.
        tensors = {name: file.get_tensor(name).clone() for name in ("hidden_states", "token_ids")}
        return tensors, (file.metadata() or {}).get("layers", "")


@contextlib.contextmanager
def open_rows(path: str) -> Iterator[Any]:
    """A file that nobody is writing; raises as ``load`` does, in the block too."""
    with contextlib.suppress(FileNotFoundError), _open(path + ERROR) as marker:
        raise ExtractionError(f"{path}: {marker.read(_MAX_REASON)}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ExtractionError(f"{path} is no file")
    try:
        with safe_open(path, "pt") as file:
            parts = file.get_slice("hidden_states"), file.get_slice("token_ids")
            form = " ".join(f"{part.get_dtype()} {part.get_shape()}" for part in parts)
            if not _FORM.fullmatch(form):
                raise RuntimeError(f"rows and ids are {form}")
            yield file
    except FileNotFoundError:
        what = f"there is no {os.path.abspath(path)}, and nobody is writing it"
        raise FileNotFoundError(f"{what}: it was removed, or is elsewhere") from None
    except (SafetensorError, RuntimeError) as error:
        raise ExtractionError(f"{path} holds no hidden states: {error}") from None


def is_being_written(path: str) -> bool:
    """Whether readers of the file wait now."""
    with contextlib.suppress(FileNotFoundError), _open(path + LOCK) as lock:
        return not _try_lock(lock.fileno(), fcntl.LOCK_SH)
    return False


def _open(path: str) -> TextIO:
    """Anybody may write here: a fifo does not block."""
    return open(path, errors="replace", opener=lambda _, how: os.open(path, how | os.O_NONBLOCK))


def remove(path: str, *, keep_hidden_states: bool = False) -> None:
    """Remove the rows at a path or URL, with lock and error marker, or the latter two only."""
    if URL.fullmatch(path):
        return None if keep_hidden_states else values.remove(path)
    for suffix in (LOCK, ERROR) if keep_hidden_states else (LOCK, ERROR, ""):
        Path(path + suffix).unlink(missing_ok=True)


def hold_lock(path: str) -> int:
    """Let readers of ``path`` wait until the descriptor returned is closed.

    Raises:
        OSError: the lock cannot be written, or another writer or a reader holds it.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Whatever is there by that name neither blocks nor leads elsewhere.
    flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # Who looks whether it is held holds it for a moment, and may remove one that is not.
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path + LOCK, flags, 0o644)
            stack.callback(os.close, descriptor)
            if _try_lock(descriptor, fcntl.LOCK_EX) and os.fstat(descriptor).st_nlink:
                stack.pop_all()
                return descriptor
        time.sleep(0.001)
    raise BlockingIOError(f"{path}{LOCK} is held by another export or a reader")


def _try_lock(descriptor: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False


def write(path: str, rows: torch.Tensor, token_ids: torch.Tensor, layers: str) -> None:
    """The whole file, or value, or nothing of it; ``layers`` is kept with it."""
    if URL.fullmatch(path):
        return values.write(path, rows, token_ids, layers)
    tensors = {"hidden_states": rows, "token_ids": token_ids}
    with _aside(path) as name:
        save_file(tensors, name, metadata={**_WRITER, "layers": layers})
    Path(path + ERROR).unlink(missing_ok=True)


def write_error(path: str, reason: str) -> None:
    """Say that the rows never come."""
    if URL.fullmatch(path):
        return values.write_error(path, reason)
    with _aside(path + ERROR) as name:
        Path(name).write_text(reason)


@contextlib.contextmanager
def _aside(path: str) -> Iterator[str]:
    """A temporary name that takes the place of ``path`` at the end."""
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(".tmp", f".{name}.", directory)
    os.close(descriptor)
    try:
        yield temporary
        os.chmod(temporary, 0o644)  # for other users' readers
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def tidy(directory: str, ttl: float | None, told: Callable[..., object] = lambda *_: None) -> int:
    """Bytes of the files in a directory, whoever wrote them, after what this package left there
    more than ``ttl`` seconds ago is removed, unless readers wait for it. ``told`` is called with
    each path that could not be removed, and its OSError."""
    oldest = time.time() - ttl if ttl is not None else 0.0
    used_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                facts = entry.stat(follow_symlinks=False)
                size = facts.st_size if entry.name.endswith(SUFFIX) else 0
                used_bytes += size
                # What is being written is younger than an hour.
                limit = min(oldest, time.time() - 3600) if entry.name.endswith(".tmp") else oldest
                if SUFFIX in entry.name and facts.st_mtime < limit and may_go(entry.path):
                    os.unlink(entry.path)
                    used_bytes -= size
            except OSError as error:
                # Anybody may write here: what is odd stays, and the others go.
                if not isinstance(error, FileNotFoundError):
                    told(entry.path, error)
    return used_bytes


def may_go(path: str) -> bool:
    """Whether this package wrote what is there; of a lock, that no reader waits by it."""
    if path.endswith(SUFFIX) and os.path.isfile(path):
        # The header begins with the metadata; mapping the file could kill this process.
        with _open(path) as file:
            return f'"writer":"{_WRITER["writer"]}"' in file.read(4096)
    if path.endswith(LOCK):
        return not is_being_written(path.removesuffix(LOCK))
    if path.endswith(ERROR):
        return not os.path.lexists(path.removesuffix(ERROR)) or may_go(path.removesuffix(ERROR))
    return path.endswith(".tmp") and os.path.basename(path).startswith(".")
