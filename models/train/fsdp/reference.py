"""The reference policy in shards: a second model, or the policy with its adapters off.

Invariants: it is never trained; one that is renewed from the policy is part of the checkpoint, since no other file
holds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.train.errors import TrainConfigInvalid
from models.train.fsdp.context import ContextParallel
from models.train.fsdp.loading import ShardedModel, load_sharded
from models.train.fsdp.lora import Adapters
from models.train.fsdp.scoring import ShardedScorer
from models.train.fsdp.updates import local
from models.train.fsdp.wrap import Sharding
from models.train.packing.packing import Packing
from models.train.spec import TrainSpec


class ShardedReference:
    """A frozen second model beside the policy."""

    def __init__(self, spec: TrainSpec, sharding: Sharding, context: ContextParallel, policy: Any) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid`."""
        train = spec.train
        source = train.ref_load or train.hf_checkpoint
        self._loaded: ShardedModel = load_sharded(
            source,
            "ref_load" if train.ref_load else "hf_checkpoint",
            train,
            sharding,
            lambda model: ShardedScorer(model, spec, sharding, context),
            seed=spec.seed,
            frozen=True,
        )
        self.packing: Packing = self._loaded.packing
        self.vocab_size = self._loaded.vocab_size
        self.score: Any = self._loaded.root
        self.renewed = bool(spec.algorithm.ref_update_interval)
        self._policy = policy
        if self.renewed and _shapes(policy) != _shapes(self._loaded.model):
            raise TrainConfigInvalid(
                f"ref_update_interval is set, but the reference {source!r} has other weights than the policy, which "
                "it cannot become; leave --ref-update-interval or --ref-load out"
            )

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Nothing has to change for scoring."""
        yield

    def renew(self) -> None:
        """Become the policy as it is now."""
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in model_tensors(self._policy).items():
                local(own[name]).copy_(local(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, in shards."""
        return model_tensors(self._loaded.model)


class AdapterReference:
    """The policy without its adapters."""

    renewed = False

    def __init__(self, adapters: Adapters, policy: ShardedModel) -> None:
        self._adapters = adapters
        self._model = policy.model
        self.packing, self.vocab_size = policy.packing, policy.vocab_size
        self.score: Any = policy.root

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Adapters off."""
        with self._adapters.disabled(self._model):
            yield

    def renew(self) -> None:
        """Never: refused when the models are built."""

    def tensors(self) -> dict[str, Tensor]:
        """None of its own."""
        return {}


def reference_of(
    spec: TrainSpec, sharding: Sharding, context: ContextParallel, policy: ShardedModel, adapters: Adapters | None
) -> ShardedReference | AdapterReference:
    """The reference of a run. Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid`."""
    if adapters is not None and spec.algorithm.ref_update_interval:
        raise TrainConfigInvalid(
            f"ref_update_interval={spec.algorithm.ref_update_interval} with lora_rank={spec.lora.lora_rank}: the "
            "reference of LoRA is the model without adapters, which no update changes; leave --ref-update-interval out"
        )
    if adapters is not None and spec.train.ref_load in (None, spec.train.hf_checkpoint):
        return AdapterReference(adapters, policy)
    return ShardedReference(spec, sharding, context, policy.model)


def model_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, each shared one once, and what else a checkpoint would hold."""
    kept = model.state_dict()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}
