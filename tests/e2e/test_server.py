"""Several real engines on one cache server, and what a restart of either leaves to find.

In the order of the file, on one server with a ``file://`` tier: an engine that was there first, a
second one, one of another model beside them, a third after both, a new server for that one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

TOKENS = 32
CHUNK = 256


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    """Not started yet."""
    server = start_server()
    server.terminate()
    yield server
    server.kill()
