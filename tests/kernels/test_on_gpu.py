"""Kernels and DeviceCopier on a real device: what the simulated ones cannot show.

Needs torch, triton, NumPy and pytest only, and runs from a source checkout as well as installed.
"""

from __future__ import annotations

import importlib.util
import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed on this platform")
if not torch.cuda.is_available():
    pytest.skip("no CUDA or ROCm device", allow_module_level=True)


def _find_package() -> None:
    """Make the package importable where it is not installed."""
    root = Path(__file__).parents[2]
    if importlib.util.find_spec("lmcache_connector") is None:
        sys.path.append(str(root))
    name = "lmcache_connector.triton_kernels"
    if importlib.util.find_spec(name) is None:
        folder = root / "triton_kernels"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_find_package()

from lmcache_connector import triton_kernels  # noqa: E402
from lmcache_connector.hidden_states.staging import RowStaging  # noqa: E402
from lmcache_connector.triton_kernels import paged_copy, reference  # noqa: E402
from lmcache_connector.worker.device_copier import DeviceCopier  # noqa: E402
from lmcache_connector.worker.staging import PageJob  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
KIB, MIB = 1 << 10, 1 << 20


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    return torch.from_numpy(values)


# ---- kernels -----------------------------------------------------------------------------------

# run bytes, bytes between pages, shift of all addresses
LAYOUTS = [
    (1, 0, 0),
    (2, 0, 0),
    (7, 0, 0),
    (24, 0, 0),
    (528, 0, 0),
    (528, 16, 8),
    (528, 4, 4),
    (528, 16, 2),
    (528, 0, 1),
    (132 * 64, 0, 0),
    (4096, 0, 0),
    (8192, 32, 0),
    (8192 + 16, 0, 0),
    (100_000, 0, 0),
    (1 << 20, 1 << 12, 0),
]


@pytest.mark.parametrize("where", ["device", "pinned host"])
@pytest.mark.parametrize(("run_bytes", "gap", "shift"), LAYOUTS)
def test_kernels_copy_as_the_reference_does(
    run_bytes: int, gap: int, shift: int, where: str
) -> None:
    num_runs, pool_blocks, num_blocks = 3, 20, 12
    stride, pitch = run_bytes + gap, -(-run_bytes // 16) * 16 + 16
    rng = np.random.default_rng(run_bytes)
    block_ids = rng.permutation(pool_blocks)[:num_blocks]
    block_ids[3] = -1
    runs = shift + np.arange(num_runs) * (-(-pool_blocks * stride // 16) * 16 + 32)
    slots = shift + rng.permutation(num_blocks) * (num_runs * pitch + 48)
    pages_host = random_bytes(int(runs[-1]) + pool_blocks * stride + 64, 1)
    slots_host = random_bytes(int(slots.max()) + num_runs * pitch + 64, 2)
    for name in ("gather_pages", "scatter_pages"):
        pages = pages_host.to(DEVICE)
        memory = slots_host.to(DEVICE) if where == "device" else slots_host.pin_memory()
        tables = (pages.data_ptr() + runs, block_ids, memory.data_ptr() + slots)
        word_bytes = paged_copy.word_bytes_of(tables[0], stride, run_bytes, tables[2], pitch)
        on_device = [torch.from_numpy(table).to(DEVICE) for table in tables]
        getattr(paged_copy, name)(
            on_device[0],
            stride,
            run_bytes,
            on_device[1],
            on_device[2],
            pitch,
            word_bytes=word_bytes,
        )
        torch.cuda.synchronize()
        expected_pages, expected_slots = pages_host.clone(), slots_host.clone()
        getattr(reference, name)(
            expected_pages.data_ptr() + runs,
            stride,
            run_bytes,
            block_ids,
            expected_slots.data_ptr() + slots,
            pitch,
        )
        assert torch.equal(pages.cpu(), expected_pages)
        assert torch.equal(memory.cpu(), expected_slots)


def test_strides_beyond_32_bits() -> None:
    stride = (1 << 31) + 4096
    if torch.cuda.mem_get_info(DEVICE)[0] < 3 * stride:
        pytest.skip("needs 6 GiB of free device memory")
    pages = torch.empty(2 * stride, dtype=torch.uint8, device=DEVICE)
    pages[:48], pages[stride : stride + 48] = 1, 2
    slots = torch.zeros(96, dtype=torch.uint8, device=DEVICE)
    runs, ids, where = (
        torch.tensor(values, device=DEVICE)
        for values in ([pages.data_ptr()], [1, 0], [slots.data_ptr(), slots.data_ptr() + 48])
    )
    paged_copy.gather_pages(runs, stride, 48, ids, where, 48, word_bytes=16)
    assert slots.tolist() == [2] * 48 + [1] * 48
    slots.fill_(3)
    paged_copy.scatter_pages(runs, stride, 48, ids, where, 48, word_bytes=16)
    assert pages[:48].tolist() == pages[stride : stride + 48].tolist() == [3] * 48


# ---- rows of hidden states ---------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def check_rows(
    name: str, case, token_dtype: torch.dtype, row_dtype: torch.dtype, where: str
) -> None:
    tokens, rows = case.tokens(token_dtype), case.rows(row_dtype)
    slots = case.slots(unique=name == "scatter_rows")
    expected = (tokens.copy(), rows.copy())
    on_device = rows.copy(DEVICE) if where == "device" else rows.copy(pinned=True)
    now = (tokens.copy(DEVICE), on_device)
    case.call(reference, name, *expected, slots)
    case.call(triton_kernels, name, *now, slots.to(DEVICE))
    torch.cuda.synchronize()
    cast = token_dtype != row_dtype
    assert now[0].equals(expected[0], cast=cast)
    assert now[1].equals(expected[1], cast=cast)


@pytest.mark.parametrize("where", ["device", "pinned host"])
@pytest.mark.parametrize("name", ["gather_rows", "scatter_rows", "gather_span"])
def test_rows_are_copied_as_the_reference_does(row_case, name: str, where: str) -> None:
    row_case = row_case._replace(layout="flat") if name == "gather_span" else row_case
    check_rows(name, row_case, BF16, BF16, where)
    check_rows(name, row_case, F32, F32, where)
    check_rows(name, row_case._replace(num_rows=500), BF16, BF16, where)


@pytest.mark.parametrize("where", ["device", "pinned host"])
@pytest.mark.parametrize("token_dtype", [BF16, F16, F32])
@pytest.mark.parametrize("row_dtype", [BF16, F16, F32])
def test_rows_are_cast_as_the_reference_does(
    cast_case, token_dtype: torch.dtype, row_dtype: torch.dtype, where: str
) -> None:
    case = cast_case._replace(num_rows=500)  # 200,000 random numbers
    for name in ("gather_rows", "scatter_rows"):
        check_rows(name, case, token_dtype, row_dtype, where)


def test_rows_beyond_32_bits() -> None:
    far = (1 << 31) + 4096  # elements
    if torch.cuda.mem_get_info(DEVICE)[0] < 3 * far:
        pytest.skip("needs 6 GiB of free device memory")
    memory = torch.empty(far + 8, dtype=BF16, device=DEVICE)
    memory[:8], memory[far:] = 1, 2
    rows = torch.zeros(2, 8, dtype=BF16, device=DEVICE)
    slots = torch.tensor([1, 0], device=DEVICE)
    triton_kernels.gather_rows(memory.as_strided((2, 8), (far, 1)), slots, rows)
    assert rows.tolist() == [[2] * 8, [1] * 8]
    triton_kernels.scatter_rows(rows + 2, slots, memory.as_strided((2, 1, 8), (far, 8, 1)))
    assert memory[:8].tolist() == [3] * 8
    assert memory[far:].tolist() == [4] * 8


# ---- DeviceCopier ------------------------------------------------------------------------------


class Pool:
    """Shared memory as the pool's extents are: mapped, then registered."""

    def __init__(self, copier: DeviceCopier, nbytes: int) -> None:
        self.mapping = mmap.mmap(-1, nbytes)
        self.memory = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.base = self.memory.data_ptr()
        copier.register_extent(self.base, nbytes)


class Pages:
    """One tensor for each layer, [blocks, bytes of a page]."""

    def __init__(self, num_layers: int, pool_blocks: int, page_bytes: int) -> None:
        self.layers = [
            random_bytes(pool_blocks * page_bytes, seed).to(DEVICE).view(pool_blocks, page_bytes)
            for seed in range(num_layers)
        ]
        self.page_bytes = page_bytes
        self.pitch = -(-page_bytes // 16) * 16
        self.block_bytes = num_layers * self.pitch

    def job(self, block_ids: np.ndarray, first_slot: int) -> PageJob:
        return PageJob(
            run_addresses=np.array([layer.data_ptr() for layer in self.layers]),
            block_stride=self.page_bytes,
            run_bytes=self.page_bytes,
            run_pitch=self.pitch,
            block_ids=block_ids,
            slot_addresses=first_slot + np.arange(len(block_ids)) * self.block_bytes,
        )

    def in_slots(self, block_ids: np.ndarray) -> torch.Tensor:
        slots = torch.zeros(len(block_ids), len(self.layers), self.pitch, dtype=torch.uint8)
        for index, layer in enumerate(self.layers):
            slots[:, index, : self.page_bytes] = layer[torch.from_numpy(block_ids).to(DEVICE)].cpu()
        return slots.ravel()


# The last two: a store larger than the ring, a block larger than a load area.
@pytest.mark.parametrize(
    ("num_layers", "page_bytes", "num_blocks"),
    [
        (1, 16, 1),
        (5, 132, 40),
        (8, 16 * KIB, 24),
        (4, 656 * 64, 16),
        (16, 128 * KIB, 32),
        (6, 3 * MIB, 3),
    ],
)
def test_round_trip(num_layers: int, page_bytes: int, num_blocks: int) -> None:
    copier = DeviceCopier(DEVICE, 32 * MIB)
    pages = Pages(num_layers, num_blocks + 8, page_bytes)
    pool = Pool(copier, -(-(num_blocks * pages.block_bytes + 512) // 4096) * 4096)
    assert pool.memory.is_pinned()
    assert pool.memory[64:128].is_pinned()
    pool.memory.fill_(0xEE)
    block_ids = np.random.default_rng(0).permutation(num_blocks + 8)[:num_blocks]
    job = pages.job(block_ids, pool.base + 256)
    before = [layer.clone() for layer in pages.layers]

    ticket = copier.store([job])
    assert ticket is not None
    copier.wait(ticket)
    assert copier.done(ticket)
    content = pages.in_slots(block_ids)
    assert torch.equal(pool.memory[256 : 256 + len(content)], content)
    assert (pool.memory[:256] == 0xEE).all()
    assert (pool.memory[256 + len(content) :] == 0xEE).all()

    wanted = torch.from_numpy(block_ids).to(DEVICE)
    for layer in pages.layers:
        layer[wanted] = 0x11
    ticket = copier.load([job])
    copier.wait(ticket)
    assert all(torch.equal(now, then) for now, then in zip(pages.layers, before, strict=True))
    copier.close()
    assert not pool.memory.is_pinned()


def _long_kernel() -> None:
    torch.cuda._sleep(400_000_000)  # cycles: about a quarter of a second


def _warm_up(copier: DeviceCopier, pages: Pages, job: PageJob) -> None:
    """Do once what the test does: loading a kernel or pinning memory for a table for the first
    time would wait for the long kernel."""
    _long_kernel()
    for ticket in [copier.store([job]) for _ in range(3)] + [copier.load([job]) for _ in range(3)]:
        copier.wait(_issued(ticket))
    for layer in pages.layers:
        layer.fill_(0)
    torch.cuda.synchronize()
    assert copier.done(0)


def test_store_takes_what_a_running_kernel_leaves_and_not_what_comes_after() -> None:
    copier = DeviceCopier(DEVICE)
    pages = Pages(4, 32, 64 * KIB)
    pool = Pool(copier, 8 * MIB)
    job = pages.job(np.arange(16), pool.base)
    _warm_up(copier, pages, job)
    stream = torch.cuda.Stream(DEVICE)  # a model's stream need not be the default one
    with torch.cuda.stream(stream):
        _long_kernel()
        for index, layer in enumerate(pages.layers):
            layer.fill_(index + 1)
        ticket = copier.store([job])
        assert not copier.done(ticket)  # the call did not wait for the kernel
        for layer in pages.layers:
            layer.fill_(0xDD)
    copier.wait(ticket)
    slots = pool.memory[: 16 * pages.block_bytes].view(16, 4, 64 * KIB)
    for index in range(4):
        assert (slots[:, index] == index + 1).all()
    torch.cuda.synchronize()
    copier.close()


def test_staged_rows_are_those_of_a_running_kernel_and_not_what_comes_after() -> None:
    staging = RowStaging(DEVICE, 8 * MIB)
    rows = torch.zeros(1024, 1024, dtype=torch.bfloat16, device=DEVICE)
    found = []
    for turn in range(8):  # more than fits at once
        _long_kernel()
        rows.fill_(turn + 1)
        copies = staging.put([rows[:, :512], rows[::2]])
        rows.fill_(-1)
        with torch.cuda.stream(staging.stream):
            found.append([copy.cpu() for copy in copies])
        staging.ring.release_oldest()
    for turn, copies in enumerate(found):
        assert [copy.shape for copy in copies] == [(1024, 512), (512, 1024)]
        assert all((copy == turn + 1).all() for copy in copies)
    torch.cuda.synchronize()


def test_load_writes_after_a_running_kernel() -> None:
    copier = DeviceCopier(DEVICE)
    pages = Pages(4, 32, 64 * KIB)
    pool = Pool(copier, 8 * MIB)
    job = pages.job(np.arange(16), pool.base)
    _warm_up(copier, pages, job)
    pool.memory.fill_(7)
    _long_kernel()
    for layer in pages.layers:
        layer.fill_(0)
    ticket = copier.load([job])
    assert not copier.done(ticket)
    copier.wait(ticket)
    for layer in pages.layers:
        assert (layer[:16] == 7).all()
        assert (layer[16:] == 0).all()
    copier.close()


def test_a_full_ring_refuses_until_copies_end() -> None:
    copier = DeviceCopier(DEVICE, 8 * MIB)  # 4 MiB of ring
    pages = Pages(1, 4, MIB)
    pool = Pool(copier, 4 * MIB)
    job = pages.job(np.arange(1), pool.base)
    _warm_up(copier, pages, job)
    _long_kernel()
    tickets = [copier.store([job]) for _ in range(4)]
    assert None not in tickets[:3]
    assert tickets[3] is None
    torch.cuda.synchronize()
    assert copier.done(tickets[0])
    assert copier.store([job]) is not None
    copier.close()


def test_a_registration_that_fails_names_the_cause() -> None:
    copier = DeviceCopier(DEVICE, MIB)
    pool = Pool(copier, MIB)
    # On a thread of its own, as the pool does it: CUDA keeps the error for the thread's next call.
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(copier.register_extent, pool.base, MIB)
        assert isinstance(again.exception(), OSError)
        assert "pin" in str(again.exception())
    copier.close()


# ---- figures -----------------------------------------------------------------------------------


def _gpu_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median of ``rounds``, after one to warm up, on the current stream's clock."""
    work()
    seconds = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return sorted(seconds)[rounds // 2]


def _wall_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[rounds // 2]


def test_print_speed(capsys: pytest.CaptureFixture[str]) -> None:
    total, num_layers = 256 * MIB, 32
    if torch.cuda.mem_get_info(DEVICE)[0] < 4 * total:
        pytest.skip("needs 1 GiB of free device memory")
    copier = DeviceCopier(DEVICE)
    pool = Pool(copier, total)
    device_slots = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    host_slots = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    to_host = total / _gpu_seconds(lambda: pool.memory.copy_(device_slots, non_blocking=True)) / 1e9
    to_device = (
        total / _gpu_seconds(lambda: device_slots.copy_(pool.memory, non_blocking=True)) / 1e9
    )
    lines = [
        f"{torch.cuda.get_device_name(DEVICE)}: {total // MIB} MiB in permuted pages of "
        f"{num_layers} layers, GB/s",
        f"cudaMemcpyAsync of the same bytes: {to_host:.1f} to the host, {to_device:.1f} from it",
        "kernel: pages <-> slots in device memory, and in pinned host memory; copier: store and "
        "load, from the call to the end (wall clock)",
        f"{'page':>9} {'gather':>7} {'scatter':>8} {'to host':>8} {'from host':>10} "
        f"{'store':>7} {'ratio':>6} {'load':>7} {'ratio':>6}",
    ]
    for page_bytes in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB):
        num_blocks = total // num_layers // page_bytes
        pages = Pages(num_layers, num_blocks, page_bytes)
        block_ids = np.random.default_rng(page_bytes).permutation(num_blocks)
        job = pages.job(block_ids, pool.base)
        rates = []
        for base in (device_slots.data_ptr(), host_slots.data_ptr()):
            tables = [
                torch.from_numpy(table).to(DEVICE)
                for table in (
                    job.run_addresses,
                    block_ids,
                    base + np.arange(num_blocks) * pages.block_bytes,
                )
            ]
            for kernel in (paged_copy.gather_pages, paged_copy.scatter_pages):
                seconds = _gpu_seconds(
                    lambda kernel=kernel, tables=tables, size=page_bytes: kernel(
                        tables[0], size, size, tables[1], tables[2], size, word_bytes=16
                    )
                )
                rates.append(total / seconds / 1e9)
        content = pages.in_slots(block_ids)
        pool.memory.zero_()
        seconds = _wall_seconds(lambda job=job: copier.wait(_issued(copier.store([job]))))
        store = total / seconds / 1e9
        assert torch.equal(pool.memory, content)
        seconds = _wall_seconds(lambda job=job: copier.wait(copier.load([job])))
        load = total / seconds / 1e9
        lines.append(
            f"{page_bytes // KIB:>5} KiB {rates[0]:>7.0f} {rates[1]:>8.0f} {rates[2]:>8.1f} "
            f"{rates[3]:>10.1f} {store:>7.1f} {store / to_host:>6.2f} {load:>7.1f} "
            f"{load / to_device:>6.2f}"
        )
    copier.close()
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_print_speed_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    hidden, block_size, total = 2048, 16, 256 * MIB
    if torch.cuda.mem_get_info(DEVICE)[0] < 8 * total:
        pytest.skip("needs 2 GiB of free device memory")
    plain = torch.empty(2, total, dtype=torch.uint8, device=DEVICE)
    seconds = _gpu_seconds(lambda: plain[0].copy_(plain[1]))
    lines = [
        f"rows of {hidden} bfloat16, {total // MIB} MiB in permuted slots of {block_size}-token "
        f"pages, GB/s of them; a plain copy on the device: {total / seconds / 1e9:.0f}",
        f"{'taps':>5} {'gather':>7} {'indexed':>8} {'to float32':>11} {'scatter':>8} "
        f"{'to host':>8} {'from host':>10}",
    ]
    for taps in (1, 4):
        num_tokens = total // (taps * hidden * 2)
        pages = torch.randn(num_tokens // block_size, taps, block_size, hidden, device=DEVICE)
        pages = pages.to(BF16)
        tokens = pages.transpose(1, 2)
        slots = torch.randperm(num_tokens, device=DEVICE)
        rows = torch.empty(num_tokens, taps, hidden, dtype=BF16, device=DEVICE)
        wide, host = rows.float(), torch.empty(rows.shape, dtype=BF16, pin_memory=True)
        at = (slots // block_size, slots % block_size)
        works = (
            partial(triton_kernels.gather_rows, tokens, slots, rows),
            partial(tokens.__getitem__, at),
            partial(triton_kernels.gather_rows, tokens, slots, wide),
            partial(triton_kernels.scatter_rows, rows, slots, tokens),
            partial(triton_kernels.gather_rows, tokens, slots, host),
            partial(triton_kernels.scatter_rows, host, slots, tokens),
        )
        rates = [total / _gpu_seconds(work) / 1e9 for work in works]
        assert torch.equal(rows, tokens[at])
        assert torch.equal(wide, rows.float())
        assert torch.equal(host, rows.cpu())
        lines.append(
            f"{taps:>5} {rates[0]:>7.0f} {rates[1]:>8.0f} {rates[2]:>11.0f} {rates[3]:>8.0f} "
            f"{rates[4]:>8.1f} {rates[5]:>10.1f}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def _issued(ticket: int | None) -> int:
    assert ticket is not None
    return ticket
