#!/usr/bin/env bash
# MAPD with a real language model on real questions: protocols of 50 of them by a script that follows
# their gold decompositions, three updates of SmolLM2, then what must hold of them. Interrupted, the
# same command goes on where it stopped.
#   bash launch/smollm2_mapd.sh DATA     DATA: SET.jsonl and SET_corpus.jsonl of the sets below
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
  echo "usage: bash launch/smollm2_mapd.sh DATA [flags of launch/train.py]" >&2
  exit 2
fi
data="$(cd "$OLDPWD" && cd "$1" && pwd)"
shift
. launch/environment.sh
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
out=runs/smollm2_mapd
if [ ! -e "$out/data" ]; then
  mkdir -p "$out"
  python launch/join_corpora.py --data="$data" --out="$out/data" \
    --sets=musique,2wikimultihopqa,hotpotqa_train100
fi
mkdir -p "$out/data/train" "$out/data/test"
for set in musique 2wikimultihopqa; do
  head -n 25 "$out/data/$set.jsonl" > "$out/data/train/$set.jsonl"
  sed -n 26,75p "$out/data/$set.jsonl" > "$out/data/test/$set.jsonl"
done
if [ ! -e "$out/data/index" ]; then
  python launch/build_index.py --corpus="$out/data/corpus.jsonl" --out="$out/data/index" \
    --encoder=package:minilm --max_tokens=128 --piece=1024
fi
python launch/build_protocols.py --config=configs/smollm2_mapd.py --oracle=plain \
  --out="$out/protocols.jsonl"
python launch/train.py --config=configs/smollm2_mapd.py --workdir="$out/training" "$@"
python launch/check_run.py --training="$out/training"
