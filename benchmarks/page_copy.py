"""CPU gather and scatter of permuted pages against one big memcpy of the same bytes.

    python benchmarks/page_copy.py

One thread. For each page size the three copies take turns in one run; the figures are medians,
the ratios are to the memcpy of the same rounds.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from lmcache_connector.triton_kernels import reference

TOTAL_BYTES = 192 << 20
NUM_RUNS = 4  # layers
ROUNDS = 9
PAGE_BYTES = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20]


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def median_seconds(copies: dict[str, Callable[[], None]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(ROUNDS):
        for name, copy in copies.items():
            begin = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(page_bytes: int, pages: np.ndarray, slots: np.ndarray) -> dict[str, float]:
    """Seconds of memcpy, gather and scatter of all of ``pages``; checks what was copied."""
    num_blocks = TOTAL_BYTES // NUM_RUNS // page_bytes
    block_ids = np.random.default_rng(page_bytes).permutation(num_blocks)
    runs = pages.ctypes.data + np.arange(NUM_RUNS) * (TOTAL_BYTES // NUM_RUNS)
    slot_addresses = slots.ctypes.data + np.arange(num_blocks) * NUM_RUNS * page_bytes
    arguments = (runs, page_bytes, page_bytes, block_ids, slot_addresses, page_bytes)
    seconds = median_seconds(
        {
            "memcpy": lambda: np.copyto(slots, pages),
            "gather": lambda: reference.gather_pages(*arguments),
            "scatter": lambda: reference.scatter_pages(*arguments),
        }
    )
    by_block = pages.reshape(NUM_RUNS, num_blocks, page_bytes).swapaxes(0, 1)[block_ids]
    assert np.array_equal(slots.reshape(by_block.shape), by_block)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    pages = np.random.default_rng(0).integers(0, 256, TOTAL_BYTES, dtype=np.uint8)
    slots = np.ones(TOTAL_BYTES, np.uint8)
    print(f"{cpu_name()}, one thread, {TOTAL_BYTES >> 20} MiB in permuted pages, GB/s")
    print(f"{'page':>9} {'memcpy':>7} {'gather':>7} {'ratio':>6} {'scatter':>8} {'ratio':>6}")
    for page_bytes in PAGE_BYTES:
        seconds = measure(page_bytes, pages, slots)
        rate = {name: TOTAL_BYTES / value / 1e9 for name, value in seconds.items()}
        print(
            f"{page_bytes >> 10:>5} KiB {rate['memcpy']:>7.1f} {rate['gather']:>7.1f} "
            f"{rate['gather'] / rate['memcpy']:>6.2f} {rate['scatter']:>8.1f} "
            f"{rate['scatter'] / rate['memcpy']:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
