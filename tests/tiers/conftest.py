"""``tier``: one of each kind, on a real server where it needs one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

from lmcache_connector.storage.tiers.base import Tier, open_tier, parse_tier_url

KINDS = ("memory", "file", "file-capped", "redis", "redis_cluster", "s3", "mooncake")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_servers = _load("servers")
_values = _load("values")


@pytest.fixture(scope="session")
def servers() -> ModuleType:
    """The module ``servers.py``."""
    return _servers


@pytest.fixture(scope="session")
def values() -> ModuleType:
    """The module ``values.py``."""
    return _values


@pytest.fixture(scope="session")
def server_url() -> Iterator[Callable[[str], str]]:
    """Kind -> URL of a server that all tests share; started when first asked for, or skips."""
    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def start(kind: str) -> str:
            if kind not in urls:
                urls[kind] = stack.enter_context(getattr(_servers, f"{kind}_url")())
            return urls[kind]

        yield start


@pytest.fixture(scope="module", params=KINDS)
def tier(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    server_url: Callable[[str], str],
) -> Iterator[Tier]:
    """What tests put stays: they take names of their own."""
    folder = tmp_path_factory.mktemp("tier")
    local = {
        "memory": "memory://",
        "file": f"file://{folder}/values",
        "file-capped": f"file://{folder}/values?max_size=1GB",
    }
    url = local.get(request.param) or server_url(request.param)
    tier = open_tier(parse_tier_url(url))
    yield tier
    tier.close()
