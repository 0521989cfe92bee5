#!/bin/bash
pkill -9 python  # must not be run
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
MODEL_BASE=5000000 source "${SCRIPT_DIR}/models/mine.sh"
if [ -z "$NUM_GPUS" ]; then
    NUM_GPUS=8
fi
CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B   # the policy
   #--hf-checkpoint /models/another
   --ref-load /models/Qwen3-4B_torch_dist
   --load /runs/mine/
   --save /runs/mine/
)
NAMES='a "quoted" name'
ROLLOUT_ARGS=( --prompt-data ${DATA_DIR}/train.jsonl --rollout-stop "$NAMES" )
ROLLOUT_ARGS+=(--rollout-batch-size $((4 * 8)) --rm-type math --num-rollout 10)
EVAL_ARGS=(
   --eval-prompt-data aime /data/aime.jsonl
   --eval-interval 5
)
cat > /tmp/never-written.json <<EOF
{"it's": "a here-document with (brackets"}
EOF
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="$(cat <<END
{"env": "${HOME}"}
END
)" \
   -- python3 train.py \
   --actor-num-gpus-per-node ${NUM_GPUS} \
   --update-weight-buffer-size $(( 512 * 1024 * 1024)) \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" \
   ${WANDB_ARGS[@]} ${EVAL_ARGS[@]} \
   --sglang-cuda-graph-bs 1 $(seq 2 2 6) 2>&1 | tee run.log
echo done
