"""Checks in a forked child."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable


def holds_in_a_child(check: Callable[[], bool]) -> bool:
    """Whether ``check`` is true there, within 20 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, from 3.12 on
        child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)
            code = not check()
        finally:
            os._exit(code)  # Whatever was raised: the tests are the parent's.
    return os.waitpid(child, 0)[1] == 0
