#!/usr/bin/env bash
# A real language model on real questions: SmolLM2-135M, MiniLM, ScaNN; evaluation of three teams,
# then both stages of training, then what must hold of them. Interrupted, the same command goes on where it stopped.
#   bash launch/smollm2_cpu.sh DATA     DATA: SET.jsonl and SET_corpus.jsonl of the sets below
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
  echo "usage: bash launch/smollm2_cpu.sh DATA [flags of launch/train.py]" >&2
  exit 2
fi
data="$(cd "$OLDPWD" && cd "$1" && pwd)"
shift
. launch/environment.sh
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
out=runs/smollm2
if [ ! -e "$out/data" ]; then
  mkdir -p "$out"
  python launch/join_corpora.py --data="$data" --out="$out/data" \
    --sets=2wikimultihopqa,hotpotqa,hotpotqa_train100,musique_train100
fi
if [ ! -e "$out/data/index" ]; then
  python launch/build_index.py --corpus="$out/data/corpus.jsonl" --out="$out/data/index" \
    --encoder=package:minilm --max_tokens=128 --piece=1024
fi
# more rows at once than training's few episodes fill
python launch/evaluate.py --config=configs/smollm2_cpu.py --workdir="$out/evaluation" \
  --config.engine.decode_rows=32 --config.rollout.concurrent=48
python launch/train.py --config=configs/smollm2_cpu.py --workdir="$out/training" "$@"
python launch/check_run.py --evaluation="$out/evaluation" --training="$out/training"
