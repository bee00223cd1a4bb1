#!/usr/bin/env bash
# From a fresh clone to a judged KV cache: installs, builds, and takes the KV cache of a real language
# model through kvstow: into three codecs, onto the disk, through kill -9 and back.
#
#   deploy/quickstart.sh               everything
#   deploy/quickstart.sh --no-install  trusts that the packages are there
#
# Exit status 0 only when every byte of `raw` came back equal and every codec kept its bound. The
# daemon runs in a temporary folder; nothing is left behind but build/release.
set -euo pipefail

usage() { sed -n '2,/^set /p' "$0" | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
root=$(cd "$(dirname "$0")/.." && pwd)
install=yes
for arg in "$@"; do
  case "$arg" in
    --no-install) install=no ;;
    -h | --help) usage; exit 0 ;;
    *) printf 'quickstart: unknown option %s; known: --no-install, --help\n' "$arg" >&2; exit 2 ;;
  esac
done
cd "$root"

steps=9
step_number=0
started=$SECONDS
step() {
  step_number=$((step_number + 1))
  printf '\n[%d/%d, %d s] %s\n' "$step_number" "$steps" $((SECONDS - started)) "$*"
}
folder=$(mktemp -d)
daemon_pid=
cleanup() {
  if [[ -n $daemon_pid ]]; then
    kill -9 "$daemon_pid" 2> /dev/null || true
    wait "$daemon_pid" 2> /dev/null || true
  fi
  rm -rf "$folder"
}
trap cleanup EXIT
die() {
  printf 'quickstart: %s\n' "$*" >&2
  if [[ -s $folder/daemon.log ]]; then
    printf 'quickstart: the daemon said:\n' >&2
    tail -20 "$folder/daemon.log" >&2
  fi
  exit 1
}
# quiet NAME COMMAND...: shows the end of the output only when the command does not succeed.
quiet() {
  local name=$1
  shift
  "$@" > "$folder/$name.log" 2>&1 || {
    tail -40 "$folder/$name.log" >&2
    die "$name did not succeed; the end of its output is above"
  }
}

kv=tests/data/smollm2_kv.safetensors
probe=tests/data/smollm2_kv_probe.safetensors
codecs=(raw int8 safe)
kvstowd=build/release/service/kvstowd
kvstow() { build/release/client/kvstow "$@" --target "unix:$folder/kvstow.sock"; }

start_daemon() {
  local waited
  : > "$folder/daemon.log"  # before the start, or the wait below would read the last one's
  "$kvstowd" --listen.unix_socket="$folder/kvstow.sock" --listen.tcp= --metrics.address= \
    --dram.capacity=256MiB --nvme.path="$folder/nvme" --nvme.capacity=1GiB \
    > "$folder/daemon.log" 2>&1 < /dev/null &
  daemon_pid=$!
  for ((waited = 0; waited < 300; ++waited)); do
    if grep -q 'ready ' "$folder/daemon.log"; then return; fi
    kill -0 "$daemon_pid" 2> /dev/null || break
    sleep 0.1
  done
  die "the daemon did not become ready"
}

step "Packages that a build needs"
if [[ $install == yes ]]; then
  bash deploy/install_deps.sh
else
  printf 'skipped, as asked\n'
fi

step "Build of the release preset (a first build takes minutes, the next one seconds)"
quiet configure cmake --preset release
quiet build cmake --build --preset release
printf 'built %s and %s\n' "$kvstowd" build/release/client/kvstow

step "Daemon with 256 MiB of memory and 1 GiB of disk in $folder"
start_daemon
printf 'kvstowd runs as process %d\n' "$daemon_pid"

step "Put the KV cache of SmolLM2-135M for a chat of 256 tokens, once per codec, durably"
for codec in "${codecs[@]}"; do
  kvstow put "$kv" --codec "$codec" --tenant "$codec" --durable ||
    die "put with codec $codec did not succeed"
done

step "What is stored: four blocks of 64 tokens per codec, in memory and on disk"
kvstow ls || die "ls did not succeed"
kvstow stat || die "stat did not succeed"

step "kill -9 the daemon, and start it again on what is on disk"
kill -9 "$daemon_pid"
wait "$daemon_pid" 2> /dev/null || true
daemon_pid=
start_daemon
printf 'kvstowd runs as process %d\n' "$daemon_pid"

step "Get raw from disk, and compare it with the original byte for byte"
kvstow get --tokens-from "$kv" --tenant raw -o "$folder/raw.safetensors" --compare "$kv" ||
  die "raw did not come back byte for byte"

step "Check every record on disk"
kvstow verify || die "a record on disk is bad"

step "Judge each codec against the original, with the queries of the 16 tokens that follow"
kvstow eval "$kv" --probe "$probe" --codecs "$(IFS=,; printf '%s' "${codecs[*]}")" --check ||
  die "a byte of raw differs or a codec broke its bound"

kill -TERM "$daemon_pid"
wait "$daemon_pid" || die "SIGTERM ended the daemon with status $?"
daemon_pid=
printf '\nAll of it held, in %d s. Where to go next:\n' $((SECONDS - started))
printf '  build/release/service/kvstowd --help     every setting of the daemon\n'
printf '  build/release/client/kvstow help         every command, each with an example\n'
printf '  build/release/client/kvstow doctor       what this machine can do\n'
printf '  tests/run.sh                             every test\n'
printf '  README.md                                what kvstow is, and what it is not yet\n'
