#!/usr/bin/env bash
# Makes .venv-omni (or VENV_DIR): what scripts/setup_venv.sh makes with the vLLM that vLLM-Omni
# asks for, and vLLM-Omni beside it. Done already: returns at once.
#
#   scripts/setup_omni_venv.sh [VENV_DIR]
#
# vLLM-Omni is installed without its dependencies: they are those of all its models, on a GPU. The
# modules named here are what its workers import.
#
# Its thinkers import torchvision by way of transformers, and use none of its operators on text.
# The package index has torchvision built for CUDA only, whose import fails where its operators
# cannot be loaded: it describes two of them without asking. These two lines are taken out.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-omni}
omni='vllm-omni==0.30.0'
torchvision='torchvision==0.28.0' # of torch 2.13
modules=(aenum omegaconf soundfile prettytable janus einops diffusers==0.40.0)
py=$venv/bin/python
pip=("$py" -m pip install --disable-pip-version-check --quiet)

scripts/setup_venv.sh "$venv" 0.30.0
if ! "$py" -W ignore -c "import importlib.metadata as m, sys, torchvision; sys.exit('$omni'.split('==')[1] != m.version('vllm-omni'))" \
  >/dev/null 2>&1; then
  printf '==> installing %s\n' "$omni"
  "${pip[@]}" "${modules[@]}"
  "${pip[@]}" --no-deps "$torchvision" "$omni"
  described=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py
  sed -i 's/^@torch.library.register_fake("torchvision::q\?nms")$/# &/' "$described"
fi
