"""Adam's state in the shape of the model's parameters, whatever layout and optimizer hold it.

A checkpoint names tensors as Megatron does: `optimizer.state.exp_avg.<weight>`, `.exp_avg_sq.`, and `.fp32_param.` for
the main copy of a weight that is not fp32 itself. Each is whole, so that every layout, and the plain as well as the
distributed optimizer, can read it.

Megatron-core 0.16.1 has functions for this, which are not used:
- saving assumes that buckets have no padding (`get_parameter_state_dp_zero`): with several buckets whose ends are not
  multiples of lcm(data-parallel size, 128), what lies behind the first is written shifted;
- loading raises KeyError 'step' with torch's Adam, whose step counts lie beside the moments, not in the group;
- `load_state_dict` gives all parameters one tensor as step count, which torch's Adam raises once for each of them:
  the bias correction of a resumed run is wrong, and nothing says so;
- an optimizer that made no update yet cannot be saved or loaded (AssertionError);
- `fully_sharded_model_space`, which needs no gathering, is refused by its own loader;
- groups and step counts are stored as process 0 has them, where other pipeline stages may have others (experts);
- every process of a replica holds the whole gathered state; here each holds its shard.

Invariants: what is saved is a private copy or a live tensor of this process; each tensor has one owner, who writes it;
step counts are restored as tensors of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from models.errors import BackendMisuse
from models.train.dp_group import all_gather

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MAIN: Final = "fp32_param"
_PIECE_ELEMENTS: Final = 1 << 24  # of each process in one gathering


class OptimizerState:
    """Reads and writes the state of a Megatron optimizer.

    `model_state`: the model's `sharded_state_dict`, with the live parameters in it.
    """

    def __init__(self, optimizer: Any, model_state: Any) -> None:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

        tensors, _ = extract_sharded_tensors_and_factories(model_state)
        sharded = {id(one.data): one for one in nested_values(tensors)}
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        with_parameters = [one for one in chained if not one.is_stub_optimizer]
        self._parts = [
            (_DistributedPart if hasattr(one, "gbuf_ranges") else _PlainPart)(one, sharded) for one in with_parameters
        ]
        for part in self._parts:
            _fill(part.optimizer)

    def entries(self, *, empty: bool) -> dict[str, Any]:
        """What this process has to write, and the shape of what others do; collective over data-parallel replicas.

        `empty`: tensors on the host to read into instead, of what this process needs; not collective.
        """
        return {f"{at}.{name}": entry for at, part in enumerate(self._parts) for name, entry in part.entries(empty)}

    def put(self, loaded: Mapping[str, Tensor], steps: int) -> None:
        """Make what was loaded into the empty tensors the optimizer's state, after the model's weights are loaded."""
        for at, part in enumerate(self._parts):
            part.put({name.partition(".")[2]: t for name, t in loaded.items() if name.partition(".")[0] == str(at)})
            _set_steps(part.optimizer, steps)

    def steps(self) -> int:
        """Updates made, as Adam counts them; collective over all processes. Raises `BackendMisuse`."""
        found = {count for part in self._parts for count in _steps(part.optimizer)}
        if len(found) > 1:
            raise BackendMisuse(
                f"parameters of one optimizer made {sorted(found)} updates; a checkpoint holds one count for all: "
                "train all parameters in every step"
            )
        most = torch.tensor([max(found, default=0)])
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most.item())


class _PlainPart:
    """Every process of a replica has the state of all its parameters."""

    def __init__(self, optimizer: Any, sharded: Mapping[int, Any]) -> None:
        self.optimizer = optimizer
        self._pairs = [(sharded[id(model)], main) for model, main in _pairs(optimizer)]

    def entries(self, empty: bool) -> Iterator[tuple[str, Any]]:
        for place, (sharded, main) in enumerate(self._pairs):
            for name, tensor in self._tensors(sharded, main):
                data = on_host(tensor) if empty else tensor
                yield f"{place}.{name}", _entry(sharded, name, data, owned_by(sharded, place))

    def put(self, loaded: Mapping[str, Tensor]) -> None:
        for place, (sharded, main) in enumerate(self._pairs):
            for name, tensor in self._tensors(sharded, main):
                tensor.copy_(loaded[f"{place}.{name}"])

    def _tensors(self, sharded: Any, main: Tensor) -> Iterator[tuple[str, Tensor]]:
        state = self.optimizer.optimizer.state[main]
        yield from ((name, state[name]) for name in MOMENTS)
        if sharded.data.dtype != torch.float32:
            yield MAIN, main.detach()


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter of the model, parameter of the optimizer)."""
    if not hasattr(optimizer, "float16_groups"):
        yield from ((one, one) for one in optimizer.get_parameters())
        return
    for models, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        yield from zip(models, mains, strict=True)
    yield from ((one, one) for group in optimizer.fp32_from_fp32_groups for one in group)


def owned_by(sharded: Any, place: int) -> tuple[int, ...]:
    """The `replica_id` of a weight, so that the data-parallel processes that hold it write such tensors in turns.

    Experts are held by fewer. The number of the process among them is last.
    """
    from megatron.core import parallel_state as ps

    if getattr(sharded.data, "allreduce", True):
        count = int(ps.get_data_parallel_world_size(with_context_parallel=True))
    else:
        count = int(ps.get_expert_data_parallel_world_size())
    return (*sharded.replica_id[:-1], (sharded.replica_id[-1] - place % count) % count)


def on_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of the same shape and, unless given, type."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")


class _DistributedPart:
    """Each process of a replica has a section of every bucket, cut without regard for parameters."""

    def __init__(self, optimizer: Any, sharded: Mapping[int, Any]) -> None:
        self.optimizer = optimizer
        self._group = optimizer.data_parallel_group
        self._rank, self._world = self._group.rank(), self._group.size()
        self._sharded = {
            parameter: sharded[id(parameter)] for buffer in optimizer.buffers for parameter in buffer.param_index_map
        }

    def entries(self, empty: bool) -> Iterator[tuple[str, Any]]:
        return self._to_load() if empty else self._to_save()

    def _to_save(self) -> Iterator[tuple[str, Any]]:
        owners = _dealt([parameter.numel() for parameter in self._sharded], self._world)
        own = {one for one, owner in zip(self._sharded, owners, strict=True) if owner == self._rank}
        for name in (*MOMENTS, MAIN):
            wanted = [one for one in self._sharded if name in MOMENTS or one.dtype != torch.float32]
            gathered = self._gather(name, own.intersection(wanted)) if wanted else {}
            for place, (parameter, sharded) in enumerate(self._sharded.items()):
                if name == MAIN and parameter.dtype == torch.float32:
                    continue
                # Ranks that do not own the tensor contribute its shape only.
                data = gathered.get(parameter, torch.empty(parameter.shape, dtype=torch.float32, device="meta"))
                copy = 0 if parameter in own and self.optimizer.distributed_optimizer_instance_id == 0 else 1
                yield f"{place}.{name}", _entry(sharded, name, data, (*sharded.replica_id[:-1], copy))

    def _to_load(self) -> Iterator[tuple[str, Any]]:
        here = {parameter for parameter, _ in self._sections()}
        for place, (parameter, sharded) in enumerate(self._sharded.items()):
            if parameter not in here:
                continue
            for name in MOMENTS if parameter.dtype == torch.float32 else (*MOMENTS, MAIN):
                yield f"{place}.{name}", _entry(sharded, name, on_host(parameter, torch.float32), sharded.replica_id)

    def put(self, loaded: Mapping[str, Tensor]) -> None:
        places = {parameter: place for place, parameter in enumerate(self._sharded)}
        for parameter, ranges in self._sections():
            begin, end = ranges["param"].start, ranges["param"].end
            found = {name: loaded[f"{places[parameter]}.{name}"].flatten()[begin:end] for name in MOMENTS}
            if parameter.dtype == torch.float32:
                found["param"] = parameter.detach().flatten()[begin:end]
            else:
                found["param"] = loaded[f"{places[parameter]}.{MAIN}"].flatten()[begin:end]
            live = self.optimizer._get_main_param_and_optimizer_states(parameter)
            if "step" in live:  # torch's Adam: the setter asks for it; `_set_steps` follows
                found["step"] = live["step"]
            with torch.no_grad():
                self.optimizer._set_main_param_and_optimizer_states(parameter, found)
        if hasattr(self.optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):  # partly in the host's memory
            self.optimizer.optimizer._sync_hdo_state_to_sub_optimizers()

    def _sections(self) -> Iterator[tuple[Any, Any]]:
        """(parameter, ranges) of what this process has."""
        for by_dtype in self.optimizer.gbuf_ranges:
            for buckets in by_dtype.values():
                for bucket in buckets:
                    yield from bucket["param_map"].items()

    def _gather(self, name: str, own: set[Any]) -> dict[Any, Tensor]:
        """Whole tensors of the own parameters, on the host; every process gives its sections of all."""
        whole = {parameter: torch.empty(parameter.numel(), dtype=torch.float32) for parameter in own}
        for buffer, by_dtype in zip(self.optimizer.buffers, self.optimizer.gbuf_ranges, strict=True):
            for number, bucket_ranges in enumerate(next(iter(by_dtype.values()))):
                bucket = buffer.buckets[number]
                section = bucket.grad_data.numel() // self._world
                mine = torch.zeros(section, dtype=torch.float32, device=bucket.grad_data.device)
                for parameter, ranges in bucket_ranges["param_map"].items():
                    states = self.optimizer._get_main_param_and_optimizer_states(parameter)
                    tensor = states["param" if name == MAIN else name]
                    mine[ranges["gbuf_local"].start : ranges["gbuf_local"].end].copy_(tensor.detach().flatten())
                in_bucket = [
                    (parameter, begin, end)
                    for parameter, (begin, end, where) in buffer.param_index_map.items()
                    if where == number and parameter in own
                ]
                for start in range(0, section, _PIECE_ELEMENTS):
                    own_piece = mine[start : start + _PIECE_ELEMENTS]
                    pieces = [own_piece] if self._world == 1 else all_gather(own_piece, self._group)
                    for rank, piece in enumerate(pieces):
                        _cut(piece, bucket.offset + rank * section + start, in_bucket, whole)
        return {parameter: flat.view(parameter.shape) for parameter, flat in whole.items()}


def _cut(piece: Tensor, at: int, parameters: Sequence[tuple[Any, int, int]], whole: Mapping[Any, Tensor]) -> None:
    """Copy what `piece`, which lies at `at` in the buffer, holds of the parameters [begin, end)."""
    for parameter, begin, end in parameters:
        low, high = max(begin, at), min(end, at + piece.numel())
        if low < high:
            whole[parameter][low - begin : high - begin].copy_(piece[low - at : high - at])


def _dealt(sizes: Sequence[int], owners: int) -> list[int]:
    """Owner of each parameter: the largest first, each to the rank that owns least."""
    loads, assigned = [0] * owners, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        assigned[at] = min(range(owners), key=lambda owner: (loads[owner], owner))
        loads[assigned[at]] += sizes[at]
    return assigned


def _entry(sharded: Any, name: str, data: Tensor, replica: tuple[int, ...]) -> Any:
    """Where the weight lies, with another tensor in its place."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    fields: dict[str, Any] = {"key": f"optimizer.state.{name}.{sharded.key}", "data": data, "replica_id": replica}
    if isinstance(sharded, ShardedTensor):
        fields["dtype"] = data.dtype
    return dataclasses.replace(sharded, **fields)


# ---------------------------------------------------------------------- the optimizer inside


def _torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, torch.optim.Adam)  # AdamW is one; without apex and Transformer Engine


def _fill(optimizer: Any) -> None:
    """Give an optimizer that made no update yet the state that its first one would begin with."""
    inner = optimizer.optimizer
    if hasattr(inner, "dummy_step"):  # partly in the host's memory
        if not inner.state:
            rates = [group["lr"] for group in inner.param_groups]
            for group in inner.param_groups:
                group["lr"] = 0.0  # else weight decay moves the parameters
            inner.dummy_step()
            for group, rate in zip(inner.param_groups, rates, strict=True):
                group["lr"] = rate
            _set_steps(optimizer, 0)
        return
    optimizer.init_state_fn(inner, optimizer.config)
    if _torch_adam(optimizer):
        for group in inner.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                device = parameter.device if on_device else "cpu"
                inner.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32, device=device))


def _steps(optimizer: Any) -> set[int]:
    inner = optimizer.optimizer
    found = {int(state["step"]) for state in inner.state.values() if "step" in state}
    return found or {int(group["step"]) for group in inner.param_groups if group["params"] and "step" in group}


def _set_steps(optimizer: Any, steps: int) -> None:
    """Restore the step counts, each as a tensor of its own: torch's Adam raises it in place."""
    inner = optimizer.optimizer
    for state in inner.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], steps)
    if not _torch_adam(optimizer):
        for group in inner.param_groups:
            group["step"] = torch.full_like(group["step"], steps) if torch.is_tensor(group.get("step")) else steps
