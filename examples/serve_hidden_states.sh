#!/usr/bin/env bash
# Serves a model and exports the hidden states of its prompts.
#
#   examples/serve_hidden_states.sh MODEL LAYERS PLACE [arguments of vllm serve ...]
#
# LAYERS, such as 0,2,4: the row of layer K is its input, 0 the embeddings, the number of layers the
# last output before the final norm. PLACE: an absolute directory, or, where readers share no file
# system with the server, the URL of a tier such as redis://host:6379/0.
# HOST and PORT say where it listens (127.0.0.1:8000). Read with examples/read_hidden_states.py.
set -euo pipefail

if (($# < 3)) || [[ ! $2 =~ ^[0-9]+(,[0-9]+)*$ ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
model=$1 layers=$2 place=${3//\\/\\\\}
place=${place//\"/\\\"}
shift 3
exec vllm serve "$model" --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" \
  --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ['"$layers"']}}}' \
  --kv-transfer-config '{"kv_connector": "LMCacheHybridConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"extract_hidden_states": {"shared_storage_path": "'"$place"'"}}}' \
  "$@"
