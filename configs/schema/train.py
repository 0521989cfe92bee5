"""How the policy is trained. Owner: `models/train`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

LOGPROB_CHUNK_IDS: Final = 16_384  # ids of the vocabulary whose logits exist at one time


class TrainConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    hf_checkpoint: Annotated[
        str,
        Meta(description="Hugging Face model directory or hub id; 'tiny' makes a small random byte-level Qwen3"),
    ] = "tiny"
    ref_load: Annotated[
        str | None, Meta(description="Hugging Face checkpoint of the reference policy; default: --hf-checkpoint")
    ] = None
    train_backend: Annotated[
        Literal["torch", "fsdp", "megatron", "simulated"],
        Meta(
            description="training backend: torch (one process, or several copies), fsdp (sharded), megatron; simulated "
            "sleeps instead of computing, for benchmarks of the schedule"
        ),
    ] = "torch"
    simulated_step_s: Annotated[
        float, Meta(ge=0, description="time of one optimizer step of the simulated backend, seconds")
    ] = 1.0
    loss_type: Annotated[Literal["policy_loss", "sft_loss", "custom_loss"], Meta(description="what is minimised")] = (
        "policy_loss"
    )
    global_batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="rollouts per optimizer step; default: derived"),
    ] = None
    num_steps_per_rollout: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="optimizer steps per rollout batch; default: derived, else 1"),
    ] = None
    max_tokens_per_gpu: Annotated[int, Meta(ge=1, description="token budget of one micro-batch, padding included")] = (
        16384
    )
    lr: Annotated[float, Meta(ge=0, description="learning rate")] = 1e-6
    lr_warmup_iters: Annotated[int, Meta(ge=0, description="optimizer steps of linear warm-up")] = 0
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], Meta(description="after the warm-up")] = (
        "constant"
    )
    min_lr: Annotated[float, Meta(ge=0, description="learning rate at the end of the decay")] = 0.0
    adam_beta1: Annotated[float, Meta(ge=0, lt=1, description="Adam beta 1")] = 0.9
    adam_beta2: Annotated[float, Meta(ge=0, lt=1, description="Adam beta 2")] = 0.98
    adam_eps: Annotated[float, Meta(gt=0, description="Adam epsilon")] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0, description="decoupled weight decay")] = 0.0
    clip_grad: Annotated[float, Meta(ge=0, description="gradient norm bound; 0 = off")] = 1.0
    train_device: Annotated[str, Meta(description="device of the trainer: auto, cpu, cuda")] = "auto"
    train_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Meta(description="precision of the trainer")] = (
        "auto"
    )
    attn_implementation: Annotated[
        str,
        Meta(description="transformers' attention: auto (FlashAttention 2 where installed, else sdpa), sdpa, eager"),
    ] = "auto"
    gradient_checkpointing: Annotated[bool, Meta(description="recompute activations in the backward pass")] = False
    logprob_chunk_tokens: Annotated[
        int, Meta(ge=1, description="tokens whose logits (over a part of the vocabulary) exist at one time")
    ] = 1024
