"""``StoreClient``: the ``Store`` of an engine core whose cache is in a server.

A background thread makes sessions with the server, one after the other. The scheduler's thread
uses the last one until a call gets no answer, and goes on without a cache until there is another:
it waits ``CALL_SECONDS``, once, for a server that is lost.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import PoolRef, SlotRef
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.session import LOST, RefusedError, Session
from lmcache_connector.storage import base

logger = init_logger(__name__)

CALL_SECONDS = 0.5
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.2, 2.0
# What a server refuses now it will hardly take in a moment.
_REFUSED_RETRY_SECONDS = 30.0
# A session that ended earlier was of no use: the scheduler's thread is not to wait again at once.
_SHORT_SECONDS = 10.0
# Of all lookups together that wait for a tier.
_POLL_SECONDS = 0.002
_STATS_SECONDS = 1.0

_T = TypeVar("_T")


class StoreClient:
    """See ``Store``. Verbs are for one thread.

    Args:
        endpoint: ``ipc:///path`` of the server.
        registration: of this engine core; its life and open ids are filled in here.
    """

    def __init__(
        self, endpoint: str, registration: messages.RegisterKVCache | messages.RegisterHiddenStates
    ) -> None:
        self._endpoint = Path(endpoint.removeprefix("ipc://"))
        self._registration = replace(registration, life=secrets.token_hex(16))
        self._groups = (
            CacheLayout(registration.geometries).shards()
            if isinstance(registration, messages.RegisterKVCache)
            else list(registration.groups)
        )
        path = str(sockets.memory_path(self._endpoint))
        self.pool_ref = PoolRef(path, "", registration.instance)
        self.has_tiers = False
        self._session: Session | None = None
        # A registered session not in use yet, with what was said and answered; it belongs to
        # whoever takes it.
        self._fresh: tuple[Session, Any, messages.Registered] | None = None
        self._lock = threading.Lock()
        self._open_loads: set[int] = set()
        self._open_stores: set[int] = set()
        # Lookup -> when it was last asked about, what, and the answer, while it is PENDING.
        self._polled: dict[int, tuple[float, messages.Message | None, Any]] = {}
        self._stats = base.StoreStats(0, 0, 0, 0, 0, 0, {}, 0)
        self._stats_due = 0.0
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-client", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float) -> bool:
        """Whether the server is there and all workers have mapped its pool within ``timeout``
        seconds; False at once when it is not there."""
        deadline = time.monotonic() + timeout
        self._tried.wait(timeout)
        while not self._call(messages.Ping()):
            if self._session is None or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def add_groups(self, groups: Sequence[base.GroupShards]) -> None:
        self._groups += groups
        self._tell(messages.AddGroups(list(groups)))

    # ---- loads ----------------------------------------------------------------------------------

    def lookup(
        self, lookup_id: int, chunk_hashes: Sequence[bytes], first_chunk: int
    ) -> base.LookupReply:
        message = messages.Lookup(lookup_id, list(chunk_hashes), first_chunk)
        nothing = [[0] * group.num_shards for group in self._groups]
        return self._poll(message, base.LookupReply(base.LookupState.READY, nothing))

    def narrow(self, lookup_id: int, keep: Sequence[base.RowKey]) -> base.LookupState:
        lost = base.LookupState.GONE if keep else base.LookupState.READY
        return self._poll(messages.Narrow(lookup_id, list(keep)), lost)

    def _poll(self, message: messages.Lookup | messages.Narrow, lost: _T) -> _T:
        """The answer, or the last one to the same question when it is too early to ask again."""
        answer: _T
        asked, what, answer = self._polled.pop(message.lookup_id, (0.0, None, None))
        now = time.monotonic()
        early = now - asked < _POLL_SECONDS * (len(self._polled) + 1)
        if not (early and what == message):
            asked, answer = now, self._call(message) or lost
        if base.LookupState.PENDING in (answer, getattr(answer, "state", None)):
            self._polled[message.lookup_id] = (asked, message, answer)
        return answer

    def release(self, lookup_id: int) -> None:
        self._polled.pop(lookup_id, None)
        self._tell(messages.Release(lookup_id))

    def prepare_load(
        self, load_id: int, lookup_id: int, wanted: Sequence[base.RowKey]
    ) -> list[base.Row] | None:
        # Before it is: the next session must not be told that it is not. After it: a session that
        # began with this call has made us forget.
        self._open_loads.add(load_id)
        message = messages.PrepareLoad(load_id, lookup_id, list(wanted))
        rows: list[base.Row] | None = self._call(message)
        (self._open_loads.discard if rows is None else self._open_loads.add)(load_id)
        return rows

    def complete_load(self, load_id: int, drop: Sequence[base.RowKey] = ()) -> None:
        self._current()
        if load_id in self._open_loads:
            self._open_loads.remove(load_id)
            self._tell(messages.CompleteLoad(load_id, list(drop)))

    # ---- stores ---------------------------------------------------------------------------------

    def prepare_store(
        self, store_id: int, rows: Sequence[base.NewRow], prefix: Sequence[bytes]
    ) -> list[list[SlotRef]]:
        self._open_stores.add(store_id)
        message = messages.PrepareStore(store_id, list(rows), list(prefix))
        slots: list[list[SlotRef]] = self._call(message) or []
        (self._open_stores.add if any(slots) else self._open_stores.discard)(store_id)
        return slots

    def complete_store(self, store_id: int, commits: Sequence[base.Commit]) -> None:
        self._current()
        if store_id in self._open_stores:
            self._open_stores.remove(store_id)
            self._tell(messages.CompleteStore(store_id, list(commits)))

    # ---- the rest -------------------------------------------------------------------------------

    def clear(self, namespace: bytes) -> None:
        self._registration = replace(self._registration, namespace=namespace)
        self._tell(messages.Clear(namespace))

    def stats(self) -> base.StoreStats:
        if time.monotonic() >= self._stats_due:
            stats = self._call(messages.Stats()) or self._stats
            # Counted by the server for all its engines: each telling them would add them up.
            self._stats = replace(stats, evicted={}, tiers={})
            self._stats_due = time.monotonic() + _STATS_SECONDS
        return self._stats

    def check_integrity(self, loads: Collection[int], stores: Collection[int]) -> None:
        assert self._open_loads <= set(loads), f"{self._open_loads} loads are open, not {loads}"
        assert self._open_stores <= set(stores), f"{self._open_stores} stores, not {stores}"
        mine = (list(self._open_loads), list(self._open_stores))
        stats = self._call(messages.Stats(mine))
        assert stats or not self._session, "the server's books do not add up: see both logs"
        self._stats = stats or self._stats

    def close(self) -> None:
        self._closing.set()
        self._call(messages.Unregister())
        self._break()
        self._thread.join(timeout=2 * CALL_SECONDS)

    # ---- the session, on the scheduler's thread -------------------------------------------------

    def _current(self) -> Session | None:
        """The session to use. Only here, inside a verb, another one takes its place: slots that a
        verb gave and the ``pool_ref`` read after it belong together."""
        with self._lock:
            fresh, self._fresh = self._fresh, None
        if fresh is not None:
            self._adopt(*fresh)
        return self._session

    def _adopt(self, session: Session, said: Any, answer: messages.Registered) -> None:
        self._break()
        self._session, self.has_tiers = session, answer.has_tiers
        self.pool_ref = replace(self.pool_ref, incarnation=session.incarnation)
        # What has changed since it was said.
        if said.namespace != self._registration.namespace:
            self._tell(messages.Clear(self._registration.namespace))
        if isinstance(said, messages.RegisterHiddenStates):
            self._tell(messages.AddGroups(self._groups))
        if not answer.resumed:
            # Slots of a server that died, or that gave them up when our workers had left.
            self._open_loads.clear()
            self._open_stores.clear()
            return
        for load_id in set(said.open_loads) - self._open_loads:
            self._tell(messages.CompleteLoad(load_id, []))
        for store_id in set(said.open_stores) - self._open_stores:
            self._tell(messages.CompleteStore(store_id, []))

    def _call(self, message: messages.Message, *, wait: bool = True) -> Any:
        """What the server answers; None when it does not, or is not waited for."""
        session = self._current()
        try:
            if session is not None and wait:
                return session.call(message, CALL_SECONDS)
            if session is not None:
                session.tell(message)
        except LOST as error:
            warn_every(logger, "failed", 10.0, "the cache server: %s", error)
            if not isinstance(error, RefusedError) or error.renew:
                self._break()
        return None

    def _tell(self, message: messages.Message) -> None:
        self._call(message, wait=False)

    def _break(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
            self._polled.clear()
            self.pool_ref = replace(self.pool_ref, incarnation="")

    # ---- the background thread ------------------------------------------------------------------

    def _run(self) -> None:
        delay, reported = _MIN_RETRY_SECONDS, ""
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._live()
                reported = ""
            except LOST as error:
                refused = isinstance(error, RefusedError)
                delay = _REFUSED_RETRY_SECONDS if refused else delay
                if reported != str(error):
                    reported = str(error)
                    log = logger.error if refused else logger.warning
                    log("no cache, until there is a server at %s: %s", self._endpoint, error)
            self._tried.set()
            self._closing.wait(delay)
            is_short = time.monotonic() - began < _SHORT_SECONDS
            delay = min(2 * delay, _MAX_RETRY_SECONDS) if is_short else _MIN_RETRY_SECONDS

    def _live(self) -> None:
        """One session, from its registration to its end. Raises one of LOST when there is none."""
        session = Session(self._endpoint, CALL_SECONDS)
        loads, stores = list(self._open_loads), list(self._open_stores)
        said = replace(self._registration, open_loads=loads, open_stores=stores)
        try:
            self._fresh = (session, said, session.call(said, CALL_SECONDS))
        except LOST:
            session.close()
            raise
        logger.info("attached to the cache server at %s", self._endpoint)
        self._tried.set()
        if not self._closing.is_set():
            session.wait_lost()
        with self._lock:
            unused, self._fresh = self._fresh, None
        if unused is not None:
            session.close()
