#!/usr/bin/env bash
# A real language model on real questions: SmolLM2-135M, MiniLM, ScaNN; evaluation of three teams,
# then both stages of training, then what must hold of them. Interrupted, the same command goes on
# where it stopped.
#   bash launch/smollm2_cpu.sh DATA [flags of launch/train.py]
#   DATA: SET.jsonl and SET_corpus.jsonl, in FlashRAG's form, of 2wikimultihopqa, hotpotqa,
#         hotpotqa_train100 and musique_train100. DRY_RUN=1 says what is left to do, and does nothing.
set -euo pipefail
. "$(dirname "$0")/smollm2_common.sh"
take runs/smollm2 "${1:-}" \
  {2wikimultihopqa,hotpotqa,hotpotqa_train100,musique_train100}{,_corpus}.jsonl
shift

echo "SmolLM2-135M with MiniLM and ScaNN in $out; minutes are those of two cores:"
tell 1 "one corpus of four sets' passages" "seconds" "$out/data"
tell 2 "its index under MiniLM" "6 minutes" "$out/data/index"
tell 3 "evaluation of three teams on 50 questions" "12 minutes" "$out/evaluation/summary.json"
tell 4 "two updates of each stage, from the last one saved" "18 minutes" \
  "$out/training/student/policy"
tell 5 "checks of both" "seconds" ""
begin

join_and_index 2wikimultihopqa,hotpotqa,hotpotqa_train100,musique_train100
# more rows at once than training's few episodes fill
python launch/evaluate.py --config=configs/smollm2_cpu.py --workdir="$out/evaluation" \
  --config.engine.decode_rows=32 --config.rollout.concurrent=48
python launch/train.py --config=configs/smollm2_cpu.py --workdir="$out/training" "$@"
python launch/check_run.py --evaluation="$out/evaluation" --training="$out/training"
