"""Ahead-of-time compilation for every supported target, without a device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lmcache_connector.triton_kernels import hidden_rows, paged_copy  # noqa: E402

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


# ---- rows of hidden states ---------------------------------------------------------------------

ROW_SCALARS = [
    *("first", "block_size", "hidden"),
    *("block_stride", "token_stride", "tap_stride", "row_stride", "row_tap_stride"),
]
ELEMENT_BYTES = {"i16": 2, "i32": 4, "bf16": 2, "fp16": 2, "fp32": 4}


def compile_rows(
    target: GPUTarget, tokens: str, rows: str, *, wide: bool, to_rows: bool, span: bool = False
) -> str:
    """Assembly of the kernel as ``hidden_rows`` launches it, for dtypes of tokens and rows."""
    sizes = (ELEMENT_BYTES[tokens], ELEMENT_BYTES[rows])
    width = 16 // min(sizes) if wide else 1
    constants = hidden_rows.kernel_constants(width, 2048, max(sizes), to_rows=to_rows)
    if span:
        constants["slots"] = None
    signature = {"tokens": f"*{tokens}", "rows": f"*{rows}", "slots": "*i64"}
    signature |= dict.fromkeys(ROW_SCALARS, "i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(hidden_rows.copy_rows_kernel, signature=signature, constexprs=constants)
    options = {"num_warps": hidden_rows.NUM_WARPS, "enable_fp_fusion": False}
    asm = triton.compile(source, target=target, options=options).asm
    return asm["ptx"] if target.backend == "cuda" else asm["amdgcn"]


def row_accesses(target: GPUTarget, code: str) -> tuple[set[str], set[str]]:
    """Loads and stores of global memory, but for the load of the slot."""
    if target.backend == "cuda":
        loads = re.findall(r"ld\.global\S*", code)
        assert loads.count("ld.global.b64") <= 1
        return set(loads) - {"ld.global.b64"}, set(re.findall(r"st\.global\S*", code))
    return set(re.findall(r"global_load_\w+", code)), set(re.findall(r"global_store_\w+", code))


@pytest.mark.parametrize("to_rows", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize(
    ("tokens", "rows"), [("i16", "i16"), ("i32", "i32"), ("bf16", "fp32"), ("fp16", "bf16")]
)
@pytest.mark.parametrize("target", [*CUDA, HIP], ids=lambda target: str(target.arch))
def test_rows_move_in_16_byte_words(
    target: GPUTarget, tokens: str, rows: str, to_rows: bool
) -> None:
    code = compile_rows(target, tokens, rows, wide=True, to_rows=to_rows)
    loads, stores = row_accesses(target, code)
    assert loads
    assert stores
    wide = WIDE_PTX if target.backend == "cuda" else WIDE_GCN
    load, store = ("ld", "st") if target.backend == "cuda" else ("load", "store")
    assert all(re.fullmatch(wide.format(load), name) for name in loads)
    assert all(re.fullmatch(wide.format(store), name) for name in stores)


@pytest.mark.parametrize("to_rows", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize(("tokens", "rows"), [("i16", "i16"), ("bf16", "fp32")])
@pytest.mark.parametrize("target", [CUDA[0], HIP], ids=lambda target: str(target.arch))
def test_elements_of_unaligned_rows_are_never_joined(
    target: GPUTarget, tokens: str, rows: str, to_rows: bool
) -> None:
    code = compile_rows(target, tokens, rows, wide=False, to_rows=to_rows)
    loads, stores = row_accesses(target, code)
    source, out = (tokens, rows) if to_rows else (rows, tokens)
    if target.backend == "cuda":
        assert loads == {f"ld.global.b{8 * ELEMENT_BYTES[source]}"}
        assert stores == {f"st.global.b{8 * ELEMENT_BYTES[out]}"}
    else:
        assert loads == {"global_load_" + {2: "ushort", 4: "dword"}[ELEMENT_BYTES[source]]}
        assert stores == {"global_store_" + {2: "short", 4: "dword"}[ELEMENT_BYTES[out]]}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("target", CUDA, ids=lambda target: str(target.arch))
def test_casts_round_to_nearest_even(target: GPUTarget, dtype: str) -> None:
    code = compile_rows(target, "fp32", dtype, wide=True, to_rows=True)
    narrow = dtype.replace("fp", "f")
    casts = set(re.findall(r"cvt\.\S*f16\S*", code))
    assert casts
    assert all(re.fullmatch(rf"cvt\.rn\.{narrow}(x2)?\.f32", name) for name in casts)


def test_all_lengths_and_strides_of_rows_are_64_bits() -> None:
    types = {p.name: p.annotation_type for p in hidden_rows.copy_rows_kernel.params}
    assert {types[name] for name in ROW_SCALARS} == {"i64"}


def test_a_span_reads_no_slots() -> None:
    code = compile_rows(CUDA[0], "i16", "i16", wide=True, to_rows=True, span=True)
    assert "ld.global.b64" not in code
    assert re.search(WIDE_PTX.format("st"), code)
