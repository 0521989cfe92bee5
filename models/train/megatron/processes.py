"""From the processes of torch.distributed's default group to Megatron's parallel layout, and to the trainer's
`DpGroup`.

Invariants:
- the layout is built once for its sizes; asking for the same again changes nothing;
- micro-batches are assigned to data-parallel ranks: tensor, pipeline and context ranks of one compute them together,
  and the process that has the log-probs first (`is_mp_src_rank`: the last stage's) hands in the results.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from datetime import timedelta

import torch

from models.errors import BackendMisuse, TrainConfigInvalid
from models.train.dp_group import DistributedDpGroup
from models.train.megatron import shim
from models.train.spec import TrainSpec


@dataclass(frozen=True)
class ParallelSizes:
    """How many processes share what."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None  # model chunks of each stage, None = 1
    context: int
    expert: int
    expert_tensor: int
    data: int


_built: ParallelSizes | None = None  # the layout of this process


def parallel_sizes(spec: TrainSpec, world: int) -> ParallelSizes:
    """The sizes of a layout for `world` processes; `configs.rules.parallel` has seen whether they go together.

    Raises `TrainConfigInvalid`.
    """
    m = spec.megatron
    tensor, pipeline, context = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    replica = tensor * pipeline * context
    if world % replica:
        raise TrainConfigInvalid(
            f"{world} processes do not divide into model replicas of {replica} (tensor_model_parallel_size={tensor} x "
            f"pipeline_model_parallel_size={pipeline} x context_parallel_size={context}); choose "
            "--actor-num-gpus-per-node and --actor-num-nodes as a multiple of it"
        )
    expert = m.expert_model_parallel_size
    expert_tensor = tensor if m.expert_tensor_parallel_size is None else m.expert_tensor_parallel_size
    experts = expert * expert_tensor * pipeline
    if world % experts:
        raise TrainConfigInvalid(
            f"{world} processes do not divide into sets of experts of {experts} (expert_model_parallel_size={expert} "
            f"x expert_tensor_parallel_size={expert_tensor} x pipeline_model_parallel_size={pipeline}); choose "
            "--expert-model-parallel-size and --expert-tensor-parallel-size so that their product divides it"
        )
    if context > 1 and not engine_installed():
        raise TrainConfigInvalid(
            f"context_parallel_size={context} needs the attention of Transformer Engine, which is not installed; "
            "install it, or set --context-parallel-size 1"
        )
    chunks = m.virtual_pipeline_model_parallel_size
    return ParallelSizes(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=None if chunks == 1 else chunks,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        data=world // replica,
    )


def engine_installed() -> bool:
    """Whether Transformer Engine is there, whose attention spreads one sequence over processes."""
    return importlib.util.find_spec("transformer_engine") is not None


def build_layout(spec: TrainSpec) -> ParallelSizes:
    """Build Megatron's process groups over the default group, and seed it; collective.

    Raises `BackendMisuse` without a default group, `TrainConfigInvalid` for sizes that do not fit.
    """
    global _built
    if not torch.distributed.is_initialized():
        raise BackendMisuse(
            "Megatron trains in the processes of a trainer group, but torch.distributed has no default group; call "
            "init_process_group first, or train with --train-backend torch"
        )
    sizes = parallel_sizes(spec, torch.distributed.get_world_size())
    shim.install()
    from megatron.core import parallel_state, tensor_parallel

    shim.install_after_import()
    if _built != sizes or not parallel_state.model_parallel_is_initialized():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            sizes.virtual_pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            distributed_timeout_minutes=spec.parallel.distributed_timeout_minutes,
        )
        _built = sizes
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed, force_reset_rng=True)
    return sizes


def build_dp_group(spec: TrainSpec) -> DistributedDpGroup:
    """The data-parallel group of the layout that was built; collective."""
    from megatron.core import parallel_state as ps

    is_mp_src_rank = (
        ps.is_pipeline_last_stage(ignore_virtual=True)
        and ps.get_tensor_model_parallel_rank() == 0
        and ps.get_context_parallel_rank() == 0
    )
    return DistributedDpGroup(
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        is_mp_src_rank=is_mp_src_rank,
        gloo=torch.distributed.new_group(
            backend="gloo", timeout=timedelta(minutes=spec.parallel.distributed_timeout_minutes)
        ),
    )
