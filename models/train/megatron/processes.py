"""One process of a Megatron layout: CUDA calls answered by the CPU where there is no GPU, and the groups of processes.

Without a GPU the shim takes the place of what Megatron-core expects of CUDA. It serves tests and small runs: layout,
schedules, losses and checkpoints are those of a GPU run, kernels and speed are not.

Invariants:
- nothing happens at import; call `install_shim` before the first import of Megatron, `install_shim_after_import` after;
- with a GPU neither does anything;
- the replacements fit one release of Megatron-core, and are refused for any other;
- the layout is built once for its sizes; a second call with the same sizes changes nothing;
- micro-batches are assigned to data-parallel ranks: tensor, pipeline and context ranks of a replica compute them
  together. The first process that has the log-probs (`is_mp_src_rank`, on the last stage) hands in the results.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch

from configs.schema.train import has_transformer_engine
from models.errors import BackendMisuse, TrainConfigInvalid
from models.train.dp_group import DistributedDpGroup, all_gather
from models.train.spec import TrainSpec

SHIM_VERSION: Final = "0.16.1"
_FACTORIES: Final = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
_MARK: Final = "_sluice_megatron_shim"


def shim_installed() -> bool:
    """Whether the replacements are in place in this process."""
    return getattr(torch, _MARK, "") != ""


def install_shim() -> None:
    """Make torch answer Megatron's CUDA calls on the CPU; nothing where there is a GPU, or when done before.

    Raises `TrainConfigInvalid` for another release of Megatron-core, `BackendMisuse` if that was imported already.
    """
    if torch.cuda.is_available() or shim_installed():
        return
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise TrainConfigInvalid(
            "train_backend=megatron needs Megatron-core, which is not installed; install sluice[megatron], or choose "
            "--train-backend torch or fsdp"
        ) from error
    if found != SHIM_VERSION:
        raise TrainConfigInvalid(
            f"megatron-core {found} on a machine without a GPU: it runs there by replacements that are known for "
            f"{SHIM_VERSION} only; install megatron-core=={SHIM_VERSION}, or train on a GPU"
        )
    if "megatron.core" in sys.modules:
        raise BackendMisuse(
            "megatron.core was imported before its replacements for a machine without a GPU were installed; call "
            "models.train.megatron.processes.install_shim first in the process"
        )
    _replace_torch()
    _replace_cuda()
    setattr(torch, _MARK, "before")


def install_shim_after_import() -> None:
    """The replacements inside Megatron-core. Imports it. Nothing where there is a GPU, or when done before."""
    if getattr(torch, _MARK, "") != "before":
        return
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = _as_numpy
    # NCCL exchanges parts of unequal lengths, gloo does not: tokens of experts that are split over tensor ranks.
    mappings._gather_along_first_dim = _gather_calls(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter(mappings._reduce_scatter_along_first_dim)
    setattr(torch, _MARK, "after")


# ---------------------------------------------------------------------- Megatron


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes of an exchange between experts as an array, also where the tensor is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_calls(equal: Callable[..., Any]) -> Callable[..., Any]:
    def gather(tensor: Any, group: Any, sizes: Any = None, *rest: Any) -> Any:
        """Parts of `sizes` rows, one of each process, behind one another."""
        if sizes is None or group.size() == 1:
            return equal(tensor, group, None, *rest)
        sizes = [int(size) for size in sizes]
        longest = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        longest[: tensor.shape[0]] = tensor
        return torch.cat([part[:size] for part, size in zip(all_gather(longest, group), sizes, strict=True)])

    return gather


def _reduce_scatter(equal: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(tensor: Any, group: Any, sizes: Any = None, *rest: Any) -> Any:
        """The own part, of `sizes[rank]` rows, of the sum over the processes."""
        if sizes is None or group.size() == 1:
            return equal(tensor, group, None, *rest)
        total = tensor.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in sizes])[group.rank()].contiguous()

    return reduce_scatter


# ---------------------------------------------------------------------- torch


def _on_cpu(device: Any) -> Any:
    """The device to use where the run sets `device`."""
    names_cuda = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if names_cuda or is_cuda or isinstance(device, int) else device


def _replace_torch() -> None:
    def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = _on_cpu(kwargs["device"])
            return make(*args, **kwargs)

        return factory

    for name in _FACTORIES:
        setattr(torch, name, wrapped(getattr(torch, name)))
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if not args and not kwargs and found.startswith("torch.") and not found.startswith("torch.cuda."):
            return "torch.cuda." + found.removeprefix("torch.")  # what its optimizers compare with
        return found

    torch.Tensor.type = type_
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda *args, **kwargs: None

    def keep(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Leave functions as they are. Megatron's decorators would load torch's compiler, two seconds of each start,
        and have it compile for a CPU what is called a few times."""
        return keep if function is None else function

    torch.compile = keep


def _replace_cuda() -> None:
    # A function of its own for every name: torch's compiler takes no function under two names.
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.current_stream = lambda *args, **kwargs: _STREAM
    cuda.default_stream = lambda *args, **kwargs: _STREAM
    cuda.stream = lambda *args, **kwargs: nullcontext()
    cuda.Stream = cuda.Event = _Stream
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)


class _Stream:
    """A stream and an event on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self, *args: Any) -> None: ...

    wait_stream = wait_event = record = synchronize

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


_STREAM: Final = _Stream()


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

    def recorded(self) -> dict[str, int]:
        """As a training state records them."""
        names = ("tensor", "pipeline", "context", "expert", "expert_tensor")
        processes = self.data * self.tensor * self.pipeline * self.context
        return {"processes": processes, **{name: getattr(self, name) for name in names}}


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
    if context > 1 and not has_transformer_engine():
        raise TrainConfigInvalid(
            f"context_parallel_size={context} needs the attention of Transformer Engine, which is not installed; "
            "install it, or set --context-parallel-size 1"
        )
    chunks = m.virtual_pipeline_model_parallel_size
    chunks = None if chunks == 1 else chunks
    return ParallelSizes(tensor, pipeline, chunks, context, expert, expert_tensor, data=world // replica)


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
    install_shim()
    from megatron.core import parallel_state, tensor_parallel

    install_shim_after_import()
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
    timeout = timedelta(minutes=spec.parallel.distributed_timeout_minutes)
    return DistributedDpGroup(
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        is_mp_src_rank=is_mp_src_rank,
        gloo=torch.distributed.new_group(backend="gloo", timeout=timeout),
    )
