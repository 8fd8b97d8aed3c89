"""Copies of rows that wait until they are stored: the engine goes on with its own buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_connector.buffers import StagingRing, align_up

_ALIGNMENT = 128  # A line of a device's caches, and of any dtype.


class RowStaging:
    """A buffer of ``capacity`` bytes on one device, taken once: what a model is served with
    shrinks by no more.

    ``stream``: for copies from here, beside the model; None on the CPU. ``ring``: what was ``put``
    first is its oldest part. Callers take turns.

    Raises:
        RuntimeError: there is no such memory.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        # Written to in and out of inference mode: it must not be an inference tensor.
        with torch.inference_mode(False):
            self._memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.ring = StagingRing(capacity)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def has_room(self, rows: Sequence[torch.Tensor]) -> bool:
        """Whether there is room for them when nothing else is here."""
        return sum(map(_size, rows)) <= self.ring.capacity

    def put(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Copies, made in the order of the current stream, for which ``stream`` waits; None when
        what is here leaves no room."""
        num_bytes = sum(map(_size, rows))
        start = self.ring.find(num_bytes)
        if start is None:
            return None
        copies = []
        for each in rows:
            part = self._memory[start : start + each.nbytes].view(each.dtype).view(each.shape)
            copies.append(part.copy_(each))
            start += _size(each)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.ring.take(num_bytes)
        return copies

    def wait(self) -> None:
        """Until nothing runs on ``stream``, nor what it waits for: the next to ``put`` may do so
        on another stream."""
        if self.stream is not None:
            self.stream.synchronize()


def _size(rows: torch.Tensor) -> int:
    return align_up(rows.nbytes, _ALIGNMENT)
