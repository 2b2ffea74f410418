#!/usr/bin/env bash
# MAPD with a real language model on real questions: protocols of 50 of them by a script that follows
# their gold decompositions, three updates of SmolLM2, then what must hold of them. Interrupted, the
# same command goes on where it stopped.
#   bash launch/smollm2_mapd.sh DATA [flags of launch/train.py]
#   DATA: SET.jsonl and SET_corpus.jsonl, in FlashRAG's form, of musique, 2wikimultihopqa and
#         hotpotqa_train100. DRY_RUN=1 says what is left to do, and does nothing.
set -euo pipefail
. "$(dirname "$0")/smollm2_common.sh"
take runs/smollm2_mapd "${1:-}" {musique,2wikimultihopqa,hotpotqa_train100}{,_corpus}.jsonl
shift

echo "SmolLM2-135M with protocols in $out; minutes are those of two busy cores:"
tell 1 "one corpus of three sets' passages" "seconds" "$out/data"
tell 2 "its index under MiniLM" "4 minutes" "$out/data/index"
tell 3 "protocols of 50 questions, what is not written yet" "half a minute" ""
tell 4 "three updates of 2 x 4 episodes, from the last one saved" "7 minutes" \
  "$out/training/agent/policy"
tell 5 "checks of the run" "seconds" ""
begin

join_and_index musique,2wikimultihopqa,hotpotqa_train100
mkdir -p "$out/data/train" "$out/data/test"
for set in musique 2wikimultihopqa; do
  head -n 25 "$out/data/$set.jsonl" > "$out/data/train/$set.jsonl"
  sed -n 26,75p "$out/data/$set.jsonl" > "$out/data/test/$set.jsonl"
done
python launch/build_protocols.py --config=configs/smollm2_mapd.py --oracle=plain \
  --out="$out/protocols.jsonl"
python launch/train.py --config=configs/smollm2_mapd.py --workdir="$out/training" "$@"
python launch/check_run.py --training="$out/training"
