#!/usr/bin/env bash
# aiperf (from PyPI, in a virtual environment of its own: its pins are not ours) against a running gateway, for a short run.
#   python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf
#   tests/live/clients/aiperf.sh /tmp/aiperf/bin/aiperf http://127.0.0.1:8000 TOKENIZER_FOLDER
# TOKENIZER_FOLDER is the folder that `conductor model pull` names; aiperf writes its figures into AIPERF_OUT.
set -euo pipefail
aiperf=$1 url=$2 tokenizer=$3
unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE # with either, aiperf takes the folder for a name on the hub, and refuses it
"$aiperf" profile --model smollm2-135m --url "$url" --endpoint-type chat --streaming --tokenizer "$tokenizer" \
  --request-count 12 --concurrency 2 --isl 96 --osl 16 --ui none --artifact-dir "${AIPERF_OUT:-out/aiperf}"
