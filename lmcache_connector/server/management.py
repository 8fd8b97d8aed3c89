"""Asks a cache server, or an engine's embedded cache, for what it has and to change it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmcache_connector.server.messages import Message
from lmcache_connector.server.session import Session

Ask = Callable[[Message], Any]
TIMEOUT_SECONDS = 2.0
_REASONS = {
    FileNotFoundError: "nobody listens there: start the server, or an engine",
    ConnectionRefusedError: "whoever listened there has died",
    PermissionError: "this user may not connect: be its user, or start it with --allow-uid",
    TimeoutError: f"no answer within {TIMEOUT_SECONDS:g} s: it is stopped, or overloaded",
}


@contextlib.contextmanager
def managing(endpoint: str) -> Iterator[Ask]:
    """Gives a function that sends a message to ``ipc:///path`` and returns its answer.

    Raises:
        ConnectionError: it is not there, or gives no answer in time.
        ConnectorError: it refuses, or speaks another version.
    """
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        with contextlib.closing(Session(path, TIMEOUT_SECONDS)) as session:
            yield lambda message: session.call(message, TIMEOUT_SECONDS)
    except OSError as error:
        raise ConnectionError(f"{endpoint}: {_REASONS.get(type(error), error)}") from None
