"""How the policy is trained, by which backend, in how many processes. Owner: `models/train`."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, ClassVar, Final, Literal

from configs.schema.notation import Count, Decay, Natural, NonNegative, Positive, ReadBy, Section, Share

LOGPROB_CHUNK_IDS: Final = 16_384  # ids of the vocabulary whose logits exist at one time


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed here, which grouped matrix products of experts need."""
    return importlib.util.find_spec("transformer_engine") is not None


class TrainConfig(Section, frozen=True, kw_only=True):
    """Training."""

    hf_checkpoint: str = "tiny"
    """Hugging Face model directory or hub id; 'tiny' makes a small random byte-level Qwen3"""
    ref_load: str | None = None
    """Hugging Face checkpoint of the reference policy; default: --hf-checkpoint"""
    train_backend: Literal["torch", "fsdp", "megatron", "simulated"] = "torch"
    """training backend: torch (one process, or several copies), fsdp (sharded), megatron; simulated sleeps instead of
    computing, for benchmarks of the schedule"""
    simulated_step_s: Annotated[NonNegative, ReadBy("--train-backend simulated")] = 1.0
    """time of one optimizer step of the simulated backend, seconds"""
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """what is minimised"""
    global_batch_size: Count | None = None
    """rollouts per optimizer step; default: derived"""
    num_steps_per_rollout: Count | None = None
    """optimizer steps per rollout batch; default: derived, else 1"""
    max_tokens_per_gpu: Count = 16384
    """token budget of one micro-batch, padding included"""
    lr: NonNegative = 1e-6
    """learning rate"""
    lr_warmup_iters: Natural = 0
    """optimizer steps of linear warm-up"""
    lr_warmup_fraction: Share | None = None
    """linear warm-up as a share of all optimizer steps, instead of --lr-warmup-iters"""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """schedule of the learning rate after the warm-up"""
    min_lr: NonNegative = 0.0
    """learning rate at the end of the decay"""
    adam_beta1: Decay = 0.9
    """Adam beta 1"""
    adam_beta2: Decay = 0.98
    """Adam beta 2"""
    adam_eps: Positive = 1e-8
    """Adam epsilon"""
    weight_decay: NonNegative = 0.0
    """decoupled weight decay"""
    clip_grad: NonNegative = 1.0
    """gradient norm bound; 0 = off"""
    train_device: str = "auto"
    """device of the trainer: auto, cpu, cuda"""
    train_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of the trainer"""
    attn_implementation: str = "auto"
    """transformers' attention: auto (FlashAttention 2 where installed, else sdpa), sdpa, eager"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    logprob_chunk_tokens: Count = 4096
    """tokens whose logits (over a part of the vocabulary) exist at one time"""
    peak_tflops: Positive | None = None
    """peak of one GPU of the trainer, TFLOP/s, of which perf/mfu is the share; default: that of its data sheet"""


class ParallelConfig(Section, frozen=True, kw_only=True):
    """Processes of the trainer."""

    READ_BY: ClassVar[str] = "--train-backend torch, fsdp or megatron"

    actor_num_nodes: Count = 1
    """machines that the trainer runs on"""
    actor_num_gpus_per_node: Count = 1
    """processes of the trainer on each machine, one for each GPU; on a CPU too"""
    use_dynamic_batch_size: bool = True
    """micro-batches by --max-tokens-per-gpu; off: by --micro-batch-size"""
    micro_batch_size: Annotated[Count, ReadBy("--no-use-dynamic-batch-size")] = 1
    """sequences of one micro-batch, with --no-use-dynamic-batch-size"""
    balance_data: bool = True
    """deal sequences to the trainer's processes by estimated FLOPs, not by number"""
    distributed_timeout_minutes: Annotated[Positive, ReadBy("a trainer in processes of its own")] = 10.0
    """time after which a collective of the trainer counts as hung"""


class FsdpConfig(Section, frozen=True, kw_only=True):
    """FSDP2."""

    READ_BY: ClassVar[str] = "--train-backend fsdp"

    fsdp_shard_size: Count | None = None
    """processes that share one copy of the model; default: all. Fewer: HSDP, several copies; 1: every process holds all
    of it (DDP)"""
    fsdp_cpu_offload: bool = False
    """keep parameters and optimizer in the memory of the host"""
    fsdp_reshard_after_forward: bool = True
    """give gathered parameters back after the forward pass (less memory, more traffic)"""
    fsdp_compile: bool = False
    """torch.compile each decoder layer"""
    fsdp_context_parallel_size: Count = 1
    """processes that share the tokens of a sequence; 1 = off"""


class LoraConfig(Section, frozen=True, kw_only=True):
    """LoRA."""

    lora_rank: Natural = 0
    """rank of LoRA's adapters (arXiv:2106.09685); 0 = train all"""
    lora_alpha: Annotated[Positive, ReadBy("--lora-rank above 0")] = 32.0
    """the adapter's output is scaled by alpha / rank"""
    lora_target_modules: Annotated[tuple[str, ...], ReadBy("--lora-rank above 0")] = ("all-linear",)
    """names of the linear modules that get an adapter; all-linear = all but the head"""


class MegatronConfig(Section, frozen=True, kw_only=True):
    """Megatron-core."""

    READ_BY: ClassVar[str] = "--train-backend megatron"

    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """kernels; auto = Transformer Engine where it is installed and there is a GPU, else local"""
    tensor_model_parallel_size: Count = 1
    """processes that share each matrix (TP)"""
    sequence_parallel: bool = False
    """split activations between matrices along the sequence, with TP"""
    pipeline_model_parallel_size: Count = 1
    """stages of layers (PP)"""
    virtual_pipeline_model_parallel_size: Count | None = None
    """model chunks of each pipeline stage, interleaved"""
    decoder_first_pipeline_num_layers: Count | None = None
    """layers of the first pipeline stage, if not an even share"""
    decoder_last_pipeline_num_layers: Count | None = None
    """layers of the last pipeline stage, if not an even share"""
    context_parallel_size: Count = 1
    """processes that share the tokens of a sequence (CP); needs Transformer Engine"""
    expert_model_parallel_size: Count = 1
    """processes that share the experts (EP)"""
    expert_tensor_parallel_size: Count | None = None
    """processes that share each expert's matrices; default: the tensor parallel size"""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """how tokens travel to their experts"""
    moe_grouped_gemm: bool = False
    """all experts of a process in one kernel; needs a GPU"""
    use_distributed_optimizer: bool = True
    """shard optimizer state over the data-parallel processes"""
    overlap_grad_reduce: bool = False
    """reduce gradients during the backward pass"""
    overlap_param_gather: bool = False
    """gather parameters during the next forward pass"""
    recompute_activations: bool = False
    """recompute attention in the backward pass: --recompute-granularity selective"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """what is recomputed"""
    recompute_method: Annotated[Literal["uniform", "block"] | None, ReadBy("--recompute-granularity full")] = None
    """with granularity full"""
    recompute_num_layers: Annotated[Count | None, ReadBy("--recompute-granularity full")] = None
    """layers of one recomputed block, with granularity full"""
    optimizer_cpu_offload: bool = False
    """optimizer in the memory of the host"""
    optimizer_offload_fraction: Annotated[Share, ReadBy("--optimizer-cpu-offload")] = 1.0
    """fraction of the optimizer that is kept in the memory of the host"""
    custom_megatron_init_path: str | None = None
    """function called in each process when its groups are there, with slime's interface: (args)"""
    custom_megatron_before_log_prob_hook_path: str | None = None
    """function called before each pass for log-probs, with slime's interface: (args, model, store_prefix)"""
    custom_megatron_before_train_step_hook_path: str | None = None
    """function called before each optimizer step, with slime's interface: (args, rollout_id, step_id, model, optimizer,
    opt_param_scheduler)"""
    megatron_args: dict[str, Any] = {}
    """further fields of Megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig by name;
    on the command line --megatron-<option> value"""
