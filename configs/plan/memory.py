"""Memory of one process of the trainer: weights, gradients, optimizer, activations, logits. No I/O; all sizes in bytes.

State per parameter. torch and fsdp: fp32 weights 4, gradients 4, Adam's moments 8; fsdp divides them over the processes
of a shard. Megatron in bfloat16: weights 2, gradients 4, and 12 of the optimizer (fp32 weights and moments), which the
distributed optimizer divides over the data-parallel processes; in fp32: 4, 4 and 8.

Activations per token and layer, h = hidden, n = norms, f = feed-forward, q and k = all query and all key heads, with
memory-efficient attention (no matrix of scores). Modules of transformers: what autograd keeps, measured (CPU, 5.23),
    fp32        (8 + 8n) h + 16 f + 8 (q + k), 16 (q + k) with q/k norms
    bfloat16    (4 + 6n) h + 8 f + 4 (q + k), 10 (q + k)
    autocast    (8 + 9n) h + 8 f + 4 (q + k), 10 (q + k)
Fused layers (Transformer Engine), derived from Korthikanti et al., arXiv:2205.05198, section 4, without dropout:
    bytes * (2 n h + 2 q + 2 k + 3 f), q/k norms (q + k) more

Left out: the runtime itself, communication buffers, fragmentation (`RUNTIME_BYTES` stands for them), unequal loads of
experts. Invariant: the estimate is of the fullest process.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct

from configs.plan.gpus import Layout, layout_of, stage_layers
from configs.schema import Config
from configs.schema.model_shapes import ModelShape, Split, adapter_parameters, layer_share, total_parameters
from configs.schema.train import LOGPROB_CHUNK_IDS

GPU_BYTES: Final = 80 * 10**9
RUNTIME_BYTES: Final = 4 * 2**30

ONE_PROCESS: Final = Layout(world=1)

# How a forward pass is computed: by transformers' modules in one precision or under autocast, or by fused layers.
Form = Literal["float32", "bfloat16", "autocast", "fused"]


class TrainerMemory(Struct, frozen=True, kw_only=True):
    """Bytes of the fullest process. `gathered`: copies of weights for the forward pass; `host`: in the host's memory;
    `parameters`: that this process holds, also in part."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    activations: int = 0
    logits: int = 0
    host: int = 0

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.logits

    @property
    def fits(self) -> bool:
        return self.total + RUNTIME_BYTES <= GPU_BYTES


def trainer_memory(config: Config, shape: ModelShape) -> TrainerMemory | None:
    """Estimate for one process; None for the simulated trainer, or where layers do not divide into stages."""
    match config.train.train_backend:
        case "torch" | "fsdp":
            return _transformers(config, shape)
        case "megatron":
            return _megatron(config, shape)
    return None


def _transformers(config: Config, shape: ModelShape) -> TrainerMemory:
    """Modules of transformers: whole in each process and under autocast (torch), or in shards (fsdp)."""
    layout, lora, sharded = layout_of(config), config.lora, config.train.train_backend == "fsdp"
    half = config.train.train_dtype == "bfloat16" or (sharded and config.train.train_dtype == "auto")
    offloaded = sharded and config.fsdp.fsdp_cpu_offload
    count = trained = total_parameters(shape)
    if lora.lora_rank:
        trained = adapter_parameters(shape, lora.lora_rank, lora.lora_target_modules)
        count += trained
    mine, mine_trained = _part(count, layout.shard), _part(trained, layout.shard)
    models = trained_models(config)
    reference = 4 * mine if _has_reference(config) and not lora.lora_rank else 0  # beside the policy
    weights, gradients, optimizer = 4 * mine * models + reference, 4 * mine_trained * models, 8 * mine_trained * models
    if sharded:
        form: Form = "bfloat16" if half else "float32"
        gathered = _gathered(config, shape, 2 if half else 4) if layout.shard > 1 or half else 0
    else:
        form = "autocast" if half else "float32"
        gathered = 2 * count if half else 0  # autocast keeps its copies until the pass ends
    return TrainerMemory(
        parameters=mine,
        weights=0 if offloaded else weights,
        gradients=0 if offloaded else gradients,
        optimizer=0 if offloaded else optimizer,
        gathered=gathered,
        activations=_whole_model_activations(config, shape, form) // layout.context,
        logits=_logits(config, shape, shape.vocabulary, half=half),
        host=weights + gradients + optimizer if offloaded else 0,
    )


def _gathered(config: Config, shape: ModelShape, width: int) -> int:
    """What a pass keeps of other processes' shards: root and one layer ahead, or all; and a layer's gradients."""
    layers = [layer_share(shape, layer).total() for layer in range(shape.layers)]
    kept = sum(layers) if not config.fsdp.fsdp_reshard_after_forward else 2 * max(layers)
    return width * (total_parameters(shape) - sum(layers) + kept) + 4 * max(layers)


def _megatron(config: Config, shape: ModelShape) -> TrainerMemory | None:
    stages = stage_layers(config, shape.layers)
    if stages is None:
        return None
    ends = zip(stages, accumulate(stages), strict=True)
    found = [_megatron_stage(config, shape, stage, range(end - count, end)) for stage, (count, end) in enumerate(ends)]
    return max(found, key=lambda memory: memory.total)


def _megatron_stage(config: Config, shape: ModelShape, stage: int, layers: range) -> TrainerMemory:
    layout, megatron = layout_of(config), config.megatron
    half = config.train.train_dtype != "float32"
    width, optimizer_bytes = (2, 12) if half else (4, 8)
    share = sum((layer_share(shape, layer) for layer in layers), Counter[Split]())
    last = stage == layout.pipeline - 1
    table = shape.vocabulary * shape.hidden
    tables = (stage == 0) + (last and (layout.pipeline > 1 or not shape.tied))
    dense = _part(share["tensor"] + tables * table, layout.tensor) + share["whole"] + (shape.hidden if last else 0)
    expert = _part(share["expert"], layout.expert * layout.expert_tensor)
    by_data, by_expert_data = 1, 1
    if megatron.use_distributed_optimizer:
        by_data, by_expert_data = layout.data * layout.context, layout.expert_data
    models = trained_models(config)
    held = _part(dense, by_data) + _part(expert, by_expert_data)  # parameters whose optimizer state is here
    optimizer = optimizer_bytes * held * models
    on_host = int(optimizer * megatron.optimizer_offload_fraction) if megatron.optimizer_cpu_offload else 0
    reference = width * (dense + expert) if _has_reference(config) else 0  # swapped in from the host
    return TrainerMemory(
        parameters=dense + expert,
        weights=width * (dense + expert) * models,
        gradients=4 * (dense + expert) * models,
        optimizer=optimizer - on_host,
        activations=_stage_activations(config, shape, layout, stage, layers),
        logits=_logits(config, shape, _part(shape.vocabulary, layout.tensor), half=half) if last else 0,
        host=on_host + reference,
    )


def _part(whole: int, parts: int) -> int:
    return -(-whole // parts)


def trained_models(config: Config) -> int:
    """PPO trains a critic of the same size beside the policy."""
    return 2 if config.algorithm.advantage_estimator == "ppo" and config.train.loss_type == "policy_loss" else 1


def _has_reference(config: Config) -> bool:
    return config.train.loss_type != "sft_loss" and (config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0)


def _logits(config: Config, shape: ModelShape, vocabulary: int, *, half: bool) -> int:
    tokens, chunk = config.train.max_tokens_per_gpu, config.train.logprob_chunk_tokens
    return log_prob_pass(tokens, chunk, vocabulary, shape.hidden, 2 if half else 4)


def log_prob_pass(tokens: int, chunk: int, vocabulary: int, hidden: int, width: int) -> int:
    """Bytes that the pass from hidden states to log-probs and back holds beside both, as
    models.algorithms.tokens computes it.

    One block of logits and of probabilities in fp32, with a mask; gradients of hidden states and of a block of the
    output layer in fp32, and of the whole layer before it is added. `vocabulary`: ids of this process; `width`: bytes
    of a weight.
    """
    ids = min(vocabulary, LOGPROB_CHUNK_IDS)
    block = min(tokens, chunk) * ids * (4 + 4 + 1)
    return block + 4 * hidden * tokens + hidden * ids * (4 + 4) + width * hidden * (vocabulary + tokens)


def layer_activations(
    shape: ModelShape, layer: int, form: Form, *, width: int = 2, layout: Layout = ONE_PROCESS
) -> int:
    """Bytes that one layer keeps of a token for its backward pass. `width`: bytes of an element (fused layers)."""
    tensor, expert_tensor = layout.tensor, layout.expert_tensor
    keys = shape.kv_heads * shape.head
    if form == "fused":
        of_h, of_f, of_q = 2 * width * shape.norms, 3 * width, 2 * width + (width if shape.qk_norm else 0)
        expert_h, latent = 2 * width, (2 * width, 2 * width, 2 * width, 2 * width)
    else:
        single = form == "float32"
        base, per_norm = {"float32": (8, 8), "bfloat16": (4, 6), "autocast": (8, 9)}[form]
        of_h, of_f = base + per_norm * shape.norms, 16 if single else 8
        of_q = (16 if single else 10) if shape.qk_norm else (8 if single else 4)
        expert_h, latent = (8, (12, 12, 9, 8)) if single else (4, (8, 8, 8, 6))
    whole = of_h * shape.hidden
    if shape.latent:
        ranks = shape.latent.key_rank + (shape.latent.query_rank or 0)
        of_rank, of_plain, of_rotary, of_value = latent
        head = of_plain * shape.latent.plain + of_rotary * shape.latent.rotary + of_value * shape.latent.value
        whole, split = whole + of_rank * ranks, shape.heads * head
    else:
        split = of_q * (shape.query_width + keys)
    experts = 0
    if shape.sparse[layer]:
        split += of_f * shape.shared_ffn
        routed = shape.active_experts * (expert_h * shape.hidden + _part(of_f * shape.expert_ffn, expert_tensor))
        experts = routed + 4 * shape.experts
        if layout.sequence:
            experts = _part(experts, tensor) * expert_tensor  # each process routes its own part of the sequence
    else:
        split += of_f * shape.ffn
    return (_part(whole, tensor) if layout.sequence else whole) + _part(split, tensor) + experts


def _whole_model_activations(config: Config, shape: ModelShape, form: Form) -> int:
    """Of a micro-batch through all layers. Recomputed layers keep their input alone, one at a time is there whole."""
    each = [layer_activations(shape, layer, form) for layer in range(shape.layers)]
    if config.train.gradient_checkpointing:
        per_token = shape.layers * shape.hidden * (2 if form == "bfloat16" else 4) + max(each)
    else:
        per_token = sum(each)
    return per_token * config.train.max_tokens_per_gpu


def _stage_activations(config: Config, shape: ModelShape, layout: Layout, stage: int, layers: range) -> int:
    """Of all micro-batches that a pipeline stage has in flight at one time (1F1B; interleaved: Narayanan et al.)."""
    megatron = config.megatron
    half = config.train.train_dtype != "float32"
    form: Form = "fused" if megatron.transformer_impl != "local" else "bfloat16" if half else "float32"
    width = 2 if half else 4
    each = [layer_activations(shape, layer, form, width=width, layout=layout) for layer in layers]
    entry = _part(width * shape.hidden, layout.tensor if layout.sequence else 1)
    kept, working = float(sum(each)), 0
    if megatron.recompute_granularity == "full":
        block = megatron.recompute_num_layers or 1
        if megatron.recompute_method == "block":  # the first `block` layers of each chunk, the others are kept whole
            recomputed = min(len(layers), block * layout.chunks)
            kept, working = float(entry * recomputed + sum(each[recomputed:])), max(each)
        else:
            kept, working = float(entry * _part(len(layers), block)), max(each) * block
    elif megatron.recompute_granularity == "selective":
        kept -= len(layers) * width * shape.value_width / layout.tensor  # what attention gives is computed again
    in_flight = float(layout.pipeline - stage)
    if layout.chunks > 1:
        in_flight += (layout.pipeline - 1) / layout.chunks
    return int((kept * in_flight + working) * config.train.max_tokens_per_gpu / layout.context)
