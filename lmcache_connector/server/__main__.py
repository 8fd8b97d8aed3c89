"""``python -m lmcache_connector.server``: the same as ``lmcache-connector server``."""

from __future__ import annotations

import sys

from lmcache_connector.observability.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "server")
    main()
