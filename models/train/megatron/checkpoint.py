"""Training states of Megatron models: saved from one parallel layout, loaded into any other, exactly.

Tensors go through Megatron's dist_checkpointing in its format torch_dist, each whole under Megatron's own name, so that
all parallel sizes and the plain or the distributed optimizer are free to change. Names of the critic and of a renewed
reference begin with `critic.` and `reference.`, those of Adam with `optimizer.state.`.

Invariants:
- a state counts once its `state.json` exists, which is written last;
- loading checks names, shapes, dtypes and file sizes in all processes, and reads everything to the host, before it
  changes the model;
- an asynchronous save has copied what it writes before `save` returns, and is complete before the next save, before
  `load`, and before the process ends;
- random states are restored into the layout that saved them; another layout keeps its own.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from models.errors import TrainStateUnreadable, first_line
from models.train.dp_group import BackgroundSave, together
from models.train.huggingface.checkpoint import MODEL_DIR, random_state, restore_random_state
from models.train.huggingface.hf_files import write_hf
from models.train.megatron.checkpoint_files import (
    STATE_DIR,
    Index,
    MegatronState,
    ModelCounters,
    Plan,
    read_state,
    torch_metadata,
)
from models.train.megatron.optimizer_state import OptimizerState, on_host, owned_by
from models.train.megatron.processes import ParallelSizes
from models.train.megatron.trained_models import MegatronCritic, SwappedReference, TrainedChunks
from models.train.model_set import Counters

POLICY: Final = "policy"
CRITIC: Final = "critic"
REFERENCE: Final = "reference"

Weights = dict[str, dict[str, Any]]  # by model and name: `model_weights`


class Held:
    """The tensors of all models, with their places in the whole."""

    def __init__(
        self, policy: TrainedChunks, critic: MegatronCritic | None, reference: SwappedReference | None
    ) -> None:
        self.trained = {POLICY: policy} if critic is None else {POLICY: policy, CRITIC: critic.trained}
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
            tensors += self.reference.host.values()
        tensors += [tensor for trained in self.trained.values() for tensor in trained.optimizer_tensors()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _reference(self, *, empty: bool) -> Iterator[tuple[str, Any]]:
        if self.reference is None:
            return
        sharded = {id(one.data): one for one in self._weights[POLICY].values()}
        live = [dict(chunk.named_parameters()) | dict(chunk.named_buffers()) for chunk in self.trained[POLICY].chunks]
        for place, (name, tensor) in enumerate(self.reference.host.items()):
            number, _, within = name.partition(".")
            one = sharded[id(live[int(number)][within])]
            data = on_host(tensor) if empty else tensor
            key = f"{REFERENCE}.{one.key}"
            yield name, dataclasses.replace(one, key=key, data=data, replica_id=owned_by(one, place))


def model_weights(chunks: list[Any], model: str) -> dict[str, Any]:
    """Weights and buffers of this process's chunks, by chunk and name, with the live tensors in them.

    Extra states of Transformer Engine's modules, scales of fp8 with delayed scaling, are left out: they are pickles.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    layout = {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    found: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        sharded = chunk.sharded_state_dict(metadata=layout)
        kept = {key: one for key, one in sharded.items() if isinstance(one, ShardedTensor | ShardedTensorFactory)}
        if model != POLICY:
            add_prefix_for_sharding(kept, f"{model}.")
        found |= {f"{number}.{key}": one for key, one in kept.items()}
    return found


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


class Checkpoints:
    """Writes and reads the state of the models of one run."""

    def __init__(
        self,
        policy: TrainedChunks,
        critic: MegatronCritic | None,
        reference: SwappedReference | None,
        *,
        sizes: ParallelSizes,
        device: torch.device,
        asynchronous: bool,
    ) -> None:
        """Collective. `asynchronous`: `save` returns as soon as everything is copied to the host; `finish` waits."""
        self._models = (policy, critic, reference)
        self._device, self.asynchronous = device, asynchronous
        self._group = torch.distributed.new_group(backend="gloo")  # for the threads that write
        self._rank: int = torch.distributed.get_rank()
        self._layout = sizes.recorded()
        self.saving = BackgroundSave()
        self.finish = self.saving.finish

    def save(self, directory: Path, counters: Counters, weights: Iterator[tuple[str, Tensor]], source: str) -> None:
        """Write the policy in Hugging Face format to `directory/hf`, and all else to `directory/megatron`; collective.

        The parameters are those of the last update (with overlap_param_gather they have been gathered). `weights`: of
        the policy, for `hf`; `source`: whose configuration and tokenizer go beside them. The Hugging Face files are on
        disk when this returns in any case. Raises `OSError` in all processes if one cannot write.
        """
        import megatron.core

        self.finish()
        files = directory / STATE_DIR
        with together(OSError("the first process could not make the directory of a checkpoint")):
            if self._rank == 0:
                if files.exists():
                    shutil.rmtree(files)
                files.mkdir(parents=True)
        with together(OSError("the first process could not write the weights in Hugging Face format")):
            write_hf(directory / MODEL_DIR, weights, source, writes=self._rank == 0)
        held = Held(*self._models)
        state = MegatronState(
            models={name: ModelCounters(one.updates, held.states[name].steps()) for name, one in held.trained.items()},
            parts=() if held.reference is None else (REFERENCE,),
            layout=self._layout,
            megatron_core=megatron.core.__version__,
            **dataclasses.asdict(counters),
        )
        plan = Plan(files, self._group)
        plan.prepare(held.tensors(empty=False))
        plan.own[f"random-{self._rank:05d}.safetensors"] = self._random()
        if self.asynchronous:
            plan.copy(held.live())
        self.saving.begin(lambda: plan.write(state))
        if not self.asynchronous:
            self.finish()

    def load(self, directory: Path) -> Counters:
        """Restore what `save` wrote in any layout, and return its counters; collective.

        Raises `TrainStateUnreadable` in all processes, then nothing is changed.
        """
        self.finish()
        held = Held(*self._models)
        wanted = held.tensors(empty=True)
        with together(TrainStateUnreadable(f"another process cannot read {directory}; let all see the same files")):
            state, index = read_state(directory)
            _check(directory, state, index, held, wanted)
        held.put(read_tensors(directory / STATE_DIR, index, wanted), state)
        if state.layout == self._layout:
            self._load_random(directory / STATE_DIR)
        return Counters(state.batches, state.steps, state.skipped_steps, state.empty_steps)

    def _random(self) -> dict[str, Tensor]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracked = get_cuda_rng_tracker().get_states()
        return random_state(self._device) | {f"tracked/{name}": state.clone() for name, state in tracked.items()}

    def _load_random(self, directory: Path) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker
        from safetensors.torch import load_file

        tensors = load_file(directory / f"random-{self._rank:05d}.safetensors")
        restore_random_state(tensors, self._device)
        tracked = {name.removeprefix("tracked/"): one for name, one in tensors.items() if name.startswith("tracked/")}
        get_cuda_rng_tracker().set_states(tracked)


def _check(directory: Path, state: MegatronState, index: Index, held: Held, wanted: dict[str, Any]) -> None:
    """Raise `TrainStateUnreadable` unless the files hold all that is wanted."""
    needed = [*held.trained] if held.reference is None else [*held.trained, REFERENCE]
    if missing := [name for name in needed if name not in (*state.models, *state.parts)]:
        raise TrainStateUnreadable(
            f"{directory} holds no {missing[0]}, which this run needs: it was saved by a run with other options; "
            "resume with those, or start a new run from its weights"
        )
    cure = "resume with the --hf-checkpoint and --train-dtype that the run was started with"
    check_tensors(directory, index, wanted, cure)


def check_tensors(directory: Path, index: Index, wanted: dict[str, Any], cure: str) -> None:
    """Raise `TrainStateUnreadable` unless all that is wanted is there, in its dtype and shape."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    expanded, _, _ = load_preprocess(wanted)
    for one in nested_values(expanded):
        stored, key = index.get(one.key), one.key
        dtype = str(one.dtype).removeprefix("torch.")
        shape = tuple(one.global_shape)
        if stored is None:
            difference = f"it has no {key!r}"
        elif stored.dtype != dtype:
            difference = f"{key!r} is {stored.dtype} instead of {dtype}"
        elif stored.shape != shape and not (one.allow_shape_mismatch and len(stored.shape) == len(shape)):
            difference = f"{key!r} is {stored.shape} instead of {shape}"
        else:
            continue
        raise TrainStateUnreadable(f"{directory} is of another model or precision: {difference}; {cure}")


def read_tensors(directory: Path, index: Index, wanted: dict[str, Any]) -> dict[str, Any]:
    """The wanted tensors, on the host; collective. Raises `TrainStateUnreadable`."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader

    class Reader(FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return torch_metadata(index)

    class NoCommon(TorchCommonLoadStrategy):  # type: ignore[misc]
        def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
            return {}

    usual = strategies._get_filesystem_reader
    strategies._get_filesystem_reader = lambda path, cache_metadata=False: Reader(path)
    try:
        return dict(
            dist_checkpointing.load(
                wanted,
                str(directory),
                sharded_strategy=strategies.TorchDistLoadShardedStrategy(),
                common_strategy=NoCommon(),
                validate_access_integrity=False,  # each process reads what it needs, also what others read
            )
        )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise TrainStateUnreadable(
            f"{directory} is damaged: its tensors cannot be read ({first_line(error)}); take another checkpoint"
        ) from error
    finally:
        strategies._get_filesystem_reader = usual
