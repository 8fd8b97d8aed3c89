"""The backend ``lmcache`` of speculators 0.9: training on the files of this connector.

Speculators knows the backends that are registered before its programs look: importing this module
does that. So does running one of them, a script or ``-m MODULE``, through it:

    python -m lmcache_connector.hidden_states.speculators scripts/launch_vllm.py MODEL \\
        --hidden-states-backend lmcache --hidden-states-path /data/rows
    python -m lmcache_connector.hidden_states.speculators -m speculators.train \\
        --hidden-states-backend lmcache ...

Nothing else here imports it: it needs hs-connectors.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from importlib.util import find_spec
from typing import Any

import torch
from hs_connectors import FileBackend, FileTransfer, HiddenStatesBackend

from lmcache_connector.hidden_states import files

NAME = "lmcache"


class LMCacheTransfer(FileTransfer):
    """Reads files, and says why there is none."""

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a finished request; waits while they are being written.

        Raises:
            ExtractionError: the engine gave the file up; says why.
            FileNotFoundError: there is no such file, and nobody is writing it.
            TimeoutError: it is still being written.
        """
        path: str = hs_transfer_params["hidden_states_path"]
        rows = files.load(path)
        files.remove(path, keep_hidden_states=True)
        return rows

    def delete(self, handle: str) -> None:
        """Remove the file, its lock and its error marker."""
        files.remove(handle)


class LMCacheBackend(FileBackend):
    """The arguments of the backend ``file``, and the connector's own."""

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        FileBackend.add_launch_args(parser)
        what = "JSON: kv_connector_extra_config of LMCacheHybridConnector"
        parser.add_argument("--lmcache-config", type=json.loads, default={}, help=what)

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> LMCacheTransfer:
        return LMCacheTransfer(FileBackend.from_train_args(args, data_path).hidden_states_path)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        config = dict(args.lmcache_config)
        path = args.hidden_states_path
        settings = {"shared_storage_path": path if "://" in path else os.path.abspath(path)}
        config["extract_hidden_states"] = settings | config.get("extract_hidden_states", {})
        connector = {"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"}
        return {**connector, "kv_connector_extra_config": config}


def main() -> None:
    """Run the program that the command line names; exit code 2 when there is none."""
    parser = argparse.ArgumentParser(usage=f"python -m {__spec__.name} (SCRIPT | -m MODULE) ...")
    is_module = sys.argv[1:2] == ["-m"]
    del sys.argv[: 1 + is_module]
    name = sys.argv[0] if sys.argv else ""
    parser.parse_args([name] if name in ("-h", "--help") else [])
    try:
        if not (find_spec(name) if name and is_module else os.path.isfile(name)):
            raise ImportError(f"no such {'module' if is_module else 'script'}")
    except (ImportError, ValueError) as error:
        parser.exit(2, f"cannot run {name!r}: {error}; usage: {parser.usage}\n")
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    # Under its own name its classes are found by a data loader's processes.
    from lmcache_connector.hidden_states.speculators import main as run

    run()
else:
    HiddenStatesBackend.register(NAME)(LMCacheBackend)
