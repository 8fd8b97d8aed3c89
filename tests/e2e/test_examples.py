"""The examples and the demo, run as a newcomer runs them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@contextlib.contextmanager
def started(command: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process group, ended with the block; its output goes to ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT | env,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def run_script(script: str, *arguments: str, log: Path) -> list[str]:
    """The lines that a script prints, once it has ended well."""
    with started([sys.executable, str(ROOT / script), *arguments], log) as process:
        status = process.wait(SECONDS)
    output = log.read_text(errors="replace")
    assert status == 0, output
    return output.splitlines()


def test_offline_example(tmp_path: Path) -> None:
    lines = run_script("examples/offline_hybrid.py", log=tmp_path / "log")
    assert "cold: 11,357 prompt tokens, 0 reused" in lines
    assert "restored: 11,357 prompt tokens, 11,264 reused" in lines
    assert "identical: yes" in lines


def test_extraction_example(tmp_path: Path) -> None:
    out = str(tmp_path / "rows")
    lines = run_script("examples/extract_hidden_states.py", "--out", out, log=tmp_path / "log")
    assert "computed: 0 tokens reused, 3000 x 3 x 128 float32" in lines
    assert "restored: 2,816 tokens reused, 3010 x 3 x 128 float32" in lines
    assert f"reused rows identical: yes; files in {out}" in lines
    assert len(os.listdir(out)) == 2


def test_thinker_talker_example(tmp_path: Path) -> None:
    lines = run_script("examples/thinker_talker.py", log=tmp_path / "log")
    assert any(line.startswith("computed: 0 tokens reused, 3015 rows, codes ") for line in lines)
    assert any(line.startswith("restored: 2,816 tokens reused, 3015 rows") for line in lines)
    assert "same rows: yes; same codes: yes" in lines


@contextlib.contextmanager
def serving(command: list[str], log: Path) -> Iterator[str]:
    """A server that answers; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with started(command, log, PORT=str(port)) as server:
        deadline = time.monotonic() + SECONDS
        while True:
            assert server.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.2)
        yield url


def test_served_example_and_its_client(tmp_path: Path, tiny_models: ModuleType) -> None:
    model = str(tiny_models.build("gemma3").path)
    command = [str(ROOT / "examples/serve_hybrid.sh"), model, "--enforce-eager"]
    command += ["--max-model-len", "12288"]
    server_log = tmp_path / "server.log"
    with serving(command, server_log) as url:
        lines = run_script("examples/client.py", "--url", url, log=tmp_path / "client.log")
    assert lines[0].endswith(" ms, 0 tokens restored")
    assert lines[1].endswith(" ms, 11,264 tokens restored")
    assert lines[-1] == "identical: yes"
    # Its values come from examples/lmcache.yaml.
    assert "max_local_cpu_size=4GiB (yaml)" in server_log.read_text(errors="replace")


def test_served_hidden_states_and_their_reader(tmp_path: Path, tiny_models: ModuleType) -> None:
    """By URL; examples/extract_hidden_states.py does it by path."""
    model = str(tiny_models.build("qwen2").path)
    tier = f"file://{tmp_path}/tier"
    command = [str(ROOT / "examples/serve_hidden_states.sh"), model, "0,2,4", tier]
    command += ["--enforce-eager", "--max-model-len", "4096"]
    reader = "examples/read_hidden_states.py"
    with serving(command, tmp_path / "server.log") as url:
        lines = run_script(reader, "--url", url, "--keep", log=tmp_path / "kept.log")
        assert lines[0].startswith(f"rows at {tier}#")
        assert lines[1] == "3,000 tokens, 3 layers of 128, bfloat16, 2,304,000 bytes"
        assert lines[-1] == "tokens are the prompt's: yes"
        values = [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]
        assert len(values) == 2
        assert run_script(reader, "--url", url, log=tmp_path / "log")[-1] == lines[-1]
    assert [path for path in (tmp_path / "tier").rglob("*") if path.is_file()] == values


def test_demo(tmp_path: Path) -> None:
    picture = ROOT / "demo-out" / "ttft.png"
    picture.unlink(missing_ok=True)
    lines = run_script("tools/demo.py", log=tmp_path / "log")
    assert lines[-1] == "identical: yes"
    restored = next(line for line in lines if line.startswith("restored "))
    assert restored.split()[3:] == ["11,264", "11,264", "256", "3", "of", "3"]
    assert picture.stat().st_size > 10_000
