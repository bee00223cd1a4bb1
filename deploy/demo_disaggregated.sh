#!/usr/bin/env bash
# A prefill engine and a decode engine, each with its own sidecar, on this machine: the decode engine
# gets the prompts' KV from the other one's sidecar instead of computing it. Prints the time to the
# first token without and with, the bytes on the wire, the codec and the path, and whether the tokens
# are right.
#
#   deploy/demo_disaggregated.sh                 codec safe
#   deploy/demo_disaggregated.sh --codec lossless
#   KVSTOW_ENGINES_DIR=DIR                       where vLLM and the model are kept (6 GB)
#
# The engines are real: vLLM for CPU with SmolLM2-135M, installed the first time, which takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,/^set /p' deploy/demo_disaggregated.sh | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
codec=safe
while [[ $# -gt 0 ]]; do
  case "$1" in
    --codec) codec=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'demo_disaggregated: unknown argument %s\n' "$1" >&2; exit 2 ;;
  esac
done

export KVSTOW_BUILD_DIR=${KVSTOW_BUILD_DIR:-$PWD/build/dev}
if [[ ! -x $KVSTOW_BUILD_DIR/service/kvstowd ]]; then
  deploy/install_deps.sh --dev
  printf 'demo_disaggregated: building\n'
  cmake --preset dev > /dev/null && cmake --build --preset dev --target kvstowd kvstow _kvstow > /dev/null
fi
exec tests/engines/run.sh --demo "$codec"
