"""The reference policy: a frozen second model, or the policy with its adapters off.

Invariants: it is never trained; with `ref_update_interval` it is part of the checkpoint, since no other file holds it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from models.errors import TrainConfigInvalid
from models.train.huggingface.hf_weights import local, model_tensors
from models.train.huggingface.lora import Adapters
from models.train.huggingface.placement import PlacedModel, Placement
from models.train.packing.rows import PackedRows


class Reference:
    """What the policy is compared with."""

    def __init__(self, placement: Placement, policy: PlacedModel, adapters: Adapters | None) -> None:
        """Collective. Raises `CheckpointUnavailable`, `UnsupportedModel`, `TrainConfigInvalid`."""
        train, interval = placement.spec.train, placement.spec.algorithm.ref_update_interval
        if adapters is not None and interval:
            raise TrainConfigInvalid(
                f"ref_update_interval={interval} with lora_rank={placement.spec.lora.lora_rank}: the reference of LoRA "
                "is the model without adapters, which no update changes; leave --ref-update-interval out"
            )
        self._policy = policy
        self.renewed = bool(interval)  # becomes the policy from time to time
        own = adapters is None or train.ref_load not in (None, train.hf_checkpoint)
        self._adapters = None if own else adapters
        self.placed = policy
        if own:
            source, key = train.ref_load or train.hf_checkpoint, "ref_load" if train.ref_load else "hf_checkpoint"
            self.placed = placement.load(source, key, placement.scorer, frozen=True)
            if self.renewed and _shapes(policy) != _shapes(self.placed):
                raise TrainConfigInvalid(
                    f"ref_update_interval is set, but the reference {source!r} has other weights than the policy, "
                    "which it cannot become; leave --ref-update-interval or --ref-load out"
                )

    def score(self, rows: PackedRows) -> Tensor:
        """Log-probs [N] of the chosen tokens, without gradient."""
        with torch.no_grad(), nullcontext() if self._adapters is None else self._adapters.disabled(self.placed.model):
            found: Tensor = self.placed.root(rows)[0]
        return found

    def renew(self) -> None:
        """Become the policy as it is now, unless it never does."""
        if not self.renewed:
            return
        own = self.tensors()
        with torch.no_grad():
            for name, tensor in model_tensors(self._policy.model).items():
                local(own[name]).copy_(local(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Its weights."""
        return model_tensors(self.placed.model)


def _shapes(placed: PlacedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(placed.model).items()}
