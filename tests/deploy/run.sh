#!/usr/bin/env bash
# Tests of deploy/: manifests, chart, dashboard, container recipe. The last line is
# `N passed, N failed, N skipped`.
#
#   tests/deploy/run.sh                   all but the container: half a minute
#   tests/deploy/run.sh --container       only the container: follows the recipe in a chroot, which
#                                         builds everything; needs root and debootstrap
#   tests/deploy/run.sh --build FOLDER    the programs to use (build/release)
#
# Needs kustomize 4.1 or kubectl 1.22, and python3 with venv; installs requirements.txt into
# build/deploy/venv from PyPI.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() { sed -n '2,/^set /p' tests/deploy/run.sh | sed -e '/^set /d' -e 's/^# \{0,1\}//'; }
die() { printf 'tests/deploy/run.sh: %s\n' "$*" >&2; exit 2; }
work=build/deploy
build=build/release
container=no
while [[ $# -gt 0 ]]; do
  case "$1" in
    --container) container=yes ;;
    --build) build=${2:?--build needs a folder}; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown option $1; known: --container, --build, --help" ;;
  esac
  shift
done
mkdir -p "$work"

if [[ $container == yes ]]; then
  [[ $(id -u) -eq 0 ]] || die "--container needs root: it mounts and makes chroots"
  command -v debootstrap > /dev/null || die "--container needs debootstrap: apt install debootstrap"
  ccache=
  if command -v ccache > /dev/null; then ccache=$(ccache --get-config cache_dir); fi
  exec python3 -B tests/deploy/container.py --work "$work/container" --ccache "$ccache"
fi

[[ -x $build/service/kvstowd ]] || die "$build has no programs: cmake --workflow --preset release"
command -v kustomize > /dev/null || command -v kubectl > /dev/null ||
  die "neither kustomize nor kubectl is installed"
if ! cmp -s tests/deploy/requirements.txt "$work/venv/requirements.txt"; then
  rm -rf "$work/venv"
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" -q install -r tests/deploy/requirements.txt
  cp tests/deploy/requirements.txt "$work/venv/"
fi
KVSTOW_BUILD=$build exec "$work/venv/bin/python" -B tests/deploy/run.py \
  manifests schema daemon recipe
