"""Ahead-of-time compilation for every supported target, without a device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lmcache_connector.triton_kernels import paged_copy  # noqa: E402

TABLES = ["run_addresses", "block_ids", "slot_addresses"]
SCALARS = ["num_runs", "block_stride", "run_bytes", "run_pitch", "num_tiles"]
CUDA = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]
HIP = GPUTarget("hip", "gfx942", 64)

WIDE_PTX = r"{}\.global\S*\.(v2\.[bu]64|v4\.[bu]32|b128)"
WIDE_GCN = r"global_{}_dwordx4"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernel(target: GPUTarget, word_bytes: int, *, to_slots: bool) -> str:
    """Assembly of the kernel with nothing known about its arguments, as it is launched."""
    constants = paged_copy.kernel_constants(word_bytes, to_slots=to_slots)
    signature = dict.fromkeys(TABLES, "*i64") | dict.fromkeys(SCALARS, "i64")
    source = ASTSource(
        paged_copy.copy_runs_kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
    )
    options = {"num_warps": paged_copy.NUM_WARPS, "enable_fp_fusion": False}
    asm = triton.compile(source, target=target, options=options).asm
    return asm["ptx"] if target.backend == "cuda" else asm["amdgcn"]


@pytest.mark.parametrize("to_slots", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("target", [*CUDA, HIP], ids=lambda target: str(target.arch))
def test_16_byte_words_are_single_accesses(target: GPUTarget, to_slots: bool) -> None:
    code = compile_kernel(target, 16, to_slots=to_slots)
    if target.backend == "cuda":
        wide, load, store = WIDE_PTX, "ld", "st"
        stores = re.findall(r"st\.global\S*", code)
    else:
        wide, load, store = WIDE_GCN, "load", "store"
        stores = re.findall(r"global_store_\w+", code)
    assert re.search(wide.format(load), code)
    # Every store moves a whole word: no scalar remainder.
    assert stores
    assert all(re.fullmatch(wide.format(store), name) for name in stores)


@pytest.mark.parametrize("target", [CUDA[0], HIP], ids=lambda target: str(target.arch))
@pytest.mark.parametrize("word_bytes", [8, 4, 2, 1])
def test_narrow_words_are_never_joined(word_bytes: int, target: GPUTarget) -> None:
    code = compile_kernel(target, word_bytes, to_slots=True)
    if target.backend == "cuda":
        stores = set(re.findall(r"st\.global\S*", code))
        assert stores
        assert all(re.search(rf"\.[bu]{8 * word_bytes}$", name) for name in stores)
        assert not any(".v" in name for name in stores)
    else:
        name = {8: "dwordx2", 4: "dword", 2: "short", 1: "byte"}[word_bytes]
        assert set(re.findall(r"global_store_\w+", code)) == {f"global_store_{name}"}
