"""Where the tensors of a run's models lie: whole in every process, here, or in shards (`models.train.fsdp`).

What differs between the two is here and nowhere else: how a model is loaded, which micro-batches a process runs, how
gradients become sums over all processes, and what has to be given back after a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.train.dp_group import DpGroup, Float32Array
from models.train.huggingface.loading import LoadedModel, autocast_dtype, enable_checkpointing, load_model, pick_device
from models.train.huggingface.scoring import Passes, Scorer
from models.train.packing.micro_batches import MicroBatch
from models.train.packing.rows import PackedRows
from models.train.spec import TrainSpec

MakeRoot = Callable[[Any], torch.nn.Module]
Prepare = Callable[[Any], None]


@dataclass(frozen=True)
class PlacedModel(LoadedModel):
    """A model that can run. Sharded, its parameters are DTensors."""

    root: Any  # the module whose forward pass is called: it gathers


class Placement:
    """Every process holds all of each model: alone, or as plain copies."""

    first = True  # whether this process is given exported weights, and writes files

    def __init__(self, spec: TrainSpec, dp_group: DpGroup | None = None) -> None:
        """`dp_group`: the processes that hold copies (default: this one alone). Raises `TrainConfigInvalid`."""
        self.spec = spec
        self.dp_group: DpGroup = dp_group or DpGroup()
        self.device = pick_device(spec.train.train_device)
        self.precision = autocast_dtype(spec.train.train_dtype, self.device)  # of the forward pass; None = fp32
        self.passes = Passes(self.device, self.precision, self.precision or torch.float32)

    def load(
        self,
        source: str,
        key: str,
        make_root: MakeRoot,
        *,
        frozen: bool = False,
        prepare: Prepare | None = None,
        precise: Callable[[Any], list[torch.nn.Module]] = lambda _: [],
    ) -> PlacedModel:
        """A model out of `source`, which the option `key` gave. Collective.

        `make_root`: wraps the module that is called around the model; `prepare`: changes the model first (adapters);
        `precise`: modules of the root that compute in fp32. Raises `CheckpointUnavailable`, `UnsupportedModel`.
        """
        loaded = load_model(source, key, self.spec.train, self.device, seed=self.spec.seed)
        if prepare is not None:
            prepare(loaded.model)
        self._set_mode(loaded.model, frozen=frozen)
        return PlacedModel(**vars(loaded), root=make_root(loaded.model).to(self.device))

    def _set_mode(self, model: Any, *, frozen: bool) -> None:
        model.train(not frozen)
        if frozen:
            model.requires_grad_(False)
        elif self.spec.train.gradient_checkpointing:
            enable_checkpointing(model)

    def scorer(self, model: Any) -> Scorer:
        """The root of a model that says log-probs."""
        return Scorer(
            model,
            self.passes,
            temperature=self.spec.scoring_temperature,
            chunk_tokens=self.spec.train.logprob_chunk_tokens,
        )

    def runs(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Those that this process runs."""
        return [batch for batch in batches if not batch.blank]

    def scores(
        self, model: PlacedModel, score: Callable[[PackedRows], Tensor], batches: Sequence[MicroBatch]
    ) -> list[Float32Array]:
        """What `score` says of the chosen tokens by running `model`, without gradient: one array [N] per micro-batch
        that is not blank; nothing without `is_mp_src_rank`.
        """
        with torch.no_grad():
            found = [(batch, score(batch.rows)) for batch in self.runs(batches)]
        self.give_back(model)
        return [one.cpu().numpy() for batch, one in found if not batch.blank and self.dp_group.is_mp_src_rank]

    def give_back(self, model: PlacedModel) -> None:
        """Drop what passes without a gradient have gathered: no copy may be older than the shards."""

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Make gradients sums over data-parallel ranks."""
        self.dp_group.all_reduce_gradients(list(parameters))

    def sum_over_shards(self, value: float) -> float:
        """Sum of one number per shard of a model; equal in all processes."""
        return value
