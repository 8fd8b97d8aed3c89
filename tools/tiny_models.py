#!/usr/bin/env python3
"""Tiny models of the hybrid families with seeded random weights, which vLLM runs on a CPU.

usage: tools/tiny_models.py [--out DIR] [family ...]

Each is a directory in Hugging Face's format, tokenizer included, so that ``vllm serve DIR`` answers
text. The weights are drawn wide enough that every token depends on the whole prompt: a cache entry
with a wrong page shows in the output within a few tokens (a recurrent state within about twelve:
compare at least 24). vLLM's own dummy weights repeat one token whatever the cache holds.

A model is built once, in seconds, and kept until this file changes. Needs torch, transformers and
tokenizers.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / ".cache" / "models"

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
SEED = 20240
WEIGHT_STD = 0.1


@dataclass(frozen=True)
class Family:
    """How to draw one model, and what the connector sees of it on a CPU."""

    architecture: str
    config_class: str
    # Over COMMON, as keyword arguments of the config class.
    config: dict[str, Any]
    # The dtype to serve it with.
    dtype: str
    # Tags of its object groups at tensor-parallel size 1.
    groups: tuple[str, ...]
    # (std of matrices, std of embeddings); None keeps transformers' own initialisation, which the
    # recurrent layers' decay parameters and MLA's norms need.
    redraw: tuple[float, float] | None
    # Queries are scaled by it: attention that looks at few tokens, so that each page matters.
    query_gain: float
    # To pass to vLLM as block_size, where its own choice is unstable on a CPU.
    block_size: int | None = None
    # The connector's default chunk, in tokens.
    chunk_tokens: int = 256
    # To pass to vLLM as compilation_config.
    compilation: dict[str, Any] | None = None


@dataclass(frozen=True)
class TinyModel:
    """A model on disk and how to serve it."""

    family: str
    path: Path
    dtype: str
    block_size: int | None
    chunk_tokens: int
    groups: tuple[str, ...]
    compilation: dict[str, Any] | None

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments for ``vllm.LLM`` that this model needs."""
        args: dict[str, Any] = {"model": str(self.path), "dtype": self.dtype}
        if self.block_size is not None:
            args["block_size"] = self.block_size
        if self.compilation is not None:
            args["compilation_config"] = self.compilation
        return args


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": WEIGHT_STD,
}
SLIDING, FULL = "sliding_attention", "full_attention"
# Gemma ties the output matrix to the embedding and scales it up: wide embeddings would drown
# everything else and repeat the last token for ever.
TIED_EMBEDDINGS = (0.2, 0.01)

FAMILIES = {
    # Plain full attention.
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        config_class="Qwen2Config",
        config={"num_hidden_layers": 4, "tie_word_embeddings": False},
        dtype="float32",
        groups=("full",),
        redraw=(WEIGHT_STD, WEIGHT_STD),
        query_gain=4.0,
    ),
    # Five sliding windows to one full layer.
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        config_class="Gemma3TextConfig",
        config={
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 256,
            "layer_types": [SLIDING] * 5 + [FULL],
        },
        dtype="float32",
        groups=("full", "window-255"),
        redraw=TIED_EMBEDDINGS,
        query_gain=8.0,
    ),
    # Windows in blocks of 256 tokens, full attention in blocks of 128, the last two layers reuse
    # the KV of earlier ones. In bfloat16 vLLM's own prefix hit changes tokens.
    "gemma4": Family(
        architecture="Gemma4ForCausalLM",
        config_class="Gemma4TextConfig",
        config={
            "num_hidden_layers": 6,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 256,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "layer_types": [SLIDING, SLIDING, FULL] * 2,
        },
        dtype="float32",
        groups=("full", "window-255"),
        redraw=TIED_EMBEDDINGS,
        query_gain=1.0,
    ),
    # Windows and full layers in turn, attention sinks, experts.
    "gptoss": Family(
        architecture="GptOssForCausalLM",
        config_class="GptOssConfig",
        config={
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [SLIDING, FULL] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 512,
                "truncate": False,
            },
        },
        dtype="bfloat16",
        groups=("full", "window-127"),
        redraw=(WEIGHT_STD, WEIGHT_STD),
        query_gain=4.0,
    ),
    # Chunked-local attention, three layers to one full layer.
    "llama4": Family(
        architecture="Llama4ForCausalLM",
        config_class="Llama4TextConfig",
        config={
            "num_hidden_layers": 4,
            "head_dim": 32,
            "intermediate_size_mlp": 256,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            # Ends inside most chunks of 256, so that boundaries ask for parts of it.
            "attention_chunk_size": 640,
            "no_rope_layers": [1, 1, 1, 0],
            # It would undo query_gain.
            "use_qk_norm": False,
            "layer_types": ["chunked_attention"] * 3 + [FULL],
        },
        dtype="float32",
        groups=("chunked-640", "full"),
        redraw=(WEIGHT_STD, WEIGHT_STD),
        query_gain=4.0,
    ),
    # Gated delta net: three recurrent states to one full layer. vLLM's CPU kernel needs bfloat16
    # and heads of 128. The block is vLLM's own choice for one page per state; given by hand, since
    # vLLM 0.32 forgets it on a CPU when the engine runs in a process of its own.
    "qwen3next": Family(
        architecture="Qwen3NextForCausalLM",
        config_class="Qwen3NextConfig",
        config={
            "num_hidden_layers": 4,
            "head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "tie_word_embeddings": False,
            "layer_types": ["linear_attention"] * 3 + [FULL],
        },
        dtype="bfloat16",
        groups=("full", "state"),
        redraw=None,
        query_gain=4.0,
        block_size=640,
        chunk_tokens=640,
    ),
    # MLA. On a CPU vLLM turns its own prefix cache and chunked prefill off for it, so
    # max_num_batched_tokens must hold the whole prompt.
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        config_class="DeepseekV3Config",
        config={
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 64,
            # All layers dense.
            "first_k_dense_replace": 4,
            "tie_word_embeddings": False,
        },
        dtype="bfloat16",
        groups=("full",),
        redraw=None,
        query_gain=4.0,
        # vLLM's CPU kernel rotates only the first rows of an MLA batch: answers would depend on
        # how a prompt is cut into steps.
        compilation={"custom_ops": ["-rotary_embedding"]},
    ),
}


def build(family: str, out_dir: Path | str = DEFAULT_OUT) -> TinyModel:
    """The model ``out_dir/family``, built unless it is there and current.

    Safe to call from several processes at once: each builds aside and renames.

    Raises:
        KeyError: no such family.
    """
    spec = FAMILIES[family]
    target = Path(out_dir).resolve() / family
    digest = _digest()
    if not _is_current(target, digest):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=target.parent))
        try:
            _write_weights(spec, aside)
            _write_tokenizer(aside)
            (aside / "digest").write_text(digest)
            aside.chmod(0o755)
            _replace(aside, target, digest)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return TinyModel(
        family=family,
        path=target,
        dtype=spec.dtype,
        block_size=spec.block_size,
        chunk_tokens=spec.chunk_tokens,
        groups=spec.groups,
        compilation=spec.compilation,
    )


def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_current(target: Path, digest: str) -> bool:
    try:
        return (target / "digest").read_text() == digest
    except FileNotFoundError:
        return False


def _replace(aside: Path, target: Path, digest: str) -> None:
    """Rename ``aside`` to ``target``; whoever comes second with the same content gives way."""
    if target.exists() and not _is_current(target, digest):
        shutil.rmtree(target)
    try:
        os.rename(aside, target)
    except OSError:
        if not _is_current(target, digest):
            raise


def _write_weights(spec: Family, target: Path) -> None:
    import torch
    import transformers

    config = getattr(transformers, spec.config_class)(**{**COMMON, **spec.config})
    config.architectures = [spec.architecture]
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if spec.redraw is not None:
            matrix_std, embedding_std = spec.redraw
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() >= 2:
                        std = embedding_std if "embed_tokens" in name else matrix_std
                        parameter.normal_(0.0, std)
        _sharpen(model, spec.query_gain)
        model.to(getattr(torch, spec.dtype)).save_pretrained(target)
    # transformers may put the name of its own class there.
    config_file = target / "config.json"
    saved = json.loads(config_file.read_text())
    saved["architectures"] = [spec.architecture]
    config_file.write_text(json.dumps(saved, indent=2) + "\n")


def _sharpen(model: torch.nn.Module, query_gain: float) -> None:
    """Make the output depend on the cache: peaked attention, states that remember.

    Queries are scaled in their norm where there is one: it would undo a scaled projection. A
    recurrent state as transformers draws it forgets within two tokens; here within some fifty.
    """
    import torch

    parameters = dict(model.named_parameters())
    has_query_norm = any(name.endswith(".q_norm.weight") for name in parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith(".q_norm.weight"):
                # Right for weights stored around 1 and for those stored around 0 (Gemma, Qwen).
                parameter.add_(query_gain - 1.0)
            elif name.endswith((".q_proj.weight", ".q_b_proj.weight")) and not has_query_norm:
                parameter.mul_(query_gain)
            elif name.endswith(".dt_bias"):
                parameter.fill_(-6.0)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()


def _vocabulary() -> dict[str, int]:
    """3 special tokens, then the 256 bytes in order, then syllables up to VOCAB_SIZE.

    Text is encoded byte by byte: byte b is id 3 + b. Encoding never yields the syllables;
    they give every id that a model can answer a text of its own.
    """
    tokens = list(SPECIAL_TOKENS)
    tokens += [_byte_char(byte) for byte in range(256)]
    syllables = (
        f"{space}{consonant}{vowel}"
        for space in (_byte_char(ord(" ")), "")
        for consonant in "bcdfghjklmnpqrstvwxyz"
        for vowel in ("a", "e", "i", "o", "u", "an", "en")
    )
    tokens += itertools.islice(syllables, VOCAB_SIZE - len(tokens))
    return {token: index for index, token in enumerate(tokens)}


def _byte_char(byte: int) -> str:
    """The printable character that stands for ``byte`` in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    others = [value for value in range(256) if value not in printable]
    return chr(256 + others.index(byte))


def _write_tokenizer(target: Path) -> None:
    import tokenizers
    import transformers

    model = tokenizers.models.BPE(vocab=_vocabulary(), merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        model_max_length=COMMON["max_position_embeddings"],
    ).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write tiny hybrid models that vLLM runs on a CPU."
    )
    parser.add_argument("family", nargs="*", choices=[[], *FAMILIES], help="default: all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    args = parser.parse_args()
    for family in args.family or FAMILIES:
        start = time.monotonic()
        model = build(family, args.out)
        size = sum(file.stat().st_size for file in model.path.iterdir())
        print(
            f"{family}: {model.path} ({size / 2**20:.1f} MiB, {model.dtype}, groups "
            f"{', '.join(model.groups)}) in {time.monotonic() - start:.1f} s"
        )


if __name__ == "__main__":
    main()
