"""Megatron-core on a machine without a GPU: what it takes from CUDA is answered by the CPU, in this process.

For tests and small runs: layout, schedules, losses and checkpoints are those of a GPU run, kernels and speed are not.

Invariants:
- nothing happens at import; `install` goes before the first import of Megatron, `install_after_import` behind it;
- with a GPU neither does anything;
- the replacements are for one release of Megatron-core, and refused for any other.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final

import torch

from models.errors import BackendMisuse, TrainConfigInvalid

VERSION: Final = "0.16.1"
_FACTORIES: Final = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")
_MARK: Final = "_sluice_megatron_shim"


def installed() -> bool:
    """Whether the replacements are in place in this process."""
    return getattr(torch, _MARK, "") != ""


def install() -> None:
    """Make torch answer Megatron's CUDA calls on the CPU; nothing where there is a GPU, or when done before.

    Raises `TrainConfigInvalid` for another release of Megatron-core, `BackendMisuse` if that was imported already.
    """
    if torch.cuda.is_available() or installed():
        return
    _check_version()
    if "megatron.core" in sys.modules:
        raise BackendMisuse(
            "megatron.core was imported before its replacements for a machine without a GPU were installed; call "
            "models.train.megatron.shim.install first in the process"
        )
    _replace_factories()
    _replace_tensor_methods()
    _replace_cuda()
    setattr(torch, _MARK, "before")


def install_after_import() -> None:
    """The replacements inside Megatron-core. Imports it. Nothing where there is a GPU, or when done before."""
    if getattr(torch, _MARK, "") != "before":
        return
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    for module in (moe_utils, token_dispatcher):
        module.maybe_move_tensor_to_cpu = _as_numpy
    # NCCL exchanges parts of unequal lengths, gloo does not: tokens of experts that are split over tensor ranks.
    mappings._gather_along_first_dim = _gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _reduce_scatter(mappings._reduce_scatter_along_first_dim)
    setattr(torch, _MARK, "after")


def _check_version() -> None:
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise TrainConfigInvalid(
            "train_backend=megatron needs Megatron-core, which is not installed; install sluice[megatron], or choose "
            "--train-backend torch or fsdp"
        ) from error
    if found != VERSION:
        raise TrainConfigInvalid(
            f"megatron-core {found} on a machine without a GPU: it runs there by replacements that are known for "
            f"{VERSION} only; install megatron-core=={VERSION}, or train on a GPU"
        )


# ---------------------------------------------------------------------- Megatron


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes of an exchange between experts as an array, also where the tensor is on the CPU already."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(equal: Callable[..., Any]) -> Callable[..., Any]:
    def gather(tensor: Any, group: Any, sizes: Any = None, *rest: Any) -> Any:
        """Parts of `sizes` rows, one of each process, behind one another."""
        if sizes is None or group.size() == 1:
            return equal(tensor, group, None, *rest)
        sizes = [int(size) for size in sizes]
        longest = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        longest[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(longest) for _ in sizes]
        torch.distributed.all_gather(parts, longest, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

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
    """The device to use where `device` is asked for."""
    names_cuda = isinstance(device, str) and device.startswith("cuda")
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    return torch.device("cpu") if names_cuda or is_cuda or isinstance(device, int) else device


def _replace_factories() -> None:
    def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = _on_cpu(kwargs["device"])
            return make(*args, **kwargs)

        return factory

    for name in _FACTORIES:
        setattr(torch, name, wrapped(getattr(torch, name)))


def _replace_tensor_methods() -> None:
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

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


_STREAM: Final = _Stream()
