"""``CacheServer``: answers the requests of engines and of the CLI over ZeroMQ.

Its one thread owns every session; the pool's service tells it which tokens and workers are gone.
A session's leases end only when nobody can write to their slots any more: its control connection
and all connections of its workers have ended.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import msgspec
import zmq

from lmcache_connector import __version__
from lmcache_connector.buffers import align_up
from lmcache_connector.errors import ConnectorError, GeometryError, ProtocolError
from lmcache_connector.groups import FULL
from lmcache_connector.layout import CacheLayout
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.server import messages
from lmcache_connector.server.service import PoolService
from lmcache_connector.storage.engine import StorageEngine, check_rows
from lmcache_connector.storage.pool import SLOT_ALIGNMENT
from lmcache_connector.storage.session import StoreSession, check_groups

logger = init_logger(__name__)

_BATCH = 64
_MAX_FILES = 1 << 16
# Of one session: open lookups, and the chunks of all of them.
_MAX_LOOKUPS, _MAX_CHUNKS = 4096, 1 << 21
_MAX_CLEARS = 64


# A message's fields are the verb's arguments, in order.
_VERBS: dict[type[messages.Message], Callable[..., object]] = {
    messages.AddGroups: StoreSession.add_groups,
    messages.Lookup: StoreSession.lookup,
    messages.Narrow: StoreSession.narrow,
    messages.Release: StoreSession.release,
    messages.PrepareLoad: StoreSession.prepare_load,
    messages.CompleteLoad: StoreSession.complete_load,
    messages.PrepareStore: StoreSession.prepare_store,
    messages.CompleteStore: StoreSession.complete_store,
    messages.Clear: StoreSession.clear,
}


class _RenewError(ProtocolError):
    """The request's session is not known: register anew."""


@dataclass(eq=False)
class Instance:
    """An engine core. ``token`` is None once its control connection has ended."""

    name: str
    model: str
    life: str
    layout: CacheLayout | messages.RegisterHiddenStates
    session: StoreSession
    token: str | None = None


class CacheServer:
    """Serves an engine's sessions and management at the endpoint of ``service``, until ``close``.

    Args:
        embedded: the instance whose store lives in this process; no other can register.

    Raises:
        zmq.ZMQError: the socket cannot be made.
    """

    def __init__(
        self, engine: StorageEngine, service: PoolService, embedded: Instance | None = None
    ) -> None:
        self._engine = engine
        self._service = service
        self._embedded = embedded
        self._instances: dict[str, Instance] = {embedded.name: embedded} if embedded else {}
        self._sessions: dict[str, Instance] = {}
        self._started = time.monotonic()
        # What other threads have for ours.
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        # Those of large pools take longer than others wait for an answer.
        self._clearing = ThreadPoolExecutor(1, "lmcache-clear")
        self._open_clears = self._cleared_rows = 0
        service.on_control_end = lambda token: self._post(partial(self._end_session, token))
        service.on_workers_gone = lambda name: self._post(partial(self._remove_if_gone, name))
        soft, hard = getrlimit(RLIMIT_NOFILE)
        # libzmq aborts the process when no descriptor is left for somebody who connects.
        setrlimit(RLIMIT_NOFILE, (max(soft, min(hard, _MAX_FILES)), hard))
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.maxmsgsize = messages.MAX_MESSAGE_BYTES
        self._router.rcvhwm = _BATCH
        # Tokens are looked at later: nobody else's frames are to fill our memory until then.
        for uid in {0, os.geteuid(), *self._service.allowed_uids}:
            self._router.setsockopt(zmq.IPC_FILTER_UID, uid)
        self._router.bind(f"ipc://{self._service.endpoint}")
        self._service.endpoint.chmod(0o666 if self._service.allowed_uids else 0o600)
        # Requests are answered as long as it lives.
        self.thread = threading.Thread(target=self._run, name="lmcache-server", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Answer no more. The service must have been closed."""
        self._post(partial(setattr, self, "_closing", True))
        self.thread.join()
        self._clearing.shutdown(cancel_futures=True)
        os.close(self._wake)

    def _post(self, event: Callable[[], None]) -> None:
        self._events.put(event)
        os.eventfd_write(self._wake, 1)

    # ---- the server's thread --------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closing:
                if self._wake in dict(poller.poll()):
                    os.eventfd_read(self._wake)
                while not self._events.empty():
                    self._events.get()()
                self._serve_batch()
        except Exception:
            logger.exception("the cache server has failed: its engines go on without it")
        finally:
            self._router.close()
            self._context.term()

    def _serve_batch(self) -> None:
        for _ in range(_BATCH):
            try:
                sender, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # One whose queue is full does not read its replies; the router drops them.
            self._router.send_multipart([sender, self._answer(b"".join(frames))])

    def _answer(self, frame: bytes) -> bytes:
        call = 0
        try:
            request = messages.decode_request(frame)
            call = request.call
            if request.token not in self._service.tokens:
                raise _RenewError("the token of this request is not known")
            return messages.encode_reply(call, self._dispatch(request))
        except (ConnectorError, ValueError) as error:
            warn_every(logger, "refused", 10.0, "refused a request: %s", error)
            return messages.encode_reply(call, None, str(error), isinstance(error, _RenewError))
        except Exception as error:
            logger.exception("a request has failed")
            return messages.encode_reply(call, None, f"{type(error).__name__}: {error}")

    def _dispatch(self, request: messages.Request) -> object:
        message = messages.decode_message(request)
        match message:
            case messages.RegisterKVCache() | messages.RegisterHiddenStates():
                return self._register(request.token, message)
            case messages.Unregister():
                self._end_session(request.token)
                return None
            case messages.Status():
                return self._status()
            case messages.Probe(namespace, chunk_hashes):
                *masks, pending = self._engine.probe(namespace, chunk_hashes)
                texts = [{tag: f"{mask:x}" for tag, mask in by_tag.items()} for by_tag in masks]
                return messages.ProbeReply(pending, *texts)
            case messages.ClearNamespace(namespace):
                self._clear(namespace)
                return None
            case messages.Pin(chunk_hashes, pinned):
                return self._engine.set_pinned(chunk_hashes, pinned)
        instance = self._sessions.get(request.token)
        if instance is None:
            raise _RenewError("no engine core is registered with the token of this request")
        return self._serve(instance, message)

    def _serve(self, instance: Instance, message: messages.Message) -> object:
        session, is_ready = instance.session, self._is_ready(instance)
        match message:
            case messages.Ping():
                return is_ready
            case messages.Stats(claimed):
                if claimed is not None:
                    session.check_integrity(*claimed)
                return session.stats()
            case messages.AddGroups() if self._engine.kv is None:
                raise ValueError("groups of KV are those of its registration")
            case messages.Lookup(lookup_id, chunk_hashes):
                if not is_ready:
                    return None
                check_rows(len(chunk_hashes), len(session.groups))
                chunks = session.num_chunks(besides=lookup_id) + len(chunk_hashes)
                if len(session.lookups) >= _MAX_LOOKUPS or chunks > _MAX_CHUNKS:
                    raise ValueError(f"{len(session.lookups)} lookups are open, {chunks} chunks")
            case messages.PrepareStore():
                if not is_ready:
                    return []
                # A row of no bytes would never have to make room for others.
                legal = [sizes for group in session.groups.values() for sizes in group.sizes]
                if not all(any(row.sizes) and row.sizes in legal for row in message.rows):
                    raise ValueError("rows of other sizes than were registered")
        return _VERBS[type(message)](session, *msgspec.structs.astuple(message))

    def _is_ready(self, instance: Instance) -> bool:
        return not instance.layout.num_ranks or self._service.wait_ready(0.0, instance.name)

    # ---- sessions -------------------------------------------------------------------------------

    def _register(
        self, token: str, message: messages.RegisterKVCache | messages.RegisterHiddenStates
    ) -> messages.Registered:
        name = message.instance
        if self._embedded is not None:
            raise ValueError("this is an engine's own cache: start `lmcache-connector server`")
        layout: CacheLayout | messages.RegisterHiddenStates
        if isinstance(message, messages.RegisterKVCache):
            layout = self._layout(message)
            groups = layout.shards()
        else:
            layout, groups = message, message.groups
            check_groups(groups)
        is_kv = isinstance(layout, CacheLayout)
        if is_kv != (self._engine.kv is None):
            raise ValueError("KV is registered at a server's endpoint, hidden states beside it")
        instance, other = self._instances.get(name), self._sessions.get(token)
        if other is not None and other is not instance:
            raise ValueError(f"this connection has registered {other.name} already")
        resumed = instance is not None
        if instance is None:
            pool_ref = self._service.pool_ref(name)
            session = self._engine.open_session(message.namespace, groups, pool_ref)
            instance = Instance(name, message.model, message.life, layout, session)
            self._instances[name] = instance
        else:
            known = list(instance.session.groups.values())
            if instance.life != message.life or (is_kv and known != groups):
                raise ValueError(
                    f"{name} is registered by another process, whose workers are still there"
                )
            if not is_kv:
                instance.session.add_groups(groups)
            self._sessions.pop(instance.token or "", None)
            if instance.session.namespace_digest != message.namespace:
                instance.session.clear(message.namespace)
            instance.session.end_lookups()
            instance.session.keep_only(message.open_loads, message.open_stores)
        instance.token = token
        self._sessions[token] = instance
        self._service.add_instance(name, layout.num_ranks)
        logger.info("%s %s: %s", name, "is back" if resumed else "registered", message.model)
        return messages.Registered(resumed, instance.session.has_tiers)

    def _layout(self, message: messages.RegisterKVCache) -> CacheLayout:
        """Raises GeometryError when ranks contradict each other, or no row fits the pool."""
        layout = CacheLayout(message.geometries)
        shards = [sizes for group in layout.shards() for sizes in group.sizes]
        largest, most = align_up(max(map(max, shards)), SLOT_ALIGNMENT), max(map(len, shards))
        if min(map(min, shards)) < 0 or largest <= 0:
            raise GeometryError(f"objects of {shards} bytes")
        room = sum(extent.nbytes // largest for extent in self._service.extents)
        if room < most:
            raise GeometryError(
                f"the server's pool of {self._engine.stats().capacity_bytes} bytes has room for "
                f"{room} objects of {largest} bytes, one chunk has up to {most}: give the server "
                "more --max-local-cpu-size, or make chunk_size smaller"
            )
        return layout

    def _end_session(self, token: str) -> None:
        """Its client is gone. What its workers may be writing to stays theirs."""
        instance = self._sessions.pop(token, None)
        if instance is not None:
            instance.token = None
            instance.session.end_lookups()
            self._remove_if_gone(instance.name)

    def _remove_if_gone(self, name: str) -> None:
        instance = self._instances.get(name)
        if instance is None or instance.token is not None or instance is self._embedded:
            return
        if self._service.remove_instance(name):
            instance.session.close()
            del self._instances[name]
            logger.info("%s is gone", name)

    # ---- management -----------------------------------------------------------------------------

    def _clear(self, namespace: str) -> None:
        if self._open_clears >= _MAX_CLEARS:
            raise ValueError(f"{self._open_clears} clears are under way: wait for them")
        self._open_clears += 1
        future = self._clearing.submit(self._engine.clear_namespace, namespace)
        future.add_done_callback(lambda future: self._post(partial(self._end_clear, future)))

    def _end_clear(self, future: Future[int]) -> None:
        self._open_clears -= 1
        if error := future.exception():
            logger.error("a clear has failed", exc_info=error)
        else:
            self._cleared_rows += future.result()

    def _status(self) -> messages.StatusReply:
        engine = self._engine
        held = engine.namespaces()
        return messages.StatusReply(
            version=__version__,
            pid=os.getpid(),
            incarnation=self._service.incarnation,
            uptime_seconds=time.monotonic() - self._started,
            embedded=self._embedded is not None,
            pool=engine.stats(),
            floor_bytes=engine.floor_bytes,
            instances=[self._instance_status(one) for one in self._instances.values()],
            open_clears=self._open_clears,
            cleared_rows=self._cleared_rows,
            namespaces={name: messages.NamespaceStatus(*counts) for name, counts in held.items()},
            tiers=[
                messages.TierStatus(
                    url=channel.url,
                    usable=channel.is_usable(),
                    used_bytes=(stats := channel.tier.stats()).used_bytes,
                    capacity_bytes=stats.capacity_bytes,
                    counters=channel.counters,
                    open_clears=channel.clears[0],
                    failed_clears=channel.clears[1],
                )
                for channel in engine.channels
            ],
        )

    def _instance_status(self, instance: Instance) -> messages.InstanceStatus:
        session, layout = instance.session, instance.layout
        by_tag = layout.by_tag if isinstance(layout, CacheLayout) else {}
        rules = [by_tag[tag].rule if tag in by_tag else FULL for tag in session.groups]
        return messages.InstanceStatus(
            instance=instance.name,
            model=instance.model,
            namespace=session.namespace,
            namespace_digest=session.namespace_digest,
            chunk_tokens=layout.chunk_tokens,
            num_ranks=layout.num_ranks,
            ready=self._is_ready(instance),
            groups=[
                messages.GroupStatus(tag, rule.kind.value, rule.tokens, max(map(sum, group.sizes)))
                for (tag, group), rule in zip(session.groups.items(), rules, strict=True)
            ],
            open_loads=len(session.loads),
            open_stores=len(session.leases),
            asked_rows=session.asked_rows,
            found_rows=session.found_rows,
        )
