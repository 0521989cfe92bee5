"""The critic of PPO: a model of its own with a scalar head, that learns what the policy can expect.

V_t is read where the log-prob of token t is read: at the token before it, so that it has not seen token t.

Invariants: values are not divided by the temperature; the head is fp32; losses are numerators, divided by the step's
denominator in `update` alone; the policy and the critic share no parameter.

Source of the clipped loss: arXiv:1707.06347 (section 5 leaves it open; this is the form of the published code, without
the factor 1/2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from configs.schema.critic import CriticConfig
from configs.schema.train import TrainConfig
from models.train.dp_group import DpGroup, Float32Array
from models.train.errors import TrainStateUnreadable
from models.train.huggingface.loading import enable_checkpointing, load_model
from models.train.huggingface.optimizer import Updater, UpdateResult
from models.train.huggingface.scoring import Backbone
from models.train.packing.balance import MicroBatch
from models.train.packing.packing import Packing
from models.train.packing.rows import PackedRows
from models.train.step.columns import float_column, weight_column
from models.train.step.examples import Example

_UPDATES: Final = "updates"
_WEIGHTS: Final = "weights/"
_MOMENTS: Final = "optimizer/"


@dataclass(frozen=True)
class ValueLoss:
    """What the value loss says of each token."""

    loss: Tensor  # [N]
    clipped: Tensor  # [N] bool, the clipped value is further from the return than the free one


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """max((V - G)^2, (V_c - G)^2) with V_c = V_old + clamp(V - V_old, -clip, clip); [N] each."""
    free = (values - returns).square()
    held = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(torch.maximum(free, held), held > free)


class ValueModel(torch.nn.Module):  # type: ignore[misc]
    """A decoder and the head that reads a value from its last hidden states."""

    def __init__(self, decoder: torch.nn.Module, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = torch.nn.Linear(hidden_size, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Small, so that the first values are near 0 whatever the scale of the hidden states.
            self.value_head.weight.normal_(0.0, 1.0 / (hidden_size + 1), generator=generator)
            self.value_head.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] of hidden states [N, H]."""
        values: Tensor = self.value_head(hidden.float()).squeeze(-1)
        return values


class ValueNumerator:
    """The loss of the critic, whatever computed the values, and its sums over a step."""

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self.begin_step()

    def begin_step(self) -> None:
        """Start new sums."""
        self._loss = self._clipped = 0.0

    def __call__(self, members: Sequence[Example], values: Tensor) -> Tensor:
        """The numerator, a scalar with a graph. `members` in the order of the rows; `values` [N], with a graph."""
        device = values.device
        old = float_column([example.values for example in members], device)
        returns = float_column([example.returns for example in members], device)
        result = value_loss(values, old, returns, clip=self._clip)
        weights = weight_column(members, device)
        numerator = torch.dot(result.loss, weights)
        self._loss += numerator.detach().double()
        self._clipped += torch.dot(result.clipped.to(weights.dtype), weights).double()
        return numerator

    def metrics(
        self, result: UpdateResult, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> dict[str, float]:
        """Metrics of the step whose update gave `result`; starts the next step."""
        sums = dp_group.merge({"loss": float(self._loss), "clipped": float(self._clipped)})
        self.begin_step()
        return {
            "train/value_loss": sums["loss"] / loss_denominator,
            "train/value_clipfrac": sums["clipped"] / mean_denominator,
            "train/critic_grad_norm": result.grad_norm,
            "train/critic_lr": result.lr,
        }


def critic_train_config(config: CriticConfig, train: TrainConfig) -> TrainConfig:
    """The optimizer's options of the critic."""
    return msgspec.structs.replace(
        train, lr=config.critic_lr, lr_warmup_iters=config.critic_lr_warmup_iters, lr_decay_style="constant"
    )


class Critic:
    """The value model with its optimizer, all of it in this process."""

    def __init__(
        self,
        config: CriticConfig,
        train: TrainConfig,
        *,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        seed: int,
    ) -> None:
        """Loads the backbone. Raises `CheckpointUnavailable`, `UnsupportedModel`."""
        source = config.critic_load or train.hf_checkpoint
        key = "critic_load" if config.critic_load else "hf_checkpoint"
        loaded = load_model(source, key, train, device, seed=seed)
        if train.gradient_checkpointing:
            enable_checkpointing(loaded.model)
        loaded.model.train()
        self.packing: Packing = loaded.packing  # without a budget
        self.vocab_size = loaded.vocab_size
        self._backbone = Backbone(loaded.model, device=device, autocast_dtype=autocast_dtype)
        hidden = int(loaded.model.config.get_text_config().hidden_size)
        self.model = ValueModel(loaded.model.base_model, hidden, seed=seed).to(device)
        self._numerator = ValueNumerator(config.value_clip)
        self.updater = Updater(self.model, critic_train_config(config, train), None)

    def values_of(self, rows: PackedRows) -> Tensor:
        """V [N] before each chosen token; differentiable."""
        with self._backbone.autocast():
            hidden = self._backbone.chosen_hidden(rows)
        result: Tensor = self.model(hidden)
        return result

    def values(self, batches: Sequence[MicroBatch]) -> list[Float32Array]:
        """V before each chosen token, one array [N] per micro-batch."""
        with torch.no_grad():
            return [self.values_of(batch.rows).cpu().numpy() for batch in batches if not batch.blank]

    def backward(self, batches: Sequence[MicroBatch]) -> None:
        """Add the gradient of the micro-batches' numerators, and their sums."""
        for batch in batches:
            if not batch.blank:
                self._numerator(batch.members, self.values_of(batch.rows)).backward()

    def update(
        self, loss_denominator: float, mean_denominator: float, dp_group: DpGroup
    ) -> tuple[UpdateResult, dict[str, float]]:
        """Make the update, or refuse it, and start the next step; metrics of this one."""
        dp_group.all_reduce_gradients([parameter for _, parameter in self.updater.named_parameters])
        result = self.updater.apply(loss_denominator)
        return result, self._numerator.metrics(result, loss_denominator, mean_denominator, dp_group)

    def discard(self) -> None:
        """Forget the gradients and sums of the running step."""
        self.updater.clear()
        self._numerator.begin_step()

    # ------------------------------------------------------------------ files

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights, moments and the number of updates."""
        out = {f"{_WEIGHTS}{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        out |= {f"{_MOMENTS}{name}": tensor for name, tensor in self.updater.state_tensors().items()}
        return out | {_UPDATES: torch.tensor(self.updater.updates)}

    def check_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `TrainStateUnreadable` unless the tensors are those of this critic."""
        own = {f"{_WEIGHTS}{name}": tuple(p.shape) for name, p in self.model.named_parameters()}
        saved = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(_WEIGHTS)}
        if own != saved or _UPDATES not in tensors:
            raise TrainStateUnreadable(
                "the saved critic has other names or shapes than this one; resume with the --critic-load and the "
                "options that the run was started with"
            )
        self.updater.check_state_tensors(_moments(tensors))

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` gave. Raises `TrainStateUnreadable`, then nothing is changed."""
        self.check_state_tensors(tensors)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"{_WEIGHTS}{name}"])
        self.updater.load_state_tensors(_moments(tensors))
        self.updater.updates = int(tensors[_UPDATES])


def _moments(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_MOMENTS): tensor for name, tensor in tensors.items() if name.startswith(_MOMENTS)}
