#!/usr/bin/env bash
# Runs the default test suite, on a fresh machine after making and filling .venv.
#   bash launch/test.sh                 the default suite
#   bash launch/test.sh -k greedy       any pytest arguments pass through
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
ruff check .
ruff format --check .
exec python -m pytest -n auto --dist worksteal "$@"
