#!/usr/bin/env bash
# Installs what kvstow needs to build, on Debian 12 and its relatives. The one list of packages.
#
#   deploy/install_deps.sh          what a build needs
#   deploy/install_deps.sh --dev    and what the tests need: GoogleTest, clang-format, pytest
#   deploy/install_deps.sh --print  prints the names and changes nothing
#
# Works as root and with sudo. Asks dpkg first: when everything is there, apt is not called. Nothing
# but the machine's configured Debian sources is used.
set -euo pipefail

build_packages=(
  g++ cmake ninja-build pkg-config git ca-certificates
  ccache mold                        # optional for a build; they make the second one fast
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc   # the wire
  libabsl-dev                        # Status, Span, time, strings
  librocksdb-dev                     # the disk tier
  libucx-dev                         # windows over RDMA or TCP
  libhwy-dev                         # SIMD with run-time dispatch
  libeigen3-dev                      # eigenvectors, for calibrations
  libxxhash-dev libssl-dev           # XXH3; SHA-256
  prometheus-cpp-dev                 # the metrics page
  nlohmann-json3-dev                 # safetensors headers, --json
  python3-dev python3-pip python3-venv pybind11-dev   # pip install ./client/python
)
test_packages=(
  libgtest-dev libgmock-dev clang-format-14
  python3-numpy python3-pytest python3-yaml   # tests of the Python package and of the manifests
)

usage() { sed -n '2,/^set /p' "$0" | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
say() { printf 'install_deps: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }

packages=("${build_packages[@]}")
print_only=no
for arg in "$@"; do
  case "$arg" in
    --dev) packages+=("${test_packages[@]}") ;;
    --print) print_only=yes ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown option $arg; known: --dev, --print, --help" ;;
  esac
done
if [[ $print_only == yes ]]; then
  printf '%s\n' "${packages[@]}"
  exit 0
fi
command -v dpkg-query > /dev/null ||
  die "this is not a Debian system; install the equivalents of: ${packages[*]}"

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2> /dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  say "all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo > /dev/null ||
    die "needs root or sudo to install: ${missing[*]}"
  as_root=(sudo)
fi
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 "$@"
}

# A mirror that fails once is common; a mirror that fails three times is a fault to show.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
retry() {
  local attempt
  for attempt in 1 2 3; do
    if apt "$@" > "$log" 2>&1; then return 0; fi
    say "apt-get $1: attempt $attempt of 3 did not succeed"
    sleep $((attempt * 3))
  done
  cat "$log" >&2
  die "apt-get $1 did not succeed; its output is above"
}

say "installing ${#missing[@]} of ${#packages[@]} packages: ${missing[*]}"
retry update
retry install --no-install-recommends "${missing[@]}"
say "done"
