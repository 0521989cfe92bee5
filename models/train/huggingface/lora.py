"""LoRA adapters of a Hugging Face model (arXiv:2106.09685), through peft.

Invariants: only adapters are trained; the model keeps its class and its names, but for the frozen weight of an adapted
layer, which peft calls `base_layer`; merged weights are W + alpha / rank * B A, computed in fp32; the reference is the
same model with its adapters off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from configs.schema.train import LoraConfig
from models.errors import TrainConfigInvalid, UnsupportedModel, first_line
from models.train.huggingface.hf_files import stored_names, whole, write_tensors

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
        # peft's own switch also changes which parameters are trained, which breaks sharded parameters.
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
        directory.mkdir(parents=True, exist_ok=True)
        self._peft.save_pretrained(str(directory))
        write_tensors(directory / WEIGHTS_FILE, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})

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
