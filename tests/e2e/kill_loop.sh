#!/usr/bin/env bash
# Kills the daemon again and again, and checks what it kept.
#
#   tests/e2e/kill_loop.sh [ROUNDS] [--build DIR] [--seed N]
#
# A round: start kvstowd, check everything earlier rounds wrote (each block byte-equal or a miss;
# those acknowledged as durable must be there; stat, list and verify agree; nothing reserved is left
# over), then put a writer and a reader to work and kill -9 the daemon at a random moment. After the
# last round the daemon is checked once more and ended with SIGTERM. The workers' bytes go through
# shared memory, UCX over TCP and gRPC in turn.
#
# ROUNDS: 100 unless given. DIR: build/dev unless given. The seed of the random moments is printed;
# the same one gives the same moments.
set -uo pipefail

usage() { sed -n '2,/^set /p' "$0" | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
root=$(cd "$(dirname "$0")/../.." && pwd)
rounds=100
build=$root/build/dev
seed=20261130
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=$2; shift 2 ;;
    --seed) seed=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    [0-9]*) rounds=$1; shift ;;
    *) printf 'kill_loop: unknown argument %s\n' "$1" >&2; exit 2 ;;
  esac
done
daemon=$build/service/kvstowd
worker=$build/tests/e2e/kill_loop_worker
for program in "$daemon" "$worker"; do
  [[ -x $program ]] || { printf 'kill_loop: %s is missing: build first\n' "$program" >&2; exit 2; }
done

folder=$(mktemp -d)
target=unix:$folder/kvstow.sock
ledger=$folder/ledger
daemon_pid=
worker_pids=()
touch "$ledger"

cleanup() {
  local pid
  for pid in "${worker_pids[@]}" $daemon_pid; do kill -9 "$pid" 2> /dev/null; done
  wait 2> /dev/null
  rm -rf "$folder"
}
trap cleanup EXIT

die() {
  printf 'kill_loop: %s (seed %s)\n' "$*" "$seed"
  printf -- '--- the daemon said:\n'
  tail -40 "$folder/daemon.log"
  exit 1
}

start_daemon() {
  local waited
  : > "$folder/daemon.log"  # before the start, or the wait below would read the last one's
  "$daemon" --listen.unix_socket="$folder/kvstow.sock" --listen.tcp= --metrics.address= \
    --channels.ucx=true --channels.ucx_tls=tcp --channels.ucx_devices=lo \
    --dram.capacity=64MiB --nvme.path="$folder/nvme" --nvme.capacity=2GiB \
    > "$folder/daemon.log" 2>&1 < /dev/null &
  daemon_pid=$!
  for ((waited = 0; waited < 600; ++waited)); do
    if grep -q 'ready ' "$folder/daemon.log"; then return; fi
    kill -0 "$daemon_pid" 2> /dev/null || break
    sleep 0.05
  done
  die "round $round: the daemon did not become ready"
}

check() {
  local output
  output=$("$worker" check "$target" "$ledger" "$round" 2>&1) || {
    printf '%s\n' "$output"
    die "round $round: the check found a fault"
  }
  printf 'round %3d: %s\n' "$round" "$output"
}

RANDOM=$seed
started=$SECONDS
for ((round = 1; round <= rounds; ++round)); do
  start_daemon
  check
  "$worker" write "$target" "$ledger" "$round" > "$folder/write.log" 2>&1 &
  worker_pids=($!)
  "$worker" read "$target" "$ledger" "$round" > "$folder/read.log" 2>&1 &
  worker_pids+=($!)
  sleep "$(printf '%d.%03d' $((RANDOM % 2)) $((RANDOM % 1000)))"
  kill -9 "$daemon_pid"
  wait "$daemon_pid" 2> /dev/null
  daemon_pid=
  for pid in "${worker_pids[@]}"; do
    wait "$pid"
    status=$?
    if [[ $status -ne 0 ]]; then
      cat "$folder/write.log" "$folder/read.log"
      die "round $round: a worker ended with status $status"
    fi
  done
  worker_pids=()
done

start_daemon
check
grep -q '^D ' "$ledger" || die "no put was ever acknowledged as durable: the load proves nothing"
kill -TERM "$daemon_pid"
wait "$daemon_pid"
status=$?
daemon_pid=
[[ $status -eq 0 ]] || die "SIGTERM ended the daemon with status $status, not 0"
puts=$(grep -c '^[SD] ' "$ledger")
printf 'kill_loop: %d rounds, %d acknowledged puts, no wrong byte, %d s (seed %s)\n' \
  "$rounds" "$puts" $((SECONDS - started)) "$seed"
