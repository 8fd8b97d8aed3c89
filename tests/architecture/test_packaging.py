"""What a wheel holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    # A copy: building leaves traces beside the sources.
    for name in ("lmcache_connector", "triton_kernels", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(out), str(source)),
        ],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lmcache_connector"}
    for needed in ("py.typed", "connector.py", "triton_kernels/reference.py", "server/client.py"):
        assert f"lmcache_connector/{needed}" in names
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[vllm.general_plugins]" in text
    assert "lmcache_connector:register" in text
    assert "lmcache-connector = lmcache_connector.observability.cli:main" in text


def test_every_source_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "lmcache_connector").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "triton_kernels").glob("*.py"):
        assert f"lmcache_connector/{path.relative_to(ROOT)}" in names


def test_the_folder_refuses_its_top_level_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import triton_kernels"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "lmcache_connector.triton_kernels" in done.stderr
