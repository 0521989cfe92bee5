"""What a training state of Megatron models is made of: their tensors, with their places in the whole.

Tensors of the policy have Megatron's own names; those of the critic and of a renewed reference begin with `critic.` and
`reference.`, those of Adam with `optimizer.state.`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from models.train.megatron.checkpoint.files import (
    MegatronState,
)
from models.train.megatron.checkpoint.optimizer_state import OptimizerState, on_host, owned_by
from models.train.megatron.critic import MegatronCritic
from models.train.megatron.optimizer import TrainedChunks
from models.train.megatron.reference import SwappedReference
from models.train.spec import TrainSpec

POLICY: Final = "policy"
CRITIC: Final = "critic"
REFERENCE: Final = "reference"

Weights = dict[str, dict[str, Any]]  # by model and name: `model_weights`


class SavedModels(Protocol):
    """The models of a run, as their checkpoints need them."""

    spec: TrainSpec
    device: torch.device
    policy: TrainedChunks
    critic: MegatronCritic | None
    reference: SwappedReference | None
    saving_group: Any

    def export(self) -> Iterator[tuple[str, Tensor]]: ...


class Held:
    """The tensors of all models, with their places in the whole."""

    def __init__(self, models: SavedModels) -> None:
        self.trained: dict[str, TrainedChunks] = {POLICY: models.policy}
        if models.critic is not None:
            self.trained[CRITIC] = models.critic.trained
        reference = models.reference
        self.reference = reference if reference is not None and reference.renewed else None
        self._weights = {name: model_weights(one.chunks, name) for name, one in self.trained.items()}
        self.states = {name: OptimizerState(one.optimizer, self._weights[name]) for name, one in self.trained.items()}

    def tensors(self, *, empty: bool) -> dict[str, Any]:
        """What a state is made of; `empty`: with tensors on the host to read into instead."""
        weights = {name: dict(tensors) for name, tensors in self._weights.items()}
        return {
            "weights": empty_weights(weights) if empty else weights,
            "state": {name: state.entries(empty=empty) for name, state in self.states.items()},
            REFERENCE: dict(self._reference(empty=empty)),
        }

    def put(self, loaded: dict[str, Any], state: MegatronState) -> None:
        """Change the models, their optimizers and their counters."""
        put_weights(self._weights, loaded["weights"])
        for name, trained in self.trained.items():
            self.states[name].put(loaded["state"][name], state.models[name].adam_steps)
            trained.updates = state.models[name].updates
        if self.reference is not None:
            self.reference.load_state_tensors(loaded[REFERENCE])

    def live(self) -> set[int]:
        """Storages that training goes on to change."""
        tensors = [one.data for weights in self._weights.values() for one in weights.values()]
        if self.reference is not None:
            tensors += self.reference.state_tensors().values()
        tensors += [tensor for state in self.states.values() for tensor in state.live()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _reference(self, *, empty: bool) -> Iterator[tuple[str, Any]]:
        if self.reference is None:
            return
        sharded = {id(one.data): one for one in self._weights[POLICY].values()}
        live = [dict(chunk.named_parameters()) | dict(chunk.named_buffers()) for chunk in self.trained[POLICY].chunks]
        for place, (name, tensor) in enumerate(self.reference.state_tensors().items()):
            number, _, within = name.partition(".")
            one = sharded[id(live[int(number)][within])]
            data = on_host(tensor) if empty else tensor
            key = f"{REFERENCE}.{one.key}"
            yield name, dataclasses.replace(one, key=key, data=data, replica_id=owned_by(one, place))


def model_weights(chunks: list[Any], model: str) -> dict[str, Any]:
    """Weights and buffers of this process's chunks, by chunk and name, with the live tensors in them.

    Extra states of Transformer Engine's modules, scales of fp8 with delayed scaling, are left out: they are pickles.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    found: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        sharded = chunk.sharded_state_dict(metadata=_format())
        kept = {key: one for key, one in sharded.items() if isinstance(one, ShardedTensor | ShardedTensorFactory)}
        if model != POLICY:
            add_prefix_for_sharding(kept, f"{model}.")
        found |= {f"{number}.{key}": one for key, one in kept.items()}
    return found


def _format() -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    return {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def empty_weights(weights: Weights) -> Weights:
    """The same places, with tensors on the host to read into: reading changes what it is given."""
    return {
        model: {key: dataclasses.replace(one, data=on_host(one.data)) for key, one in tensors.items()}
        for model, tensors in weights.items()
    }


def put_weights(weights: Weights, loaded: dict[str, dict[str, Tensor]]) -> None:
    """Change the live tensors to what was read into `empty_weights`."""
    with torch.no_grad():
        for model, tensors in weights.items():
            for key, one in tensors.items():
                one.data.copy_(loaded[model][key])
