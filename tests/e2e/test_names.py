"""That vLLM does not take our kernels for OpenAI's triton_kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import lmcache_connector.triton_kernels
from vllm.utils.import_utils import has_triton_kernels
print(lmcache_connector.__file__, has_triton_kernels())
"""


@pytest.mark.parametrize("directory", ["/", str(ROOT)])
def test_vllm_does_not_take_us_for_triton_kernels(tmp_path: Path, directory: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    package = tmp_path / "lmcache_connector"
    ignored = shutil.ignore_patterns("__pycache__", "triton_kernels")
    shutil.copytree(ROOT / "lmcache_connector", package, ignore=ignored)
    shutil.copytree(ROOT / "triton_kernels", package / "triton_kernels")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR", "HOME": str(tmp_path)},
    )
    where, answer = done.stdout.splitlines()[-1].split()
    assert where == str(package / "__init__.py")
    assert answer == "False"
