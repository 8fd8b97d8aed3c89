#!/usr/bin/env python3
"""The connector under vLLM's offline API: a prompt computed, forgotten by vLLM, and restored.

usage: examples/offline_hybrid.py [MODEL] [--prompt-file FILE] [--max-model-len N]

MODEL is a directory or a Hugging Face id; the default is a tiny model with Gemma 3's layers, which
runs on a CPU. Exit status 0: something was restored, and the answers are equal.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# GiB of vLLM's own KV cache where it runs on a CPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def tiny_model() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models

    return tiny_models.build("gemma3").engine_args()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "LICENSE")
    parser.add_argument("--max-model-len", type=int, default=12288)
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        **({"model": options.model} if options.model else tiny_model()),
        max_model_len=options.max_model_len,
        enforce_eager=True,
        kv_transfer_config={"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"},
    )
    prompt = options.prompt_file.read_text()
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def ask(situation: str) -> tuple[int, tuple[int, ...]]:
        output = llm.generate(prompt, sampling, use_tqdm=False)[0]
        length, reused = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
        print(f"{situation}: {length:,} prompt tokens, {reused:,} reused")
        return reused, tuple(output.outputs[0].token_ids)

    _, cold = ask("cold")
    # vLLM forgets its own blocks, as it does under memory pressure; the connector's stay.
    llm.reset_prefix_cache()
    restored_tokens, restored = ask("restored")
    identical = restored == cold
    print(f"identical: {'yes' if identical else 'no'}")
    return 0 if identical and restored_tokens else 1


# The engine starts processes that import this file.
if __name__ == "__main__":
    sys.exit(main())
