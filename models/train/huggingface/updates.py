"""What training changes in a Hugging Face model: AdamW over fp32 master parameters, LoRA adapters, and their device.

Invariants of `Updater`, where every gradient becomes an update:
- gradients arrive as sums of numerators; they are divided by the step's denominator here, once;
- with sharded parameters, each process updates its shards; the norm of the gradient is that of all shards together, so
  that all processes clip alike, and refuse together;
- a gradient that is not finite changes neither parameters nor optimizer state;
- the learning rate depends only on the number of updates made, and on the factor that the caller gives.

Invariants of `Adapters` (LoRA, arXiv:2106.09685, through peft): only adapters are trained; the model keeps its class
and its names, but for the frozen weight of an adapted layer, which peft calls `base_layer`; merged weights are
W + alpha / rank * B A, computed in fp32; the reference is the same model with its adapters off.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from configs.schema.train import LoraConfig, TrainConfig
from models.errors import TrainConfigInvalid, UnsupportedModel, first_line
from models.train.huggingface.hf_files import local, stored_names, whole
from models.train.model_set import UpdateResult
from models.train.spec import learning_rate

_BASE: Final = ".base_layer"
_ADAPTER: Final = "default"
_NAMES_OF_EXPERTS: Final = frozenset(("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
WEIGHTS_FILE: Final = "adapter_model.safetensors"


class Adapters:
    """The adapters of one model."""

    def __init__(self, config: LoraConfig, checkpoint: str) -> None:
        """`checkpoint`: what the adapters belong to. `config.lora_rank` is at least 1."""
        self._config = config
        self._checkpoint = checkpoint
        self._peft: Any = None

    def inject(self, model: Any) -> None:
        """Put adapters into a model, and freeze all else. Raises `TrainConfigInvalid`, `UnsupportedModel`."""
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model

        config, targets = self._config, self._config.lora_target_modules
        self._peft = PeftLoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=_all_linear(model) if targets == ("all-linear",) else list(targets),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._checkpoint,
        )
        try:
            inject_adapter_in_model(self._peft, model)
        except ValueError as error:
            raise TrainConfigInvalid(
                f"lora_target_modules={list(targets)} do not fit {type(model).__name__} ({first_line(error)}); "
                "name its linear modules, or set --lora-target-modules all-linear"
            ) from error
        for name, layer in self._layers(model).items():
            if not isinstance(layer.get_base_layer(), torch.nn.Linear):
                raise UnsupportedModel(
                    f"lora_target_modules: {name} of {type(model).__name__} is no linear layer, whose adapters are not "
                    "merged here; name linear modules, or set --lora-target-modules all-linear"
                )

    @contextlib.contextmanager
    def disabled(self, model: Any) -> Iterator[None]:
        """Within it, the model is the one that training started from."""
        layers = list(self._layers(model).values())
        # peft's own switch also changes which parameters are trained, which sharded parameters do not take lightly.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    # ------------------------------------------------------------------ weights

    def merged(self, model: Any, device: torch.device) -> dict[str, Callable[[], Tensor]]:
        """What makes each weight of the merged model, under the name that it would have without adapters."""
        names = [name for name in stored_names(model) if ".lora_" not in name]
        return {name.replace(_BASE, ""): partial(self._merged, model, name, device) for name in names}

    def _merged(self, model: Any, name: str, device: torch.device) -> Tensor:
        """The whole weight called `name` in memory, with its adapter. Collective."""
        weight = whole(attrgetter(name)(model), device)
        module, _, kind = name.rpartition(_BASE + ".")
        if not module or kind != "weight":
            return weight
        layer = model.get_submodule(module)
        down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        return weight.float() + whole(up, device).float() @ whole(down, device).float() * layer.scaling[_ADAPTER]

    def tensors(self, model: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, whole, under the names of peft's files. Collective."""
        for name, layer in self._layers(model).items():
            for part, held in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                yield f"base_model.model.{name}.{part}.weight", whole(held[_ADAPTER].weight, device)

    def write(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        """An adapter's directory, as peft reads it."""
        from safetensors.torch import save_file

        directory.mkdir(parents=True, exist_ok=True)
        self._peft.save_pretrained(str(directory))
        save_file({name: one.cpu().contiguous() for name, one in tensors.items()}, directory / WEIGHTS_FILE)

    def _layers(self, model: Any) -> dict[str, Any]:
        from peft.tuners.lora import LoraLayer

        return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _all_linear(model: Any) -> list[str]:
    """Names of the linear modules, but for the output embedding: last parts where those are enough, else whole paths.

    In a model with stacked experts those of its dense and shared MLPs are left out: peft takes their names for the
    experts', which are no modules. Raises `UnsupportedModel`.
    """
    head = model.get_output_embeddings()
    stacked = any(parameter.ndim > 2 for parameter in model.parameters())
    linear: set[str] = set()
    other: set[str] = set()
    for name, module in model.named_modules():
        wanted = isinstance(module, torch.nn.Linear) and module is not head
        if not (wanted and stacked and _end(name) in _NAMES_OF_EXPERTS):
            (linear if wanted else other).add(name)
    if not linear:
        raise UnsupportedModel(f"{type(model).__name__} has no linear modules for LoRA; set --lora-rank 0")
    ends = {_end(name) for name in linear}
    return sorted(linear if ends & {_end(name) for name in other} else ends)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


class Updater:
    """AdamW with warm-up, decay and gradient clipping (arXiv:1711.05101)."""

    def __init__(
        self,
        model: torch.nn.Module,
        train: TrainConfig,
        total_steps: int | None,
        sum_over_shards: Callable[[float], float] = float,
    ) -> None:
        """`sum_over_shards`: of one number per shard of the model; default: this process holds all of it."""
        self._train = train
        self._total_steps = total_steps
        self._sum_over_shards = sum_over_shards
        self.named_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        # Norms and biases are not pulled to zero: their scale is not a measure of complexity.
        matrices = [p for _, p in self.named_parameters if p.ndim > 1]
        vectors = [p for _, p in self.named_parameters if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            fused=True,
        )
        self.updates = 0

    def apply(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        """Divide the summed gradients by `denominator`, clip, update; or refuse. Clears the gradients either way.

        Gradients are complete sums over all processes. `lr_scale`: factor of this update's learning rate.
        """
        lr = learning_rate(self.updates, self._train, self._total_steps) * lr_scale
        gradients = [local(p.grad) for _, p in self.named_parameters if p.grad is not None]
        norm = math.sqrt(self._sum_over_shards(_sum_of_squares(gradients))) / denominator
        if not gradients or not math.isfinite(norm):
            self.clear()
            return UpdateResult(applied=False, grad_norm=norm, lr=lr)
        torch._foreach_mul_(gradients, gradient_scale(norm, denominator, self._train.clip_grad))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.updates += 1
        self.clear()
        return UpdateResult(applied=True, grad_norm=norm, lr=lr)

    def refuse(self) -> UpdateResult:
        """Make no update: there is nothing to learn from."""
        self.clear()
        return UpdateResult(
            applied=False, grad_norm=0.0, lr=learning_rate(self.updates, self._train, self._total_steps)
        )

    def clear(self) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Optimizer state as flat tensors, `<parameter>/<entry>`."""
        out: dict[str, torch.Tensor] = {}
        for name, parameter in self.named_parameters:
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{name}/{entry}"] = value.detach()
        return out


def gradient_scale(norm: float, denominator: float, clip_grad: float) -> float:
    """What summed gradients are multiplied by: divided by the step's denominator, and clipped to `clip_grad` (0: not).

    `norm`: of the gradient after the division.
    """
    clipped = clip_grad > 0 and norm > clip_grad
    return (clip_grad / norm if clipped else 1.0) / denominator


def _sum_of_squares(gradients: list[torch.Tensor]) -> float:
    """Over all gradients; summed in fp64 so that many parameters do not overflow."""
    if not gradients:
        return 0.0
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return float(norms.square().sum())


# --------------------------------------------------------------------------------------------------
# Models and optimizers move between their device and the host's memory, for a trainer that shares its GPU in turns.
#
# Invariants: parameters stay the same objects, so that optimizer, packing and scorers still know them; nothing is lost
# on the way: what is on the host can be saved and exported from there. On a CPU nothing moves.


HOST = torch.device("cpu")


def move(modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move parameters, buffers and optimizer state; gradients are expected to be cleared."""
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for entry, value in state.items():
                if torch.is_tensor(value):
                    state[entry] = value.to(device)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # or another process could not have what was given back
