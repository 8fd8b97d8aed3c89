#!/usr/bin/env python3
"""Reads the hidden states of a prompt from a server that examples/serve_hidden_states.sh started.

usage: examples/read_hidden_states.py [--url http://127.0.0.1:8000] [--file FILE] [--keep]

The answer names a file, or a URL where the rows go to a tier: the reader takes either. Credentials
of a tier come from the environment. Exit status 0: the rows are those of the prompt's tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lmcache_connector.errors import ConnectorError
from lmcache_connector.hidden_states import files

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        # What is wrong is in the body.
        why = error.read(2000).decode(errors="replace")
        raise OSError(f"{request.full_url} answers {error}: {why}") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--file", type=Path, default=LICENSE, help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="do not remove what was read")
    options = parser.parse_args()
    url = options.url.rstrip("/")
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    # The rows of the prompt are there once one token was computed from it.
    body = {"model": model, "prompt": options.file.read_text()[:3000], "max_tokens": 1}
    answer = ask(f"{url}/v1/completions", {**body, "return_token_ids": True})
    place = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    if place is None:
        sys.exit("read: the server exported nothing; its log says why")
    print(f"rows at {place}")
    # Waits while they are being written.
    tensors, layers = files.load_with_layers(place, timeout=60)
    rows, token_ids = tensors["hidden_states"], tensors["token_ids"]
    tokens, count, width = rows.shape
    dtype = str(rows.dtype).removeprefix("torch.")
    print(f"{tokens:,} tokens, {count} layers of {width}, {dtype}, {rows.nbytes:,} bytes")
    # Another writer may not have said which layers they are.
    for index, layer in enumerate(layers.split(",") if layers else range(count)):
        norm = rows[:, index].float().norm(dim=-1).mean()
        print(f"layer {layer}: mean norm {norm:.3f}")
    if not options.keep:
        files.remove(place)
    matches = token_ids.tolist() == answer["choices"][0]["prompt_token_ids"]
    print(f"tokens are the prompt's: {'yes' if matches else 'no'}")
    return 0 if matches else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConnectorError, OSError, ValueError) as error:
        sys.exit(f"read: {error}")
