"""Loggers whose lines reach vLLM's log without importing vLLM, and a rate limit for warnings."""

from __future__ import annotations

import logging
import threading
import time

_lock = threading.Lock()
# (logger name, key) -> (time of the last line, warnings held back since).
_last: dict[tuple[str, str], tuple[float, int]] = {}


def init_logger(name: str) -> logging.Logger:
    """The logger for a module, called with ``__name__``.

    vLLM gives a handler and its level to the logger "vllm" only, so ours are its children.
    Without vLLM the line goes where the root logger sends it.
    """
    return logging.getLogger(f"vllm.{name}")


def warn_every(
    logger: logging.Logger, key: str, seconds: float, message: str, *args: object
) -> None:
    """Warn at most once in ``seconds`` for ``key``; the next line tells how many were held back.

    ``key`` comes from a small fixed set (never a request id): what is remembered is not trimmed.
    """
    now = time.monotonic()
    with _lock:
        last, held_back = _last.get((logger.name, key), (-float("inf"), 0))
        if now - last < seconds:
            _last[logger.name, key] = (last, held_back + 1)
            return
        _last[logger.name, key] = (now, 0)
    text = message % args if args else message
    if held_back:
        text += f" ({held_back} more like this since the last line)"
    logger.warning("%s", text, stacklevel=2)
