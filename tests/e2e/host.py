"""Runs one vLLM engine in a process of its own and obeys a test over a socket, line by line.

usage: host.py FD   (a connected socket; one JSON object per line, one answer per line)

Commands: {"start": {LLM arguments}}, {"run": source, "args": {...}}. The source is executed with
``llm``, ``args`` and the helpers below in its namespace; what it binds to ``result`` is answered.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# collective_rpc with functions of this file.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


class Host:
    """Helpers for the tests' sources."""

    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 32, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Greedy tokens, their logprobs and the cached tokens of each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        answers = []
        for output in outputs:
            completion = output.outputs[0]
            answers.append(
                {
                    "tokens": list(completion.token_ids),
                    "logprobs": [
                        step[token].logprob
                        for token, step in zip(
                            completion.token_ids, completion.logprobs, strict=True
                        )
                    ],
                    "cached": output.num_cached_tokens or 0,
                }
            )
        return answers

    @property
    def core(self) -> Any:
        """The engine core, when it lives in this process."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The scheduler-side connector, when it lives in this process."""
        return self.core.scheduler.connector

    @property
    def scheduler(self) -> Any:
        """The connector's state machine."""
        return self.connector.scheduler_side._scheduler

    @property
    def engine(self) -> Any:
        """The store."""
        return self.scheduler._store

    @property
    def worker(self) -> Any:
        """The worker-side connector, when it lives in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side._worker

    def settle(self) -> dict[str, Any]:
        """Nothing in flight, nothing pinned, books balanced: raises or answers the figures."""
        scheduler = self.scheduler
        assert not scheduler._stores, scheduler._stores
        assert not scheduler._loads, scheduler._loads
        assert not scheduler._requests, list(scheduler._requests)
        scheduler.check_integrity()
        stats = self.engine.stats()
        assert stats.pinned_rows == 0, stats
        assert stats.leases == 0, stats
        assert not self.core.scheduler.has_requests()
        pool = self.core.scheduler.kv_cache_manager.block_pool
        return {
            "rows": stats.rows,
            "used_bytes": stats.used_bytes,
            "free_blocks": pool.get_num_free_blocks(),
        }


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    stream = connection.makefile("rw")
    host = Host()
    for line in stream:
        command = json.loads(line)
        try:
            if "start" in command:
                host.start(command["start"])
                answer: dict[str, Any] = {"result": None}
            else:
                names: dict[str, Any] = {"host": host, "args": command["args"], "result": None}
                names["llm"] = host.llm
                exec(compile(command["run"], "<test>", "exec"), names)
                answer = {"result": names["result"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
