#!/usr/bin/env bash
# The main job: trains a team in two stages in the toy world and shows whether it got better.
#   bash launch/demo.sh                                              seed 0, into runs/demo
#   bash launch/demo.sh --config.seed=1 --workdir=runs/demo_seed1    flags pass through
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
# XLA on a CPU maps its temporaries anew in every step; huge pages make that cheap
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec python launch/demo.py "$@"
