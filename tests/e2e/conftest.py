"""Engines for the tests: real vLLM, tiny models, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONNECTOR = "LMCacheHybridConnector"


class EngineError(Exception):
    """The engine's process answered with an exception, or died."""


class Engine:
    """A handle on one engine process."""

    def __init__(
        self,
        arguments: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        prefix: list[str],
    ) -> None:
        self.log = log
        ours, theirs = socket.socketpair()
        host = str(Path(__file__).with_name("host.py"))
        with theirs, log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, host, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                # Not the repository: vLLM must find nothing there by accident.
                cwd=log.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ours.settimeout(300)
        self._socket = ours
        self._stream = ours.makefile("rw")
        try:
            self._call({"start": arguments})
        except BaseException:
            self.close()
            raise

    def _call(self, command: dict[str, Any]) -> Any:
        try:
            self._stream.write(json.dumps(command) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise EngineError(f"{error}\n{self.tail()}") from error
        if not line:
            raise EngineError(f"the engine died\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"] + self.tail())
        return answer["result"]

    def tail(self) -> str:
        """The end of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def run(self, source: str, **args: Any) -> Any:
        """Execute ``source`` in the engine's process; answers what it binds to ``result``."""
        return self._call({"run": source, "args": args})

    def generate(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        return self.run(
            "result = host.generate(args['prompts'], **args['options'])",
            prompts=prompts,
            options=options,
        )

    def one(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        return self.generate([prompt], **options)[0]

    def reset_local(self) -> None:
        """Drop the engine's own prefix cache; ours stays."""
        assert self.run("result = llm.reset_prefix_cache()")

    def settle(self) -> dict[str, Any]:
        return self.run("result = host.settle()")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    return _load("tiny_models", ROOT / "tools" / "tiny_models.py")


@pytest.fixture(scope="session")
def start_engine(
    tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """start_engine(family, multiprocess=False, extra={...}, env={...}, **LLM arguments).

    ``prefix`` is put before the command that starts the process."""
    engines: list[Engine] = []

    def start(
        family: str,
        *,
        multiprocess: bool = False,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        transfer: dict[str, Any] | None = None,
        prefix: list[str] | None = None,
        **arguments: Any,
    ) -> Engine:
        model = tiny_models.build(family)
        arguments = {
            **model.engine_args(),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "max_model_len": 8192,
            "max_num_seqs": 16,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": CONNECTOR,
                "kv_role": role,
                "kv_connector_extra_config": {"max_local_cpu_size": "256MiB", **(extra or {})},
                **(transfer or {}),
            },
            **arguments,
        }
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
            **(env or {}),
        }
        log = tmp_path_factory.mktemp("engine") / f"{family}.log"
        engine = Engine(arguments, environment, log, prefix or [])
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


def assert_same_answer(
    cold: dict[str, Any], restored: dict[str, Any], tolerance: float, *, bf16_mla: bool = False
) -> None:
    """Same tokens, and logprobs within ``tolerance``.

    MLA computes a restored prompt in other batch shapes than a cold one. In bf16 that may turn a
    near tie: the two answers are then compared up to there, and the cold run's token must be
    within the tolerance of the restored run's choice.
    """
    for step, token in enumerate(cold["tokens"]):
        if bf16_mla and restored["tokens"][step] != token:
            alternatives = dict(map(tuple, restored["alternatives"][step]))
            assert token in alternatives, f"step {step}: {token} is no alternative"
            assert restored["logprobs"][step] - alternatives[token] <= tolerance, f"step {step}"
            return
        assert restored["tokens"][step] == token, f"step {step}"
        difference = abs(restored["logprobs"][step] - cold["logprobs"][step])
        assert difference <= tolerance, f"step {step}: logprobs differ by {difference}"


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return assert_same_answer


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., list[int]]:
    """make_prompt(seed, length): token ids that repeat for a seed."""

    def make(seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(3, 500) for _ in range(length)]

    return make
