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
import time
import traceback
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Several engines share few cores: threads that wait must not spin.
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# vLLM compiles parts of its sampler anew for many shapes, which takes seconds each time.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# collective_rpc with functions of this file.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def poison(worker: Any, group: str, rank: int | None = None, bits: int = 0x40) -> None:
    """On a worker: flip bits of every byte of ``group`` before it is loaded, behind the check.
    ``rank`` limits it to one. The pool keeps what it had; ``unpoison`` ends it."""
    import ctypes

    import numpy

    from lmcache_connector.worker import transfer
    from lmcache_connector.worker import worker as module

    owner, check = module.CacheWorker, transfer.SlotCheck
    add, digest = owner._add_object, check.digest
    saved: list[tuple[int, bytes]] = []

    def poisoned_add(self: Any, blocks: Any, client: Any, obj: Any, *, storing: bool) -> Any:
        ours = rank is None or self.geometry.rank == rank
        if obj.group == group and not storing and ours and group in self._groups:
            slot = obj.slots[self.geometry.shard_of(self._groups[group])]
            base = client.address(slot)
            content = (ctypes.c_uint8 * slot.nbytes).from_address(base)
            saved.append((base, bytes(content)))
            numpy.frombuffer(content, dtype=numpy.uint8)[:] ^= bits
        return add(self, blocks, client, obj, storing=storing)

    def unpoison() -> int:
        owner._add_object, check.digest = add, digest
        for base, content in saved:
            ctypes.memmove(base, content, len(content))
        return len(saved)

    owner._add_object = poisoned_add
    check.digest = lambda self: self.expected if self.expected is not None else digest(self)
    module.unpoison = unpoison


def unpoison(worker: Any) -> int:
    """On a worker: end ``poison``; how many objects it touched."""
    from lmcache_connector.worker import worker as module

    return int(module.unpoison())


def watch_pages(worker: Any) -> None:
    """On a worker: compare every page that a load writes with its slot, byte for byte, and pages
    beside them with what they were; ``pages_seen`` ends it."""
    import ctypes

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    ours = get_kv_transfer_group().worker_side._worker
    copier, load = ours._copier, ours._copier.load
    seen = {"pages": 0, "others": 0, "wrong": 0}

    def page(job: Any, block: int) -> list[bytes]:
        starts = job.run_addresses + block * job.block_stride
        return [ctypes.string_at(int(start), job.run_bytes) for start in starts]

    def slot(job: Any, position: int) -> list[bytes]:
        base = int(job.slot_addresses[position])
        return [
            ctypes.string_at(base + run * job.run_pitch, job.run_bytes)
            for run in range(len(job.run_addresses))
        ]

    def watched(jobs: Any, checks: Any) -> Any:
        written = {int(block) for job in jobs for block in job.block_ids}
        others = [block for block in range(200) if block not in written]
        before = [[page(job, block) for block in others] for job in jobs]
        ticket = load(jobs, checks)
        for job, pages in zip(jobs, before, strict=True):
            for position, block in enumerate(job.block_ids):
                seen["pages"] += 1
                seen["wrong"] += page(job, int(block)) != slot(job, position)
            for block, content in zip(others, pages, strict=True):
                seen["others"] += 1
                seen["wrong"] += page(job, block) != content
        return ticket

    copier.load = watched
    ours.seen = seen


def pages_seen(worker: Any) -> dict[str, int]:
    """On a worker: end ``watch_pages``; what it counted."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    ours = get_kv_transfer_group().worker_side._worker
    del ours._copier.load
    return dict(ours.seen)


def fail_checks(worker: Any, rank: int) -> None:
    """On a worker: every load's check fails on one rank, until ``pass_checks``."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmcache_connector.worker import transfer

    if get_kv_transfer_group().worker_side._worker.geometry.rank == rank:
        digest = transfer.SlotCheck.digest
        transfer.SlotCheck.digest = lambda self: digest(self) ^ (self.expected is not None)
        transfer.original = digest


def pass_checks(worker: Any) -> None:
    """On a worker: end ``fail_checks``."""
    from lmcache_connector.worker import transfer

    if hasattr(transfer, "original"):
        transfer.SlotCheck.digest = transfer.original
        del transfer.original


def trap(worker: Any, copy: str, count: int, number: int) -> int:
    """On a worker: its ``count``-th "store" or "load" from now sends its process a signal, when the
    first slot of a store is half overwritten and nothing is copied yet. Answers the process id."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group().worker_side._worker._copier
    inner = getattr(copier, copy)
    seen = 0

    def trapped(jobs: Any, checks: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == count:
            delattr(copier, copy)
            if copy == "store":
                half = checks[0].nbytes // 2
                checks[0].view[:half] = bytes(half)
            os.kill(os.getpid(), number)
        return inner(jobs, checks)

    setattr(copier, copy, trapped)
    return os.getpid()


class Host:
    """Helpers for the tests' sources."""

    def __init__(self) -> None:
        self.llm: Any = None

    def start(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 32,
        salt: str | None = None,
        transfer: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Greedy tokens, their logprobs, the cached tokens and the time of the first token of each
        prompt. ``transfer``: its kv_transfer_params, and under that name those of the answer."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=3,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
            **sampling,
        )
        outputs = self.llm.generate(
            [
                {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
                for prompt in prompts
            ],
            params,
            use_tqdm=False,
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
                    "alternatives": [
                        [[token, entry.logprob] for token, entry in step.items()]
                        for step in completion.logprobs
                    ],
                    "cached": output.num_cached_tokens or 0,
                    "transfer": output.kv_transfer_params,
                    "first_token_seconds": output.metrics and output.metrics.first_token_latency,
                }
            )
        return answers

    def on_workers(self, function: Any, *args: Any) -> list[Any]:
        """Call one of the functions above on every worker."""
        return self.llm.collective_rpc(function, args=args)

    def generate_poisoned(self, prompt: list[int], group: str, max_tokens: int) -> dict[str, Any]:
        """The answer when one group's bytes are wrong."""
        self.on_workers(poison, group)
        try:
            answer = self.generate([prompt], max_tokens)[0]
        finally:
            touched = self.on_workers(unpoison)
        assert min(touched) > 0, "nothing of the group was loaded"
        return answer

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
        return self.connector.scheduler_side.scheduler

    @property
    def store(self) -> Any:
        """The store, embedded or a client."""
        return self.scheduler._open.store

    @property
    def engine(self) -> Any:
        """The storage engine, when it is embedded."""
        return self.store._engine

    def forget(self) -> None:
        """Drop all that is kept, here or in the server. Keys stay as they are."""
        from lmcache_connector.server import messages
        from lmcache_connector.server.management import managing

        if hasattr(self.store, "_engine"):
            self.engine.clear_namespace("")
            return
        # An answer to this engine: the server has all that was said before.
        self.scheduler.check_integrity()
        with managing(self.connector.scheduler_side._setup.config.server) as ask:
            ask(messages.ClearNamespace(""))
            while ask(messages.Status()).open_clears:
                time.sleep(0.01)

    def attach(self, seconds: float = 60.0) -> None:
        """Wait until the server is there and all workers have mapped its pool."""
        deadline = time.monotonic() + seconds
        while not self.store.wait_ready(1.0):
            assert time.monotonic() < deadline, "not attached"
            time.sleep(0.02)

    def load_bytes(self) -> dict[str, int]:
        """Bytes that were ever loaded, by group."""
        metrics = [
            metric for metric in self.llm.get_metrics() if metric.name == "vllm:lmcache_load_bytes"
        ]
        return {metric.labels["group"]: int(metric.value) for metric in metrics}

    @property
    def worker(self) -> Any:
        """The worker-side connector, when it lives in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side._worker

    def drain(self) -> None:
        """Step an engine in this process until no report is awaited. With a speculative method
        they come a step late."""
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.engine_core.get_output()

    def settle(self) -> dict[str, Any]:
        """Nothing in flight, nothing pinned, books balanced: raises or answers the figures.
        Waits for what is being written to tiers."""
        scheduler = self.scheduler
        assert not scheduler._stores, scheduler._stores
        assert not scheduler._loads, scheduler._loads
        assert not scheduler._requests, list(scheduler._requests)
        deadline = time.monotonic() + 30
        while True:
            scheduler.check_integrity()
            stats = self.store.stats()
            if not self.store.has_tiers or not stats.busy_rows or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert stats.busy_rows == 0, stats
        assert stats.leases == 0, stats
        assert not self.core.scheduler.has_unfinished_requests()
        assert not self.connector.has_pending_push_work()
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
                names = {**globals(), "host": host, "args": command["args"], "result": None}
                names["llm"] = host.llm
                exec(compile(command["run"], "<test>", "exec"), names)
                answer = {"result": names["result"]}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
