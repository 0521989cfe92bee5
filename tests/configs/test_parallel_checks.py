"""Refusals and warnings about the trainer's processes, its backends' options, LoRA and checkpoints, in their words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from tests.configs.config_rig import faults_of, settled

BASE = ("--prompt-data", "arithmetic", "--num-rollout", "3", "--hf-checkpoint")
MODEL: dict[str, Any] = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8}
MODEL |= {"num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 96, "vocab_size": 256}
EXPERTS = MODEL | {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MEGATRON = ("--train-backend", "megatron", "--actor-num-gpus-per-node")


@pytest.fixture
def dense(tmp_path: Path) -> tuple[str, ...]:
    """The base of a command line, with a model of six layers, eight heads, four key heads."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return (*BASE, str(tmp_path))


@pytest.fixture
def sparse(tmp_path: Path) -> tuple[str, ...]:
    """The same with twelve experts."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS), encoding="utf-8")
    return (*BASE, str(tmp_path))


def sizes(**given: int) -> list[str]:
    """`tp=2` -> `--tensor-model-parallel-size 2`."""
    names = {
        "tp": "tensor-model",
        "pp": "pipeline-model",
        "cp": "context",
        "ep": "expert-model",
        "etp": "expert-tensor",
    }
    return [part for key, size in given.items() for part in (f"--{names[key]}-parallel-size", str(size))]


SP = "--sequence-parallel"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["6", *sizes(tp=4)],
            "--actor-num-nodes x --actor-num-gpus-per-node is 6, but must be a multiple of --tensor-model-parallel-"
            "size 4 x --pipeline-model-parallel-size 1 x --context-parallel-size 1 = 4; set --actor-num-gpus-per-node",
        ),
        (["8", *sizes(tp=2, pp=3)], "= 6; set --actor-num-gpus-per-node so that it is, for example 6 on one node"),
        (["2", *sizes(tp=1), SP], "--tensor-model-parallel-size is 1; set that to 2 or more, or leave --sequence-"),
        (
            ["2", *sizes(cp=2), "--transformer-impl", "local"],
            "--context-parallel-size is 2, but --transformer-impl is local, and only Transformer Engine's attention",
        ),
        (["2", "--overlap-param-gather"], "needs --use-distributed-optimizer and --overlap-grad-reduce: set both"),
        (
            ["2", "--overlap-param-gather", "--overlap-grad-reduce", "--no-use-distributed-optimizer"],
            "--overlap-param-gather gathers what the distributed optimizer has spread",
        ),
        (
            ["1", "--optimizer-cpu-offload", "--no-use-distributed-optimizer"],
            "--optimizer-cpu-offload works on the state that the distributed optimizer has spread",
        ),
        (["1", "--optimizer-offload-fraction", "0.5"], "is 0.5, but only --optimizer-cpu-offload reads it"),
        (
            ["1", "--virtual-pipeline-model-parallel-size", "2"],
            "--virtual-pipeline-model-parallel-size is 2, but interleaves pipeline stages, and "
            "--pipeline-model-parallel-size is 1",
        ),
        (["1", "--decoder-last-pipeline-num-layers", "2"], "is 2, but --pipeline-model-parallel-size is 1, so that"),
        (
            ["4", *sizes(pp=4)],
            "--pipeline-model-parallel-size is 4, but the model's 6 layers do not divide into such stages; choose a "
            "size that divides 6, or set --decoder-last-pipeline-num-layers to what is left of 2 for each of the",
        ),
        (
            ["2", *sizes(pp=2), "--virtual-pipeline-model-parallel-size", "2"],
            "is 2, but the model's 6 layers do not divide into such stages of 2 chunks",
        ),
        (
            ["2", *sizes(pp=2), "--decoder-first-pipeline-num-layers", "7"],
            "is 2, --decoder-first-pipeline-num-layers 7, but the model's 6 layers",
        ),
        (["16", *sizes(tp=16), SP], "is 16, but must divide the model's 8 attention heads; set it to 8"),
        (["8", *sizes(tp=8), SP], "is 8, but must divide the model's 4 key and value heads; set it to 4"),
        (["2", *sizes(ep=2)], "--expert-model-parallel-size is 2, but the model (qwen3) has no experts; leave it out"),
        (
            ["1", "--recompute-activations", "--recompute-granularity", "full"],
            "--recompute-activations means --recompute-granularity selective, but that is full",
        ),
        (["1", "--recompute-method", "block"], "is block, but only --recompute-granularity full reads it"),
        (["1", "--recompute-num-layers", "2"], "is 2, but only --recompute-granularity full reads it"),
    ],
)  # fmt: skip
def test_refusals_of_a_dense_model(dense: tuple[str, ...], argv: list[str], words: str) -> None:
    found = faults_of(*dense, *MEGATRON, *argv)
    assert any(words in fault for fault in found), found


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["4", *sizes(ep=3, etp=1)],
            "is 4, but must be a multiple of --expert-model-parallel-size 3 x --expert-tensor-parallel-size 1 x "
            "--pipeline-model-parallel-size 1 = 3; lower --expert-model-parallel-size, or set --expert-tensor-",
        ),
        (["8", *sizes(ep=8, etp=1)], "must divide the model's 12 experts; set it to 6"),
        (["2", *sizes(tp=2)], "for a model with experts, which Megatron-core trains only together with sequence"),
        (["3", *sizes(ep=3, etp=3)], "= 9; lower --expert-model-parallel-size"),
        (
            ["3", *sizes(etp=3)],
            "--expert-tensor-parallel-size is 3, but must divide the experts' width 40; set it to 2",
        ),
        (["4", *sizes(tp=2, etp=4), SP], "is 4, but must be at most --tensor-model-parallel-size 2"),
        (["2", *sizes(ep=2), "--moe-token-dispatcher-type", "allgather"], "needs equally many tokens in every process"),
        (["1", "--moe-grouped-gemm", "--train-device", "cpu"], "needs Transformer Engine on a GPU"),
        (["1", "--moe-grouped-gemm", "--transformer-impl", "local"], "leave it out (--no-moe-grouped-gemm)"),
    ],
)
def test_refusals_of_a_model_with_experts(sparse: tuple[str, ...], argv: list[str], words: str) -> None:
    found = faults_of(*sparse, *MEGATRON, *argv)
    assert any(words in fault for fault in found), found


@pytest.mark.parametrize(
    "argv",
    [
        ["8", *sizes(tp=4, pp=2), SP],
        ["4", *sizes(pp=2), "--virtual-pipeline-model-parallel-size", "3", "--overlap-grad-reduce"],
        ["4", *sizes(pp=4), "--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1"],
        ["4", *sizes(pp=4), "--megatron-pipeline-model-parallel-layout", "Ettt|t|t|tL"],
        ["2", *sizes(cp=2)],
        ["2", "--overlap-grad-reduce", "--overlap-param-gather"],
        ["1", "--recompute-granularity", "full", "--recompute-num-layers", "2"],
        ["1", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"],
        ["3"],
    ],
)
def test_layouts_that_fit(dense: tuple[str, ...], argv: list[str]) -> None:
    assert settled(*dense, *MEGATRON, *argv)[1] == ()


@pytest.mark.parametrize(
    "argv",
    [
        ["4", *sizes(ep=4, etp=1)],
        ["4", *sizes(tp=2, ep=2, etp=2), SP],
        ["8", *sizes(tp=2, ep=4, etp=1), SP],
        ["1", "--moe-grouped-gemm"],
        ["4", *sizes(pp=2, ep=2)],
    ],
)
def test_layouts_of_experts_that_fit(sparse: tuple[str, ...], argv: list[str]) -> None:
    assert settled(*sparse, *MEGATRON, *argv)[1] == ()


def test_without_a_config_at_hand_sizes_are_checked_against_each_other_alone() -> None:
    hub = (*BASE, "some/model", *MEGATRON)
    assert settled(*hub, "64", *sizes(tp=8, pp=2), SP)[1] == ()
    (fault,) = faults_of(*hub, "4", *sizes(tp=2, ep=2, etp=1))
    assert "a model with experts, which Megatron-core trains only together with sequence parallelism" in fault


def test_options_of_recomputation_follow_from_each_other(dense: tuple[str, ...]) -> None:
    for argv, expected in (
        ((), (None, None, None)),
        (("--recompute-activations",), ("selective", None, None)),
        (("--recompute-granularity", "full"), ("full", "uniform", 1)),
        (("--gradient-checkpointing",), ("full", "uniform", 1)),
        (("--gradient-checkpointing", "--recompute-activations"), ("selective", None, None)),
        (("--gradient-checkpointing", "--recompute-method", "block"), ("full", "block", 1)),
    ):
        found = settled(*dense, *MEGATRON, "1", *argv)[0].megatron
        assert (found.recompute_granularity, found.recompute_method, found.recompute_num_layers) == expected
    assert settled(*dense, "--gradient-checkpointing")[0].megatron == Config().megatron


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--fsdp-shard-size", "2"],
            "--fsdp-shard-size is 2, but only --train-backend fsdp reads it; choose that, or leave it out",
        ),
        (
            ["--train-backend", "megatron", "--fsdp-cpu-offload", "--fsdp-compile"],
            "--fsdp-compile is true, but only --train-backend fsdp reads it",
        ),
        (
            ["--tensor-model-parallel-size", "2", "--megatron-moe-permute-fusion"],
            '{"moe_permute_fusion":true}, but only --train-backend megatron reads it',
        ),
        (
            ["--train-backend", "simulated", "--actor-num-gpus-per-node", "4"],
            "--actor-num-gpus-per-node is 4, but only --train-backend torch, fsdp or megatron reads it",
        ),
        (
            ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "6", "--fsdp-shard-size", "4"],
            "--fsdp-shard-size is 4, but must divide the trainer's 6 processes",
        ),
        (
            ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "4", "--fsdp-context-parallel-size", "3"],
            "--fsdp-context-parallel-size is 3, but must divide the trainer's 4 processes (--actor-num-nodes x "
            "--actor-num-gpus-per-node); set it to 2",
        ),
        (
            ["--lora-rank", "8"],
            "--lora-rank is 8, but --train-backend is torch, which trains all weights (fsdp does it in one process "
            "too); use --train-backend fsdp",
        ),
        (["--lora-rank", "8", "--train-backend", "megatron"], "is megatron, whose layers get no adapters; use"),
        (["--lora-rank", "8", "--train-backend", "simulated"], "is simulated, which trains nothing; use"),
        (
            ["--train-backend", "fsdp", "--lora-alpha", "8", "--lora-target-modules", "q_proj"],
            "--lora-target-modules is q_proj, but only --lora-rank above 0 reads it",
        ),
        (
            ["--train-backend", "fsdp", "--lora-rank", "8", "--use-kl-loss", "--kl-loss-coef", "1",
             "--ref-update-interval", "2"],
            "--ref-update-interval is 2, but with --lora-rank 8 the reference is the model without adapters",
        ),
        (
            ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "2", "--fsdp-context-parallel-size", "2",
             "--attn-implementation", "eager"],
            "--attn-implementation is eager, but --fsdp-context-parallel-size 2 needs attention whose mask",
        ),
        (["--micro-batch-size", "4"], "is 4, but only --no-use-dynamic-batch-size reads it"),
        (["--async-save", "--save-interval", "1"], "but only --train-backend fsdp or megatron reads it"),
        (["--save-hf", "out/{stepp}", "--save-interval", "1"], "the only name in braces is {step}, not {stepp}"),
        (["--save-hf", "o", "--train-backend", "simulated"], "--save-hf writes weights, but --train-backend simulated"),
    ],
)  # fmt: skip
def test_options_that_nobody_would_read(argv: list[str], words: str) -> None:
    found = faults_of(*BASE, "tiny", *argv)
    assert any(words in fault for fault in found), found


def test_options_that_are_read() -> None:
    fsdp = ("--train-backend", "fsdp", "--actor-num-gpus-per-node", "4")
    for argv in (
        (*fsdp, "--fsdp-shard-size", "2", "--lora-rank", "8", "--lora-alpha", "16", "--fsdp-compile"),
        (*fsdp, "--async-save", "--save-interval", "1", "--save-hf", "out/{step}"),
        ("--no-use-dynamic-batch-size", "--micro-batch-size", "4"),
        ("--save-hf", "out/{step}", "--save-interval", "1"),
    ):
        assert settled(*BASE, "tiny", *argv)[1] == ()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--actor-num-gpus-per-node", "2"], "in each of 2 processes; --train-backend fsdp divides them"),
        (
            ["--train-backend", "fsdp", "--actor-num-nodes", "2"],
            "--actor-num-nodes is 2, but --runner local starts all processes on this machine",
        ),
        (
            ["--train-backend", "fsdp", "--actor-num-gpus-per-node", "8", "--rollout-batch-size", "2",
             "--n-samples-per-prompt", "2"],
            "--global-batch-size 4 is less than the 8 data-parallel shares of the trainer",
        ),
        (["--train-backend", "fsdp", "--async-save"], "--async-save has no effect: the run writes no checkpoints"),
        (["--save-hf", "out/{step}"], "--save-hf has no effect: the run writes no checkpoints; add --save-interval"),
        (["--save-hf", "out", "--save-interval", "2"], "--save-hf out has no {step} in it: each checkpoint replaces"),
        (["--train-backend", "megatron", "--attn-implementation", "eager"], "--attn-implementation has no effect"),
    ],
)  # fmt: skip
def test_warnings(argv: list[str], words: str) -> None:
    found = settled(*BASE, "tiny", *argv)[1]
    assert any(words in warning for warning in found), found


def test_a_model_of_an_unknown_type_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "gemma9"}), encoding="utf-8")
    found = settled(*BASE, str(tmp_path), "--train-backend", "megatron")[1]
    assert any("the model is of type 'gemma9'" in warning for warning in found)
    assert settled(*BASE, str(tmp_path), "--train-backend", "fsdp")[1] == ()


def test_latent_attention_over_tensor_ranks_needs_sequence_parallelism() -> None:
    argv = ("--model", "moonlight-16b-a3b", "--prompt-data", "arithmetic", "--num-rollout", "3")
    settled(*argv, *sizes(tp=2), SP)
    found = faults_of(*argv, *sizes(tp=2), "--no-sequence-parallel")
    assert any("latent attention (deepseek_v3), which is trained only together with" in fault for fault in found), found
