"""What the plan says about the model: parameters, memory of a process and of an engine, operations of a batch."""

from __future__ import annotations

from configs.plan.gpus import Gpus
from configs.plan.memory import GPU_BYTES, RUNTIME_BYTES, TrainerMemory
from configs.plan.parallel_layout import Layout
from configs.plan.run_estimate import PEAK_FLOPS, UTILISATION, EngineMemory, RunEstimate


def model_lines(found: RunEstimate, layout: Layout, backend: str, gpus: Gpus) -> list[str]:
    """The last part of the plan; sizes are estimates."""
    active = f", {found.active:,} of them active per token" if found.active != found.parameters else ""
    lines = [f"model and memory (estimates): {found.parameters:,} parameters{active}"]
    if found.trainer is not None:
        lines += _trainer(found.trainer, layout, backend)
    if found.engine is not None:
        lines += _engine(found.engine)
    if gpus.shared and found.trainer is not None and found.engine is not None:
        lines += _together(found.trainer, found.engine)
    if gpus.total:
        lines.append(f"  GPUs               {gpus}")
    lines.append(f"  weight store       {size_text(found.weight_slots)}   two versions in shared memory")
    if backend != "simulated":
        lines += _work(found, layout)
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


def _engine(engine: EngineMemory) -> list[str]:
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


def _work(found: RunEstimate, layout: Layout) -> list[str]:
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
