#!/usr/bin/env python3
"""Hidden states of prompts as files, under vLLM's offline API; a prefix that was computed before
is not computed again, and its rows are in the file all the same.

usage: examples/extract_hidden_states.py [MODEL] [--layers K ...] [--out DIR]

MODEL is a directory or a Hugging Face id; the default is a tiny model that runs on a CPU. The row
of layer K is its input: 0 the embeddings, the number of layers the last output before the final
norm. Exit status 0: rows of the restored prefix are those that were computed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
# GiB of vLLM's own KV cache where it runs on a CPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def tiny_model() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models

    return tiny_models.build("qwen2").engine_args()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 4], metavar="K")
    parser.add_argument("--out", type=Path, default=None, help="default: a temporary directory")
    options = parser.parse_args()
    out = (options.out or Path(tempfile.mkdtemp(prefix="hidden-states-"))).resolve()

    import torch
    from vllm import LLM, SamplingParams

    from lmcache_connector.hidden_states import files

    llm = LLM(
        **({"model": options.model} if options.model else tiny_model()),
        max_model_len=4096,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": options.layers}
            },
        },
        kv_transfer_config={
            "kv_connector": "LMCacheHybridConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "extract_hidden_states": {"shared_storage_path": str(out), "max_size": "10GiB"}
            },
        },
    )
    text = (ROOT / "LICENSE").read_text()[:3000]

    def extract(situation: str, prompt: str) -> tuple[int, torch.Tensor]:
        # The rows of the prompt are there once one token was computed from it.
        output = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        path = (output.kv_transfer_params or {})["hidden_states_path"]
        rows = files.load(path)["hidden_states"]
        reused, shape = output.num_cached_tokens or 0, " x ".join(map(str, rows.shape))
        dtype = str(rows.dtype).removeprefix("torch.")
        print(f"{situation}: {reused:,} tokens reused, {shape} {dtype}")
        files.remove(path, keep_hidden_states=True)
        return reused, rows

    _, computed = extract("computed", text)
    # vLLM forgets its own blocks, as it does under memory pressure; the connector's stay.
    llm.reset_prefix_cache()
    reused, restored = extract("restored", text + " And more.")
    # Rows that are computed again may differ in their last bits: other batch shapes.
    identical = torch.equal(computed[:reused], restored[:reused])
    print(f"reused rows identical: {'yes' if identical else 'no'}; files in {out}")
    return 0 if identical and reused else 1


# The engine starts processes that import this file.
if __name__ == "__main__":
    sys.exit(main())
