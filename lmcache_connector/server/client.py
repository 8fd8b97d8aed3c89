"""``PoolClient``: a worker's attachment to a pool's memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_connector.errors import ProtocolError
from lmcache_connector.log import init_logger
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import protocol, sockets
from lmcache_connector.server.prefault import prefault
from lmcache_connector.storage.pool import SLOT_ALIGNMENT

logger = init_logger(__name__)

# The owner may still be starting when a worker is told where its socket will be.
_CONNECT_SECONDS = 60.0
_RETRY_SECONDS = 0.02


class PoolClient:
    """Maps the extents that the service at ``path`` offers, on a helper thread.

    One client is one attachment to one life of a pool. Its memory stays mapped until ``close``,
    also when the service ends; the owner takes its connection's end for the worker's death, so
    the connection stays open as long as anything is mapped.

    Args:
        register_extent: called on the helper thread with the address and bytes of each extent
            before it counts as mapped, to pin it for a device. What it pins, its owner unpins
            before ``close``.
        touch_ahead: keep the pages of one extent more than is used populated, so that copies do
            not wait for them; for memory that nothing pins.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        register_extent: Callable[[int, int], None] | None = None,
        *,
        touch_ahead: bool = False,
    ) -> None:
        # Known once the service has answered.
        self.incarnation: str | None = None
        self._path = path
        self._rank = rank
        self._register_extent = register_extent
        self._maps: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._connection: socket.socket | None = None
        self._touch_ahead = touch_ahead
        # Extents to be touched: the first, and the one behind each that is used.
        self._num_wanted = 1
        self._wanted = threading.Event()
        self._closing = threading.Event()
        self._attached = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-attach", daemon=True)

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()

    def wait_attached(self, timeout: float) -> bool:
        """Whether all extents are mapped within ``timeout`` seconds."""
        return self._attached.wait(timeout)

    def is_alive(self) -> bool:
        """Whether it is attached or still trying."""
        return self._attached.is_set() or self._thread.is_alive()

    def has(self, extent: int) -> bool:
        """Whether an extent is mapped by now."""
        return 0 <= extent < len(self._addresses)

    def address(self, slot: SlotRef) -> int:
        """Where a slot begins in this process.

        Raises:
            ProtocolError: the slot is not inside what is mapped.
        """
        extent = self._check(slot)
        if extent + 2 > self._num_wanted:
            self._num_wanted = extent + 2
            self._wanted.set()
        return self._addresses[extent] + slot.offset

    def view(self, slot: SlotRef) -> memoryview:
        """A slot's bytes, writable. Views must be gone before ``close``.

        Raises:
            ProtocolError: the slot is not inside what is mapped.
        """
        mapping = self._maps[self._check(slot)]
        return memoryview(mapping)[slot.offset : slot.offset + slot.nbytes]

    def _check(self, slot: SlotRef) -> int:
        if not self.has(slot.extent):
            raise ProtocolError(f"{slot} is in an extent that is not mapped")
        if min(slot.offset, slot.nbytes) < 0 or (
            slot.offset + slot.nbytes > len(self._maps[slot.extent])
        ):
            raise ProtocolError(f"{slot} reaches beyond its extent")
        return slot.extent

    def close(self) -> None:
        """Unmap the memory, then tell the owner by ending the connection. No copy may run."""
        self._closing.set()
        self._wanted.set()
        if self._connection is not None:
            # Wakes the helper thread; the owner does not see this.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)
        if self._thread.ident is not None:
            self._thread.join()
        self._addresses.clear()
        try:
            while self._maps:
                self._maps[-1].close()
                del self._maps[-1]
        except BufferError:
            logger.warning("pool memory stays mapped: a view of it is still in use")
            return
        if self._connection is not None:
            self._connection.close()

    # ---- the helper thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            connection = self._connect()
            if connection is not None:
                self._attach(connection)
                if self._touch_ahead:
                    self._touch_extents()
        except Exception:
            if self._closing.is_set():
                return
            # Until the worker ends, slots in extents that are missing here are refused.
            logger.exception("attaching to the pool at %s failed: nothing is cached", self._path)

    def _connect(self) -> socket.socket | None:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while not self._closing.is_set():
            connection = socket.socket(socket.AF_UNIX, sockets.SOCKET_TYPE)
            try:
                connection.settimeout(1.0)
                connection.connect(str(self._path))
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer in {_CONNECT_SECONDS:.0f} s") from error
                self._closing.wait(_RETRY_SECONDS)
                continue
            connection.settimeout(None)
            self._connection = connection
            return None if self._closing.is_set() else connection
        return None

    def _attach(self, connection: socket.socket) -> None:
        uid = sockets.peer_uid(connection)
        if not sockets.is_trusted(uid):
            raise ProtocolError(f"the service is run by user {uid}")
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, self._rank)
        connection.send(protocol.encode(hello))
        welcome, _ = self._receive(connection)
        if isinstance(welcome, protocol.Refused):
            raise ProtocolError(welcome.reason)
        if not isinstance(welcome, protocol.Welcome):
            raise ProtocolError(f"expected a welcome, got {welcome}")
        self.incarnation = welcome.incarnation
        for index in range(welcome.num_extents):
            offer, fd = self._receive(connection)
            try:
                if not isinstance(offer, protocol.ExtentOffer) or offer.extent != index:
                    raise ProtocolError(f"expected extent {index}, got {offer}")
                self._map(fd, offer.nbytes)
            finally:
                if fd is not None:
                    os.close(fd)
            connection.send(protocol.encode(protocol.ExtentMapped(index)))
        self._attached.set()

    def _touch_extents(self) -> None:
        for index, address in enumerate(tuple(self._addresses)):
            while self._num_wanted <= index:
                self._wanted.wait()
                self._wanted.clear()
                if self._closing.is_set():
                    return
            if not prefault(address, len(self._maps[index]), self._closing):
                return

    def _receive(self, connection: socket.socket) -> tuple[protocol.OwnerFrame, int | None]:
        """One frame, and the descriptor that came with it."""
        data, fds, flags, _ = socket.recv_fds(connection, protocol.MAX_FRAME_BYTES, 1)
        try:
            if not data:
                raise ProtocolError("the service has ended the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("a packet was cut: too long, or no descriptor is free here")
            frame = protocol.decode_owner_frame(data)
        except ProtocolError:
            for fd in fds:
                os.close(fd)
            raise
        return frame, fds[0] if fds else None

    def _map(self, fd: int | None, nbytes: int) -> None:
        if fd is None:
            raise ProtocolError("an extent came without its memory")
        size = os.fstat(fd).st_size
        if nbytes <= 0 or nbytes % SLOT_ALIGNMENT or size != nbytes:
            raise ProtocolError(f"an extent of {nbytes} bytes came as a file of {size} bytes")
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if self._register_extent is not None:
            self._register_extent(address, nbytes)
        self._maps.append(mapping)
        # Last: it is what makes the extent count as mapped.
        self._addresses.append(address)
