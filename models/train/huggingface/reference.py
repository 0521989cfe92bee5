"""The reference policy: frozen, or renewed from the policy every so many rollout batches.

Invariant: it is never trained; with `ref_update_interval` it is part of the checkpoint, since no other file holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from configs.schema.train import TrainConfig
from models.train.errors import TrainConfigInvalid, TrainStateUnreadable
from models.train.huggingface.loading import LoadedModel, load_model


class Reference:
    """A second model beside the policy."""

    def __init__(self, train: TrainConfig, *, device: torch.device, seed: int, renewed_from: Any | None = None) -> None:
        """`renewed_from`: the policy, if the reference is to become it from time to time.

        Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid` if the policy has other weights.
        """
        source = train.ref_load or train.hf_checkpoint
        key = "ref_load" if train.ref_load else "hf_checkpoint"
        self.loaded: LoadedModel = load_model(source, key, train, device, seed=seed)
        self.loaded.model.eval().requires_grad_(False)
        self._policy = renewed_from
        if renewed_from is not None and _shapes(renewed_from) != _shapes(self.loaded.model):
            raise TrainConfigInvalid(
                f"ref_update_interval is set, but the reference {source!r} has other weights than the policy, which "
                "it cannot become; leave --ref-update-interval or --ref-load out"
            )

    @property
    def renewed(self) -> bool:
        """Whether it becomes the policy from time to time."""
        return self._policy is not None

    def renew(self) -> None:
        """Become the policy as it is now."""
        if self._policy is not None:
            self.load_state_tensors(_tensors(self._policy))

    def state_tensors(self) -> dict[str, Tensor]:
        """Its weights. Those of a reference that is never renewed are in its checkpoint anyway."""
        return _tensors(self.loaded.model)

    def check_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `TrainStateUnreadable` unless the tensors are those of this model."""
        if _shapes(self.loaded.model) != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
            raise TrainStateUnreadable(
                "the saved reference has other names or shapes than this one; resume with the --ref-load that the run "
                "was started with"
            )

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Raises `TrainStateUnreadable`, then nothing is changed."""
        self.check_state_tensors(tensors)
        with torch.no_grad():
            for name, tensor in _tensors(self.loaded.model).items():
                tensor.copy_(tensors[name])


def _tensors(model: Any) -> dict[str, Tensor]:
    """Parameters, each shared one once, and what else a checkpoint would hold."""
    kept = model.state_dict()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
