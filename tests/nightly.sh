#!/usr/bin/env bash
# What is too long for every change: ten minutes of load, a hundred kills, a hundred faults over each
# path, every decoder under noise for a minute, the pages in a browser, the costs of the policy at ten
# million blocks, a million simulated requests. An hour and a half.
#
#   tests/nightly.sh [--build DIR]
#
# DIR: build/dev unless given; it must be built. The decoders run in build/asan where that is built.
# Prints each check's own last line and, at the end,
# `N passed, N failed, N skipped`. Exit status 0 only when none failed. Logs: build/logs/nightly-*.log.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage() { sed -n '2,/^set /p' tests/nightly.sh | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
build=build/dev
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'tests/nightly.sh: unknown option %s; known: --build, --help\n' "$1" >&2; exit 2 ;;
  esac
done
[[ -x $build/service/kvstowd ]] || { printf 'tests/nightly.sh: %s is not built\n' "$build" >&2; exit 2; }

mkdir -p build/logs
passed=0
failed=0
skipped=0

# check NAME COMMAND...
check() {
  local name=$1 log=build/logs/nightly-$1.log status=0 started=$SECONDS
  shift
  "$@" > "$log" 2>&1 || status=$?
  case $status in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)); tail -40 "$log" ;;
  esac
  printf '%-14s status %d, %d s: %s\n' "$name" "$status" $((SECONDS - started)) "$(tail -n 1 "$log")"
}

# The mark: a million requests through three tiers within a minute.
million_requests() {
  local started=$SECONDS
  "$build/storage/policy/kvstow-replay" tests/data/mooncake_conversation_trace.jsonl \
    --policy rtv --repeat 84 --blocks none || return
  printf '%d requests in %d s, at most 60\n' $((12031 * 84)) $((SECONDS - started))
  [[ $((SECONDS - started)) -le 60 ]]
}

check soak tests/e2e/soak.sh 600 --build "$build"
check kill_loop tests/e2e/kill_loop.sh 100 --build "$build"
check fault_loop tests/e2e/fault_loop.sh 100 --build "$build"
fuzz=$build
[[ -x build/asan/tests/fuzz/codec_fuzz_smoke ]] && fuzz=build/asan
check codec_fuzz env KVSTOW_FUZZ_SECONDS=30 "$fuzz/tests/fuzz/codec_fuzz_smoke" --gtest_filter='CodecFuzz.DecodersTake*'
check admin_page tests/e2e/admin_page.py --build "$build"
check policy_cost "$build/tests/bench/policy_bench" --policy rtv --check
check million million_requests
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[[ $failed -eq 0 ]]
