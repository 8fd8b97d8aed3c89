"""Copies between paged tensors and contiguous memory: kernels, and what does the same on the CPU.

Importable as ``lmcache_connector.triton_kernels`` only. vLLM probes for a top-level module named
``triton_kernels`` (OpenAI's MoE kernels); this package must never be taken for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ == "triton_kernels":
    raise ImportError(
        "this is lmcache_connector.triton_kernels, not OpenAI's triton_kernels package; "
        "import it by its full name"
    )

if TYPE_CHECKING:
    import torch


def gather_rows(source: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    """``reference.gather_rows`` where ``source`` is: on the current stream of a device, or on the
    CPU. On a device, ``out`` may lie in pinned memory, and slots are not checked."""
    _rows_on(source.device).gather_rows(source, slots, out)


def gather_span(source: torch.Tensor, first: int, count: int, out: torch.Tensor) -> None:
    """``reference.gather_span`` where ``source`` is, as ``gather_rows``."""
    _rows_on(source.device).gather_span(source, first, count, out)


def scatter_rows(rows: torch.Tensor, slots: torch.Tensor, destination: torch.Tensor) -> None:
    """``reference.scatter_rows`` where ``destination`` is; ``rows`` as ``out`` of
    ``gather_rows``."""
    _rows_on(destination.device).scatter_rows(rows, slots, destination)


def _rows_on(device: torch.device) -> Any:
    # Imported late: importing the package loads no torch, and without a device there may be no
    # Triton.
    if device.type == "cpu":
        from lmcache_connector.triton_kernels import reference

        return reference
    from lmcache_connector.triton_kernels import hidden_rows

    return hidden_rows
