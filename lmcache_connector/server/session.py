"""``Session``: one control connection to a server, and requests with its token."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import zmq

from lmcache_connector.errors import ConnectorError
from lmcache_connector.log import init_logger, warn_every
from lmcache_connector.server import messages, sockets
from lmcache_connector.server.client import open_control

logger = init_logger(__name__)

# What the making of a session and its calls raise when the server is absent, silent, ended, or
# cannot be understood.
LOST = (OSError, zmq.ZMQError, ConnectorError)


class RefusedError(ConnectorError):
    """The answer is an error. ``renew``: the server does not know the session any more."""

    def __init__(self, text: str, *, renew: bool = False) -> None:
        super().__init__(text)
        self.renew = renew


class Session:
    """For one thread at a time, but ``wait_lost``. Raises one of LOST."""

    def __init__(self, endpoint: Path, timeout: float) -> None:
        self._control, welcome = open_control(sockets.memory_path(endpoint), timeout)
        self._control.settimeout(None)
        self.incarnation = welcome.incarnation
        self._token = welcome.token
        self._calls = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(1 << 16)
        self._socket.connect(f"ipc://{endpoint}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._control.fileno(), zmq.POLLIN)

    def call(self, message: messages.Message, timeout: float) -> Any:
        """What the message is answered with (messages.py), or RefusedError, or one of LOST."""
        deadline = time.monotonic() + timeout
        self.tell(message)
        while (left := deadline - time.monotonic()) > 0:
            ready = self._poller.poll(int(left * 1000) + 1)
            if (reply := self._receive()) is not None:
                if reply.call == self._calls:
                    if reply.error is not None:
                        raise RefusedError(reply.error, renew=reply.renew)
                    return messages.decode_result(message, reply)
            elif ready:
                raise ConnectionResetError("it has ended the connection")
        raise TimeoutError(f"no answer within {timeout:g} s")

    def tell(self, message: messages.Message) -> None:
        """Send a message without waiting for its answer."""
        while self._receive() is not None:
            pass  # of earlier ones: what is not read is in the way of what comes
        self._calls += 1
        data = messages.encode_request(self._token, self._calls, message)
        if len(data) > messages.MAX_MESSAGE_BYTES:
            raise RefusedError(f"a message of {len(data)} bytes is too long")
        self._socket.send(data, zmq.NOBLOCK)

    def _receive(self) -> messages.Reply | None:
        """The next reply, if there is one."""
        try:
            reply = messages.decode_reply(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if reply.error is not None and reply.call != self._calls:
            warn_every(logger, "error", 60.0, "the cache server's answer: %s", reply.error)
        return reply

    def wait_lost(self) -> None:
        """Return when the server has ended the connection, or ``close`` was called."""
        with contextlib.suppress(OSError):
            self._control.recv(1)

    def close(self) -> None:
        """End it; a thread in ``wait_lost`` returns."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
