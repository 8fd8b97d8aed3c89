"""``Tiering``: the threads that ask, read and write the tiers, and what they think of each.

A tier that fails or hangs is left alone for a while: requests must not wait for it again and
again. Nothing here is called with the engine's lock held for longer than it takes to queue a job.
"""

from __future__ import annotations

import contextlib
import copy
import math
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal

import msgspec
import xxhash

from lmcache_connector.errors import StartupError
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import SlotRef
from lmcache_connector.storage.base import Row, RowKey, TierCounters
from lmcache_connector.storage.pool import MemoryPool
from lmcache_connector.storage.tiers import base

logger = init_logger(__name__)

Work = Literal["ask", "read", "write"]
# More readers hide the latency of remote tiers; values are large enough that a few suffice. A
# question must not wait behind the reads of other requests.
_THREADS: dict[Work, int] = {"ask": 2, "read": 4, "write": 2}
# Reads are as many as lookups ask for, each soon given up by its deadline.
_MAX_WRITES = 4096
# How long a tier that failed is left alone; a call that takes longer than _STALL counts as hung.
_SUSPEND_SECONDS = 5.0
_STALL_SECONDS = 5.0
_FLUSH_SECONDS = 5.0

# Run with the tier, or with None when the job was given up before its turn.
Job = Callable[[base.Tier | None], None]


class Question:
    """Which of many rows the tiers have. ``found`` is complete once ``done``."""

    def __init__(self) -> None:
        # Key -> index of the nearest tier that has it.
        self.found: dict[RowKey, int] = {}
        self.done = False

    def add_to(
        self,
        masks: dict[str, int],
        chunk_hashes: Sequence[bytes],
        tags: Iterable[str],
        without: Container[RowKey] = (),
    ) -> None:
        """Set the bits of the rows found."""
        for bit, chunk_hash in enumerate(chunk_hashes if self.found else ()):
            for tag in tags:
                if (key := (chunk_hash, tag)) in self.found and key not in without:
                    masks[tag] = masks.get(tag, 0) | 1 << bit


class Channel:
    """One tier with its threads, counters and health."""

    def __init__(self, url: str, tier: base.Tier) -> None:
        self.url = url
        self.tier = tier
        self.counters = TierCounters()
        self._lock = threading.Lock()
        # Namespaces to delete that are not dealt with yet, and how many could not be.
        self.clears = [0, 0]
        # A tier that is full can be read; one that cannot be read is not written to either.
        self._suspended_until = dict.fromkeys(_THREADS, 0.0)
        # Thread -> when its call began.
        self._calls: dict[int, float] = {}
        self._jobs: dict[Work, queue.Queue[Job | None]] = {
            work: queue.Queue(_MAX_WRITES if work == "write" else 0) for work in _THREADS
        }
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="lmcache-tier", daemon=True)
            for work, count in _THREADS.items()
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def count(self, **increments: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, increment in increments.items():
                setattr(self.counters, name, getattr(self.counters, name) + increment)

    def snapshot(self) -> TierCounters:
        """The counters as they are now."""
        with self._lock:
            return msgspec.structs.replace(self.counters)

    def is_usable(self, work: Work = "write") -> bool:
        """Whether it is worth trying now. What can be written to can be read, too."""
        now = time.monotonic()
        with self._lock:
            hung = any(now - began > _STALL_SECONDS for began in self._calls.values())
        return not hung and now >= self._suspended_until[work]

    def submit(self, job: Job, work: Work) -> bool:
        """Queue a job; False when there are too many or the tier is left alone."""
        if not self.is_usable(work):
            return False
        try:
            self._jobs[work].put_nowait(job)
        except queue.Full:
            return False
        return True

    def clear(self, namespace: str) -> None:
        """Delete a namespace's values, in the background."""

        def job(tier: base.Tier | None) -> None:
            is_done = False
            try:
                if tier is not None:
                    tier.clear(namespace)
                    is_done = True
            finally:
                with self._lock:
                    self.clears = [self.clears[0] - 1, self.clears[1] + (not is_done)]

        with self._lock:
            self.clears = [self.clears[0] + 1, self.clears[1]]
        if not self.submit(job, "write"):
            logger.warning("tier %s is left alone now: %s stays there", self.url, namespace)
            job(None)

    def _run(self, work: Work) -> None:
        ident, jobs = threading.get_ident(), self._jobs[work]
        while (job := jobs.get()) is not None:
            usable = self.is_usable(work)
            with self._lock:
                self._calls[ident] = time.monotonic()
            try:
                job(self.tier if usable else None)
            except base.DroppedError:
                pass  # counted by the job, and offered again when it is used
            except base.TierError as error:
                self.count(errors=1)
                self._suspend(time.monotonic() + _SUSPEND_SECONDS, work)
                what = "not written to" if work == "write" else "left alone"
                text = f"tier {self.url}: {error}; it is {what} for {_SUSPEND_SECONDS:.0f} s"
                warn_every(logger, f"{what} {self.url}", 60.0, text)
            except Exception:
                # Whoever waits for the job does so with a deadline.
                logger.exception("tier %s: a job has failed", self.url)
            finally:
                with self._lock:
                    del self._calls[ident]
                jobs.task_done()

    def _suspend(self, until: float, failed: Work) -> None:
        for work, before in self._suspended_until.items():
            if failed in (work, "ask", "read"):
                self._suspended_until[work] = max(until, before)

    def close(self, deadline: float) -> None:
        """Write what is queued until ``deadline``, then end the threads that are not hung."""
        writes = self._jobs["write"]
        while writes.unfinished_tasks and time.monotonic() < deadline and self.is_usable():
            time.sleep(0.005)
        if left := writes.unfinished_tasks:
            logger.warning("tier %s: %d rows were not written in time", self.url, left)
        self._suspend(math.inf, "ask")  # nothing is queued any more
        for work, jobs in self._jobs.items():
            with contextlib.suppress(queue.Empty):
                while (job := jobs.get_nowait()) is not None:
                    job(None)
            for _ in range(_THREADS[work]):
                jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline + 0.5 - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.tier.close()


class Tiering:
    """All tiers of one pool, nearest first."""

    def __init__(
        self, tiers: Sequence[tuple[str, base.Tier]], memory: Sequence[memoryview]
    ) -> None:
        self.channels = [Channel(url, tier) for url, tier in tiers]
        self._register(memory)

    def _register(self, memory: Sequence[memoryview]) -> None:
        self._memory = memory
        for channel in self.channels:
            for extent in memory:
                channel.tier.register(extent)

    def for_pool(self, pool: MemoryPool) -> Tiering:
        """The same tiers, threads included, for the rows of another pool."""
        other = copy.copy(self)
        other._register(pool.map() if self.channels else [])
        return other

    def ask(self, namespace: str, keys: Sequence[RowKey]) -> Question:
        """Ask the tiers in turn, in the background, one call each."""
        question = Question()
        self._ask(question, namespace, list(keys), 0)
        return question

    def _ask(self, question: Question, namespace: str, keys: list[RowKey], index: int) -> None:
        def job(tier: base.Tier | None) -> None:
            unknown = keys
            try:
                if tier is not None:
                    names = [base.value_name(namespace, *key) for key in keys]
                    present = tier.contains(names)
                    unknown = []
                    for key, there in zip(keys, present, strict=True):
                        if there:
                            question.found[key] = index
                        else:
                            unknown.append(key)
            finally:
                self._ask(question, namespace, unknown, index + 1)

        while keys and index < len(self.channels):
            if self.channels[index].submit(job, "ask"):
                return
            index += 1
        question.done = True

    def read(
        self, channel: Channel, tier: base.Tier, name: str, slots: Sequence[SlotRef]
    ) -> list[int] | None:
        """Fill slots with a row and check it; its digests, or None when it cannot be had.

        Raises:
            TierError: the tier did not do as asked.
        """
        views = [self._view(slot) for slot in slots]
        header = bytearray(base.header_bytes(len(slots)))
        if not tier.get(name, [memoryview(header), *views]):
            # Where it is there after all, it is damaged: it would be found again and again.
            tier.remove(name)
            return None
        digests = base.unpack_header(bytes(header), name, [slot.nbytes for slot in slots])
        if digests != [xxhash.xxh3_64_intdigest(view) if len(view) else 0 for view in views]:
            channel.count(corrupt_rows=1)
            text = f"tier {channel.url}: {name} is damaged and removed"
            warn_every(logger, f"damaged {channel.url}", 60.0, text)
            tier.remove(name)
            return None
        channel.count(hit_rows=1, read_bytes=sum(map(len, views)))
        return digests

    def write(self, channel: Channel, tier: base.Tier, name: str, row: Row) -> None:
        """Put a row.

        Raises:
            TierError: the tier did not do as asked.
        """
        header = base.pack_header(name, [slot.nbytes for slot in row.slots], row.digests)
        views = [self._view(slot) for slot in row.slots]
        tier.put(name, [memoryview(header), *views])
        channel.count(written_bytes=sum(map(len, views)))

    def _view(self, slot: SlotRef) -> memoryview:
        if not slot.nbytes:
            return memoryview(bytearray())
        return self._memory[slot.extent][slot.offset : slot.offset + slot.nbytes]

    def clear(self, namespace: str) -> None:
        """Delete a namespace's values, in the background: see ``Channel.clears``."""
        for channel in self.channels:
            channel.clear(namespace)

    def close(self) -> None:
        """Write what is queued, within a few seconds, and end the threads."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        for channel in self.channels:
            channel.close(deadline)


def open_tiering(urls: Sequence[str], pool: MemoryPool) -> Tiering:
    """Open the tiers of a pool.

    Raises:
        StartupError: holds the problems of all URLs.
    """
    problems: list[str] = []
    tiers: list[tuple[str, base.Tier]] = []
    for text in urls:
        try:
            url = base.parse_tier_url(text)
            tiers.append((url.text, base.open_tier(url)))
        except StartupError as error:
            problems.extend(error.problems)
        except base.TierError as error:
            problems.append(f"tiers: {text}: {error}")
    if problems:
        for _, tier in tiers:
            tier.close()
        raise StartupError(*problems)
    tiering = Tiering(tiers, pool.map() if tiers else [])
    # Which of them do not answer is told now.
    tiering.ask("0" * 16, [(bytes(32), "start")])
    return tiering
