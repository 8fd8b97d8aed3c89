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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache_connector.server import messages
from lmcache_connector.server.management import managing

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


class Server:
    """A handle on a cache server; it may be started again and again at its endpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sockets = directory / "run"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.endpoint = f"ipc://{self.sockets}/kv"
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, size: str = "256MiB", tiers: Sequence[str] = (), hidden: str | None = None
    ) -> None:
        """Start it and wait until it answers."""
        assert self.process is None
        command = [sys.executable, "-m", "lmcache_connector.server", "--socket", self.endpoint]
        command += ["--max-local-cpu-size", size]
        command += ["--max-hidden-state-cpu-size", hidden] if hidden else []
        for tier in tiers:
            command += ["--tier", tier]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                cwd=self.directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.status()
                return
            except ConnectionError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.02)

    def status(self) -> messages.StatusReply:
        with managing(self.endpoint) as ask:
            reply: messages.StatusReply = ask(messages.Status())
        return reply

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _ended(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        self._signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def terminate(self) -> None:
        """SIGTERM: it ends in order."""
        code = self._ended(signal.SIGTERM)
        assert code == 0, self.log.read_text()

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        self._ended(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP; ``cont`` ends it."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        self._signal(signal.SIGCONT)


class Bed:
    """One family's engine, its scheduler in reach, and the ways to bring it into a state.

    ``cold_answers`` may be shared by engines of the same family and options.
    """

    TOKENS = 32

    def __init__(
        self, family: str, spec: Any, engine: Engine, cold_answers: dict[tuple[int, ...], Any]
    ) -> None:
        self.family = family
        self.groups: tuple[str, ...] = spec.groups
        self.chunk: int = spec.chunk_tokens
        self.engine = engine
        self._cold_answers = cold_answers
        engine.run(
            """
scheduler = host.scheduler
host.matches = []
inner = scheduler.match
def match(request_id, local_tokens):
    answer = inner(request_id, local_tokens)
    host.matches.append((local_tokens, answer))
    return answer
scheduler.match = match
"""
        )

    def same(self, cold: dict[str, Any], restored: dict[str, Any]) -> None:
        assert_same_answer(cold, restored, 1e-4)

    def use(self, *, load: bool, store: bool) -> None:
        self.engine.run(
            "host.scheduler._can_load, host.scheduler._can_store = args['load'], args['store']",
            load=load,
            store=store,
        )

    def clear(self) -> None:
        """Forget everything, ours and the engine's."""
        self.engine.run("host.forget(); host.matches.clear()")
        self.engine.reset_local()

    def cold(self, prompt: list[int]) -> dict[str, Any]:
        """The answer without any cache."""
        key = tuple(prompt)
        if key not in self._cold_answers:
            self.use(load=False, store=False)
            self.engine.reset_local()
            self._cold_answers[key] = self.engine.one(prompt, max_tokens=self.TOKENS)
            self.engine.reset_local()
            self.use(load=True, store=True)
        return self._cold_answers[key]

    def fill(self, prompt: list[int]) -> None:
        """Store a prompt's chunks, every boundary's state included."""
        self.use(load=False, store=True)
        if self.family == "qwen3next":
            for end in range(self.chunk, len(prompt), self.chunk):
                # A step that ends at the boundary leaves its state.
                self.engine.reset_local()
                self.engine.one(prompt[: end + 1], max_tokens=1)
        self.engine.reset_local()
        self.engine.one(prompt, max_tokens=1)
        self.engine.reset_local()
        self.use(load=True, store=True)

    def last_match(self) -> tuple[int, int]:
        """(local tokens, tokens that we added) of the last request's last lookup."""
        return tuple(self.engine.run("result = host.matches[-1]"))

    def poisoned(self, prompt: list[int], group: str) -> dict[str, Any]:
        """The answer when one group's bytes are wrong."""
        self.engine.reset_local()
        return self.engine.run(
            "result = host.generate_poisoned(args['prompt'], args['group'], args['tokens'])",
            prompt=prompt,
            group=group,
            tokens=self.TOKENS,
        )


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
def vllm_server() -> ModuleType:
    return _load("vllm_server", ROOT / "tools" / "vllm_server.py")


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


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """start_server(...), with the arguments of ``Server.start``; killed at the end. ``later``:
    whoever asks will start it."""
    servers: list[Server] = []

    def start(*, later: bool = False, **options: Any) -> Server:
        server = Server(tmp_path_factory.mktemp("server"))
        servers.append(server)
        if not later:
            server.start(**options)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def start_bed(start_engine: Callable[..., Engine], tiny_models: ModuleType) -> Callable[..., Bed]:
    """start_bed(family, cold_answers={}, ...), with the options of ``start_engine``."""

    def start(
        family: str, cold_answers: dict[tuple[int, ...], Any] | None = None, **options: Any
    ) -> Bed:
        # In bf16 MLA's answers depend on batch shapes; test_processes.py has it so.
        options = {"dtype": "float32", **options} if family == "deepseek_v3" else options
        answers = {} if cold_answers is None else cold_answers
        return Bed(family, tiny_models.FAMILIES[family], start_engine(family, **options), answers)

    return start


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
