"""Copies between the engine's pages and the pool's slots, with a check of every object.

A copier takes jobs (pages and the slot addresses they belong to) and checks (the slots' bytes),
and answers later with one xxh3_64 per check: of the bytes written for a store, of the bytes read
for a load. Two devices differ here and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash

from lmcache_connector.triton_kernels import reference
from lmcache_connector.worker.device_copier import DeviceCopier
from lmcache_connector.worker.staging import PageJob

# Hashing one slot runs at memory speed and releases the interpreter lock; a few threads keep up
# with a PCIe link.
_HASH_THREADS = 4


@dataclass(slots=True)
class SlotCheck:
    """The bytes of one object in the pool, and what they must hash to (None for a store)."""

    view: memoryview
    nbytes: int
    expected: int | None

    def digest(self) -> int:
        """xxh3_64 of the bytes as they are now."""
        return xxhash.xxh3_64_intdigest(self.view)


class Copier(Protocol):
    """Called by one thread. A ticket's pages and slots are in use until it has a result."""

    # Whether pool memory is to be touched before it is used (pinning does that already).
    touch_ahead: bool

    def register_extent(self, address: int, nbytes: int) -> None:
        """Make pool memory reachable for copies; may be called from a helper thread."""

    def unregister_extent(self, address: int) -> None:
        """Undo it, if that was not done yet; no copy uses the memory."""

    def store(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        """Pages -> slots. When it returns, later forwards cannot change what is stored. None:
        no room to do it now, and nothing was started."""

    def load(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        """Slots -> pages."""

    def result(self, ticket: int) -> list[int] | None:
        """Digests by check once the copy has ended (asked once), None while it runs."""

    def close(self) -> None:
        """Wait for what runs."""


class CpuCopier:
    """Copies inside the call: on CPUs the forward and the copy share the same cores anyway."""

    touch_ahead = True

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._results: dict[int, list[int]] = {}

    def register_extent(self, address: int, nbytes: int) -> None:
        """Nothing to pin."""

    def unregister_extent(self, address: int) -> None:
        """Nothing was pinned."""

    def store(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        for job in jobs:
            reference.gather_pages(*job)
        return self._keep([check.digest() for check in checks])

    def load(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        digests = [check.digest() for check in checks]
        # Bytes that fail their check do not reach the engine's blocks at all.
        if all(d == check.expected for d, check in zip(digests, checks, strict=True)):
            for job in jobs:
                reference.scatter_pages(*job)
        return self._keep(digests)

    def _keep(self, digests: list[int]) -> int:
        ticket = next(self._tickets)
        self._results[ticket] = digests
        return ticket

    def result(self, ticket: int) -> list[int] | None:
        return self._results.pop(ticket)

    def close(self) -> None:
        self._results.clear()


class GpuCopier:
    """Copies on a stream of its own; slots are hashed on host threads beside it."""

    touch_ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = DeviceCopier(device)
        self.register_extent = self._device.register_extent
        self.unregister_extent = self._device.unregister_extent
        self._threads = ThreadPoolExecutor(_HASH_THREADS, "lmcache-hash")
        # Begins to hash a copy's slots when it is first called.
        self._copies: dict[int, Callable[[], list[Future[int]]]] = {}

    def store(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        ticket = self._device.store(jobs)
        if ticket is not None:
            self._copies[ticket] = self._hashing(checks)  # after the copy
        return ticket

    def load(self, jobs: Sequence[PageJob], checks: Sequence[SlotCheck]) -> int | None:
        ticket = self._device.load(jobs)
        self._copies[ticket] = self._hashing(checks)
        self._copies[ticket]()  # at once
        return ticket

    def _hashing(self, checks: Sequence[SlotCheck]) -> Callable[[], list[Future[int]]]:
        return functools.cache(lambda: [self._threads.submit(check.digest) for check in checks])

    def result(self, ticket: int) -> list[int] | None:
        if not self._device.done(ticket):
            return None
        digests = self._copies[ticket]()
        if not all(future.done() for future in digests):
            return None
        del self._copies[ticket]
        return [future.result() for future in digests]

    def close(self) -> None:
        for ticket in self._copies:
            self._device.wait(ticket)
        self._threads.shutdown()
        self._device.close()


def make_copier(device: torch.device) -> Copier:
    """The copier for the device that holds the KV cache."""
    return CpuCopier() if device.type == "cpu" else GpuCopier(device)
