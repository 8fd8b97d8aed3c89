#!/usr/bin/env bash
# Serves a model with the connector, configured by examples/lmcache.yaml.
#
#   examples/serve_hybrid.sh MODEL [arguments of vllm serve ...]
#
# HOST and PORT say where (127.0.0.1:8000). Ask it with examples/client.py.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LMCACHE_CONFIG_FILE=${LMCACHE_CONFIG_FILE:-$here/lmcache.yaml}
# Lets the client empty vLLM's own cache (/reset_prefix_cache), to see the connector's work.
export VLLM_SERVER_DEV_MODE=${VLLM_SERVER_DEV_MODE:-1}

model=$1
shift
exec vllm serve "$model" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
  --kv-transfer-config '{"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both"}' "$@"
