#!/usr/bin/env bash
# Makes .venv-omni (or VENV_DIR): what scripts/setup_venv.sh makes with the vLLM that vLLM-Omni
# asks for, and vLLM-Omni beside it. Done already: returns at once.
#
#   scripts/setup_omni_venv.sh [VENV_DIR]
#
# vLLM-Omni is installed without its dependencies: they are those of all its models, on a GPU. The
# modules named here are what its workers import.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-omni}
omni='vllm-omni==0.30.0'
modules=(aenum omegaconf soundfile prettytable janus einops diffusers==0.40.0)
py=$venv/bin/python

scripts/setup_venv.sh "$venv" 0.30.0
if ! "$py" -c "import importlib.metadata as m, sys; sys.exit('$omni'.split('==')[1] != m.version('vllm-omni'))" \
  >/dev/null 2>&1; then
  printf '==> installing %s\n' "$omni"
  "$py" -m pip install --disable-pip-version-check --quiet "${modules[@]}"
  "$py" -m pip install --disable-pip-version-check --quiet --no-deps "$omni"
fi
