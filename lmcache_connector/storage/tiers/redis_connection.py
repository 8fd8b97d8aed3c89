"""A connection of redis-py that keeps a deadline and moves values without copying them.

redis-py bounds single reads, not calls: in a cluster it tries each command of a pipeline anew when
a node falls silent. It would copy a value some five times, and hold the GIL meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import redis


class _Call(threading.local):
    """The call that a thread is in: nothing waits past its deadline."""

    deadline = 0.0

    def time_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


call = _Call()


class _Socket:
    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        # A timeout of 0 is redis-py's way to ask what has come already.
        if name in ("recv", "recv_into", "sendall") and self._wrapped.gettimeout() != 0:
            self._wrapped.settimeout(call.time_left())
        return getattr(self._wrapped, name)


class Connection(redis.Connection):
    """SET takes buffers for a value, GET buffers as an option; its reply is: were they filled."""

    _sock: Any
    _awaited: Sequence[memoryview] | None = None

    def _connect(self) -> Any:
        self.socket_connect_timeout = self.socket_timeout = call.time_left()
        return _Socket(super()._connect())

    def send_command(self, *args: Any, **kwargs: Any) -> None:
        self._awaited = None
        if args[0] == "SET":
            _, key, buffers, *rest = args
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (len(args), len(key), key)
            head += b"$%d\r\n" % sum(map(len, buffers))
            tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in rest)
            self.send_packed_command([head, *buffers, tail])
        elif args[0] == "GET":
            super().send_command(*args[:2], **kwargs)
            self._awaited = args[2]
        else:
            super().send_command(*args, **kwargs)

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        buffers, self._awaited = self._awaited, None
        if buffers is None:
            return super().read_response(*args, **kwargs)
        try:
            return self._fill(buffers)
        except (OSError, ValueError) as error:
            self.disconnect()
            kind = redis.TimeoutError if isinstance(error, TimeoutError) else redis.ConnectionError
            raise kind(str(error)) from error

    def _fill(self, buffers: Sequence[memoryview]) -> bool:
        line = self._line()
        if line.startswith(b"-"):
            raise self._parser.parse_error(line[1:-2].decode())
        length = int(line[1:] if line.startswith(b"$") else "no length")
        if length != sum(map(len, buffers)):
            if length >= 0:
                self.disconnect()  # cheaper than to read a value of no use
            return False
        for buffer in buffers:
            while buffer:
                count = self._sock.recv_into(buffer)
                if not count:
                    raise ConnectionResetError("closed by the server")
                buffer = buffer[count:]
        if self._line() != b"\r\n":
            raise ValueError("not a reply of Redis")
        return True

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self._sock.recv(1)
            if not byte or len(line) > 1000:
                raise ValueError("not a reply of Redis")
            line += byte
        return line


class TlsConnection(Connection, redis.SSLConnection):
    """The same over TLS."""
