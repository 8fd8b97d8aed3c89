"""``PoolService``: the small private service that the owner of a pool runs.

It hands the pool's memory to this user's workers over a Unix socket, learns which extents all
ranks have mapped, and when a worker is gone. See protocol.py for the conversation.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_connector.errors import ProtocolError
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import PoolRef
from lmcache_connector.server import protocol, sockets
from lmcache_connector.storage.pool import Extent

logger = init_logger(__name__)

# Connections beyond are closed at once, before they cost descriptors that others need.
_MAX_SESSIONS = 512


@dataclass(slots=True, eq=False)
class _Session:
    """One connection. ``rank`` is None until its Hello; extents are mapped in order."""

    connection: socket.socket
    rank: int | None = None
    num_mapped: int = 0
    # Broke the rules: not served any more, and watched only for its end.
    dropped: bool = False


class PoolService:
    """Serves one pool's extents on its own daemon thread from ``start`` to ``close``.

    Args:
        extents: the pool's memfds; they stay open at least until ``close``.
        path: where to listen (``sockets.socket_path_for``); ``pool_ref`` tells the real place.
        expected_ranks: an extent is ready once ranks 0..expected_ranks-1 have all mapped it.
        on_session_end: called on the service's thread with the rank whose last connection has
            ended: its process is gone or has unmapped the memory, so that nothing it was asked
            to copy can still happen. Whoever owns the store may then complete what it held.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        path: Path,
        expected_ranks: int,
        on_session_end: Callable[[int], None] | None = None,
    ) -> None:
        assert expected_ranks > 0
        self.incarnation = uuid.uuid4().hex
        self.ready = threading.Event()
        self._extents = tuple(extents)
        self._path = path
        self._expected_ranks = expected_ranks
        self._on_session_end = on_session_end
        self._num_ready = 0
        self._sessions: set[_Session] = set()

    @property
    def pool_ref(self) -> PoolRef:
        """Where workers attach; valid once started."""
        return PoolRef(str(self._path), self.incarnation)

    def start(self, on_extent_ready: Callable[[int], None]) -> None:
        """Listen, and call ``on_extent_ready`` with each extent's index, in order.

        Raises:
            OSError: the socket cannot be made.
        """
        self._on_extent_ready = on_extent_ready
        self._listener, self._path = sockets.listen_private(self._path)
        self._listener.setblocking(False)
        self._inode = self._path.lstat().st_ino
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lmcache-pool", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float) -> bool:
        """Whether all ranks have mapped all extents within ``timeout`` seconds."""
        return self.ready.wait(timeout)

    def close(self) -> None:
        """End all connections and remove the socket's name. No callback comes after."""
        # First: as long as we listen, nobody else takes the name or the inode.
        sockets.remove_socket(self._path, self._inode)
        self._wake.close()
        self._thread.join()
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
        if not sockets.is_trusted(uid) or len(self._sessions) >= _MAX_SESSIONS:
            logger.warning(
                "memory socket: refused a connection of user %d (%d are open)",
                uid,
                len(self._sessions),
            )
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
            self._handle(session, protocol.decode_worker_frame(data))
        except ProtocolError as error:
            logger.warning("memory socket: dropped a worker (rank %s): %s", session.rank, error)
            if session.rank is None:
                return False
            # It may have memory mapped, and be writing to it: only its own end tells.
            session.dropped = True
            with contextlib.suppress(OSError):
                session.connection.shutdown(socket.SHUT_WR)
        return True

    def _handle(self, session: _Session, frame: protocol.WorkerFrame) -> None:
        if isinstance(frame, protocol.Hello):
            if session.rank is not None:
                raise ProtocolError("a second hello")
            if reason := self._reason_refused(frame):
                self._send(session, protocol.Refused(reason))
                raise ProtocolError(reason)
            session.rank = frame.rank
            self._send(session, protocol.Welcome(self.incarnation, len(self._extents)))
        else:
            if session.rank is None or frame.extent != session.num_mapped:
                raise ProtocolError(f"extent {frame.extent} was not offered")
            session.num_mapped += 1
            self._advance()
        if session.num_mapped < len(self._extents):
            extent = self._extents[session.num_mapped]
            offer = protocol.ExtentOffer(session.num_mapped, extent.nbytes)
            self._send(session, offer, extent.fd)

    def _reason_refused(self, hello: protocol.Hello) -> str | None:
        if hello.version != protocol.PROTOCOL_VERSION:
            return (
                f"protocol version {hello.version} of the worker, {protocol.PROTOCOL_VERSION} of "
                "the pool's owner: install the same lmcache-connector in both"
            )
        if hello.rank >= self._expected_ranks:
            return f"rank {hello.rank} is not one of {self._expected_ranks} ranks"
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

    def _advance(self) -> None:
        """Tell which extents all ranks have mapped by now."""
        mapped = [0] * self._expected_ranks
        for session in self._sessions:
            if session.rank is not None:
                mapped[session.rank] = max(mapped[session.rank], session.num_mapped)
        while self._num_ready < min(mapped):
            self._on_extent_ready(self._num_ready)
            self._num_ready += 1
        if self._num_ready == len(self._extents):
            self.ready.set()

    def _end(self, session: _Session) -> None:
        self._selector.unregister(session.connection)
        session.connection.close()
        self._sessions.remove(session)
        rank = session.rank
        if rank is None or self._on_session_end is None:
            return
        if all(other.rank != rank for other in self._sessions):
            self._on_session_end(rank)
