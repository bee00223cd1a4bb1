#!/usr/bin/env bash
# Faults while blocks move over shared memory, UCX over TCP and gRPC.
#
#   tests/e2e/fault_loop.sh [LOOPS] [--build DIR] [--seed N] [--fault NAME]
#
# A loop is one fault, over the three paths at once: the daemon or the worker killed with -9 or
# stopped and continued, a bit changed in frames, in windows, in the memory tier, on disk or on the
# wire, a wire that trickles, a reader a hundred times too slow, a lease that ends during a read. It
# holds when no byte is ever wrong, every call ends within its deadline and a second, work goes on
# afterwards and nothing is held after two deadlines.
#
# LOOPS: 100 unless given; ten are each fault once. DIR: build/dev unless given. The seed is printed;
# the same one makes the same blocks and damages the same places. --fault runs one of them alone.
set -uo pipefail

usage() { sed -n '2,/^set /p' "$0" | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
root=$(cd "$(dirname "$0")/../.." && pwd)
loops=100
build=$root/build/dev
seed=20261201
fault=
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=$2; shift 2 ;;
    --seed) seed=$2; shift 2 ;;
    --fault) fault=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    [0-9]*) loops=$1; shift ;;
    *) printf 'fault_loop: unknown argument %s\n' "$1" >&2; exit 2 ;;
  esac
done
program=$build/tests/e2e/fault_loop
[[ -x $program ]] || { printf 'fault_loop: %s is missing: build first\n' "$program" >&2; exit 2; }
cd "$root" || exit 2
exec "$program" "$loops" "$seed" ${fault:+"$fault"}
