#!/usr/bin/env bash
# Load without pause on a small daemon, and what must hold all the while and afterwards.
#
#   tests/e2e/soak.sh [SECONDS] [--build DIR] [--seed N]
#
# One daemon with 64 MiB of memory and 256 MiB of disk; eight clients over shared memory, UCX over
# TCP and gRPC: three that put, get, look up and delete with several codecs, one whose writes never
# end, one that reads slowly, three readers that are killed with -9 every second or so and come back.
# Every byte read is compared, every call must end by its deadline; a watcher polls the metrics page
# and the folder: no tier ever past its cap, and at the end no pin, no reserved byte, no window and no
# file left that was not there at the start. Then every record is verified and SIGTERM must end the
# daemon with 0.
#
# SECONDS: 60 unless given; a machine that has not filled the disk by then gets up to 200 more. DIR: build/dev unless given. The seed of all random choices is printed;
# the same one makes the same choices.
set -uo pipefail

usage() { sed -n '2,/^set /p' "$0" | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
root=$(cd "$(dirname "$0")/../.." && pwd)
seconds=60
build=$root/build/dev
seed=20261201
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=$2; shift 2 ;;
    --seed) seed=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    [0-9]*) seconds=$1; shift ;;
    *) printf 'soak: unknown argument %s\n' "$1" >&2; exit 2 ;;
  esac
done
daemon=$build/service/kvstowd
client=$build/tests/e2e/soak_client
watch=$build/tests/e2e/soak_watch
for program in "$daemon" "$client" "$watch"; do
  [[ -x $program ]] || { printf 'soak: %s is missing: build first\n' "$program" >&2; exit 2; }
done

folder=$(mktemp -d)
target=unix:$folder/kvstow.sock
daemon_pid=
watch_pid=
client_pids=()
reader_pids=(0 0 0)
paths=(shm ucx grpc)
next_seed=$seed

cleanup() {
  local pid
  for pid in "${client_pids[@]}" "${reader_pids[@]}" $watch_pid $daemon_pid; do
    if [[ $pid -gt 0 ]]; then kill -9 "$pid" 2> /dev/null; fi
  done
  wait 2> /dev/null
  rm -rf "$folder"
}
trap cleanup EXIT

die() {
  printf 'soak: %s (seed %s)\n' "$*" "$seed"
  cat "$folder"/*.out
  printf -- '--- the daemon said:\n'
  tail -40 "$folder/daemon.log"
  exit 1
}

wait_for() {  # FILE TEXT PID
  local waited
  for ((waited = 0; waited < 1200; ++waited)); do
    if grep -q "$2" "$1" 2> /dev/null; then return 0; fi
    kill -0 "$3" 2> /dev/null || return 1
    sleep 0.05
  done
  return 1
}

# start_client ROLE PATH NAME: its process is $!.
start_client() {
  next_seed=$((next_seed + 1))
  "$client" "$1" "$target" "$2" "$next_seed" >> "$folder/$3.out" 2>&1 < /dev/null &
}

# ended PID NAME [STATUS]: waits for a client that was told to stop. A reader that has just been
# started may not know SIGTERM yet.
ended() {
  local status
  wait "$1"
  status=$?
  [[ $status -eq 0 || $status -eq ${3:-0} ]] || die "$2 ended with status $status"
}

printf 'soak: %s s, seed %s\n' "$seconds" "$seed"
"$daemon" --listen.unix_socket="$folder/kvstow.sock" --listen.tcp= --metrics.address=127.0.0.1:0 \
  --channels.ucx=true --channels.ucx_tls=tcp --channels.ucx_devices=lo --channels.window_bytes=512MiB \
  --dram.capacity=64MiB --nvme.path="$folder/nvme" --nvme.capacity=256MiB \
  --tickets.write_deadline=5s --tickets.reuse_delay=1s \
  > "$folder/daemon.log" 2>&1 < /dev/null &
daemon_pid=$!
wait_for "$folder/daemon.log" 'ready ' "$daemon_pid" || die "the daemon did not become ready"
metrics=$(sed -nE 's/.*ready .*metrics=([^ ]+).*/\1/p' "$folder/daemon.log")
"$watch" "$target" "$metrics" "$folder/nvme" "$daemon_pid" > "$folder/watch.out" 2>&1 &
watch_pid=$!
wait_for "$folder/watch.out" '^watching' "$watch_pid" || die "the watcher did not see a daemon at rest"

for i in 0 1 2; do
  start_client mixed "${paths[i]}" "mixed-${paths[i]}"
  client_pids+=($!)
done
start_client abort grpc abort
client_pids+=($!)
start_client slow grpc slow
client_pids+=($!)

RANDOM=$seed
kills=0
end=$((SECONDS + seconds))
latest=$((end + 200))
while [[ $SECONDS -lt $end ]] ||
  { [[ $SECONDS -lt $latest ]] && ! grep -q '^loaded' "$folder/watch.out"; }; do
  i=$((RANDOM % 3))
  if [[ ${reader_pids[i]} -gt 0 ]]; then
    kill -9 "${reader_pids[i]}" && kills=$((kills + 1))
    wait "${reader_pids[i]}" 2> /dev/null
  fi
  start_client reader "${paths[i]}" "reader-${paths[i]}"
  reader_pids[i]=$!
  sleep "$(printf '0.%03d' $((RANDOM % 1000)))"
  kill -0 "$daemon_pid" 2> /dev/null || die "the daemon died"
  for pid in "${client_pids[@]}"; do
    kill -0 "$pid" 2> /dev/null || die "a client ended by itself"
  done
done

for pid in "${client_pids[@]}" "${reader_pids[@]}"; do
  if [[ $pid -gt 0 ]]; then kill -TERM "$pid"; fi
done
for pid in "${client_pids[@]}"; do ended "$pid" "a client"; done
for pid in "${reader_pids[@]}"; do
  if [[ $pid -gt 0 ]]; then ended "$pid" "a reader" 143; fi
done
client_pids=()
reader_pids=(0 0 0)
if grep -q '^FAULT' "$folder"/*.out; then die "a client met a fault"; fi
kill -TERM "$watch_pid"
wait "$watch_pid"
status=$?
watch_pid=
[[ $status -eq 0 ]] || die "the watcher ended with status $status"
kill -TERM "$daemon_pid"
wait "$daemon_pid"
status=$?
daemon_pid=
[[ $status -eq 0 ]] || die "SIGTERM ended the daemon with status $status, not 0"
tail -qn 1 "$folder"/{mixed,abort,slow}*.out
tail -n 4 "$folder/watch.out"
printf 'soak: %s s, %d readers killed, no fault (seed %s)\n' "$seconds" "$kills" "$seed"
