"""How the trainer's processes divide a model: sizes against the processes, against each other, against the model; and
adapters, which one backend trains."""

from __future__ import annotations

from collections.abc import Iterator

from configs.plan.gpus import Layout, layout_of, own_stages, stage_layers
from configs.schema import Config
from configs.schema.model_shapes import ModelShape, known_shape, matrices
from configs.schema.notation import cure
from configs.schema.train import has_transformer_engine
from configs.sources import known_model

_WORLD = "--actor-num-nodes x --actor-num-gpus-per-node"


def layout_faults(config: Config) -> Iterator[str]:
    """Whether the groups of processes come out even."""
    layout, fsdp = layout_of(config), config.fsdp
    world, backend = layout.world, config.train.train_backend
    if backend == "fsdp":
        processes = f"the trainer's {world} process{'es' if world > 1 else ''} ({_WORLD})"
        yield from _dividing("--fsdp-shard-size", fsdp.fsdp_shard_size or 1, world, processes)
        yield from _dividing("--fsdp-context-parallel-size", fsdp.fsdp_context_parallel_size, world, processes)
        if fsdp.fsdp_context_parallel_size > 1 and config.train.attn_implementation not in ("auto", "sdpa"):
            yield (
                f"--attn-implementation is {config.train.attn_implementation}, but --fsdp-context-parallel-size "
                f"{fsdp.fsdp_context_parallel_size} needs attention whose mask can be chosen; set it to sdpa or auto"
            )


def megatron_faults(config: Config) -> Iterator[str]:
    """The same of Megatron-core's groups, and what they do to each other and to the model."""
    if config.train.train_backend != "megatron":
        return
    layout, megatron, shape = layout_of(config), config.megatron, known_shape(known_model(config) or {})
    world, one = layout.world, layout.tensor * layout.pipeline * layout.context
    if world % one:
        yield (
            f"{_WORLD} is {world}, but must be a multiple of --tensor-model-parallel-size {layout.tensor} x "
            f"--pipeline-model-parallel-size {layout.pipeline} x --context-parallel-size {layout.context} = {one}; "
            f"set --actor-num-gpus-per-node so that it is, for example {one} on one node, or lower a size"
        )
    experts = layout.expert_tensor * layout.expert * layout.pipeline
    if world % experts and (layout.expert > 1 or layout.expert_tensor != layout.tensor):
        yield (
            f"{_WORLD} is {world}, but must be a multiple of --expert-model-parallel-size {layout.expert} x "
            f"--expert-tensor-parallel-size {layout.expert_tensor} x --pipeline-model-parallel-size "
            f"{layout.pipeline} = {experts}; lower --expert-model-parallel-size, or set --expert-tensor-parallel-size 1"
        )
    if layout.sequence and layout.tensor == 1:
        yield (
            "--sequence-parallel splits activations over the tensor parallel processes, but "
            "--tensor-model-parallel-size is 1; set that to 2 or more, or leave --sequence-parallel out"
        )
    if layout.context > 1 and megatron.transformer_impl == "local":
        yield (
            f"--context-parallel-size is {layout.context}, but --transformer-impl is local, and only Transformer "
            "Engine's attention divides a sequence; set --transformer-impl transformer_engine, or "
            "--context-parallel-size 1"
        )
    yield from _pipeline_faults(config)
    yield from _expert_faults(config, layout, shape)
    for what, size in _divided(shape) if shape is not None else ():
        model = f"the model's {size} {what}"
        if fault := next(_dividing("--tensor-model-parallel-size", layout.tensor, size, model), None):
            yield fault
            break
    if megatron.overlap_param_gather and not (megatron.overlap_grad_reduce and megatron.use_distributed_optimizer):
        yield (
            "--overlap-param-gather gathers what the distributed optimizer has spread, while gradients are reduced; "
            "it needs --use-distributed-optimizer and --overlap-grad-reduce: set both, or leave it out"
        )
    if megatron.optimizer_cpu_offload and not megatron.use_distributed_optimizer:
        yield (
            "--optimizer-cpu-offload works on the state that the distributed optimizer has spread, but "
            "--no-use-distributed-optimizer is given; leave one of the two out"
        )
    if megatron.recompute_activations and megatron.recompute_granularity == "full":
        yield (
            "--recompute-activations means --recompute-granularity selective, but that is full; leave one of them out"
        )


def _pipeline_faults(config: Config) -> Iterator[str]:
    """Stages, chunks of stages, and uneven first and last stages."""
    megatron = config.megatron
    stages, chunks = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    uneven = {
        "--decoder-first-pipeline-num-layers": megatron.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": megatron.decoder_last_pipeline_num_layers,
    }
    if stages == 1:
        if chunks is not None and chunks > 1:
            yield (
                f"--virtual-pipeline-model-parallel-size is {chunks}, but interleaves pipeline stages, and "
                "--pipeline-model-parallel-size is 1; set that to 2 or more, or leave it out"
            )
        for label, value in uneven.items():
            if value is not None:
                yield (
                    f"{label} is {value}, but --pipeline-model-parallel-size is 1, so that one stage has all layers; "
                    "set that to 2 or more, or leave it out"
                )
        return
    layers = (known_model(config) or {}).get("num_hidden_layers")
    if isinstance(layers, int) and stage_layers(config, layers) is None and not own_stages(config):
        named = "".join(f", {label} {value}" for label, value in uneven.items() if value is not None)
        of_chunks = f" of {chunks} chunks" if chunks is not None and chunks > 1 else ""
        yield (
            f"--pipeline-model-parallel-size is {stages}{named}, but the model's {layers} layers do not divide into "
            f"such stages{of_chunks}; choose a size that divides {layers}, or set --decoder-last-pipeline-num-layers "
            f"to what is left of {-(-layers // stages)} for each of the others"
        )


def _expert_faults(config: Config, layout: Layout, shape: ModelShape | None) -> Iterator[str]:
    """Experts over processes."""
    megatron = config.megatron
    if shape is not None and shape.latent is not None and layout.tensor > 1 and not layout.sequence:
        yield (
            f"--tensor-model-parallel-size is {layout.tensor} for a model with latent attention ({shape.family}), "
            "which is trained only together with sequence parallelism; add --sequence-parallel"
        )
    if shape is not None and not any(shape.sparse):
        for label, size in (
            ("--expert-model-parallel-size", layout.expert),
            ("--expert-tensor-parallel-size", megatron.expert_tensor_parallel_size or 1),
        ):
            if size > 1:
                yield f"{label} is {size}, but the model ({shape.family}) has no experts; leave it out"
        return
    known_sparse = shape is not None or layout.expert > 1
    if known_sparse and layout.tensor > 1 and not layout.sequence:
        yield (
            f"--tensor-model-parallel-size is {layout.tensor} for a model with experts, which Megatron-core trains "
            "only together with sequence parallelism; add --sequence-parallel"
        )
    if layout.expert_tensor > layout.tensor:
        yield (
            f"--expert-tensor-parallel-size is {layout.expert_tensor}, but must be at most "
            f"--tensor-model-parallel-size {layout.tensor}, for experts are cut as the other layers are, or less; set "
            f"it to {layout.tensor}"
        )
    if shape is not None:
        experts, width = f"the model's {shape.experts} experts", f"the experts' width {shape.expert_ffn}"
        yield from _dividing("--expert-model-parallel-size", layout.expert, shape.experts, experts)
        yield from _dividing("--expert-tensor-parallel-size", layout.expert_tensor, shape.expert_ffn, width)
    spread = layout.data > 1 or layout.pipeline > 1
    if layout.expert > 1 and megatron.moe_token_dispatcher_type == "allgather" and spread:
        yield (
            "--moe-token-dispatcher-type is allgather, which needs equally many tokens in every process, but "
            "micro-batches of packed sequences differ; choose alltoall"
        )
    if megatron.moe_grouped_gemm and (megatron.transformer_impl == "local" or config.train.train_device == "cpu"):
        yield (
            "--moe-grouped-gemm needs Transformer Engine on a GPU, but --transformer-impl is "
            f"{megatron.transformer_impl} and --train-device is {config.train.train_device}; leave it out "
            "(--no-moe-grouped-gemm)"
        )


def _divided(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """What tensor parallelism cuts."""
    yield "attention heads", shape.heads
    if shape.latent is None:
        yield "key and value heads", shape.kv_heads
    if not all(shape.sparse):
        yield "elements of the feed-forward width", shape.ffn
    if shape.shared_ffn:
        yield "elements of the shared experts' width", shape.shared_ffn


def lora_faults(config: Config) -> Iterator[str]:
    """Adapters are trained by one backend."""
    backend, lora = config.train.train_backend, config.lora
    if lora.lora_rank and backend != "fsdp":
        why = {
            "torch": "which trains all weights (fsdp does it in one process too)",
            "megatron": "whose layers get no adapters",
        }.get(backend, "which trains nothing")
        yield (
            f"--lora-rank is {lora.lora_rank}, but --train-backend is {backend}, {why}; use --train-backend fsdp, or "
            "leave --lora-rank out"
        )
    if lora.lora_rank and not lora.lora_target_modules:
        yield "--lora-target-modules is empty, but adapters need a place; write all-linear, or names such as q_proj"
    shape = known_shape(known_model(config) or {}) if lora.lora_rank else None
    if shape is None or shape.family not in ("llama", "qwen2", "qwen3"):  # others join or split their matrices
        return
    known = ("all-linear", "lm_head", "embed_tokens", *(matrix.name for matrix in matrices(shape, 0)))
    for name in lora.lora_target_modules:
        if name.rpartition(".")[2] not in known:
            yield f"--lora-target-modules holds {name!r}, which is no module of the model; {cure(name, known)}"


def warnings(config: Config) -> Iterator[str]:
    layout, parallel, backend = layout_of(config), config.parallel, config.train.train_backend
    if backend == "torch" and layout.world > 1:
        yield (
            f"--train-backend torch keeps a whole copy of the model, its gradients and optimizer in each of "
            f"{layout.world} processes; --train-backend fsdp divides them"
        )
    if backend != "simulated" and parallel.actor_num_nodes > 1 and config.run.runner != "ray":
        yield (
            f"--actor-num-nodes is {parallel.actor_num_nodes}, but --runner {config.run.runner} starts all processes "
            "on this machine; such a layout can be planned (--dry-run), and started with --runner ray"
        )
    size = config.train.global_batch_size
    if size is not None and size < layout.data:
        yield (
            f"--global-batch-size {size} is less than the {layout.data} data-parallel shares of the trainer: some of "
            "its processes have nothing to do"
        )
    shape, preset = known_shape(known_model(config) or {}), config.model.model
    if backend == "megatron" and preset and shape is not None and shape.experts and not has_transformer_engine():
        yield (
            f"--model {preset} computes its experts in one grouped matrix product where Transformer Engine is "
            "installed. It is not here, so the experts are computed one after the other; make gpu-env installs it"
        )
    if backend == "megatron" and config.train.attn_implementation != "auto":
        yield "--attn-implementation has no effect: --train-backend megatron has attention of its own"


def _dividing(label: str, size: int, number: int, what: str) -> Iterator[str]:
    if number % size:
        largest = next(fitting for fitting in range(min(size, number), 0, -1) if number % fitting == 0)
        yield f"{label} is {size}, but must divide {what}; set it to {largest}"
