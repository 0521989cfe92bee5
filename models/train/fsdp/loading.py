"""Loading one Hugging Face model into shards: one process reads it, each process keeps its part.

The first process loads the checkpoint on its CPU, finds out what the model allows, and sends it layer by layer. Every
process builds the architecture without memory, receives one layer at a time and shards it before the next one comes.

Invariants: no process but the first holds more than its shards and one layer (or what belongs to no layer); tied
weights stay one parameter; what the first process cannot load, no process waits for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from configs.schema.train import TrainConfig
from models.train import errors
from models.train.errors import TrainError, UnsupportedModel
from models.train.fsdp.wrap import Sharding, decoder_layers
from models.train.huggingface.loading import FLASH_ATTENTION, LoadedModel, enable_checkpointing, load_model
from models.train.packing.packing import Packing

MakeRoot = Callable[[Any], torch.nn.Module]
Prepare = Callable[[Any], None]


@dataclass(frozen=True)
class ShardedModel:
    """A model in shards."""

    model: Any  # the Hugging Face module; its parameters are DTensors
    root: torch.nn.Module  # its forward pass gathers
    vocab_size: int
    packing: Packing  # without a budget
    converts: bool  # checkpoints store some of its weights in another form, sorted by name


def load_sharded(
    source: str,
    key: str,
    train: TrainConfig,
    sharding: Sharding,
    make_root: MakeRoot,
    *,
    seed: int,
    frozen: bool = False,
    prepare: Prepare | None = None,
    precise: Callable[[torch.nn.Module], list[torch.nn.Module]] = lambda _: [],
) -> ShardedModel:
    """Collective. `prepare`: changes a model before it is sharded (adapters); `precise`: modules that compute in fp32.

    Raises in every process what the first one meets: `CheckpointUnavailable`, `UnsupportedModel`.
    """
    mesh = sharding.mesh
    full, header = _read(source, key, train, sharding, seed, prepare) if mesh.first else (None, {})
    header = json.loads(mesh.send(json.dumps(header).encode()))
    if "error" in header:
        raise getattr(errors, header["error"])(header["text"])
    model = _skeleton(header["config"], header["attention"])
    if prepare is not None:
        with torch.device("meta"):
            prepare(model)
    if frozen:
        model.eval().requires_grad_(False)
    elif train.gradient_checkpointing:
        enable_checkpointing(model)
    if full is not None:
        model._weight_conversions = getattr(full.model, "_weight_conversions", None)
    root = make_root(model)
    filler = _Filler(model, root, full, sharding)
    for layer in decoder_layers(model):
        filler.fill(layer)
        if sharding.compiled:
            layer.compile()
        sharding.apply(layer, keep=not frozen)
    filler.fill(root)
    for module in precise(root):
        sharding.apply(module, precise=True)
    sharding.apply(root, root=True)
    return ShardedModel(model, root, header["vocab_size"], Packing(**header["packing"]), header["converts"])


def _read(
    source: str, key: str, train: TrainConfig, sharding: Sharding, seed: int, prepare: Prepare | None
) -> tuple[LoadedModel | None, dict[str, Any]]:
    """In the first process: the model on the CPU, and what the others need to know of it."""
    flash = _wants_flash(train, sharding)
    # FlashAttention has no CPU kernel: what the model allows is found with another attention.
    probed = msgspec.structs.replace(train, attn_implementation="auto") if flash else train
    try:
        loaded = load_model(source, key, probed, torch.device("cpu"), seed=seed)
        config = loaded.model.config.to_json_string(use_diff=False)
        _compare(loaded.model, _skeleton(config, loaded.model.config._attn_implementation))
        if prepare is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                prepare(loaded.model)
    except TrainError as error:
        return None, {"error": type(error).__name__, "text": str(error)}
    packing = Packing(max_tokens=1, share_prompts=False, single_row=True) if flash else loaded.packing
    return loaded, {
        "config": config,
        "attention": FLASH_ATTENTION if flash else loaded.model.config._attn_implementation,
        "vocab_size": loaded.vocab_size,
        "packing": asdict(packing),
        "converts": _converts(loaded.model),
    }


def _compare(model: Any, skeleton: Any) -> None:
    """Raise `UnsupportedModel` unless the configuration alone makes the model that was loaded."""
    found, made = ({name: tuple(one.shape) for name, one in _tensors(which)} for which in (model, skeleton))
    if found != made:
        name = min(found.items() ^ made.items())[0]
        raise UnsupportedModel(
            f"{type(model).__name__} has a tensor {name} of {found.get(name)}, where its configuration makes "
            f"{made.get(name)}, so that other processes cannot build it; use --train-backend torch"
        )


def _wants_flash(train: TrainConfig, sharding: Sharding) -> bool:
    if sharding.mesh.device.type != "cuda":
        return False
    if sharding.mesh.sizes.context > 1 and train.attn_implementation == "auto":
        return False  # it takes no mask
    if train.attn_implementation != "auto":
        return train.attn_implementation == FLASH_ATTENTION
    from transformers.utils import is_flash_attn_2_available

    return sharding.precision is not None and bool(is_flash_attn_2_available())


def _converts(model: Any) -> bool:
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _skeleton(config_json: str, attention: str) -> Any:
    """The architecture, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(config_json)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.train()
    return model


class _Filler:
    """Gives parameters and buffers their memory, and what the first process has in them."""

    def __init__(self, model: Any, root: torch.nn.Module, full: LoadedModel | None, sharding: Sharding) -> None:
        self._device = sharding.mesh.device
        self._sharding = sharding
        self._names = {id(tensor): name for name, tensor in _tensors(model)}
        self._full = dict(_tensors(full.model)) if full is not None else {}
        self._holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for tree in (model, root):
            for module in tree.modules():
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is not None:
                        self._holders.setdefault(id(tensor), []).append((module, name))
        # They stay alive, so that an identity is never that of another tensor.
        self._unfilled = {id(tensor): tensor for tree in (model, root) for _, tensor in _tensors(tree)}

    def fill(self, module: torch.nn.Module) -> None:
        """Whatever below `module` has no memory yet. Collective."""
        for _, tensor in list(_tensors(module)):
            if id(tensor) not in self._unfilled:
                continue
            filled = self._filled(tensor)
            for holder, name in self._holders[id(tensor)]:
                if isinstance(tensor, torch.nn.Parameter):
                    holder._parameters[name] = filled
                else:
                    holder._buffers[name] = filled

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        made_here = tensor.device.type != "meta"  # equal in all processes
        content = tensor.detach().to(self._device) if made_here else self._received(tensor, trained)
        return torch.nn.Parameter(content, trained) if isinstance(tensor, torch.nn.Parameter) else content

    def _received(self, tensor: torch.Tensor, trained: bool) -> torch.Tensor:
        dtype = tensor.dtype
        # What is never trained needs no master copy in fp32.
        if isinstance(tensor, torch.nn.Parameter) and not trained and self._sharding.precision is not None:
            dtype = self._sharding.precision
        name = self._names[id(tensor)]
        if self._full:
            source = self._full.pop(name)
            content = source.detach().to(self._device, dtype, copy=True).contiguous()
            source.data = source.data.new_empty(0)
        else:
            content = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        dist.broadcast(content, src=0)
        return content


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each shared one once."""
    yield from module.named_parameters()
    yield from module.named_buffers()
