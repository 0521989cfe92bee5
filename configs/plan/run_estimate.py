"""Memory and work of a whole run: the trainer's processes, one engine, the weight store, operations of a batch. No I/O.

A rollout batch costs, for each token: forward (1) and backward (2) passes, one more forward pass where activations are
recomputed, one for the old log-probs and one for the reference, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from configs.graph import evaluates, path
from configs.plan.gpus import Gpus, Layout
from configs.plan.memory import GPU_BYTES, RUNTIME_BYTES, TrainerMemory, trained_models, trainer_memory
from configs.schema import Config
from configs.schema.algorithm import needs, scores_old
from configs.schema.model_shapes import (
    ModelShape,
    active_parameters,
    forward_flops,
    fp8_block,
    known_shape,
    total_parameters,
)
from configs.schema.notation import as_number
from configs.sources import model_config

PEAK_FLOPS: Final = 989e12  # per second, H100 SXM, dense bfloat16 (its data sheet)
UTILISATION: Final = 0.4  # share of it that is assumed, not measured
# Of a GPU that SGLang takes for weights and KV cache, unless `mem_fraction_static` is given.
STATIC_FRACTION: Final = 0.88


class EngineMemory(Struct, frozen=True, kw_only=True):
    """Bytes on one GPU of one engine. `kv_tokens`: that the slots may hold at full length (embedded engine), or that
    fit beside the weights into 80 GB (SGLang)."""

    gpus: int
    weights: int
    kv_bytes_per_token: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_bytes_per_token * self.kv_tokens


class Work(Struct, frozen=True, kw_only=True):
    """Floating point operations. `passes`: forward passes that a trained token costs; `length`: tokens of the longest
    sequence, which all are taken to have; `batch`: of a rollout batch, at most."""

    forward_token: int
    passes: float
    length: int
    batch: int

    def seconds(self, processes: int) -> float:
        """Time of a rollout batch on so many H100 at the utilisation that is assumed."""
        return self.batch / (processes * PEAK_FLOPS * UTILISATION)


class RunEstimate(Struct, frozen=True, kw_only=True):
    """What a model costs in this run."""

    parameters: int
    active: int
    trainer: TrainerMemory | None
    engine: EngineMemory | None
    weight_slots: int  # two versions in shared memory
    work: Work


def estimate_run(config: Config, model: Mapping[str, Any]) -> RunEstimate | None:
    """Estimate for a model's config.json; None if its shape is not known."""
    shape = known_shape(model)
    if shape is None:
        return None
    count = total_parameters(shape)
    return RunEstimate(
        parameters=count,
        active=active_parameters(shape),
        trainer=trainer_memory(config, shape),
        engine=_engine(config, shape, count) if "generate" in path(config) or evaluates(config) else None,
        weight_slots=2 * _sent_bytes(config, shape, count),
        work=_work(config, shape),
    )


def _engine_width(config: Config) -> int:
    """Bytes of a weight in the engine."""
    if config.engine.engine == "sglang":
        return 4 if config.sglang.sglang_args.get("dtype") == "float32" else 2
    return 2 if config.engine.engine_dtype == "bfloat16" else 4


def _sent_bytes(config: Config, shape: ModelShape, count: int) -> int:
    """Of one version on its way to the engines: in float8 a byte for each weight but those of embedding and head."""
    width, served = _engine_width(config), model_config(config.engine.engine_checkpoint or "")
    if served is None or fp8_block(served) is None:
        return count * width
    return count + (width - 1) * shape.vocabulary * shape.hidden * (1 if shape.tied else 2)


def _engine(config: Config, shape: ModelShape, count: int) -> EngineMemory:
    width, layers = _engine_width(config), shape.layers
    if config.engine.engine != "sglang":
        slots = min(config.engine.engine_slots, config.rollout.server_concurrency)
        return EngineMemory(
            gpus=1,
            weights=count * width,
            kv_bytes_per_token=shape.key_values * layers * width,
            kv_tokens=slots * (_longest(config, shape) or 0),
        )
    gpus = config.sglang.rollout_num_gpus_per_engine
    # Key heads are divided until each GPU has one; a compressed cache is whole on every GPU.
    per_token = shape.key_values if shape.latent else -(-shape.key_values // min(gpus, shape.kv_heads))
    per_token *= layers * width
    weights = -(-_sent_bytes(config, shape, count) // gpus)
    fraction = as_number(config.sglang.sglang_args.get("mem_fraction_static")) or STATIC_FRACTION
    room = int(GPU_BYTES * fraction) - weights
    tokens = max(0, room) // max(1, per_token)
    return EngineMemory(gpus=gpus, weights=weights, kv_bytes_per_token=per_token, kv_tokens=tokens)


def _longest(config: Config, shape: ModelShape) -> int | None:
    """Tokens of the longest sequence: as configured, else the model's own limit."""
    length = config.rollout.rollout_max_context_len
    if length is None:
        prompt = config.data.rollout_max_prompt_len
        length = prompt + config.rollout.rollout_max_response_len if prompt is not None else shape.positions
    if shape.positions is not None and length is not None:
        length = min(length, shape.positions)
    return length


def _work(config: Config, shape: ModelShape) -> Work:
    rollout = config.rollout
    prompt = config.data.rollout_max_prompt_len or 0
    length = min(
        prompt + rollout.rollout_max_response_len,
        rollout.rollout_max_context_len or shape.positions or 1 << 62,
        shape.positions or 1 << 62,
    )
    one = forward_flops(shape, length)
    megatron = config.train.train_backend == "megatron"
    recomputes = config.megatron.recompute_granularity == "full" if megatron else config.train.gradient_checkpointing
    passes = 3.0 + recomputes + _scored(config)
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    batch = int(one * passes * rollouts * trained_models(config))
    return Work(forward_token=one // length, passes=passes, length=length, batch=batch)


def _scored(config: Config) -> float:
    """Forward passes before the update: for the old log-probs, which the first step mostly finds itself, again for
    those of later steps, of the reference."""
    algorithm, correction, loss_type = config.algorithm, config.correction, config.train.loss_type
    if loss_type == "sft_loss":
        return 0
    steps = config.train.num_steps_per_rollout or 1
    first, old = (
        scores_old(algorithm, correction, config.distill, loss_type=loss_type, steps=count) for count in (1, steps)
    )
    again = loss_type == "policy_loss" and needs(algorithm, correction) == "current"
    reference = (algorithm.use_kl_loss and algorithm.kl_loss_coef > 0) or algorithm.kl_coef > 0
    return (first or old * (steps - 1) / steps) + again * (steps - 1) / steps + reference


# --------------------------------------------------------------------------------------------------
# What the plan says about the model: parameters, memory of a process and of an engine, operations of a batch.


def model_lines(found: RunEstimate, layout: Layout, backend: str, gpus: Gpus) -> list[str]:
    """The last part of the plan; sizes are estimates."""
    active = f", {found.active:,} of them active per token" if found.active != found.parameters else ""
    lines = [f"model and memory (estimates): {found.parameters:,} parameters{active}"]
    if found.trainer is not None:
        lines += _trainer(found.trainer, layout, backend)
        if gpus.trainer and found.trainer.fits:
            rest = f"of a GPU of {size_text(GPU_BYTES)}, beside about {size_text(RUNTIME_BYTES)} of the runtime"
            lines.append(f"  both               {size_text(found.trainer.total)}   {rest}")
    if found.engine is not None:
        lines += _engine_lines(found.engine)
    if gpus.shared and found.trainer is not None and found.engine is not None:
        lines += _together(found.trainer, found.engine)
    if gpus.total:
        lines.append(f"  GPUs               {gpus}")
    lines.append(f"  weight store       {size_text(found.weight_slots)}   two versions in shared memory")
    if backend != "simulated":
        lines += _work_lines(found, layout)
    return lines


def _trainer(memory: TrainerMemory, layout: Layout, backend: str) -> list[str]:
    each = f"each of {layout.world} processes" if layout.world > 1 else "one process"
    state = f"weights {size_text(memory.weights)}, gradients {size_text(memory.gradients)}, optimizer "
    lines = [
        f"  trainer            {size_text(memory.state)}   {each}, {backend}: {state}{size_text(memory.optimizer)}",
        f"  passes             {size_text(memory.total - memory.state)}   a full micro-batch: activations "
        f"{size_text(memory.activations)}, logits {size_text(memory.logits)}"
        + (f", gathered weights {size_text(memory.gathered)}" if memory.gathered else ""),
    ]
    if memory.host:
        lines.append(f"  on the host        {size_text(memory.host)}   for each process")
    if not memory.fits:
        lines.append(
            f"  warning: {size_text(memory.total)} and about {size_text(RUNTIME_BYTES)} of the runtime do not fit into "
            f"{GPU_BYTES // 10**9} GB; {_cure(memory, layout, backend)}"
        )
    return lines


def _cure(memory: TrainerMemory, layout: Layout, backend: str) -> str:
    """What lowers the larger part."""
    if memory.state < memory.total - memory.state:
        recompute = "--recompute-granularity full" if backend == "megatron" else "--gradient-checkpointing"
        return f"lower --max-tokens-per-gpu, or add {recompute}"
    if backend == "torch":
        return "divide the model with --train-backend fsdp and --actor-num-gpus-per-node"
    if backend == "fsdp":
        return "raise --actor-num-nodes or --actor-num-gpus-per-node, or add --fsdp-cpu-offload"
    return "raise a parallel size with the number of processes, or add --optimizer-cpu-offload"


def _engine_lines(engine: EngineMemory) -> list[str]:
    each = f"each of its {engine.gpus} GPUs: " if engine.gpus > 1 else ""
    lines = [
        f"  one engine         {size_text(engine.total)}   {each}{size_text(engine.weights)} weights + KV cache of "
        f"{engine.kv_tokens:,} tokens, {engine.kv_bytes_per_token:,} bytes each"
    ]
    if engine.weights >= GPU_BYTES or not engine.kv_tokens:
        lines.append(
            f"  warning: {size_text(engine.weights)} of weights leave no room for a KV cache in {GPU_BYTES // 10**9} "
            "GB; divide them with --engine sglang and a larger --rollout-num-gpus-per-engine"
        )
    return lines


def _together(trainer: TrainerMemory, engine: EngineMemory) -> list[str]:
    """Of a colocated run: what would be needed at the same time, and what is, in turns."""
    whole, at_once = trainer.total + engine.total, max(trainer.total, engine.total)
    lines = [
        f"  trainer and engine {size_text(whole)}   on the same GPU, in turns: {size_text(at_once)} at one time, and "
        f"{size_text(trainer.weights + trainer.optimizer)} of the trainer on the host in the engine's turn"
    ]
    if at_once + RUNTIME_BYTES > GPU_BYTES:
        lines.append(
            f"  warning: the larger of both and about {size_text(RUNTIME_BYTES)} of the runtime do not fit into "
            f"{GPU_BYTES // 10**9} GB; lower --max-tokens-per-gpu or --engine-slots, or leave --colocate out"
        )
    return lines


def _work_lines(found: RunEstimate, layout: Layout) -> list[str]:
    work = found.work
    return [
        f"  work               {_flops(work.forward_token)} forward per token, {work.passes:g} times that to train it; "
        f"{_flops(work.batch)} per rollout batch if all sequences have {work.length:,} tokens",
        f"                     at {UTILISATION:.0%} of {PEAK_FLOPS / 1e12:g} TFLOP/s (H100, bfloat16) on "
        f"{layout.world} GPU{'s' if layout.world > 1 else ''}: {work.seconds(layout.world):.3g} s",
    ]


def _flops(count: float) -> str:
    return _scaled(count, 1000, 3, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def size_text(count: int | None) -> str:
    """Bytes with a binary unit."""
    return _scaled(count or 0, 1024, 4, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(count: float, base: int, digits: int, units: tuple[str, ...]) -> str:
    power = next((power for power in range(len(units)) if count < base ** (power + 1)), len(units) - 1)
    return f"{count / base**power:.{digits}g} {units[power]}"
