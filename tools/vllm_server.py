"""One ``vllm serve`` on the CPU, in a process group of its own, and a script's calls to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 300.0
STOP_SECONDS = 30.0
REQUEST_SECONDS = 300.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # GiB of vLLM's own KV cache.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Serves /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ServerError(Exception):
    """The server did not start, died, or refused a request."""


@dataclass(frozen=True)
class Completion:
    """One streamed answer. ``ttft`` is the time to its first token in seconds."""

    ttft: float
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    # Prompt tokens that vLLM did not compute, its own hits and the connector's together.
    cached_tokens: int


class VllmServer:
    """Use it as a context manager: started and healthy inside, gone after."""

    def __init__(self, model: Path, arguments: Sequence[str], log: Path) -> None:
        self.model = model
        self.log = log
        self.port = _free_port()
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.model)]
        command += ["--host", HOST, "--port", str(self.port), *self._arguments]
        # Not the repository: the connector must be found by its installation alone.
        self._directory = tempfile.TemporaryDirectory(prefix="vllm-server-")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._directory.name,
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ask, wait, then kill whatever is left of the process group."""
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._directory.cleanup()

    def tail(self, lines: int = 30) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """Greedy completion of ``prompt`` (token ids), streamed.

        Raises:
            ServerError: the answer is not a completion.
        """
        body = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        start = time.perf_counter()
        ttft = None
        text: list[str] = []
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "POST", "/v1/completions", body)
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise ServerError(event["error"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if ttft is None:
                        ttft = time.perf_counter() - start
                    text.append(choice["text"])
                    token_ids += choice["token_ids"] or ()
        if ttft is None or len(token_ids) != max_tokens:
            raise ServerError(f"{len(token_ids)} tokens came for {max_tokens} asked")
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            ttft=ttft,
            text="".join(text),
            token_ids=tuple(token_ids),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""
        body = {"model": str(self.model), "prompt": text, "add_special_tokens": False}
        answer: list[int] = json.loads(self._request("POST", "/tokenize", body))["tokens"]
        return answer

    def reset_prefix_cache(self) -> None:
        """Drop vLLM's own prefix cache, and nothing of the connector's.

        Raises:
            ServerError: it still refuses after ten seconds.
        """
        deadline = time.monotonic() + 10
        while not json.loads(self._request("POST", "/reset_prefix_cache"))["success"]:
            if time.monotonic() > deadline:
                raise ServerError("/reset_prefix_cache fails: blocks stay in use")
            time.sleep(0.05)

    def metric(self, name: str, label: str) -> dict[str, float]:
        """Samples of one Prometheus metric by the value of ``label``."""
        samples: dict[str, float] = {}
        for line in self._request("GET", "/metrics").decode().splitlines():
            match = _SAMPLE.match(line)
            if match and match["name"] == name:
                labels = dict(_LABEL.findall(match["labels"] or ""))
                key = labels.get(label, "")
                samples[key] = samples.get(key, 0.0) + float(match["value"])
        return samples

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self._process.poll() is not None:
                raise ServerError(f"vllm serve ended with {self._process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException, ServerError):
                self._request("GET", "/health")
                return
            if time.monotonic() > deadline:
                raise ServerError(f"vllm serve was not ready after {START_SECONDS:.0f} s")
            time.sleep(0.2)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.port, timeout=REQUEST_SECONDS)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            message = response.read().decode(errors="replace")
            raise ServerError(f"{method} {path}: {response.status} {message}")
        return response

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        with contextlib.closing(self._connect()) as connection:
            return self._send(connection, method, path, body).read()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
