#!/usr/bin/env python3
"""Two stages: a thinker answers, and a talker speaks from the thinker's hidden states. When the
thinker's prompt is restored, the talker is conditioned on the same rows as when it was computed.

usage: examples/thinker_talker.py [MODEL]

MODEL is a directory or a Hugging Face id; the default is a tiny model that runs on a CPU. The
talker is a few random matrices that choose codes. Exit status 0: rows and codes are the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
EMBEDDINGS, ACCEPTED = 0, 2  # The rows of layer K are its inputs.
# GiB of vLLM's own KV cache where it runs on a CPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def tiny_model() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models

    return tiny_models.build("qwen2").engine_args()


def talk(rows: torch.Tensor, num_codes: int = 24) -> list[int]:
    """Codes from the thinker's rows, [tokens, layers, hidden]; each depends on all of them."""
    import torch

    embeddings, accepted = torch.nn.functional.normalize(rows.float(), dim=-1)[:, [0, -1]].unbind(1)
    codebook = torch.randn(256, rows.shape[-1], generator=torch.Generator().manual_seed(0))
    codes, state = [], accepted[-1]
    for step in range(num_codes):
        context = torch.softmax(40 * accepted @ state, dim=0) @ embeddings
        codes.append(int((codebook @ (2 * context + state.roll(1))).argmax()))
        state = torch.nn.functional.normalize(codebook[(codes[-1] + step) % 256], dim=0)
    return codes


def main() -> int:
    import torch
    from vllm import LLM, SamplingParams

    from lmcache_connector.hidden_states import files

    layers = {"eagle_aux_hidden_state_layer_ids": [EMBEDDINGS, ACCEPTED]}
    directory = tempfile.mkdtemp(prefix="thinker-")
    extract = {"shared_storage_path": directory, "include_output_tokens": True}
    thinker = LLM(
        **({"model": sys.argv[1]} if sys.argv[1:] else tiny_model()),
        max_model_len=4096,
        enforce_eager=True,
        # Steps end where chunks do, so that the tokens behind a hit run in the same step as before.
        max_num_batched_tokens=256,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        },
        kv_transfer_config={
            "kv_connector": "LMCacheHybridConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"extract_hidden_states": extract},
        },
    )
    prompt = (ROOT / "LICENSE").read_text()[:3000]

    def speak(situation: str) -> tuple[torch.Tensor, list[int]]:
        sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        answer = thinker.generate(prompt, sampling, use_tqdm=False)[0]
        path = (answer.kv_transfer_params or {})["hidden_states_path"]
        rows = files.load(path)["hidden_states"]
        files.remove(path)
        codes = talk(rows)
        text = f"{answer.num_cached_tokens or 0:,} tokens reused, {len(rows)} rows"
        print(f"{situation}: {text}, codes {' '.join(map(str, codes[:8]))} ...")
        return rows, codes

    computed, said = speak("computed")
    # vLLM forgets its own blocks, as it does under memory pressure; the connector's stay.
    thinker.reset_prefix_cache()
    restored, said_again = speak("restored")
    same_rows, same_codes = torch.equal(computed, restored), said == said_again
    print(f"same rows: {'yes' if same_rows else 'no'}; same codes: {'yes' if same_codes else 'no'}")
    return 0 if same_rows and same_codes else 1


# The engine starts processes that import this file.
if __name__ == "__main__":
    sys.exit(main())
