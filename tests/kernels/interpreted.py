"""The kernels under Triton's interpreter, against the CPU copies.

Not collected by itself: the interpreter is chosen before kernels are decorated, for a whole
process. ``test_interpreted.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from lmcache_connector.triton_kernels import paged_copy, reference

NUM_RUNS, POOL_BLOCKS = 3, 9
BLOCK_IDS = np.array([7, 0, -1, 3, 8, 1], np.int64)

STRIDED = torch.full((4,), -1, dtype=torch.int64)[::2]

# run bytes, bytes between pages, shift of all addresses, word
CASES = [
    (1, 0, 0, 1),
    (2, 0, 0, 2),
    (3, 1, 0, 1),
    (7, 0, 0, 1),
    (24, 0, 0, 8),
    (36, 0, 0, 4),
    (528, 0, 0, 16),
    (528, 16, 8, 8),
    (528, 4, 4, 4),
    (528, 16, 2, 2),
    (528, 0, 1, 1),
    (132 * 64, 0, 0, 16),
    (4096, 0, 0, 16),
    (8192, 32, 0, 16),
    (8192 + 16, 0, 0, 16),
    (20_000, 0, 0, 16),
    (8191, 1, 0, 1),
]


def arguments(
    memory: np.ndarray, run_bytes: int, gap: int, shift: int
) -> tuple[np.ndarray, int, int, np.ndarray, np.ndarray, int]:
    stride, pitch = run_bytes + gap, -(-run_bytes // 16) * 16
    base = -(-memory.ctypes.data // 16) * 16 + shift
    pool_bytes = -(-POOL_BLOCKS * stride // 16) * 16 + 512
    runs = base + np.arange(NUM_RUNS) * pool_bytes
    slots = base + NUM_RUNS * pool_bytes
    order = np.array([4, 1, 0, 5, 2, 3])
    return runs, stride, run_bytes, BLOCK_IDS, slots + order * (NUM_RUNS * pitch + 32), pitch


def run_kernel(kernel, runs, stride, run_bytes, block_ids, slots, pitch) -> int:
    word_bytes = paged_copy.word_bytes_of(runs, stride, run_bytes, slots, pitch)
    tables = [torch.from_numpy(array) for array in (runs, block_ids, slots)]
    kernel(tables[0], stride, run_bytes, tables[1], tables[2], pitch, word_bytes=word_bytes)
    return word_bytes


@pytest.mark.parametrize(("run_bytes", "gap", "shift", "word_bytes"), CASES)
@pytest.mark.parametrize("name", ["gather_pages", "scatter_pages"])
def test_copies_as_the_reference_does(
    name: str, run_bytes: int, gap: int, shift: int, word_bytes: int
) -> None:
    total = 2 * NUM_RUNS * POOL_BLOCKS * (run_bytes + gap + 64) + 8192
    before = np.random.default_rng(run_bytes).integers(0, 256, total, dtype=np.uint8)
    memory = before.copy()
    call = arguments(memory, run_bytes, gap, shift)
    getattr(reference, name)(*call)
    expected = memory.copy()
    memory[:] = before
    assert run_kernel(getattr(paged_copy, name), *call) == word_bytes
    assert np.array_equal(memory, expected)
    assert not np.array_equal(memory, before)


def test_strides_beyond_32_bits() -> None:
    stride = (1 << 31) + 4096
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: little is touched
    with mmap.mmap(-1, 2 * stride, flags=flags) as far:
        pages = np.frombuffer(far, np.uint8)
        pages[:48], pages[stride : stride + 48] = 1, 2
        slots = np.zeros(96, np.uint8)
        call = (
            np.array([pages.ctypes.data]),
            stride,
            48,
            np.array([1, 0]),
            slots.ctypes.data + np.array([0, 48]),
            48,
        )
        run_kernel(paged_copy.gather_pages, *call)
        assert slots.tolist() == [2] * 48 + [1] * 48
        slots[:] = 3
        run_kernel(paged_copy.scatter_pages, *call)
        assert pages[:48].tolist() == pages[stride : stride + 48].tolist() == [3] * 48
        del pages


def test_nothing_to_copy() -> None:
    empty, one = torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    paged_copy.gather_pages(one, 16, 16, empty, empty, 16, word_bytes=16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_bytes": 24},
        {"block_stride": 8},
        {"run_pitch": 40},
        {"run_pitch": 16},
        {"word_bytes": 32},
        {"block_ids": torch.zeros(2, dtype=torch.int64)},
        {"block_ids": torch.zeros(1, dtype=torch.int32)},
        {"run_addresses": torch.zeros((1, 1), dtype=torch.int64)},
        {"slot_addresses": STRIDED, "block_ids": STRIDED.contiguous()},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_launchers_refuse_what_the_kernel_does_not_check(wrong: dict[str, object]) -> None:
    table = torch.full((1,), -1, dtype=torch.int64)
    right = {
        "run_addresses": table,
        "block_stride": 32,
        "run_bytes": 32,
        "block_ids": table,
        "slot_addresses": table,
        "run_pitch": 32,
        "word_bytes": 16,
    }
    paged_copy.gather_pages(**right)
    with pytest.raises(AssertionError):
        paged_copy.gather_pages(**(right | wrong))
