"""Places in buffers. Imports nothing: it is used where there is only torch."""

from __future__ import annotations

from collections import deque

# Pages start at multiples of this in a stored object, so that kernels move 16-byte words.
PAGE_ALIGNMENT = 16


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


class StagingRing:
    """Hands out contiguous parts of ``capacity`` bytes and takes them back oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._parts: deque[tuple[int, int]] = deque()  # [start, end), oldest first

    def take(self, nbytes: int) -> int | None:
        """Offset of ``nbytes`` free bytes; None, and nothing changed, when there is no room."""
        assert nbytes > 0
        start = self.find(nbytes)
        if start is not None:
            self._parts.append((start, start + nbytes))
        return start

    def find(self, nbytes: int) -> int | None:
        """What ``take`` would give."""
        if not self._parts:
            return 0 if nbytes <= self.capacity else None
        oldest, end = self._parts[0][0], self._parts[-1][1]
        if end <= oldest:  # wrapped: free is what lies between
            return end if nbytes <= oldest - end else None
        if nbytes <= self.capacity - end:
            return end
        return 0 if nbytes <= oldest else None

    def release_oldest(self) -> None:
        """Take back the part that was handed out first."""
        self._parts.popleft()
