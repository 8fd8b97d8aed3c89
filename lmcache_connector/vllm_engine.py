"""Calls of vLLM's engine core after which the same tokens have other KV: new weights, adapters."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Watcher(Protocol):
    """Lives in the process of the engine core."""

    def on_weights(self, *, local_hits_are_new: bool) -> None:
        """Weights may be others now. ``local_hits_are_new``: vLLM's own prefix cache has nothing
        of before."""

    def on_adapter(self, lora: Any) -> None:
        """A LoRARequest is about to be loaded."""


# Calls on workers that change weights; not those that look at them or make ready for it.
_CHANGES_WEIGHTS = re.compile(
    r"(?!_?(compute|get|check|supports|init|shutdown)_).*weight|load_model"
)


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """Tell ``watcher`` for as long as it lives; vLLM's own prefix cache is reset too.

    Weights that code in a worker changes without a call of a name such as ``reload_weights`` or
    ``update_weights`` are not noticed.
    """
    from vllm.v1.engine.core import EngineCore

    _watchers.add(watcher)
    if not hasattr(EngineCore, "_lmcache_watched"):
        EngineCore._lmcache_watched = True
        EngineCore.collective_rpc = _tells_of_weights(EngineCore.collective_rpc)
        EngineCore.add_lora = _tells_of_adapters(EngineCore.add_lora)


def _tells_of_weights(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        try:
            return call(core, method, *args, **kwargs)
        finally:
            if _CHANGES_WEIGHTS.match(name):
                # It does nothing and says so while requests run. Of several engines in a process
                # nobody can tell here whose it was.
                is_clean = bool(core.reset_prefix_cache()) and len(_watchers) == 1
                for watcher in list(_watchers):
                    watcher.on_weights(local_hits_are_new=is_clean)

    return collective_rpc


def _tells_of_adapters(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def add_lora(core: Any, lora_request: Any) -> Any:
        for watcher in list(_watchers):
            watcher.on_adapter(lora_request)
        return call(core, lora_request)

    return add_lora
