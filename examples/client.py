#!/usr/bin/env python3
"""Asks a server started by examples/serve_hybrid.sh about one document twice, with stdlib alone.

usage: examples/client.py [--url http://127.0.0.1:8000] [--file FILE]

Between the two requests vLLM's own prefix cache is emptied, so that the second one is served by the
connector. Exit status 0: both answers are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
RESTORED_METRIC = "vllm:lmcache_loaded_tokens_total"


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def complete(url: str, model: str, prompt: str) -> tuple[float, str]:
    """Time to the first token in seconds, and the text."""
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": True}
    start = time.perf_counter()
    ttft = None
    text = []
    with post(f"{url}/v1/completions", body) as response:
        for line in response:
            event = line.removeprefix(b"data: ").strip()
            if event and event != b"[DONE]":
                if ttft is None:
                    ttft = time.perf_counter() - start
                text.append(json.loads(event)["choices"][0]["text"])
    if ttft is None:
        sys.exit("client: the server answered with no token")
    return ttft, "".join(text)


def restored_tokens(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(RESTORED_METRIC)]
    return int(sum(map(float, values)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--file", type=Path, default=LICENSE, help="default: %(default)s")
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.url}/v1/models", timeout=30) as response:
        model = json.load(response)["data"][0]["id"]
    prompt = options.file.read_text()

    texts = []
    for situation in ("first", "again"):
        before = restored_tokens(options.url)
        ttft, text = complete(options.url, model, prompt)
        restored = restored_tokens(options.url) - before
        print(f"{situation}: first token after {ttft * 1000:.0f} ms, {restored:,} tokens restored")
        texts.append(text)
        post(f"{options.url}/reset_prefix_cache", {}).close()
    print(f"answer: {texts[-1]!r}")
    identical = texts[0] == texts[1]
    print(f"identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except urllib.error.HTTPError as error:
        hint = ""
        if error.code == 404 and error.url.endswith("/reset_prefix_cache"):
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1"
        text = error.read().decode(errors="replace")
        sys.exit(f"client: {error.url}: {error.code} {text}{hint}")
    except urllib.error.URLError as error:
        sys.exit(f"client: no server answers: {error.reason}")
