"""What ``lmcache-connector doctor`` looks at, and what it says to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_MEMLOCK, RLIMIT_NOFILE, getrlimit
from typing import NamedTuple

from packaging.requirements import Requirement

from lmcache_connector import __version__
from lmcache_connector.config import describe, load_config
from lmcache_connector.errors import ConfigError, ConnectorError, StartupError
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.management import managing
from lmcache_connector.storage.pool import MAX_EXTENTS, check_memory_budget
from lmcache_connector.storage.tiers.base import open_tier, parse_tier_url, value_name

_PACKAGE = "lmcache-connector"
_TIER_SECONDS = 10.0


class Check(NamedTuple):
    """``state``: "ok", "note" (may be meant so) or "FAIL"."""

    state: str
    what: str
    fix: str = ""


def _check(what: str, problem: str | None, state: str = "FAIL") -> Check:
    return Check(state if problem else "ok", what, problem or "")


def run_checks(socket: str | None) -> Iterator[Check]:
    """All checks. ``socket``: an endpoint to look at, beside the configured one and all of this
    user."""
    config = load_config({}, {}).config
    try:
        loaded = load_config({}, os.environ)
    except ConfigError as error:
        yield from (Check("FAIL", "configuration", problem) for problem in error.problems)
    else:
        config = loaded.config
        yield Check("ok", f"configuration: {describe(config, loaded.origins)}")
        yield from (Check("note", "configuration", warning) for warning in loaded.warnings)
    yield from _check_packages()
    live: list[str] = []
    try:
        live, dead = sockets.our_endpoints()
        for path in dead:
            yield Check("note", f"{path} is left of a dead process", "the next start removes it")
    except StartupError as error:
        yield Check("FAIL", "directory of sockets", error.problems[0])
    endpoints = list(dict.fromkeys(filter(None, [socket, config.server, *live])))
    urls = dict.fromkeys(config.tier_urls)
    for endpoint in endpoints:
        yield _check(f"socket {endpoint}", _socket_problem(endpoint, urls))
    yield from _check_limits(config.max_local_cpu_bytes, "note" if endpoints else "FAIL")
    for url in urls:
        problem = [f"no answer within {_TIER_SECONDS:g} s: is it up, and reachable from here?"]
        thread = threading.Thread(target=_try_tier, args=(url, problem), daemon=True)
        thread.start()
        thread.join(_TIER_SECONDS)
        yield _check(f"tier {url}: put, get, remove", problem[-1])


def _check_packages() -> Iterator[Check]:
    found = metadata.entry_points(group="vllm.general_plugins", name="lmcache_connector")
    fix = f"pip install {_PACKAGE}: vLLM cannot see it"
    yield _check("plugin for vLLM", None if found else fix)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "lmcache_connector" not in plugins.split(","):
        yield Check("FAIL", f"VLLM_PLUGINS={plugins}", "add lmcache_connector, or unset it")
    for text in (metadata.requires(_PACKAGE) or ()) if found else ():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": "vllm"}):
            version = _version(wanted.name) or _version(f"{wanted.name}-cpu")
            fits = version and wanted.specifier.contains(version, prereleases=True)
            fix = f"pip install '{wanted.name}{wanted.specifier}'"
            # A server needs no vLLM.
            state = "FAIL" if version or wanted.name != "vllm" else "note"
            yield _check(f"{wanted.name} {version or 'is missing'}", None if fits else fix, state)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_limits(pool_bytes: int, state: str) -> Iterator[Check]:
    what = f"memory for one more pool of {pool_bytes >> 20} MiB"
    yield _check(what, check_memory_budget(pool_bytes), state)
    files, locked = getrlimit(RLIMIT_NOFILE)[0], getrlimit(RLIMIT_MEMLOCK)[0]
    few = files != RLIM_INFINITY and files < MAX_EXTENTS + 768
    fix = "ulimit -n 4096: each extent (256 MiB) of a pool is an open file, each connection too"
    yield _check(f"ulimit -n (open files) {files}", fix if few else None)
    few = locked != RLIM_INFINITY and locked < pool_bytes
    fix = "ulimit -l unlimited, if a GPU cannot pin the pool"
    yield _check(f"ulimit -l (locked memory) {locked}", fix if few else None, "note")
    yield Check("ok", "/dev/shm: not needed, a pool is anonymous memory (memfd)")


def _socket_problem(endpoint: str, urls: dict[str, None]) -> str | None:
    """Adds the tiers in use there."""
    directory = Path(endpoint.removeprefix("ipc://")).parent
    try:
        if directory.stat().st_mode & 0o022:
            return f"others can write to {directory}: choose a directory of your own"
        with managing(endpoint) as ask:
            status: messages.StatusReply = ask(messages.Status())
    except FileNotFoundError:
        return f"there is no {directory}: start the server, or an engine"
    except (ConnectorError, OSError) as error:
        return str(error)
    urls.update(dict.fromkeys(tier.url for tier in status.tiers))
    if status.version != __version__:
        return f"it is version {status.version}, this is {__version__}: install the same in both"
    return None


def _try_tier(url: str, problem: list[str]) -> None:
    value, buffer = os.urandom(64), bytearray(64)
    name = value_name("0" * 16, os.urandom(32), "doctor")
    try:
        tier = open_tier(parse_tier_url(url))
        try:
            tier.put(name, [memoryview(value)])
            found = tier.get(name, [memoryview(buffer)]) and buffer == value
            tier.remove(name)
        finally:
            tier.close()
        problem.append("" if found else "it does not give back what was put: is it full?")
    except Exception as error:
        # The thread's outermost frame: it answers.
        problem.append(str(error) or repr(error))
