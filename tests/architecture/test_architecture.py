"""The directions that imports may take, and what importing the package may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lmcache_connector"

# Module or folder -> its level. A module imports from lower levels and from its own folder only.
LEVELS = {
    "buffers": 0,
    "errors": 0,
    "log": 0,
    "groups": 1,
    "shape_spec": 2,
    "chunk_size": 2,
    "keys": 2,
    "metadata": 2,
    "config": 2,
    "counters": 2,
    "storage": 3,
    "triton_kernels": 3,
    "layout": 4,
    "server": 5,
    "hidden_states": 6,
    "scheduler": 7,
    "worker": 7,
    "vllm_view": 8,
    "observability": 8,
    "vllm_faults": 8,
    "vllm_engine": 8,
    "vllm_request": 8,
    "omni_stage": 9,
    "setup": 10,
    "sides": 11,
    "connector": 12,
    "__main__": 13,
}
MAY_IMPORT_VLLM = {
    "connector",
    "vllm_view",
    "vllm_faults",
    "vllm_engine",
    "vllm_request",
    "omni_stage",
    "observability",
    "setup",
    "sides",
    "__init__",
}
NO_TORCH = {
    "errors",
    "log",
    "groups",
    "keys",
    "metadata",
    "config",
    "counters",
    "layout",
    "storage",
    "server",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "triton_kernels").glob("*.py"))


def unit_of(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        relative = path.relative_to(PACKAGE)
        if relative.name == "__main__.py":
            return "__main__"
        return relative.parts[0].removesuffix(".py")
    return "triton_kernels"


def imports_of(path: Path) -> list[tuple[str, int]]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "lmcache_connector":
                names += [(f"lmcache_connector.{alias.name}", node.lineno) for alias in node.names]
            else:
                names.append((node.module, node.lineno))
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    unit = unit_of(path)
    for name, line in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{line}: {name}"
        top = name.split(".")[0]
        if top == "vllm":
            assert unit in MAY_IMPORT_VLLM, f"{where}: vLLM is read in vllm_view.py"
        if top == "torch":
            assert unit not in NO_TORCH, f"{where}: this part knows bytes and keys only"
        assert top != "triton_kernels", f"{where}: vLLM takes a module of this name for another"
        if path.name != "speculators.py":
            assert "speculators" not in name.split("."), f"{where}: it needs another package"
        if not name.startswith("lmcache_connector."):
            continue
        target = name.split(".")[1]
        if target not in LEVELS:  # a public name of the package itself
            continue
        if unit != target:
            assert unit != "__init__", f"{where}: importing the package must stay light"
            assert LEVELS[target] < LEVELS[unit], f"{where}: from {unit} to {target}"


def test_every_module_has_its_level() -> None:
    assert {unit_of(path) for path in sources()} - {"__init__"} <= set(LEVELS)


def test_files_are_short() -> None:
    for path in sources():
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines"


def test_forbidden_constructs() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "hash"), where
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                assert not {"pickle", "marshal", "shelve"} & set(names), where
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or (
                    isinstance(node.type, ast.Name)
                    and node.type.id in ("Exception", "BaseException")
                )
                silent = all(isinstance(child, ast.Pass) for child in node.body)
                assert not (broad and silent), f"{where}: an error disappears"


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, lmcache_connector; lmcache_connector.register; "
        "print(sorted({'torch', 'vllm', 'triton', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    assert output.strip() == "[]"


def test_what_is_tested_on_devices_needs_no_more_than_torch() -> None:
    """A machine that is lent for `make gpu-test` has torch, Triton and NumPy."""
    code = (
        "import sys; "
        "import lmcache_connector.worker.device_copier, lmcache_connector.hidden_states.staging; "
        "print(sorted({'msgspec', 'zmq', 'xxhash', 'vllm', 'safetensors'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    assert output.strip() == "[]"


def test_public_names() -> None:
    import lmcache_connector

    assert lmcache_connector.__all__ == [
        "CONNECTOR_MODULE",
        "CONNECTOR_NAME",
        "__version__",
        "register",
    ]
