"""Memory and work of a run: recomputed by hand, against what autograd keeps, and in the plan's text."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.load import read_preset
from configs.plan.gpus import Layout, layout_of, stage_layers
from configs.plan.memory import Form, layer_activations, trainer_memory
from configs.plan.plan import make_plan, render
from configs.plan.run_estimate import _scored, estimate_run
from configs.schema import Config
from configs.schema.model_shapes import (
    active_parameters,
    adapter_parameters,
    forward_flops,
    known_shape,
    layer_share,
    total_parameters,
)
from models.train.spec import batch_needs, train_spec
from tests.configs.config_rig import planned

TINY = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256}
EXPERTS = TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def trainer_group(backend: str, processes: int, *argv: str) -> Config:
    return planned(f"--train-backend {backend} --actor-num-gpus-per-node {processes}", *argv)


def shape_of(model: dict[str, Any]) -> Any:
    return known_shape(model)


def trainer(model: dict[str, Any], config: Config) -> Any:
    return trainer_memory(config, shape_of(model))


def estimate(model: dict[str, Any], *argv: str) -> Any:
    return estimate_run(planned(*argv), model)


def engine(model: dict[str, Any], *argv: str) -> Any:
    return estimate(model, *argv).engine


def preset(name: str) -> Any:
    return read_preset(name).values["model.architecture"]


def test_one_process_of_torch() -> None:
    total = total_parameters(shape_of(TINY))
    found = trainer(TINY, planned())
    assert (found.weights, found.gradients, found.optimizer) == (4 * total, 4 * total, 8 * total)
    assert trainer(TINY, trainer_group("torch", 4)).state == found.state, "copies, not parts"
    assert trainer(TINY, planned("--use-kl-loss --kl-loss-coef 0.1")).weights == 8 * total
    assert trainer(TINY, planned("--advantage-estimator ppo")).state == 32 * total, "policy and critic"
    half = trainer(TINY, planned("--train-dtype bfloat16"))
    assert (half.state, half.gathered) == (16 * total, 2 * total)
    shape = shape_of(TINY)
    assert found.activations == 16384 * 4 * layer_activations(shape, 0, "float32")
    head = 64 * (4 * 16384 + 8 * 256 + 4 * (256 + 16384))
    assert found.logits == 4096 * 256 * 9 + head
    recomputed = trainer(TINY, planned("--gradient-checkpointing"))
    assert recomputed.activations == 16384 * (4 * 64 * 4 + layer_activations(shape, 0, "float32"))


def test_fsdp_divides_the_state_by_the_shard() -> None:
    total = total_parameters(shape_of(TINY))
    whole = trainer(TINY, trainer_group("fsdp", 8))
    assert whole.weights == 4 * -(-total // 8)
    assert whole.state == 16 * -(-total // 8)
    assert trainer(TINY, trainer_group("fsdp", 8, "--fsdp-shard-size 2")).state == 16 * -(-total // 2)
    assert trainer(TINY, trainer_group("fsdp", 8, "--fsdp-shard-size 1")).state == 16 * total
    shape = shape_of(TINY)
    layer = layer_share(shape, 0).total()
    root = total - 4 * layer
    assert whole.gathered == 2 * (root + 2 * layer) + 4 * layer
    kept = trainer(TINY, trainer_group("fsdp", 8, "--no-fsdp-reshard-after-forward"))
    assert kept.gathered == 2 * (root + 4 * layer) + 4 * layer
    offloaded = trainer(TINY, trainer_group("fsdp", 8, "--fsdp-cpu-offload"))
    assert (offloaded.state, offloaded.host) == (0, whole.state)
    halves = trainer(TINY, trainer_group("fsdp", 8, "--fsdp-context-parallel-size 2"))
    assert halves.activations * 2 == whole.activations


def test_adapters_alone_have_gradients() -> None:
    adapters = 4 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 96))
    found = trainer(TINY, trainer_group("fsdp", 1, "--lora-rank 4"))
    assert found.gradients == 4 * adapters
    assert found.optimizer == 8 * adapters
    assert found.weights == 4 * (total_parameters(shape_of(TINY)) + adapters)


def test_megatron_in_two_precisions() -> None:
    total = total_parameters(shape_of(TINY))
    half = trainer(TINY, trainer_group("megatron", 1))
    assert (half.weights, half.gradients, half.optimizer) == (2 * total, 4 * total, 12 * total)
    single = trainer(TINY, trainer_group("megatron", 1, "--train-dtype float32"))
    assert (single.weights, single.gradients, single.optimizer) == (4 * total, 4 * total, 8 * total)
    spread = trainer(TINY, trainer_group("megatron", 4))
    assert spread.optimizer == 12 * -(-total // 4)
    assert trainer(TINY, trainer_group("megatron", 4, "--no-use-distributed-optimizer")).optimizer == 12 * total
    offloaded = trainer(TINY, trainer_group("megatron", 1, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"))
    assert (offloaded.optimizer, offloaded.host) == (6 * total, 6 * total)
    assert trainer(TINY, trainer_group("megatron", 1, "--use-kl-loss --kl-loss-coef 0.1")).host == 2 * total, (
        "reference"
    )


def test_experts_have_data_parallelism_of_their_own() -> None:
    shape = shape_of(EXPERTS)
    layer = layer_share(shape, 0)
    argv = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    found = trainer(EXPERTS, trainer_group("megatron", 8, argv))
    dense = 4 * (layer["tensor"] + layer["whole"]) + 2 * 256 * 64 + 64
    expert = 4 * layer["expert"] // 4
    assert found.parameters == dense + expert
    assert found.optimizer == 12 * (-(-dense // 8) + expert // 2), "8 copies of what is dense, 2 of an expert"
    layout = layout_of(trainer_group("megatron", 8, argv))
    assert (layout.data, layout.expert_data) == (8, 2)


def test_activations_of_a_pipeline() -> None:
    shape = shape_of(TINY)
    one = layer_activations(shape, 0, "fused")
    argv = "--pipeline-model-parallel-size 2 --max-tokens-per-gpu 100 --logprob-chunk-tokens 1"
    two = trainer(TINY, trainer_group("megatron", 2, argv))
    assert two.activations == 100 * 2 * 2 * one, "two micro-batches in flight"
    full = trainer(TINY, trainer_group("megatron", 2, argv, "--recompute-granularity full"))
    assert full.activations == 100 * (2 * 2 * 64 + one), "of the last stage, which has the head besides"
    by_sequence = layer_activations(shape, 0, "fused", layout=Layout(world=2, tensor=2, sequence=True))
    assert by_sequence * 2 == one
    assert one > layer_activations(shape, 0, "fused", layout=Layout(world=2, tensor=2)) > by_sequence


@pytest.mark.parametrize(("argv", "layers", "stages"), [
    ("4", 8, (2, 2, 2, 2)),
    ("4", 10, None),
    ("4 --decoder-last-pipeline-num-layers 13", 61, (16, 16, 16, 13)),
    ("2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5", 8, (3, 5)),
    ("2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4", 8, None),
    ("2 --virtual-pipeline-model-parallel-size 2", 8, (4, 4)),
    ("2 --virtual-pipeline-model-parallel-size 3", 8, None),
    ("2 --decoder-first-pipeline-num-layers 9", 8, None),
    ("1", 8, (8,)),
])  # fmt: skip
def test_layers_of_the_stages(argv: str, layers: int, stages: tuple[int, ...] | None) -> None:
    assert stage_layers(trainer_group("megatron", 4, "--pipeline-model-parallel-size", argv), layers) == stages


def test_one_embedded_engine() -> None:
    model = preset("qwen3-0.6b")
    found = engine(model, "--engine-slots 64 --rollout-max-context-len 2048")
    assert found.weights == 596_049_920 * 4
    assert found.kv_bytes_per_token == 2 * 28 * 8 * 128 * 4
    assert found.kv_tokens == 64 * 2048
    assert found.total == found.weights + found.kv_bytes_per_token * found.kv_tokens
    half = engine(model, "--engine-dtype bfloat16")
    assert (half.weights, half.kv_tokens) == (596_049_920 * 2, 256 * 40960), "the model's own limit"
    assert engine(model, "--rollout-max-prompt-len 100").kv_tokens == 256 * 612
    assert estimate(model, "--loss-type sft_loss").engine is None


def test_one_gpu_of_an_sglang_engine() -> None:
    model = preset("qwen3-8b")
    argv = "--engine sglang --rollout-num-gpus-per-engine"
    one, four, many = (engine(model, argv, str(gpus)) for gpus in (1, 4, 16))
    assert one.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert four.kv_bytes_per_token * 4 == one.kv_bytes_per_token
    assert many.kv_bytes_per_token * 8 == one.kv_bytes_per_token, "each GPU has one key head at least"
    assert four.weights == -(-one.weights // 4)
    assert one.kv_tokens == (int(80e9 * 0.88) - one.weights) // one.kv_bytes_per_token
    less = engine(model, argv, "1 --sglang-mem-fraction-static 0.5")
    assert less.kv_tokens == (int(80e9 * 0.5) - one.weights) // one.kv_bytes_per_token
    latent = preset("deepseek-v3")
    for gpus in ("16", "32"):
        assert engine(latent, argv, gpus).kv_bytes_per_token == 61 * (512 + 64) * 2, "whole on every GPU"


def test_engines_in_float8(tmp_path: Path) -> None:
    """A byte for each weight, but two for those of the embedding, which is the head as well or has one beside it."""
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"quantization_config": quantised}))
    argv = ("--engine sglang", "--engine-checkpoint", str(tmp_path))
    for tied in (True, False):
        model = TINY | {"tie_word_embeddings": tied}
        total, rows = total_parameters(shape_of(model)), 256 * 64 * (1 if tied else 2)
        found, plain = estimate(model, *argv), estimate(model, "--engine sglang")
        assert (found.engine.weights, found.weight_slots) == (total + rows, 2 * (total + rows))
        assert (plain.engine.weights, plain.weight_slots) == (2 * total, 4 * total)
        assert found.engine.kv_tokens > plain.engine.kv_tokens


def test_work_of_a_batch() -> None:
    argv = "--rollout-max-response-len 100 --rollout-max-prompt-len 28 --mode sync"
    plain = estimate(TINY, argv).work
    assert (plain.length, plain.passes) == (128, 3)
    assert plain.forward_token == pytest.approx(plain.batch / (3 * 256 * 128), abs=1)
    assert estimate(TINY, argv, "--gradient-checkpointing").work.passes == 4
    assert estimate(TINY, argv, "--train-backend megatron --recompute-granularity full").work.passes == 4
    stale = argv.removesuffix(" --mode sync") + " --num-steps-per-rollout 4 --policy-loss m2po"
    assert estimate(TINY, stale).work.passes == 4.75, "each start anew"
    assert plain.seconds(4) == pytest.approx(plain.batch / (4 * 989e12 * 0.4))


SETTINGS = (
    "--mode sync|--use-rollout-logprobs||--prox loglinear --use-tis|--tis-batch-normalize --use-tis",
    "|--num-steps-per-rollout 4",
    "|--policy-loss m2po|--policy-loss kl_cov|--rs-veto 1e-4 --rs-unit rollout|--rs-veto 1e-4"
    "|--correction-ratio current",
    "|--loss-type sft_loss|--loss-type custom_loss --custom-loss-function-path a:b|--use-opd"
    "|--advantage-estimator ppo --kl-coef 0.1|--advantage-estimator ppo|--use-kl-loss --kl-loss-coef 0.1"
    "|--use-kl-loss --kl-loss-coef 0|--custom-advantage-function-path a:b",
)


def test_the_work_is_that_of_the_passes_that_the_trainer_makes() -> None:
    """Log-probs at the start of the batch, and of later steps' starts; the reference. A fifth of the combinations, in
    which each pair of settings occurs."""
    found = set()
    for numbered in itertools.product(*(enumerate(one.split("|")) for one in SETTINGS)):
        numbers, parts = zip(*numbered, strict=True)
        if sum(numbers) % 5:
            continue
        config = planned(*parts)
        spec = train_spec(config, 10)
        spec = replace(spec, algorithm=msgspec.structs.replace(spec.algorithm, custom_loss_function_path="a:b"))
        steps = config.train.num_steps_per_rollout or 1
        needed = batch_needs(spec, steps=steps)
        later = (steps - 1) / steps  # share of the batch that is trained by later steps than the first
        again = later if needed.statistics == "current" else 0
        expected = needed.old_log_probs * (1 if needed.score_first_step else later) + again + spec.uses_reference
        assert _scored(config) == expected, parts
        found.add(expected)
    assert found == {0, 0.75, 1, 2, 1.75, 2.75}


def plan_text(*argv: str) -> str:
    return render(make_plan(planned(*argv)))


def test_the_plan_warns_of_what_does_not_fit() -> None:
    one = plan_text("--model qwen3-32b --train-backend torch")
    assert "divide the model with --train-backend fsdp" in one
    small = "--model qwen3-32b --train-backend fsdp --actor-num-nodes 1 --actor-num-gpus-per-node"
    assert "do not fit into 80 GB; raise --actor-num-nodes" in plan_text(small, "4")
    assert "warning" not in plan_text(small, "16")
    offloaded = plan_text(small, "8", "--fsdp-cpu-offload")
    assert "warning" not in offloaded
    assert "on the host" in offloaded
    long = "--max-tokens-per-gpu 400000 --no-gradient-checkpointing --actor-num-gpus-per-node 8"
    activations = plan_text("--model qwen3-0.6b --train-backend fsdp", long)
    assert "lower --max-tokens-per-gpu, or add --gradient-checkpointing" in activations
    engine = plan_text("--model llama3.1-70b --rollout-num-gpus-per-engine 1")
    assert "leave no room for a KV cache in 80 GB; divide them with --engine sglang and a larger" in engine


def test_the_plan_of_a_trainer_group() -> None:
    text = plan_text("--model qwen3-30b-a3b")
    assert "30,532,122,624 parameters, 3,353,032,704 of them active per token" in text
    assert "train        x1   process and a trainer group of 4 processes (TP 4, EP 4)" in text
    assert "each of 4 processes, megatron: weights" in text
    assert "each of its 2 GPUs" in text
    assert "at 40% of 989 TFLOP/s (H100, bfloat16) on 4 GPUs" in text
    assert all(len(line) <= 200 for line in text.splitlines())


def test_a_trainer_group_is_counted() -> None:
    one = make_plan(planned()).processes
    assert make_plan(trainer_group("fsdp", 4)).processes == one + 4
    assert make_plan(trainer_group("fsdp", 1)).processes == one + 1, "the train stage itself does not train then"
    assert make_plan(trainer_group("torch", 2)).processes == one + 2
    assert make_plan(planned("--train-backend simulated")).processes == one
    assert "a trainer group of 1 process (one process)" in render(make_plan(trainer_group("megatron", 1)))


TOKENS = 128
SHAPE = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
SHAPE |= {"intermediate_size": 320}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 64, "qk_nope_head_dim": 32}
# Heads of one width: for two, CPU attention falls back to a kernel that keeps the scores.
LATENT |= {"qk_rope_head_dim": 16, "v_head_dim": 48, "first_k_dense_replace": 9}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {"head_dim": 32}),
    ("Llama", {"head_dim": 64}),
    ("Glm4", {"head_dim": 32, "pad_token_id": 0, "eos_token_id": 1}),
    ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
    ("DeepseekV3", LATENT),
]


def kept(config: Any, form: Form) -> float:
    """Bytes per token that a forward pass keeps, without weights."""
    import torch

    torch.manual_seed(0)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if form == "bfloat16":
        model = model.to(torch.bfloat16)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    alive: dict[int, tuple[int, Any]] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        alive.setdefault(storage.data_ptr(), (storage.nbytes(), tensor))  # held, so that no address is used again
        return tensor

    ids = torch.randint(0, 64, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=ids)
    own = {pointer: size for pointer, (size, _) in alive.items() if pointer not in weights}
    return sum(own.values()) / TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), CASES, ids=[kind for kind, _ in CASES])
def test_a_layer_keeps_what_is_estimated(kind: str, shape: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    make = getattr(transformers, f"{kind}Config")
    forms: tuple[Form, ...] = ("float32", "bfloat16")
    for form in forms:
        one, three = (make(**{**SHAPE, **shape}, num_hidden_layers=layers, attention_dropout=0.0) for layers in (1, 3))
        known = shape_of(three.to_dict())
        measured = (kept(three, form) - kept(one, form)) / 2
        assert layer_activations(known, 2, form) == pytest.approx(measured, rel=0.06), form


# Parameters of all known families: against published totals, and against transformers' modules, exactly.


# Trainable parameters of the published checkpoints, embeddings included, without the routers' biases and without layers
# for multi-token prediction. The second figure is the published one per token, in billions.
DENSE = {
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "glm4-9b": 9_400_279_040, "glm-z1-9b": 9_400_279_040,
}  # fmt: skip
SPARSE = {
    "qwen3-30b-a3b": (30_532_122_624, 3.3), "qwen3-235b-a22b": (235_093_634_560, 22),
    "glm-4.5-355b-a32b": (352_797_814_784, 32), "glm-4.7-355b-a32b": (352_797_814_784, 32),
    "glm-4.5-air": (106_852_245_504, 12), "deepseek-v3": (671_026_404_352, 37), "deepseek-r1": (671_026_404_352, 37),
    "kimi-k2": (1_026_408_209_408, 32), "moonlight-16b-a3b": (15_960_108_544, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_parameters_of_published_models(name: str) -> None:
    total, active = SPARSE.get(name) or (DENSE[name], None)
    shape = shape_of(preset(name))
    assert total_parameters(shape) == total
    if active is None:
        assert active_parameters(shape) == total
    else:  # published figures leave out one or both of embedding table and head, and are rounded
        tables = shape.vocabulary * shape.hidden
        assert active_parameters(shape) - 2 * tables < active * 1e9 * 1.03
        assert active_parameters(shape) > active * 1e9 * 0.97


def test_unknown_shapes_are_not_guessed() -> None:
    unknown: tuple[dict[str, Any], ...] = ({}, {"model_type": "mamba"}, {"model_type": "llama"})
    small = {key: size for key, size in TINY.items() if key != "head_dim"}
    changes = ({"vocab_size": None}, {"num_attention_heads": 0}, {"model_type": "deepseek_v3"})
    for model in (*unknown, *(small | change for change in changes)):
        assert known_shape(model) is None


def test_experts_under_the_name_that_transformers_saves() -> None:
    for name, own in (("qwen3-30b-a3b", "num_experts"), ("deepseek-v3", "n_routed_experts")):
        published = preset(name)
        saved = {"num_local_experts" if key == own else key: value for key, value in published.items()}
        assert total_parameters(shape_of(saved)) == total_parameters(shape_of(published))


def test_adapters() -> None:
    shape = shape_of(preset("qwen3-0.6b"))
    attention = (1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024)
    assert adapter_parameters(shape, 16, ("q_proj",)) == 28 * 16 * (1024 + 2048)
    assert adapter_parameters(shape, 16, ("all-linear",)) == 28 * 16 * (attention + 3 * (1024 + 3072))
    experts = shape_of(preset("qwen3-30b-a3b"))
    assert adapter_parameters(experts, 8, ("gate_proj", "up_proj", "down_proj")) == 0


def test_operations_of_a_sequence() -> None:
    shape = shape_of(preset("qwen3-8b"))
    table = 151936 * 4096
    one = 2 * (8_190_735_360 - table) + 4 * 4096 * 36
    assert forward_flops(shape, 1) == one
    # Each later token also looks at all before it.
    assert forward_flops(shape, 3) == 3 * one + (1 + 2) * 4 * 4096 * 36
    tied = shape_of(preset("qwen3-0.6b"))
    assert forward_flops(tied, 1) == 2 * 596_049_920 + 4 * 2048 * 28  # the table is the head
    latent = shape_of(preset("deepseek-v3"))
    pairs = forward_flops(latent, 2) - 2 * forward_flops(latent, 1)
    assert pairs == 2 * 128 * (192 + 128) * 61


TINY_SHAPES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_SHAPES |= {"intermediate_size": 84, "vocab_size": 130, "max_position_embeddings": 64}
LATENT_SHAPES = {"kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
LATENT_SHAPES |= {"num_key_value_heads": 4}
ROUTED = {"moe_intermediate_size": 20, "num_experts_per_tok": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    ("Llama", {"head_dim": 16}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 2, "head_dim": 16, **ROUTED}),
    ("Qwen3Moe", {"num_experts": 4, "mlp_only_layers": [0], "attention_bias": True, "head_dim": 16, **ROUTED}),
    ("Glm4", {"attention_bias": True, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 1}),
    ("Glm4", {"attention_bias": False, "head_dim": 12, "pad_token_id": 0, "eos_token_id": 1}),
    ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
                 "attention_bias": True, "head_dim": 16, **ROUTED}),
    ("Glm4Moe", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "head_dim": 16, **ROUTED}),
    ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
                    "n_group": 1, "topk_group": 1, **LATENT_SHAPES, **ROUTED}),
    ("DeepseekV3", {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
                    "attention_bias": True, "n_group": 1, "topk_group": 1, **LATENT_SHAPES, **ROUTED}),
]  # fmt: skip


def parameter_count(config: Any) -> int:
    """Parameters of transformers' model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return int(sum(weight.numel() for weight in model.parameters()))


@pytest.mark.slow
def test_tiny_models_against_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for number, (kind, shape) in enumerate(VARIANTS):
        config = getattr(transformers, f"{kind}Config")(**{**TINY_SHAPES, **shape}, tie_word_embeddings=number % 2 == 0)
        known = shape_of(config.to_dict())
        assert total_parameters(known) == parameter_count(config), (kind, shape)
