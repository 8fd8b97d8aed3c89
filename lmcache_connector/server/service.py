"""``PoolService``: the small private service that the owner of a pool runs.

It hands the pool's memory to this user's workers over a Unix socket, learns which extents all
ranks of an engine core (an instance) have mapped, and when they are gone. It also gives out the
tokens that requests carry. See protocol.py for the conversation.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit

from lmcache_connector.errors import ProtocolError
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import PoolRef
from lmcache_connector.server import protocol, sockets
from lmcache_connector.storage.pool import Extent

logger = init_logger(__name__)

# Connections beyond are closed at once, before they cost descriptors that others need.
_MAX_SESSIONS = 512
# Descriptors that nobody is welcome to take: libzmq, which needs one for each client, aborts the
# process when none is left.
_SPARE_FILES = 64


@dataclass(slots=True, eq=False)
class _Session:
    """One connection: a worker once it has a rank, control once it has a token."""

    connection: socket.socket
    token: str | None = None
    instance: str = ""
    rank: int | None = None
    # Extents are mapped in order.
    num_mapped: int = 0
    # Broke the rules: not served any more, and watched only for its end.
    dropped: bool = False


@dataclass(slots=True)
class _Instance:
    """The workers of one engine core. ``is_open``: more of them are welcome."""

    num_ranks: int
    is_open: bool = True
    num_workers: int = 0
    # Extents that all ranks have mapped.
    num_mapped: int = 0


class PoolService:
    """Serves one pool's extents on its own daemon thread, until ``close``.

    Callbacks come on that thread.

    Args:
        extents: the pool's memfds; they stay open at least until ``close``.
        endpoint: where to listen (``sockets.memory_path`` of it).
        exclusive: refuse to start when the name is taken, instead of taking one beside it.
        allowed_uids: users who may connect, beside this one and root.
        on_mapped: called with 1, 2, ... when all ranks of an instance have mapped so many extents,
            the first time that any has.

    Raises:
        OSError: the socket cannot be made.
        StartupError: it is in use, and ``exclusive`` was asked for.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        endpoint: Path,
        *,
        exclusive: bool = False,
        allowed_uids: Collection[int] = (),
        on_mapped: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.extents = tuple(extents)
        self.allowed_uids = frozenset(allowed_uids)
        # The last connection of an instance's workers has ended: their processes are gone or have
        # unmapped the memory, so that nothing they were asked to copy can still happen.
        self.on_workers_gone: Callable[[str], None] = lambda instance: None
        # A control connection, and with it this token, has ended.
        self.on_control_end: Callable[[str], None] = lambda token: None
        self._on_mapped = on_mapped
        self._sessions: set[_Session] = set()
        # Of control connections that live.
        self.tokens: set[str] = set()
        self._num_told = 0
        # Guards the instances; held for moments only, never during a callback.
        self._changed = threading.Condition()
        self._instances: dict[str, _Instance] = {}
        mode = 0o666 if self.allowed_uids else 0o600
        self._listener, self.endpoint = sockets.listen_private(
            endpoint, exclusive=exclusive, mode=mode
        )
        self._listener.setblocking(False)
        self._inode = sockets.memory_path(self.endpoint).lstat().st_ino
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # Connections are served as long as it lives.
        self.thread = threading.Thread(target=self._run, name="lmcache-pool", daemon=True)
        self.thread.start()

    def pool_ref(self, instance: str = "") -> PoolRef:
        """Where workers attach."""
        return PoolRef(str(sockets.memory_path(self.endpoint)), self.incarnation, instance)

    def add_instance(self, name: str, num_ranks: int) -> None:
        """Welcome workers of an engine core, or welcome them again."""
        with self._changed:
            self._instances.setdefault(name, _Instance(num_ranks)).is_open = True

    def remove_instance(self, name: str) -> bool:
        """Welcome no more workers of it; whether none is connected. Else ``on_workers_gone``
        comes when the last one has gone."""
        with self._changed:
            instance = self._instances.get(name)
            if instance is not None:
                instance.is_open = False
                if instance.num_workers:
                    return False
                del self._instances[name]
            return True

    def wait_ready(self, timeout: float, instance: str = "") -> bool:
        """Whether all ranks have mapped all extents within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_ready(instance), timeout)

    def _is_ready(self, name: str) -> bool:
        instance = self._instances.get(name)
        return instance is not None and instance.num_mapped == len(self.extents)

    def close(self) -> None:
        """End all connections and remove the endpoint's names. No callback comes after."""
        # First: as long as we listen, nobody else takes the name or the inode.
        sockets.remove_socket(self.endpoint, self._inode)
        self._wake.close()
        self.thread.join()
        self._woken.close()

    # ---- the service's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_events():
                pass
        except Exception:
            # Without the service no memory is handed out any more; what is mapped stays usable.
            logger.exception("the service of the memory pool has failed")
        finally:
            for session in self._sessions:
                session.connection.close()
            self._listener.close()
            self._selector.close()

    def _serve_events(self) -> bool:
        """Wait for events and handle them; False when asked to stop."""
        for key, _ in self._selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif not self._receive(key.data):
                self._end(key.data)
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            warn_every(logger, "accept", 60.0, "memory socket: %s", error)
            # The connection stays in the queue: without a pause this would spin.
            time.sleep(0.1)
            return
        uid = sockets.peer_uid(connection)
        trusted = sockets.is_trusted(uid) or uid in self.allowed_uids
        if not trusted or len(self._sessions) >= _MAX_SESSIONS:
            text = f"refused a connection of user {uid} ({len(self._sessions)} are open)"
            warn_every(logger, "refused", 10.0, f"memory socket: {text}")
            connection.close()
            return
        connection.setblocking(False)
        session = _Session(connection)
        self._sessions.add(session)
        self._selector.register(connection, selectors.EVENT_READ, session)

    def _receive(self, session: _Session) -> bool:
        """Handle one packet; False when the connection has ended."""
        try:
            data, _, flags, _ = session.connection.recvmsg(protocol.MAX_FRAME_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            # The worker closed without reading everything.
            return False
        if not data or session.dropped:
            return bool(data)
        try:
            if flags & socket.MSG_TRUNC:
                raise ProtocolError(f"a frame of more than {protocol.MAX_FRAME_BYTES} bytes")
            return self._handle(session, protocol.decode_worker_frame(data))
        except ProtocolError as error:
            logger.warning("memory socket: dropped a worker (rank %s): %s", session.rank, error)
            if session.rank is None:
                return False
            # It may have memory mapped, and be writing to it: only its own end tells.
            session.dropped = True
            with contextlib.suppress(OSError):
                session.connection.shutdown(socket.SHUT_WR)
        return True

    def _handle(self, session: _Session, frame: protocol.WorkerFrame) -> bool:
        """Whether the connection goes on."""
        if isinstance(frame, protocol.ExtentMapped):
            if session.rank is None or frame.extent != session.num_mapped:
                raise ProtocolError(f"extent {frame.extent} was not offered")
            session.num_mapped += 1
            self._advance(session.instance)
        else:
            if session.rank is not None or session.token is not None:
                raise ProtocolError("a second hello")
            if refused := self._admit(session, frame):
                self._send(session, refused)
                if refused.retry:
                    return False
                raise ProtocolError(refused.reason)
        if session.rank is not None and session.num_mapped < len(self.extents):
            extent = self.extents[session.num_mapped]
            offer = protocol.ExtentOffer(session.num_mapped, extent.nbytes)
            self._send(session, offer, extent.fd)
        return True

    def _admit(self, session: _Session, hello: protocol.Hello) -> protocol.Refused | None:
        """Give a connection its part, or say why not."""
        if hello.version != protocol.PROTOCOL_VERSION:
            return protocol.Refused(
                f"protocol version {hello.version} of the worker, {protocol.PROTOCOL_VERSION} of "
                "the pool's owner: install the same lmcache-connector in both"
            )
        # The lowest free number is taken: so many are in use.
        if session.connection.fileno() + _SPARE_FILES >= getrlimit(RLIMIT_NOFILE)[0]:
            return protocol.Refused("few file descriptors are left: raise ulimit -n", retry=True)
        if hello.rank is None:
            session.token = secrets.token_hex(32)
            self.tokens.add(session.token)
            self._send(session, protocol.Welcome(self.incarnation, 0, session.token))
            return None
        with self._changed:
            instance = self._instances.get(hello.instance)
            if instance is None or not instance.is_open:
                return protocol.Refused(f"{hello.instance!r} is not registered", retry=True)
            num_ranks = instance.num_ranks
            if hello.rank >= num_ranks:
                return protocol.Refused(f"rank {hello.rank} is not one of {num_ranks} ranks")
            instance.num_workers += 1
        session.instance, session.rank = hello.instance, hello.rank
        self._send(session, protocol.Welcome(self.incarnation, len(self.extents)))
        return None

    def _send(self, session: _Session, frame: protocol.OwnerFrame, fd: int | None = None) -> None:
        rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        try:
            session.connection.sendmsg([protocol.encode(frame)], rights)
        except ConnectionError:
            # It is gone: the next receive tells.
            pass
        except OSError as error:
            raise ProtocolError(f"cannot be sent to: {error}") from error

    def _advance(self, name: str) -> None:
        """Tell how many extents all ranks of an instance have mapped by now."""
        instance = self._instances[name]
        mapped = [0] * instance.num_ranks
        for session in self._sessions:
            if session.rank is not None and session.instance == name:
                mapped[session.rank] = max(mapped[session.rank], session.num_mapped)
        while instance.num_mapped < min(mapped):
            if instance.num_mapped == self._num_told:
                self._num_told += 1
                self._on_mapped(self._num_told)
            with self._changed:
                instance.num_mapped += 1
                self._changed.notify_all()

    def _end(self, session: _Session) -> None:
        self._selector.unregister(session.connection)
        session.connection.close()
        self._sessions.remove(session)
        if session.token is not None:
            self.tokens.discard(session.token)
            self.on_control_end(session.token)
        if session.rank is None:
            return
        with self._changed:
            instance = self._instances[session.instance]
            instance.num_workers -= 1
            is_gone = not instance.num_workers
            if is_gone:
                # Who comes after them has to map everything anew.
                instance.num_mapped = 0
        if is_gone:
            self.on_workers_gone(session.instance)
