"""Options of slime and of Megatron-LM that are no flags here, by what becomes of them (`configs.translate`).

Facts, from slime's launch scripts and its documentation (commit 624b824), and from Megatron-LM's arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# What these say of the model is compared with its config.json (`configs.rules.model_args`) or follows from its family.
MODEL_ARGS: Final = frozenset(
    """
    add-qkv-bias apply-layernorm-1p attention-output-gate disable-bias-linear ffn-hidden-size group-query-attention
    hidden-size kv-channels kv-lora-rank make-vocab-size-divisible-by max-position-embeddings model-name
    moe-ffn-hidden-size moe-layer-freq moe-router-enable-expert-bias moe-router-group-topk moe-router-num-groups
    moe-router-pre-softmax moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
    moe-shared-expert-gate moe-shared-expert-intermediate-size mscale mscale-all-dim multi-latent-attention
    no-position-embedding norm-epsilon normalization num-attention-heads num-experts num-layers num-query-groups
    padded-vocab-size position-embedding-type post-mlp-layernorm post-self-attn-layernorm q-lora-rank qk-head-dim
    qk-layernorm qk-pos-emb-head-dim rotary-base rotary-interleaved rotary-percent rotary-scaling-factor spec swiglu
    untie-embeddings-and-output-weights use-gated-attention use-rotary-position-embeddings v-head-dim vocab-size
    """.split()  # noqa: SIM905 - a list would take a line for each
)

# Fields of Megatron-core's dataclasses whose flag in Megatron-LM has no prefix; here they are passed on.
_MEGATRON_OPTIONS: Final = tuple(
    """
    attention-backend attention-softmax-in-fp32 cp-comm-type cpu-offloading-num-layers cross-entropy-fusion-impl
    cross-entropy-loss-fusion deterministic-mode distribute-saved-activations exp-avg-dtype exp-avg-sq-dtype fp8-recipe
    fp8-param-gather main-grads-dtype main-params-dtype moe-enable-deepep moe-expert-capacity-factor moe-permute-fusion
    moe-router-dtype moe-router-fusion moe-shared-expert-overlap moe-token-drop-policy overlap-cpu-optimizer-d2h-h2d
    overlap-p2p-comm recompute-modules tp-comm-overlap use-precision-aware-optimizer
    """.split()  # noqa: SIM905
)

# Other names of flags.
ALIASES: Final[Mapping[str, str]] = {
    "buffer-filter-path": "buffer-order",
    "sglang-server-concurrency": "server-concurrency",
    "accumulate-allreduce-grads-in-fp32": "megatron-grad-reduce-in-fp32",
    "ddp-bucket-size": "megatron-bucket-size",
    "fp8-format": "megatron-fp8",
    "log-probs-chunk-size": "logprob-chunk-tokens",
    "sglang-cuda-graph-bs": "sglang-cuda-graph-bs-decode",
    "sglang-cuda-graph-max-bs": "sglang-cuda-graph-max-bs-decode",
    "tis-threshold": "tis-clip",
    "wandb-project": "project",
    "wandb-group": "run-group",
    "tis-upper-bound": "tis-clip",
    "tis-lower-bound": "tis-clip-low",
    "use-rollout-correction": "use-tis",
    "update-weight-disk-dir": "update-weight-delta-dir",
    **{name: f"megatron-{name}" for name in _MEGATRON_OPTIONS},
}

# Options with nothing to switch: the values that ask for what happens anyway ("": any, or none), and what is so.
TAKEN: Final[Mapping[str, tuple[str, str]]] = {
    "optimizer": ("adam", "the optimizer is AdamW"),
    **dict.fromkeys(("attention-dropout", "hidden-dropout"), ("0", "there is no dropout")),
    "moe-aux-loss-coeff": ("0", "there is no auxiliary loss"),
    "moe-router-load-balancing-type": ("", "there is no auxiliary loss"),
    "moe-router-bias-update-rate": ("0", "the router's bias stays as the checkpoint has it"),
    "seq-length": ("", "sequences have the length that they have"),
    "use-fault-tolerance": ("", "engines that fail are always started again"),
    "use-mcore-models": ("", "all models are Megatron-core's"),
    "allgather-cp": ("", "Megatron-core chooses how context parallel processes exchange; see --cp-comm-type"),
    "data-pad-size-multiplier": ("", "micro-batches are filled by --max-tokens-per-gpu"),
    "enable-experimental": ("", "Megatron-core's options are passed on by name"),
    "no-check-for-nan-in-loss-and-grad": ("", "a step with a loss that is no number is refused"),
    **dict.fromkeys(("balance-by-flops", "balance-abs-threshold"), ("", "--balance-data deals sequences by FLOPs")),
    "ckpt-format": ("torch_dist", "Megatron-core's state is saved in its distributed format"),
    "disable-rollout-global-dataset": ("", "prompts come from --prompt-data, or from --data-source-path"),
    "distributed-backend": ("", "processes of the trainer exchange over NCCL on GPUs and gloo on CPUs"),
    "get-mismatch-metrics": ("", "differences between engine and trainer are always logged"),
    "keep-old-actor": ("", "log-probs of the old policy are those of the batch's first pass"),
    "log-multi-turn": ("", "turns are always logged"),
    "log-passrate": ("", "pass rates are always logged"),
    "log-probs-max-tokens-per-gpu": ("", "--max-tokens-per-gpu bounds every pass"),
    "num-gpus-per-node": ("", "the GPUs of each machine are counted"),
    "recompute-loss-function": ("", "logits are never kept for the backward pass"),
    "rollout-data-transport": ("", "rollouts go over the streams between stages"),
    **dict.fromkeys(("tb-experiment-name", "tb-project-name"), ("", "TensorBoard's files lie in the run's directory")),
    "update-weight-disk-keep-files": ("false", "older versions of the weights are removed"),
    "use-critic": ("", "--advantage-estimator ppo has its critic"),
    "disable-wandb-random-suffix": ("", "names of runs have no suffix"),
    "wandb-always-use-train-step": ("", "the steps of all metrics are the trainer's"),
    "wandb-dir": ("", "W&B's files lie in the run's directory"),
    "use-distributed-post": ("", "--scale generate=N spreads requests over processes"),
    "use-rollout-entropy": ("", "entropy is always logged"),
    **dict.fromkeys(("offload", "offload-train", "offload-rollout", "release-train"),
                    ("", "engine and trainer of a colocated run never hold memory at the same time")),
    "update-weight-delta-checksum": ("xxh3-128", "every version has a checksum of its own"),
    "update-weight-delta-encoding": ("xor", "differences are byte-wise"),
    "update-weight-local-checkpoint-dir": ("", "an engine's copy lies in shared memory"),
    "memory-recorder": ("torch", "torch records the memory"),
    "memory-snapshot-dir": ("", "snapshots of the memory lie in the run's directory"),
    "profile-target": ("train_overall", "a profile has all that the trainer does"),
    **dict.fromkeys(("mtp-num-layers", "mtp-loss-scaling-factor"),
                    ("0", "heads for multi-token prediction are not trained")),
    "enable-mtp-training": ("false", "heads for multi-token prediction are not trained"),
}  # fmt: skip

# Not here, each with what to use.
NOT_HERE: Final[Mapping[str, str]] = {
    "fp16": "training is in bfloat16 or float32; write --train-dtype",
    "custom-model-provider-path": "what the model is comes from --hf-checkpoint",
    "custom-update-weight-post-write-path": "engines fetch versions themselves; see --update-weight-transport",
    "slime-router-middleware-paths": "requests are changed in --custom-generate-function-path; see --router",
    "multimodal-keys": "prompts are text",
    "loss-mask-type": "the reference answer of a row is trained, and nothing before it; see docs/data.md",
    "prefill-num-servers": "start such servers yourself and give --rollout-external-engine-addrs; see docs/sglang.md",
    "sglang-config": "all servers of the run are alike; give their options as --sglang-<option>",
    "no-offload-train": "a colocated trainer always gives its memory back; leave --colocate out for GPUs of its own",
    "no-offload-rollout": "a colocated engine always gives its memory back; leave --colocate out for GPUs of its own",
    "load-debug-rollout-data-subsample": "--load-debug-rollout-data trains the batches that were written",
    "eval-max-prompt-len": "--rollout-max-prompt-len holds for evaluations too",
    "eval-max-context-len": "--rollout-max-context-len holds for evaluations too",
    "eval-min-new-tokens": "a response may end at its first token",
    "eval-reward-key": "--reward-key holds for evaluations too",
    "eval-tool-key": "--tool-key holds for evaluations too",
    "http-proxy": "set http_proxy in the environment",
    "log-correct-samples": "python launch.py samples RUN shows them by reward",
    "log-reward-category": "a grader that returns a dict has each of its numbers logged",
    "min-batch-collection-ratio": "a batch is trained when it is complete",
    "no-save-optim": "each checkpoint has the optimizer's state, for a lost trainer goes on from it; --keep-last-n 1 "
                     "keeps one of them, and --save-hf copies weights alone",
    "qwen-gdn-backend": "linear attention is not implemented",
    "freeze-indexer": "sparse attention is not implemented",
    "reset-optimizer-states": "start a new run with --hf-checkpoint and the saved weights",
    "rollout-sample-hook-path": "a stage of yours after generate sees every sample before its reward",
    "train-env-vars": "set them in the shell; every process of the run inherits them",
    "use-stateless-adam": "the optimizer is AdamW; --optimizer-cpu-offload keeps its state on the host",
    **dict.fromkeys(("only-train-params-name-list", "freeze-params-name-list"),
                    "all parameters are trained, or --lora-rank adapters alone"),
    **dict.fromkeys(("use-routing-replay", "use-rollout-routing-replay"),
                    "the trainer routes tokens itself; --use-tis and --rollout-rs bound what that changes"),
    **dict.fromkeys(("ref-ckpt-step", "ckpt-step", "opd-teacher-ckpt-step"),
                    "give the directory of that checkpoint"),
    **dict.fromkeys(("rollout-buffer-url", "rollout-task-type", "fetch-trajectory-retry-times",
                     "load-forge-rollout-data"),
                    "programs that make trajectories go through the gateway; see docs/gateway.md"),
    **dict.fromkeys(("mis-mode", "mis-level", "mis-lower-bound", "mis-upper-bound", "mis-batch-normalize",
                     "mis-veto-threshold", "rs-level", "rs-lower-bound", "rs-upper-bound", "rs-veto-threshold"),
                    "write --tis-mode, --tis-level and --rollout-rs; see docs/off_policy.md"),
    **dict.fromkeys(("ci-test", "ci-disable-kl-checker", "ci-load-grad-norm", "ci-save-grad-norm",
                     "ci-train-rollout-logprob-abs-diff-threshold"),
                    "it is for slime's own tests"),
    "wandb-key": "everyone on a machine can read its command lines; export WANDB_API_KEY",
    "wandb-run-id": "a resumed run goes on in its own run of W&B",
}  # fmt: skip
