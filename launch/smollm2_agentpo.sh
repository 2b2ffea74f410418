#!/usr/bin/env bash
# AgentPO with a real language model on real problems: SmolLM2 writes hints for a frozen SmolLM2, three
# updates of two problems each, drawn from 50 of GSM8K, then the Actor on 16 others, alone and with a hint, then what must
# hold of them. Interrupted, the same command goes on where it stopped.
#   bash launch/smollm2_agentpo.sh DATA [flags of launch/train.py]
#   DATA: gsm8k_train2000.jsonl and gsm8k.jsonl, in FlashRAG's form.
#         DRY_RUN=1 says what is left to do, and does nothing.
set -euo pipefail
. "$(dirname "$0")/smollm2_common.sh"
take runs/smollm2_agentpo "${1:-}" gsm8k_train2000.jsonl gsm8k.jsonl
shift

echo "SmolLM2-135M with hints of its own in $out; minutes are those of two busy cores:"
tell 1 "50 problems to train on, and 16 others to test on" "seconds" "$out/data"
tell 2 "three updates of 2 x 4 episodes, from the last one saved" "20 minutes" \
  "$out/training/agentpo/policy"
tell 3 "the Actor on 16 problems, alone and with a hint" "15 minutes" "$out/evaluation/summary.json"
tell 4 "checks of both" "seconds" ""
begin

mkdir -p "$out/data/train" "$out/data/validation" "$out/data/test"
head -n 50 "$data/gsm8k_train2000.jsonl" > "$out/data/train/gsm8k.jsonl"
sed -n 51,100p "$data/gsm8k_train2000.jsonl" > "$out/data/validation/gsm8k.jsonl"
head -n 16 "$data/gsm8k.jsonl" > "$out/data/test/gsm8k.jsonl"
python launch/train.py --config=configs/smollm2_agentpo.py --workdir="$out/training" "$@"
python launch/evaluate.py --config=configs/smollm2_agentpo.py --workdir="$out/evaluation" \
  --config.model.checkpoint="$out/training/agentpo/policy"
python launch/check_run.py --evaluation="$out/evaluation" --training="$out/training"
