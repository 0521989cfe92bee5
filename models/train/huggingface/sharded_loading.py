"""Models in shards (FSDP2, HSDP, DDP): the mesh of processes, and how a checkpoint is read and divided among them.

Ranks are laid out as [data-parallel rank, context-parallel rank]; parameters are sharded over runs of `fsdp_shard_size`
consecutive ranks, and runs hold equal copies. The first process loads the checkpoint on its CPU and sends it layer by
layer. Every process builds the architecture without memory, and shards each layer before the next one comes.

Invariants:
- no process but the first holds more than its shards and one layer (or what belongs to no layer); tied weights stay one
  parameter; what the first process cannot load, no process waits for;
- every decoder layer is a unit of its own, what is left over belongs to the root;
- parameters are fp32 shards; the forward pass gathers them in the precision of the policy; gradients are reduced in
  fp32, and summed over all processes, never averaged: the step's denominator divides them;
- outside forward and backward passes every parameter is sharded, so that no gathered copy outlives an update.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from configs.schema.train import FsdpConfig, ParallelConfig
from models import errors
from models.errors import TrainError, UnsupportedModel
from models.train.dp_group import DistributedDpGroup, gather_bytes
from models.train.huggingface import loading
from models.train.huggingface.attention import FLASH_ATTENTION, PACKED_SDPA, register_packed_sdpa
from models.train.huggingface.loading import LoadedModel, MakeRoot, Placement, Prepare
from models.train.huggingface.scoring import ContextParallel, Passes
from models.train.spec import TrainSpec
from models.train.step.critic import ValueHead
from models.train.step.micro_batches import MicroBatch
from models.train.step.packing import Packing


def own_device(device: torch.device) -> torch.device:
    """This process's device: of several GPUs, the one named, else that of LOCAL_RANK, else the current one."""
    if device.type != "cuda":
        return device
    index = device.index
    if index is None:
        index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class Mesh:
    """The processes of the default group, as FSDP2 and the trainer see them."""

    def __init__(self, config: FsdpConfig, parallel: ParallelConfig, device: torch.device) -> None:
        """Collective. `configs.rules.parallel` has seen that the sizes divide the processes."""
        self.world: int = dist.get_world_size()
        shard, self.context_size = config.fsdp_shard_size or self.world, config.fsdp_context_parallel_size
        self.replicas: int = self.world // shard  # copies of the model
        dp_size = self.world // self.context_size
        self.device = device
        self.rank: int = dist.get_rank()
        self.first = self.rank == 0  # of all processes
        # For numbers on the CPU; None = the default group is one.
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        self.gloo = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        shape, names = ((self.replicas, shard), ("replicate", "shard")) if self.replicas > 1 else ((shard,), ("shard",))
        self.parameters: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.context: Any | None = None  # the group that shares the tokens of this process's sequences
        if self.context_size > 1:
            shape = (dp_size, self.context_size)
            self.context = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp")).get_group("cp")
        dp_rank, place = divmod(self.rank, self.context_size)
        self.dp_group = DistributedDpGroup(dp_rank=dp_rank, dp_size=dp_size, is_mp_src_rank=place == 0, gloo=self.gloo)


class Shards(Placement):
    """Each process holds its part of each model."""

    def __init__(self, spec: TrainSpec, mesh: Mesh) -> None:
        super().__init__(spec, mesh.dp_group)
        self.mesh, self.device, self.first = mesh, mesh.device, mesh.first
        # Parameters are gathered in the precision of the forward pass.
        self.passes = Passes(mesh.device, None, self.precision or torch.float32, ContextParallel(mesh.context))

    def load(
        self, source: str, key: str, make_root: MakeRoot, *, frozen: bool = False, prepare: Prepare | None = None
    ) -> LoadedModel:
        """Raises in every process what the first one meets: `CheckpointUnavailable`, `UnsupportedModel`."""
        full, found = self._read(source, key, prepare) if self.first else (None, {})
        header = json.loads(gather_bytes(json.dumps(found).encode(), self.mesh.gloo)[0])
        if "error" in header:
            raise getattr(errors, header["error"])(header["text"])
        model = _skeleton(header["config"], header["attention"])
        if prepare is not None:
            with torch.device("meta"):
                prepare(model)
        self._set_mode(model, frozen=frozen)
        if full is not None:
            model._weight_conversions = getattr(full.model, "_weight_conversions", None)
        root = make_root(model)
        filler = _Filler(model, root, full, self)
        for layer in _decoder_layers(model):
            filler.fill(layer)
            if self.spec.fsdp.fsdp_compile:
                layer.compile()
            self._shard(layer, keep=not frozen)
        filler.fill(root)
        for module in root.modules():
            if isinstance(module, ValueHead):
                self._shard(module, precise=True)
        self._shard(root, root=True)
        return LoadedModel(model, header["vocab_size"], Packing(**header["packing"]), header["converts"], root)

    def _read(self, source: str, key: str, prepare: Prepare | None) -> tuple[LoadedModel | None, dict[str, Any]]:
        """In the first process: the model on the CPU, and what the others need to know of it."""
        train, seed = self.spec.train, self.spec.seed
        unmasked = self.mesh.context_size == 1 or train.attn_implementation != "auto"  # FlashAttention takes no mask
        flash = self.device.type == "cuda" and unmasked and loading.attention_of(train, self.device) == FLASH_ATTENTION
        # FlashAttention has no CPU kernel: what the model allows is found with another attention.
        probed = msgspec.structs.replace(train, attn_implementation="auto") if flash else train
        try:
            loaded = loading.load_model(source, key, probed, torch.device("cpu"), seed=seed)
            config = loaded.model.config.to_json_string(use_diff=False)
            _compare(loaded.model, _skeleton(config, loaded.model.config._attn_implementation))
            if prepare is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(seed)
                    prepare(loaded.model)
            attention = FLASH_ATTENTION if flash else loaded.model.config._attn_implementation
            if self.spec.fsdp.fsdp_compile and attention == PACKED_SDPA:
                attention = "sdpa"  # the lengths of a micro-batch's sequences would be compiled in
        except TrainError as error:
            return None, {"error": type(error).__name__, "text": str(error)}
        return loaded, {
            "config": config,
            "attention": attention,
            "vocab_size": loaded.vocab_size,
            "packing": asdict(loading.FLASH_PACKING if flash else loaded.packing),
            "converts": loaded.converts,
        }

    def _shard(self, module: torch.nn.Module, *, root: bool = False, precise: bool = False, keep: bool = True) -> None:
        """Shard what no submodule has sharded before.

        `precise`: compute in fp32 whatever the run's precision; `keep`: as the configuration says, parameters may stay
        gathered after the forward pass, which is of no use where no backward pass follows.
        """
        config = self.spec.fsdp
        # On a CPU there is nowhere to offload to.
        offloads = config.fsdp_cpu_offload and self.device.type != "cpu"
        fully_shard(
            module,
            mesh=self.mesh.parameters,
            # The head is needed again as soon as the forward pass ends.
            reshard_after_forward=False if root else config.fsdp_reshard_after_forward or not keep,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=None if precise else self.precision,
                reduce_dtype=torch.float32,
                cast_forward_inputs=not precise,
            ),
            offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Without it, a factor becomes a reduction that gloo does not have.
        module.set_force_sum_reduction_for_comms(True)

    def runs(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """All: passes are collective."""
        return batches

    def give_back(self, model: LoadedModel) -> None:
        """What a backward pass would have given back."""
        for module in model.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing: FSDP2 reduces them."""

    def sum_over_shards(self, value: float) -> float:
        """Over all processes, each copy of the model once."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self.mesh.gloo)
        return float(total) / self.mesh.replicas


def _decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The modules that are gathered one at a time, in the order of the forward pass. Raises `UnsupportedModel`."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        list(module)
        for module in model.base_model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) and (not whole or type(module[0]).__name__ in whole)
    ]
    layers = max(lists, key=lambda found: sum(p.numel() for layer in found for p in layer.parameters()), default=[])
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no list of decoder layers to shard; use --train-backend torch"
        )
    return layers


def _compare(model: Any, skeleton: Any) -> None:
    """Raise `UnsupportedModel` unless the configuration alone makes the model that was loaded."""
    found, made = ({name: tuple(one.shape) for name, one in _tensors(which)} for which in (model, skeleton))
    if found != made:
        name = min(found.items() ^ made.items())[0]
        raise UnsupportedModel(
            f"{type(model).__name__} has a tensor {name} of {found.get(name)}, where its configuration makes "
            f"{made.get(name)}, so that other processes cannot build it; use --train-backend torch"
        )


def _skeleton(config_json: str, attention: str) -> Any:
    """The architecture, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_packed_sdpa()
    fields = json.loads(config_json)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    loading.disable_dropout(model)
    return model


class _Filler:
    """Gives parameters and buffers their memory, and what the first process has in them."""

    def __init__(self, model: Any, root: torch.nn.Module, full: LoadedModel | None, placement: Placement) -> None:
        self._device, self._precision = placement.device, placement.precision
        self._names = {id(tensor): name for name, tensor in _tensors(model)}
        self._full = dict(_tensors(full.model)) if full is not None else {}
        self._holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in [*model.modules(), *root.modules()]:
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    self._holders.setdefault(id(tensor), []).append((held, name))
        # They stay alive, so that an identity is never that of another tensor.
        self._unfilled = {id(tensor): tensor for tree in (model, root) for _, tensor in _tensors(tree)}

    def fill(self, module: torch.nn.Module) -> None:
        """Whatever below `module` has no memory yet. Collective."""
        for _, tensor in list(_tensors(module)):
            if id(tensor) in self._unfilled:
                filled = self._filled(tensor)
                for held, name in self._holders[id(tensor)]:
                    held[name] = filled

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        parameter = isinstance(tensor, torch.nn.Parameter)
        # What is never trained needs no master copy in fp32.
        frozen = parameter and not tensor.requires_grad
        dtype = self._precision if frozen and self._precision is not None else tensor.dtype
        if tensor.device.type != "meta":  # made here, equal in all processes
            content = tensor.detach().to(self._device)
        else:
            if self._full:
                source = self._full.pop(self._names[id(tensor)])
                content = source.detach().to(self._device, dtype, copy=True).contiguous()
                source.data = source.data.new_empty(0)
            else:
                content = torch.empty(tensor.shape, dtype=dtype, device=self._device)
            dist.broadcast(content, src=0)
        return torch.nn.Parameter(content, tensor.requires_grad) if parameter else content


def _tensors(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each shared one once."""
    yield from module.named_parameters()
    yield from module.named_buffers()
