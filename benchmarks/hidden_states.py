#!/usr/bin/env python3
"""Hidden states: retrieving rows beside a plain copy and LMCache 0.5.6's store, and what exporting
them costs an engine.

usage: benchmarks/hidden_states.py

The rows of 16,384 tokens, 2048 wide, in bfloat16; the sides take turns in one process. LMCache
takes part once scripts/setup_lmcache_venv.sh has been run. "export": a tiny model on the CPU with
vLLM's extract_hidden_states, the same prompts computed with and without files of their rows.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch

from lmcache_connector.config import load_config
from lmcache_connector.groups import FULL, KVLayerGroupInfo, WorkerGeometry, engine_group_infos
from lmcache_connector.hidden_states.store import HiddenStateStore
from lmcache_connector.keys import ChunkChain, TokenDatabase
from lmcache_connector.layout import CacheLayout
from lmcache_connector.server import messages
from lmcache_connector.server.client import PoolClient
from lmcache_connector.server.embedded import EmbeddedStore
from lmcache_connector.server.sockets import memory_path
from lmcache_connector.server.store_client import StoreClient
from lmcache_connector.storage.base import Commit, NewRow

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
TOKENS, WIDTH, CHUNK = 16384, 2048, 256
NAMESPACE = b"n" * 32
IDS = list(range(TOKENS))
ROUNDS = 15
# Of the engine: prompts in a batch, their tokens, and generated ones.
PROMPTS, LENGTH, OUTPUT = 8, 512, 16


def _layout() -> CacheLayout:
    group = KVLayerGroupInfo(
        engine_group_idx=0,
        layer_indices=(0,),
        kv_size=1,
        nl=1,
        nb=8,
        bs=CHUNK,
        nh=1,
        hs=16,
        element_size=1,
        block_stride_elems=CHUNK * 16,
        dtype="int8",
        layout="NB,BS,HS",
        tokens_per_block=CHUNK,
        slots_per_block=CHUNK,
        sw_size_tokens=-1,
        recurrent_state=False,
        rule=FULL,
        num_shards=1,
        num_runs=1,
        run_bytes=CHUNK * 16,
    )
    infos = engine_group_infos([group])
    return CacheLayout([WorkerGeometry(0, 0, 1, 0, 1, CHUNK, infos, (group,))])


def _ours(stack: ExitStack) -> HiddenStateStore:
    """As an engine's: its pool is behind sockets. The KV that the rows go with is there."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    sizes = {"max_local_cpu_size": "16MiB", "max_hidden_state_cpu_size": "256MiB"}
    config = load_config({**sizes, "enable_hidden_state_cache": True}, {}).config
    kv = EmbeddedStore(folder / "a.sock", "model", NAMESPACE, _layout(), config)
    stack.callback(kv.close)
    assert kv.hidden is not None
    memory = PoolClient(memory_path(folder / "a.sock"), 0, "")
    stack.callback(memory.close)
    chain = ChunkChain(TokenDatabase(NAMESPACE, CHUNK))
    chain.extend(lambda start, end: IDS[start:end], TOKENS)
    assert kv.wait_ready(10)
    keys = [(name, "full") for name in chain.hashes]
    kv.prepare_store(1, [NewRow([CHUNK * 16], key) for key in keys], [])
    kv.complete_store(1, [Commit(at, key[0], None, "full", [7]) for at, key in enumerate(keys)])
    who = messages.RegisterHiddenStates("e/rows", "model", NAMESPACE, CHUNK, 1)
    client = StoreClient(kv.hidden.endpoint, who)
    stack.callback(client.close)
    rows = PoolClient(memory_path(Path(kv.hidden.endpoint.removeprefix("ipc://"))), 0, "e/rows")
    stack.callback(rows.close)
    store = HiddenStateStore()
    store.attach(client, rows, TokenDatabase(NAMESPACE, CHUNK))
    stack.callback(store.close)
    while not client.wait_ready(1.0):
        pass
    return store


def _lmcache() -> Any:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.hidden_state_store import HiddenStateStore as Theirs
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, enable_hidden_state_cache=True, max_hidden_state_cpu_size=0.5
    )
    shape = (1, 2, CHUNK, 1, 8)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, shape)
    return Theirs(config, ChunkedTokenDatabase(config, metadata))


def _medians(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(some) for name, some in seconds.items()}


def retrieve(stack: ExitStack) -> None:
    rows = torch.randn(TOKENS, WIDTH).bfloat16()
    store, out = _ours(stack), torch.empty_like(rows)
    assert store.store_hidden_states(IDS, rows) == TOKENS // CHUNK

    def native(**how: Any) -> torch.Tensor | None:
        return store.retrieve_hidden_states(IDS, **{"dtype": torch.bfloat16, **how})

    sides: dict[str, Callable[[], object]] = {
        "plain copy, to memory in use": lambda: out.copy_(rows),
        "ours, to memory in use": lambda: native(out=out),
        "plain copy": rows.clone,
        "ours": native,
        "plain copy, to float32": rows.float,
        "ours, to float32": lambda: store.retrieve_hidden_states(IDS),
    }
    held = {"ours": store.stats()["used_bytes"]}
    try:
        theirs = _lmcache()
        stack.callback(theirs.close)
        assert theirs.store_hidden_states(IDS, rows) == TOKENS // CHUNK
        sides["LMCache, to float32"] = lambda: theirs.retrieve_hidden_states(IDS)
        stored = [part[0] for part in theirs._chunks.values()]
        held["LMCache"] = sum(part.get_size() for part in stored)
    except ImportError:
        print("without LMCache: scripts/setup_lmcache_venv.sh has not been run")
    for side in sides.values():  # What is copied is what was given.
        answer = side()
        assert isinstance(answer, torch.Tensor)
        assert torch.equal(answer.bfloat16(), rows)
    seconds = _medians(sides)
    print(f"{TOKENS} rows of {WIDTH} bfloat16: ms, and the speed beside a plain copy of the kind")
    for name, value in seconds.items():
        plain = seconds["plain copy" + "".join(name.partition(", ")[1:])]
        print(f"  {name:<30}{value * 1e3:>8.1f}{plain / value:>8.2f}")
    for name, num_bytes in held.items():
        print(f"  bytes held by {name:<16}{num_bytes / rows.nbytes:>8.2f} of the rows given")


def export(stack: ExitStack) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models
    from vllm import LLM, SamplingParams

    from lmcache_connector.hidden_states import files

    out = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    llm = LLM(
        **tiny_models.build("qwen2").engine_args(),
        max_model_len=2048,
        enforce_eager=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": taps},
        },
        kv_transfer_config={
            "kv_connector": "LMCacheHybridConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"extract_hidden_states": {"shared_storage_path": out}},
        },
    )
    random = Random(1)

    def written() -> int:
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    def run(wanted: bool) -> list[str]:
        prompts = [random.choices(range(3, 500), k=LENGTH) for _ in range(PROMPTS)]
        params = SamplingParams(
            temperature=0,
            max_tokens=OUTPUT,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"extract_hidden_states": wanted}},
        )
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        # What finished requests left is taken up by the next step.
        llm.llm_engine.step()
        return [(one.kv_transfer_params or {}).get("hidden_states_path", "") for one in answers]

    before = written()
    loaded = [files.load(path)["hidden_states"] for path in run(True)]
    rows, num_written = sum(some.nbytes for some in loaded), written() - before
    sides = {"without files": lambda: run(False), "with files": lambda: run(True)}
    seconds = _medians(sides)
    ratio = seconds["with files"] / seconds["without files"]
    print(f"{PROMPTS} prompts of {LENGTH} tokens, {OUTPUT} generated each, {rows} bytes of rows")
    for name, value in seconds.items():
        print(f"  {name:<30}{value * 1e3:>8.1f}")
    print(f"  with / without{ratio:>24.3f}")
    print(f"  bytes written / bytes of rows{num_written / rows:>9.3f}")


if __name__ == "__main__":
    if PEER_PYTHON.exists() and Path(sys.executable) != PEER_PYTHON:
        os.execv(PEER_PYTHON, [str(PEER_PYTHON), *sys.argv])
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # The engine first: vLLM does not start beside what LMCache imports.
    for measure in (export, retrieve):
        with ExitStack() as outer:
            measure(outer)
