"""Refusals and warnings about the trainer's processes, its backends' options, LoRA and checkpoints, in their words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.graph import engine_count, loops, path
from configs.resolve import derive
from configs.rules.reward import tool_faults
from configs.rules.run import debug_faults
from configs.schema import Config
from configs.schema.algorithm import ESTIMATORS
from configs.schema.model_shapes import FAMILIES
from models.families import registry
from tests.configs.config_rig import BASE, WORK, faults_of, one_says, settled, warnings_of

MODEL: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8}
MODEL |= {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 96, "vocab_size": 256}
EXPERTS = MODEL | {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MEGATRON = "--train-backend megatron --actor-num-gpus-per-node"
FSDP = "--train-backend fsdp --actor-num-gpus-per-node"
TINY = f"{WORK} --hf-checkpoint tiny"


def model(tmp_path: Path, shape: dict[str, Any]) -> str:
    """The base of a command line, with a model of this shape."""
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return f"{WORK} --hf-checkpoint {tmp_path}"


@pytest.fixture
def dense(tmp_path: Path) -> str:
    """Six layers, eight heads, four key heads."""
    return model(tmp_path, MODEL)


def sizes(**given: int) -> str:
    """`tp=2` -> `--tensor-model-parallel-size 2`."""
    names = {"tp": "tensor-model", "pp": "pipeline-model", "cp": "context", "ep": "expert-model"}
    names |= {"etp": "expert-tensor"}
    return " ".join(f"--{names[key]}-parallel-size {size}" for key, size in given.items())


SP = "--sequence-parallel"


@pytest.mark.parametrize(("argv", "words"), [
    (f"6 {sizes(tp=4)}", "--actor-num-nodes x --actor-num-gpus-per-node is 6, but must be a multiple of "
     "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1 x --context-parallel-size 1 "
     "= 4; set --actor-num-gpus-per-node"),
    (f"8 {sizes(tp=2, pp=3)}", "= 6; set --actor-num-gpus-per-node so that it is, for example 6 on one node"),
    (f"2 {sizes(tp=1)} {SP}", "--tensor-model-parallel-size is 1; set that to 2 or more, or leave --sequence-"),
    (f"2 {sizes(cp=2)} --transformer-impl local",
     "--context-parallel-size is 2, but --transformer-impl is local, and only Transformer Engine's attention"),
    ("2 --overlap-param-gather", "needs --use-distributed-optimizer and --overlap-grad-reduce: set both"),
    ("2 --overlap-param-gather --overlap-grad-reduce --no-use-distributed-optimizer",
     "--overlap-param-gather gathers what the distributed optimizer has spread"),
    ("1 --optimizer-cpu-offload --no-use-distributed-optimizer",
     "--optimizer-cpu-offload works on the state that the distributed optimizer has spread"),
    ("1 --virtual-pipeline-model-parallel-size 2",
     "--virtual-pipeline-model-parallel-size is 2, but interleaves pipeline stages, and "
     "--pipeline-model-parallel-size is 1"),
    ("1 --decoder-last-pipeline-num-layers 2", "is 2, but --pipeline-model-parallel-size is 1, so that"),
    (f"4 {sizes(pp=4)}",
     "--pipeline-model-parallel-size is 4, but the model's 6 layers do not divide into such stages; "
     "choose a size that divides 6, or set --decoder-last-pipeline-num-layers to what is left of 2 for each of the"),
    (f"2 {sizes(pp=2)} --virtual-pipeline-model-parallel-size 2",
     "is 2, but the model's 6 layers do not divide into such stages of 2 chunks"),
    (f"2 {sizes(pp=2)} --decoder-first-pipeline-num-layers 7",
     "is 2, --decoder-first-pipeline-num-layers 7, but the model's 6 layers"),
    (f"16 {sizes(tp=16)} {SP}", "is 16, but must divide the model's 8 attention heads; set it to 8"),
    (f"8 {sizes(tp=8)} {SP}", "is 8, but must divide the model's 4 key and value heads; set it to 4"),
    (f"2 {sizes(ep=2)}", "--expert-model-parallel-size is 2, but the model (qwen3) has no experts; leave it out"),
    ("1 --recompute-activations --recompute-granularity full",
     "--recompute-activations means --recompute-granularity selective, but that is full"),
])  # fmt: skip
def test_refusals_of_a_dense_model(dense: str, argv: str, words: str) -> None:
    one_says(words, faults_of(dense, MEGATRON, argv))


@pytest.mark.parametrize(("argv", "words"), [
    (f"4 {sizes(ep=3, etp=1)}",
     "is 4, but must be a multiple of --expert-model-parallel-size 3 x --expert-tensor-parallel-size "
     "1 x --pipeline-model-parallel-size 1 = 3; lower --expert-model-parallel-size, or set --expert-tensor-"),
    (f"8 {sizes(ep=8, etp=1)}", "must divide the model's 12 experts; set it to 6"),
    (f"2 {sizes(tp=2)}", "for a model with experts, which Megatron-core trains only together with sequence"),
    (f"3 {sizes(ep=3, etp=3)}", "= 9; lower --expert-model-parallel-size"),
    (f"3 {sizes(etp=3)}", "--expert-tensor-parallel-size is 3, but must divide the experts' width 40; set it to 2"),
    (f"4 {sizes(tp=2, etp=4)} {SP}", "is 4, but must be at most --tensor-model-parallel-size 2"),
    (f"2 {sizes(ep=2)} --moe-token-dispatcher-type allgather", "needs equally many tokens in every process"),
    ("1 --moe-grouped-gemm --train-device cpu", "needs Transformer Engine on a GPU"),
    ("1 --moe-grouped-gemm --transformer-impl local", "leave it out (--no-moe-grouped-gemm)"),
])  # fmt: skip
def test_refusals_of_a_model_with_experts(tmp_path: Path, argv: str, words: str) -> None:
    one_says(words, faults_of(model(tmp_path, EXPERTS), MEGATRON, argv))


@pytest.mark.parametrize("argv", [
    f"8 {sizes(tp=4, pp=2)} {SP}",
    f"4 {sizes(pp=2)} --virtual-pipeline-model-parallel-size 3 --overlap-grad-reduce",
    f"4 {sizes(pp=4)} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    f"4 {sizes(pp=4)} --megatron-pipeline-model-parallel-layout Ettt|t|t|tL",
    f"2 {sizes(cp=2)}",
    "2 --overlap-grad-reduce --overlap-param-gather",
    "1 --recompute-granularity full --recompute-num-layers 2",
    "1 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    "3",
])  # fmt: skip
def test_layouts_that_fit(dense: str, argv: str) -> None:
    assert settled(dense, MEGATRON, argv)[1] == ()


def test_without_a_config_at_hand_sizes_are_checked_against_each_other_alone() -> None:
    hub = f"{WORK} --hf-checkpoint some/model {MEGATRON}"
    assert settled(hub, "64", sizes(tp=8, pp=2), SP)[1] == ()
    (fault,) = faults_of(hub, "4", sizes(tp=2, ep=2, etp=1))
    assert "a model with experts, which Megatron-core trains only together with sequence parallelism" in fault


def test_options_of_recomputation_follow_from_each_other(dense: str) -> None:
    for argv, expected in (
        ("", (None, None, None)),
        ("--recompute-activations", ("selective", None, None)),
        ("--recompute-granularity full", ("full", "uniform", 1)),
        ("--gradient-checkpointing", ("full", "uniform", 1)),
        ("--gradient-checkpointing --recompute-activations", ("selective", None, None)),
        ("--gradient-checkpointing --recompute-method block", ("full", "block", 1)),
    ):
        found = settled(dense, MEGATRON, "1", argv)[0].megatron
        assert (found.recompute_granularity, found.recompute_method, found.recompute_num_layers) == expected
    assert settled(dense, "--gradient-checkpointing")[0].megatron == Config().megatron


@pytest.mark.parametrize(("argv", "words"), [
    ("--tensor-model-parallel-size 2 --megatron-moe-permute-fusion",
     '{"moe_permute_fusion":true}, but only --train-backend megatron reads it'),
    (f"{FSDP} 6 --fsdp-shard-size 4", "--fsdp-shard-size is 4, but must divide the trainer's 6 processes"),
    (f"{FSDP} 4 --fsdp-context-parallel-size 3",
     "--fsdp-context-parallel-size is 3, but must divide the trainer's 4 processes "
     "(--actor-num-nodes x --actor-num-gpus-per-node); set it to 2"),
    ("--lora-rank 8", "--lora-rank is 8, but --train-backend is torch, which trains all weights (fsdp does it in one "
     "process too); use --train-backend fsdp"),
    ("--lora-rank 8 --train-backend megatron", "is megatron, whose layers get no adapters; use"),
    ("--lora-rank 8 --train-backend simulated", "is simulated, which trains nothing; use"),
    ("--train-backend fsdp --lora-rank 8 --use-kl-loss --kl-loss-coef 1 --ref-update-interval 2",
     "--ref-update-interval 2 with --lora-rank 8: the reference is the model without adapters"),
    (f"{FSDP} 2 --fsdp-context-parallel-size 2 --attn-implementation eager",
     "--attn-implementation is eager, but --fsdp-context-parallel-size 2 needs attention whose mask"),
    ("--save-hf out/{stepp} --save-interval 1", "the names in braces are {step} and {rollout_id}, not {stepp}"),
    ("--save-hf o --train-backend simulated", "--save-hf writes weights, but --train-backend simulated"),
])  # fmt: skip
def test_options_that_nothing_reads(argv: str, words: str) -> None:
    one_says(words, faults_of(TINY, argv))


def test_options_that_are_read() -> None:
    fsdp = "--train-backend fsdp --actor-num-gpus-per-node 4"
    for argv in (
        f"{fsdp} --fsdp-shard-size 2 --lora-rank 8 --lora-alpha 16 --fsdp-compile",
        f"{fsdp} --async-save --save-interval 1 --save-hf out/{{step}}",
        "--no-use-dynamic-batch-size --micro-batch-size 4",
        "--save-hf out/{step} --save-interval 1",
        "--save-hf out/{rollout_id}/hf --save-interval 1",
    ):
        assert settled(TINY, argv)[1] == ()


@pytest.mark.parametrize(("argv", "words"), [
    ("--actor-num-gpus-per-node 2", "in each of 2 processes; --train-backend fsdp divides them"),
    ("--train-backend fsdp --actor-num-nodes 2",
     "--actor-num-nodes is 2, but --runner local starts all processes on this machine"),
    (f"{FSDP} 8 --rollout-batch-size 2 --n-samples-per-prompt 2",
     "--global-batch-size 4 is less than the 8 data-parallel shares of the trainer"),
    ("--train-backend fsdp --async-save", "--async-save has no effect: the run writes no checkpoints"),
    ("--save-hf out/{step}", "--save-hf has no effect: the run writes no checkpoints; add --save-interval"),
    ("--save-hf out --save-interval 2", "--save-hf out has no {step} in it: each checkpoint replaces"),
    ("--train-backend megatron --attn-implementation eager", "--attn-implementation has no effect"),
])  # fmt: skip
def test_warnings(argv: str, words: str) -> None:
    one_says(words, settled(TINY, argv)[1])


def test_a_model_that_the_ranks_would_refuse_is_refused(tmp_path: Path) -> None:
    argv = model(tmp_path, MODEL | {"model_type": "gemma9"})
    words = f"--hf-checkpoint is '{tmp_path}', a model of type 'gemma9', which --train-backend megatron does not build"
    one_says(words, faults_of(argv, "--train-backend megatron"))
    reference = f"--use-kl-loss --kl-loss-coef 0.1 --ref-load {tmp_path} --train-backend megatron"
    one_says(f"--ref-load is '{tmp_path}', a model of", faults_of(TINY, reference))
    assert settled(argv, "--train-backend fsdp")[1] == ()
    quantized = model(tmp_path, MODEL | {"quantization_config": {"bits": 4}})
    words = "whose weights are quantized; give a checkpoint in bfloat16"
    one_says(words, faults_of(quantized, "--train-backend megatron"))
    assert settled(quantized, "--train-backend fsdp")[1] == ()
    assert set(FAMILIES) == set(registry.FAMILIES), "the ranks' own list"


def test_latent_attention_over_tensor_ranks_needs_sequence_parallelism() -> None:
    argv = f"{WORK} --model moonlight-16b-a3b {sizes(tp=2)}"
    settled(argv, SP)
    faults = faults_of(argv, "--no-sequence-parallel")
    one_says("latent attention (deepseek_v3), which is trained only together with", faults)


# Refusals and warnings about estimators, losses, corrections, rewards, filters, and parts of a run alone.


SYNC = "--mode sync"
OPD = "--advantage-estimator on_policy_distillation --use-opd --frozen-engine teacher=tiny"


def test_every_estimator_is_accepted_as_it_is() -> None:
    for estimator in ESTIMATORS:
        argv = OPD if estimator == "on_policy_distillation" else f"--advantage-estimator {estimator}"
        argv += " --reward-component a=exact@1 b=math@1" if estimator == "gdpo" else ""
        for mode in ("async", "sync"):
            warnings_of(BASE, f"--mode {mode}", argv)


@pytest.mark.parametrize(("argv", "words"), [
    ("--advantage-estimator grop", "which is neither known nor an import path"),
    ("--advantage-estimator grop", "did you mean grpo?"),
    ("--advantage-estimator qqq", "choose one of grpo, dr_grpo"),
    ("--policy-loss pppo", "did you mean ppo?"),
    ("--advantage-estimator no_such_pkg:f", "--advantage-estimator is 'no_such_pkg:f', but no package"),
    ("--policy-loss no_such_pkg:f", "no package 'no_such_pkg' is found"),
    ("--n-samples-per-prompt 1 --advantage-estimator gspo", "but gspo compares the rollouts"),
    ("--n-samples-per-prompt 1 --advantage-estimator ppo --dynamic-sampling-filter nonzero_std",
     "drops every group of one"),
    ("--disable-rewards-normalization --advantage-estimator rloo", "baseline is all that this estimator is"),
    ("--advantage-estimator on_policy_distillation", "every advantage is 0; add --use-opd"),
    (f"{OPD} --dynamic-sampling-filter nonzero_std", "which this estimator never reads"),
    ("--kl-coef 0.1", "--kl-coef is 0.1, but --advantage-estimator grpo has no reward per token"),
    ("--kl-coef 0.1 --advantage-estimator ppo --use-kl-loss --kl-loss-coef 0.1",
     "once in the reward and once in the loss"),
    ("--loss-type custom_loss", "give --custom-loss-function-path"),
    ("--advantage-estimator gdpo --reward-component a=exact@1", "--reward-component is given 1 times, but"),
    (f"--loss-type custom_loss --custom-loss-function-path json:loads {SYNC} --policy-loss cispo",
     "--policy-loss cispo with --loss-type custom_loss"),
    ("--loss-type custom_loss --custom-loss-function-path json:loads",
     "whether your loss corrects stale tokens cannot be seen"),
    ("--eps-clip 1", "must stay above 0"),
    ("--policy-loss dppo --use-tis", "the correction would count twice"),
    ("--policy-loss topr --policy-mode decoupled", "measures its ratio to the sampler"),
    (f"--policy-mode onpolicy --rollout-rs token_k2=0.1 {SYNC}", "compare the old log-probs with"),
    (f"--prox loglinear {SYNC}", "but the mode is onpolicy"),
    ("--prox loglinear --policy-loss gspo", "a ratio of whole responses to it has no meaning"),
    ("--prox loglinear --correction-ratio current", "counts the step from the old to the current"),
    ("--use-opsm --policy-loss aipo", "--use-opsm with --policy-loss aipo"),
    ("--tis-seq-low 2 --tis-mode seq_mask", "--tis-seq-low is 2, but must not be above --tis-seq-high"),
    ("--tis-level sequence --tis-mode icepop", "--tis-mode icepop with --tis-level sequence"),
    ("--tis-level geometric --tis-clip-decay 0.5", "--tis-clip-decay 0.5 with --tis-level geometric"),
    ("--tis-level geometric --tis-batch-normalize", "is no importance weight whose mean should be 1"),
    ("--rollout-rs seq_mean_k1", "is no rejection rule"),
    ("--rollout-rs seq_max_k1=0.5_1.5", "does not exist"),
    ("--rollout-rs token_k1=0.5", "needs two bounds"),
    ("--rollout-rs token_k1=1.5_0.5", "the lower one first"),
    ("--rollout-rs token_k3=0.5_1.5", "needs one upper bound above 0"),
    ("--rollout-rs token_k2=0.5 token_k2=0.1", "--rollout-rs has token_k2 2 times"),
    (f"--rollout-top-p 0.9 {SYNC} --rs-veto 1e-4", "but must be 1"),
    ("--frozen-engine teacher", "must have the form name=CHECKPOINT"),
    ("--frozen-engine a=tiny a=tiny", "names 'a' 2 times"),
    ("--use-opd", "--use-opd has no teacher"),
    (f"{OPD} --opd-teacher techer", "is no frozen engine; did you mean teacher?"),
    ("--judge-engine j --rm-type judge", "add --frozen-engine j=PATH"),
    ("--rm-type judge", "rm_type judge has no judge"),
    ("--rm-type judge:j", "rm_type 'judge:j' names no frozen engine; add --frozen-engine j=PATH"),
    ("--reward-component a=math@1 --reward-key x", "both say what a response earns"),
    ("--reward-component a=math@1 --group-rm --custom-rm-path json:loads", "--group-rm with --reward-c"),
    ("--rm-type remote", "rm_type remote has no address"),
    ("--rm-url localhost:80", "must be an http address"),
    ("--reward-component math@0.8", "must have the form name=GRADER@WEIGHT"),
    ("--reward-component acc=math", "must have the form name=GRADER@WEIGHT"),
    ("--reward-component a=math@1 a=exact@1", "names 'a' 2 times"),
    ("--reward-component a=remote@1", "rm_type remote has no address"),
    ("--reward-component a=math@1 --custom-rm-path json:loads", "both say how to grade"),
    ("--group-rm", "--group-rm needs a function over whole groups"),
    ("--overlong-buffer-len 600", "must be below --rollout-max-response-len 512"),
    ("--overlong-buffer-len 512", "must be below --rollout-max-response-len 512"),
    ("--custom-reward-post-process-path json:loads --advantage-estimator ppo",
     "--advantage-estimator ppo: it replaces a group's normalisation"),
    ("--over-sampling-batch-size 16 --dynamic-sampling-filter nonzero_std",
     "a batch of 32 groups needs as many in flight anyway; set it to at least 32"),
    ("--over-sampling-batch-size 64 --dynamic-sampling-filter nonzero_std --deterministic",
     "depends on the order in which they finish"),
    ("--dynamic-sampling-early-after 4", "only --dynamic-sampling-filter or --dynamic-sampling-filter-path reads it"),
    *((f"--dynamic-sampling-early-after {n} --dynamic-sampling-filter nonzero_std",
       f"is {n}, but must be at least 2 and below --n-samples-per-prompt 8") for n in (1, 8)),
    ("--dynamic-sampling-early-after 4 --dynamic-sampling-filter nonzero_std --deterministic",
     "which rollouts end first then decides which groups are trained"),
    ("--dynamic-sampling-early-after 4 --dynamic-sampling-filter nonzero_std --group-rm --custom-rm-path json:loads",
     "rewards are there only when the group is whole"),
    ("--dynamic-sampling-filter nonzero_std nonzero_std_fallback", "leave one of them out"),
    ("--buffer-order oldest", "did you mean oldest_first?"),
    ("--curriculum pass_rate --curriculum-low 0.95", "must not be above --curriculum-high"),
])  # fmt: skip
def test_refusals(argv: str, words: str) -> None:
    faults = faults_of(BASE, argv)
    assert any(words in fault for fault in faults), faults
    assert all("\n" not in fault for fault in faults)


@pytest.mark.parametrize(("argv", "words"), [
    ("--advantage-estimator cispo", "its canonical form has no lower bound"),
    ("--advantage-estimator gspo", "is wide for gspo"),
    ("--eps-clip-high 0.1", "the reverse of clip-higher"),
    ("--policy-loss aipo --eps-clip 0.3", "have no effect with --policy-loss aipo"),
    ("--advantage-estimator dr_grpo", "its own form is --loss-aggregation constant"),
    ("--advantage-estimator reinforce_plus_plus --no-normalize-advantages", "without any baseline"),
    ("--no-use-tis --rollout-rs token_k2=0.1", "does not reweight the others"),
    ("--allow-uncorrected", "are trained as if the current policy had sampled them"),
    ("--correction-ratio current --num-steps-per-rollout 2", "with 2 optimizer steps per batch"),
    (f"--tis-level sequence {SYNC}", "--tis-level have no effect without --use-tis"),
])  # fmt: skip
def test_warnings_about_algorithms(argv: str, words: str) -> None:
    one_says(words, warnings_of(BASE, argv))


def test_allowed_combinations_that_are_easily_refused_by_mistake() -> None:
    for argv in (
        "--advantage-estimator ppo --n-samples-per-prompt 1 --gamma 0.9 --critic-lr 1e-4",
        "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 4",
        "--rollout-rs seq_mean_k1=0.99_1.01 token_k3=0.05 --rs-unit rollout --rs-veto 1e-4",
        "--reward-component acc=contains:a@b@0.8 fmt=format:x=y@0.2",
        "--frozen-engine teacher=http://localhost:30000 --use-opd --opd-teacher teacher",
        "--dynamic-sampling-filter nonzero_std --over-sampling-batch-size 48 --dynamic-sampling-early-after 7",
        "--kl-coef 0.01 --advantage-estimator reinforce_plus_plus --ref-update-interval 4",
    ):
        settled(BASE, argv)


def a_config(**sections: Any) -> Config:
    return msgspec.convert({"rollout": {"num_rollout": 2}, **sections}, Config)


@pytest.mark.parametrize(("sections", "words"), [
    ({"debug": {"debug_train_only": True}}, "nothing to train on; give --load-debug-rollout-data"),
    ({"debug": {"debug_train_only": True, "debug_rollout_only": True}}, "--debug-train-only does not"),
    ({"debug": {"debug_rollout_only": True, "load_debug_rollout_data": "x"}}, "--load-debug-rollout-data does not"),
    ({"debug": {"save_debug_rollout_data": "all.msgpack"}}, "each batch would replace the one before"),
    ({"debug": {"save_debug_train_data": "all.parquet"}}, "--save-debug-train-data is 'all.parquet', so that each"),
    ({"debug": {"save_debug_train_data": "{rank}"}}, "the only name in braces is {rollout_id}"),
    ({"debug": {"save_debug_rollout_data": "{step}"}}, "the only name in braces is {rollout_id}"),
    ({"debug": {"load_debug_rollout_data": "/no/{}"}}, "the only name in braces is {rollout_id}"),
    ({"debug": {"load_debug_rollout_data": "/no/{rollout_id}"}}, "there is no /no/0 for batch 0; correct the path"),
    ({"debug": {"load_debug_rollout_data": "x"}, "run": {"resume": "y"}}, "cut differently"),
    ({"debug": {"load_debug_rollout_data": "x"}, "train": {"loss_type": "sft_loss"}}, "leave one out"),
    ({"debug": {"fault_inject": ["reward:0.1:die"]}}, "'reward:0.1:die': the kind is 'die' and must be one of"),
    ({"debug": {"fault_inject": ["rewards:0.1:kill"]}}, "no stage rewards in this run that takes messages; choose"),
    ({"debug": {"fault_inject": ["engines:0.1:kill"]}}, "no stage engines in this run that takes messages"),
    ({"debug": {"fault_inject": ["reward:0.1:drop"]}}, "only engine has it; choose another kind"),
    ({"debug": {"fault_inject": ["engine:0.1:hang"]}, "engine": {"engine": "sglang"}},
     "SGLang's servers can only be killed on purpose; choose kill, --engine simulated, or disturb generate"),
    ({"debug": {"fault_inject": ["engine:0.1:kill"]}, "sglang": {"rollout_external_engine_addrs": ["http://h:1"]}},
     "engines that are not started by the run have no faults on purpose"),
    ({"debug": {"fault_inject": ["rank:0.1:kill"]}}, "no stage rank in this run that takes messages"),
    ({"debug": {"fault_inject": ["reward:0.1:kill"]}, "run": {"runner": "inprocess"}},
     "would be of the whole run; choose --runner local"),
])  # fmt: skip
def test_faults(sections: dict[str, Any], words: str) -> None:
    one_says(words, list(debug_faults(a_config(**sections))))


def test_faults_that_a_run_can_have_are_taken() -> None:
    every = ["engine:1:drop", "prompts:0.1:kill", "generate:0.1:hang", "reward:0.1:error", "train:0.5:slow:3"]
    assert not list(debug_faults(a_config(debug={"fault_inject": every})))
    assert not list(debug_faults(a_config(debug={"fault_inject": ["engine:1:kill"]}, engine={"engine": "sglang"})))
    ranks = {"debug": {"fault_inject": ["rank:1:hang"]}, "parallel": {"actor_num_gpus_per_node": 2}}
    assert not list(debug_faults(a_config(**ranks)))
    assert not list(debug_faults(a_config(**ranks, run={"runner": "inprocess"}))), "they are processes all the same"
    sft = a_config(debug={"fault_inject": ["reward:0.1:kill"]}, train={"loss_type": "sft_loss"})
    assert any("choose one of prompts, train" in fault for fault in debug_faults(sft))


def test_a_missing_batch_is_named_with_the_length_that_works(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    config = a_config(debug={"load_debug_rollout_data": str(tmp_path / "{rollout_id}")})
    (fault,) = debug_faults(config)
    assert f"no {tmp_path}/1 for batch 1; set --num-rollout to at most 1" in fault
    (tmp_path / "1").touch()
    assert not list(debug_faults(config))


def test_a_function_that_makes_whole_rollouts_excludes_loops() -> None:
    config = a_config(rollout={"custom_generate_function_path": "x:y"}, tools={"tools": ["calculator"]})
    assert any("the stage agents would never be reached" in fault for fault in tool_faults(config))
    assert not list(tool_faults(a_config(rollout={"custom_generate_function_path": "x:y"})))
    batches = {"rollout_function_path": "x:y"}
    (fault,) = tool_faults(a_config(rollout=batches, run={"scale": {"generate": 2}}))
    assert fault.startswith("--scale generate=2 shares prompts out, but --rollout-function-path")
    assert not list(tool_faults(a_config(rollout=batches)))


def test_import_paths_may_have_a_dot_before_the_name() -> None:
    config = a_config(
        rollout={"custom_generate_function_path": "a.b.generate"},
        reward={"custom_rm_path": "rewards.score"},
        data={"chat_template_path": "a.jinja"},
    )
    resolved, _ = derive(config)
    assert resolved.rollout.custom_generate_function_path == "a.b:generate"
    assert resolved.reward.custom_rm_path == "rewards:score"
    assert resolved.data.chat_template_path == "a.jinja", "a file"
    assert derive(resolved)[0] == resolved


def test_saved_batches_need_neither_engines_nor_tools() -> None:
    config = a_config(debug={"load_debug_rollout_data": "x"}, tools={"tools": ["calculator"]})
    assert path(config) == ("prompts", "train")
    assert loops(config) == ()
    assert engine_count(config) == 0
    assert not list(debug_faults(a_config(debug={"debug_train_only": True}, train={"loss_type": "sft_loss"})))
