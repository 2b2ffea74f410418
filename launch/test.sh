#!/usr/bin/env bash
# Runs the default test suite, on a fresh machine after making and filling .venv.
#   bash launch/test.sh                 the default suite
#   bash launch/test.sh -k greedy       any pytest arguments pass through
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
# the TPU compiler lies in a folder of its own: in the environment it would slow every start; it is a
# later one than the extra `tpu` of this jax brings, whose pin the lock must not contradict
if [ ! -d .cache/libtpu/libtpu ]; then
  python -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/libtpu \
    libtpu==0.0.52
fi
ruff check .
ruff format --check .
exec python -m pytest -n auto --dist worksteal "$@"
