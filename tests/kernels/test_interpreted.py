"""Runs the kernels' cases on the CPU, in a process where Triton interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_agree_with_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    cases = [
        str(Path(__file__).with_name(name)) for name in ("interpreted.py", "interpreted_rows.py")
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *cases],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
