"""Megatron-core: parallel layout, recomputation, optimizer. Names are Megatron's. Owner: `models/train/megatron`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class MegatronConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    transformer_impl: Annotated[
        Literal["auto", "local", "transformer_engine"],
        Meta(description="kernels; auto = Transformer Engine where it is installed and there is a GPU, else local"),
    ] = "auto"
    tensor_model_parallel_size: Annotated[int, Meta(ge=1, description="processes that share each matrix (TP)")] = 1
    sequence_parallel: Annotated[
        bool, Meta(description="split activations between matrices along the sequence, with TP")
    ] = False
    pipeline_model_parallel_size: Annotated[int, Meta(ge=1, description="stages of layers (PP)")] = 1
    virtual_pipeline_model_parallel_size: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="model chunks of each pipeline stage, interleaved")
    ] = None
    decoder_first_pipeline_num_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="layers of the first pipeline stage, if not an even share")
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="layers of the last pipeline stage, if not an even share")
    ] = None
    context_parallel_size: Annotated[
        int, Meta(ge=1, description="processes that share the tokens of a sequence (CP); needs Transformer Engine")
    ] = 1
    expert_model_parallel_size: Annotated[int, Meta(ge=1, description="processes that share the experts (EP)")] = 1
    expert_tensor_parallel_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="processes that share each expert's matrices; default: the tensor parallel size"),
    ] = None
    moe_token_dispatcher_type: Annotated[
        Literal["allgather", "alltoall", "flex"], Meta(description="how tokens travel to their experts")
    ] = "alltoall"
    moe_grouped_gemm: Annotated[bool, Meta(description="all experts of a process in one kernel; needs a GPU")] = False
    use_distributed_optimizer: Annotated[
        bool, Meta(description="shard optimizer state over the data-parallel processes")
    ] = True
    overlap_grad_reduce: Annotated[bool, Meta(description="reduce gradients during the backward pass")] = False
    overlap_param_gather: Annotated[bool, Meta(description="gather parameters during the next forward pass")] = False
    recompute_activations: Annotated[
        bool, Meta(description="recompute attention in the backward pass: --recompute-granularity selective")
    ] = False
    recompute_granularity: Annotated[Literal["full", "selective"] | None, Meta(description="what is recomputed")] = None
    recompute_method: Annotated[Literal["uniform", "block"] | None, Meta(description="with granularity full")] = None
    recompute_num_layers: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="layers of one recomputed block, with granularity full")
    ] = None
    optimizer_cpu_offload: Annotated[bool, Meta(description="optimizer in the memory of the host")] = False
    optimizer_offload_fraction: Annotated[
        float, Meta(ge=0, le=1, description="fraction of the optimizer that is kept in the memory of the host")
    ] = 1.0
    megatron_args: Annotated[
        dict[str, Any],
        Meta(
            description="further fields of Megatron-core's TransformerConfig, OptimizerConfig and "
            "DistributedDataParallelConfig by name; on the command line --megatron-<option> value"
        ),
    ] = {}
