"""PyTorch's fully sharded data parallelism (FSDP2), and LoRA. Owner: `models/train/fsdp`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class FsdpConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    fsdp_shard_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="processes that share one copy of the model; default: all. Fewer: HSDP, several copies; 1: "
            "every process holds all of it (DDP)"
        ),
    ] = None
    fsdp_cpu_offload: Annotated[bool, Meta(description="keep parameters and optimizer in the memory of the host")] = (
        False
    )
    fsdp_reshard_after_forward: Annotated[
        bool, Meta(description="give gathered parameters back after the forward pass (less memory, more traffic)")
    ] = True
    fsdp_compile: Annotated[bool, Meta(description="torch.compile each decoder layer")] = False
    fsdp_context_parallel_size: Annotated[
        int, Meta(ge=1, description="processes that share the tokens of a sequence; 1 = off")
    ] = 1


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    lora_rank: Annotated[int, Meta(ge=0, description="rank of LoRA's adapters (arXiv:2106.09685); 0 = train all")] = 0
    lora_alpha: Annotated[float, Meta(gt=0, description="the adapter's output is scaled by alpha / rank")] = 32.0
    lora_target_modules: Annotated[
        tuple[str, ...],
        Meta(description="names of the linear modules that get an adapter; all-linear = all but the head"),
    ] = ("all-linear",)
