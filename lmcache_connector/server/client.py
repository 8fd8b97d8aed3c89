"""``PoolClient``: a worker's attachment to a pool's memory, and how a control connection begins."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lmcache_connector.errors import ProtocolError
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.metadata import SlotRef
from lmcache_connector.server import protocol, sockets
from lmcache_connector.server.prefault import prefault
from lmcache_connector.storage.pool import SLOT_ALIGNMENT

logger = init_logger(__name__)

_CONNECT_SECONDS = 1.0
# The first retries come quickly: the owner may be starting right now.
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.02, 1.0
_UNMAP_RETRY_SECONDS = 0.05
# Who could not map all begins anew: what was in the way may have gone. Later each time, since
# what is mapped may be of use.
_MIN_PARTIAL_SECONDS, _MAX_PARTIAL_SECONDS = 5.0, 300.0


class PoolClient:
    """Maps the extents that the service at ``path`` offers, on a helper thread.

    It attaches to one life of a pool after the other, until ``close``: when the service ends (its
    process, or the connection), the memory is unmapped once no copy holds it, and the next service
    at the path is looked for. The owner takes the connection's end for the worker's death, so it
    stays open as long as anything is mapped.

    Args:
        register_extent: called on the helper thread with the address and bytes of each extent
            before it counts as mapped, to pin it for a device.
        unregister_extent: called with the address before an extent is unmapped.
        touch_ahead: keep the pages of one extent more than is used populated, so that copies do
            not wait for them; for memory that nothing pins.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        instance: str = "",
        *,
        register_extent: Callable[[int, int], None] = lambda address, nbytes: None,
        unregister_extent: Callable[[int], None] = lambda address: None,
        touch_ahead: bool = False,
    ) -> None:
        self.path = path
        self.instance = instance
        # The life that is attached; None before and between.
        self.incarnation: str | None = None
        self._rank = rank
        self._register_extent = register_extent
        self._unregister_extent = unregister_extent
        self._touch_ahead = touch_ahead
        self._maps: list[mmap.mmap] = []
        self._addresses: list[int] = []
        self._connection: socket.socket | None = None
        # Copies that run. Also guards ``incarnation``: it ends before the memory goes.
        self._held = threading.Condition()
        self._num_held = 0
        self._partial_seconds = _MIN_PARTIAL_SECONDS
        # Extents to be touched: the first, and the one behind each that is used.
        self._num_wanted = 1
        self._wanted = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Event()
        self._attached = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-attach", daemon=True)
        self._thread.start()

    def hold(self, incarnation: str) -> bool:
        """Keep the memory of this life mapped until ``drop``; False when it is not attached."""
        with self._held:
            if self.incarnation != incarnation:
                return False
            self._num_held += 1
            return True

    def drop(self) -> None:
        """Undo one ``hold``. Views must be gone."""
        with self._held:
            self._num_held -= 1
            self._held.notify_all()

    def address(self, slot: SlotRef) -> int:
        """Where a slot begins in this process.

        Raises:
            ProtocolError: the slot is not inside what is mapped.
        """
        extent = self._check(slot)
        if extent + 2 > self._num_wanted:
            self._num_wanted = extent + 2
            os.eventfd_write(self._wanted, 1)
        return self._addresses[extent] + slot.offset

    def view(self, slot: SlotRef) -> memoryview:
        """A slot's bytes, writable.

        Raises:
            ProtocolError: the slot is not inside what is mapped.
        """
        mapping = self._maps[self._check(slot)]
        return memoryview(mapping)[slot.offset : slot.offset + slot.nbytes]

    def _check(self, slot: SlotRef) -> int:
        if not 0 <= slot.extent < len(self._addresses):
            raise ProtocolError(f"{slot} is in an extent that is not mapped")
        end = slot.offset + slot.nbytes
        if min(slot.offset, slot.nbytes) < 0 or end > len(self._maps[slot.extent]):
            raise ProtocolError(f"{slot} reaches beyond its extent")
        return slot.extent

    def close(self) -> None:
        """Unmap the memory, then tell the owner by ending the connection. No copy may run."""
        self._closing.set()
        with self._held:
            self._held.notify_all()
        if self._connection is not None:
            # Wakes the helper thread; the owner does not see this.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)
        self._thread.join()
        if not self._unmap():
            logger.warning("pool memory stays mapped: a view of it is still in use")
        elif self._wanted >= 0:
            os.close(self._wanted)
            self._wanted = -1

    # ---- the helper thread ----------------------------------------------------------------------

    def _run(self) -> None:
        delay = _MIN_RETRY_SECONDS
        try:
            while not self._closing.is_set():
                try:
                    self._live()
                    delay = _MIN_RETRY_SECONDS
                except (OSError, RuntimeError, ProtocolError) as error:
                    # That nobody is there, or does not know us yet, happens at every start.
                    if not isinstance(error, ConnectionError | FileNotFoundError):
                        self._report(error)
                    delay = min(2 * delay, _MAX_RETRY_SECONDS)
                self._closing.wait(delay)
        except Exception:
            logger.exception("the attachment to the pool at %s has ended", self.path)

    def _report(self, error: Exception) -> None:
        text = f"attaching to the pool at {self.path} failed: {error}"
        warn_every(logger, "attach", 60.0, text)

    def _live(self) -> None:
        """One life of the pool, from its welcome to its last unmapped extent."""
        connection = self._connection = sockets.connect(self.path, _CONNECT_SECONDS)
        connection.settimeout(None)
        try:
            if not self._closing.is_set():
                self._attach(connection)
                self._watch(connection)
        except (OSError, RuntimeError, ProtocolError) as error:
            if not self._maps:
                raise
            # What is mapped may be in use; slots elsewhere are refused.
            self._report(error)
            self._watch(connection, self._partial_seconds)
            self._partial_seconds = min(2 * self._partial_seconds, _MAX_PARTIAL_SECONDS)
        finally:
            self._attached.clear()
            with self._held:
                self.incarnation = None
                self._held.wait_for(lambda: not self._num_held or self._closing.is_set())
            while not self._closing.is_set() and not self._unmap():
                self._closing.wait(_UNMAP_RETRY_SECONDS)

    def _attach(self, connection: socket.socket) -> None:
        welcome = _say_hello(connection, self._rank, self.instance)
        with self._held:
            self.incarnation = welcome.incarnation
        self._num_wanted = 1
        for index in range(welcome.num_extents):
            offer, fd = _receive(connection)
            try:
                if not isinstance(offer, protocol.ExtentOffer) or offer.extent != index:
                    raise ProtocolError(f"expected extent {index}, got {offer}")
                self._map(fd, offer.nbytes)
            finally:
                if fd is not None:
                    os.close(fd)
            connection.send(protocol.encode(protocol.ExtentMapped(index)))
        self._partial_seconds = _MIN_PARTIAL_SECONDS
        self._attached.set()

    def _map(self, fd: int | None, nbytes: int) -> None:
        if fd is None:
            raise ProtocolError("an extent came without its memory")
        size = os.fstat(fd).st_size
        if nbytes <= 0 or nbytes % SLOT_ALIGNMENT or size != nbytes:
            raise ProtocolError(f"an extent of {nbytes} bytes came as a file of {size} bytes")
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._register_extent(address, nbytes)
        self._maps.append(mapping)
        # Last: it is what makes the extent count as mapped.
        self._addresses.append(address)

    def _watch(self, connection: socket.socket, seconds: float | None = None) -> None:
        """Touch extents ahead of their use, until the owner or ``close`` ends the connection, or
        for some seconds."""
        deadline = time.monotonic() + (seconds or 0.0)
        untouched = list(enumerate(self._addresses)) if self._touch_ahead else []
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(self._wanted, select.POLLIN)
        while True:
            while untouched and untouched[0][0] < self._num_wanted:
                index, address = untouched.pop(0)
                if not prefault(address, len(self._maps[index]), self._closing):
                    untouched.clear()
            ready = poller.poll(seconds and max(0.0, deadline - time.monotonic()) * 1000)
            if not ready or any(fd != self._wanted for fd, _ in ready):
                return
            os.eventfd_read(self._wanted)

    def _unmap(self) -> bool:
        """Give the memory back, then the connection up; False while a view is left."""
        for address in self._addresses:
            self._unregister_extent(address)
        self._addresses.clear()
        try:
            while self._maps:
                self._maps[-1].close()
                del self._maps[-1]
        except BufferError:
            return False
        if self._connection is not None:
            self._connection.close()
        return True


def open_control(path: Path, timeout: float) -> tuple[socket.socket, protocol.Welcome]:
    """A connection to the memory socket at ``path`` that brings a token.

    Raises:
        OSError: nobody is there, or no answer within ``timeout`` seconds.
        ProtocolError: refused, or the answer cannot be understood.
    """
    connection = sockets.connect(path, timeout)
    try:
        return connection, _say_hello(connection, None, "")
    except (OSError, ProtocolError):
        connection.close()
        raise


def _say_hello(connection: socket.socket, rank: int | None, instance: str) -> protocol.Welcome:
    hello = protocol.Hello(protocol.PROTOCOL_VERSION, rank, instance)
    connection.send(protocol.encode(hello))
    welcome, _ = _receive(connection)
    if not isinstance(welcome, protocol.Welcome):
        raise ProtocolError(f"expected a welcome, got {welcome}")
    return welcome


def _receive(connection: socket.socket) -> tuple[protocol.OwnerFrame, int | None]:
    """One frame, and the descriptor that came with it."""
    data, fds, flags, _ = socket.recv_fds(connection, protocol.MAX_FRAME_BYTES, 1)
    try:
        if not data:
            raise ConnectionResetError("the service has ended the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("a packet was cut: too long, or no descriptor is free here")
        frame = protocol.decode_owner_frame(data)
        if isinstance(frame, protocol.Refused):
            raise (ConnectionRefusedError if frame.retry else ProtocolError)(frame.reason)
    except (OSError, ProtocolError):
        for fd in fds:
            os.close(fd)
        raise
    return frame, fds[0] if fds else None
