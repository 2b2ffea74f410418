#!/usr/bin/env bash
# MAPD with a real language model on real questions: protocols of 50 of them by a script that follows
# their gold decompositions, three updates of SmolLM2, then what must hold of them. Interrupted, the
# same command goes on where it stopped.
#   bash launch/smollm2_mapd.sh DATA [flags of launch/train.py]
#   DATA: SET.jsonl and SET_corpus.jsonl, in FlashRAG's form, of musique, 2wikimultihopqa and
#         hotpotqa_train100. DRY_RUN=1 says what is left to do, and does nothing.
set -euo pipefail
self="$(realpath "$0")"
cd "$(dirname "$self")/.."
sets=(musique 2wikimultihopqa hotpotqa_train100)
out=runs/smollm2_mapd

refuse() {
  printf '%s\n' "$@" >&2
  exit 2
}

if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
  refuse "$(sed -n '2,7s/^# \{0,1\}//p' "$self")"
fi
data="$(cd "$OLDPWD" && realpath -m -- "$1")"
shift
missing=()
for set in "${sets[@]}"; do
  for file in "$set.jsonl" "${set}_corpus.jsonl"; do
    [ -f "$data/$file" ] || missing+=("$file")
  done
done
if [ ${#missing[@]} -gt 0 ]; then
  refuse "$data lacks ${missing[*]}; name the directory that holds questions and corpora"
fi
if [ -e "$out/data" ] && [ "$(cat "$out/source" 2>/dev/null || echo "$data")" != "$data" ]; then
  refuse "$out was begun with $(cat "$out/source"), and this is $data; move $out elsewhere"
fi

tell() { # number, what, how long, what is there once it is done
  printf '  %s. %-58s %s\n' "$1" "$2" "$([ -e "$4" ] && echo 'done before' || echo "$3")"
}
echo "SmolLM2-135M with protocols in $out; minutes are those of two busy cores:"
tell 1 "one corpus of three sets' passages" "seconds" "$out/data"
tell 2 "its index under MiniLM" "6 minutes" "$out/data/index"
tell 3 "protocols of 50 questions, what is not written yet" "half a minute" ""
tell 4 "three updates of 2 x 4 episodes, from the last one saved" "30 minutes" \
  "$out/training/agent/policy"
tell 5 "checks of the run" "seconds" ""
if [ -n "${DRY_RUN:-}" ]; then
  exit 0
fi

. launch/environment.sh
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
mkdir -p "$out"
if [ ! -e "$out/data" ]; then
  echo "$data" > "$out/source"
  (IFS=,; python launch/join_corpora.py --data="$data" --out="$out/data" --sets="${sets[*]}")
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
