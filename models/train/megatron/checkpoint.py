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
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from models.errors import TrainStateUnreadable, first_line
from models.train.dp_group import together
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
from models.train.megatron.trained_models import MegatronCritic, SwappedReference, TrainedChunks
from models.train.model_set import Counters
from models.train.spec import TrainSpec

POLICY: Final = "policy"
CRITIC: Final = "critic"
REFERENCE: Final = "reference"

Weights = dict[str, dict[str, Any]]  # by model and name: `model_weights`


class SavedModels(Protocol):
    """The models of a run, as their checkpoints need them."""

    spec: TrainSpec
    device: torch.device
    policy: TrainedChunks
    critic: MegatronCritic | None
    reference: SwappedReference | None
    saving_group: Any

    def export(self) -> Iterator[tuple[str, Tensor]]: ...


class Held:
    """The tensors of all models, with their places in the whole."""

    def __init__(self, models: SavedModels) -> None:
        self.trained: dict[str, TrainedChunks] = {POLICY: models.policy}
        if models.critic is not None:
            self.trained[CRITIC] = models.critic.trained
        reference = models.reference
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
            tensors += self.reference.state_tensors().values()
        tensors += [tensor for state in self.states.values() for tensor in state.live()]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _reference(self, *, empty: bool) -> Iterator[tuple[str, Any]]:
        if self.reference is None:
            return
        sharded = {id(one.data): one for one in self._weights[POLICY].values()}
        live = [dict(chunk.named_parameters()) | dict(chunk.named_buffers()) for chunk in self.trained[POLICY].chunks]
        for place, (name, tensor) in enumerate(self.reference.state_tensors().items()):
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


_writer = ThreadPoolExecutor(1, "checkpoint")  # its thread outlives the main one
_saving: weakref.WeakKeyDictionary[SavedModels, Future[None]] = weakref.WeakKeyDictionary()


def save(models: SavedModels, directory: Path, counters: Counters, *, asynchronous: bool = False) -> None:
    """Write the policy in Hugging Face format to `directory/hf`, and all else to `directory/megatron`; collective.

    The parameters are those of the last update (with overlap_param_gather they have been gathered).

    `asynchronous`: return as soon as everything is copied to the host; `finish` waits for the rest. The Hugging Face
    files are written before in either case. Raises `OSError` in all processes if one cannot write.
    """
    finish(models)
    rank = torch.distributed.get_rank()
    files = directory / STATE_DIR
    with together(OSError("the first process could not make the directory of a checkpoint")):
        if rank == 0:
            if files.exists():
                shutil.rmtree(files)
            files.mkdir(parents=True)
    _write_hf(models, directory / MODEL_DIR)
    held = Held(models)
    state = _state_of(models, held, counters)
    plan = Plan(files, models.saving_group)
    plan.prepare(held.tensors(empty=False))
    plan.add(f"random-{rank:05d}.safetensors", _random(models.device))
    if asynchronous:
        plan.copy(held.live())
    _saving[models] = _writer.submit(plan.write, state)
    if not asynchronous:
        finish(models)


def finish(models: SavedModels) -> None:
    """Wait until a save that was begun is complete; collective. Raises `OSError` in all processes if one failed."""
    saving = _saving.pop(models, None)
    if saving is not None:
        with together(OSError("another process could not write its part of a checkpoint")):
            saving.result()


def load(models: SavedModels, directory: Path) -> Counters:
    """Restore what `save` wrote in any layout, and return its counters; collective.

    Raises `TrainStateUnreadable` in all processes, then nothing is changed.
    """
    finish(models)
    held = Held(models)
    wanted = held.tensors(empty=True)
    with together(TrainStateUnreadable(f"another process cannot read {directory}; let all see the same files")):
        state, index = read_state(directory)
        _check(directory, state, index, held, wanted)
    held.put(read_tensors(directory, index, wanted), state)
    _load_random(directory / STATE_DIR, state, models.device)
    return Counters(state.batches, state.steps, state.skipped_steps, state.empty_steps)


def _state_of(models: SavedModels, held: Held, counters: Counters) -> MegatronState:
    import megatron.core

    return MegatronState(
        models={name: ModelCounters(one.updates, held.states[name].steps()) for name, one in held.trained.items()},
        parts=() if held.reference is None else (REFERENCE,),
        layout=parallel_layout(),
        megatron_core=megatron.core.__version__,
        **dataclasses.asdict(counters),
    )


def parallel_layout() -> dict[str, int]:
    """The sizes of the layout of this process, as a state records them."""
    from megatron.core import parallel_state as ps

    return {
        "processes": torch.distributed.get_world_size(),
        "tensor": ps.get_tensor_model_parallel_world_size(),
        "pipeline": ps.get_pipeline_model_parallel_world_size(),
        "context": ps.get_context_parallel_world_size(),
        "expert": ps.get_expert_model_parallel_world_size(),
        "expert_tensor": ps.get_expert_tensor_parallel_world_size(),
    }


def _write_hf(models: SavedModels, directory: Path) -> None:
    """The weights, by the first process; the others take part in gathering them, also when it fails."""
    tensors = models.export()
    with together(OSError("the first process could not write the weights in Hugging Face format")):
        try:
            write_hf(directory, tensors, models.spec.train.hf_checkpoint, writes=torch.distributed.get_rank() == 0)
        finally:
            for _ in tensors:  # none is left where all were written
                continue


def _check(directory: Path, state: MegatronState, index: Index, held: Held, wanted: dict[str, Any]) -> None:
    """Raise `TrainStateUnreadable` unless the files hold all that is wanted."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

    needed = [*held.trained] if held.reference is None else [*held.trained, REFERENCE]
    if missing := [name for name in needed if name not in (*state.models, *state.parts)]:
        raise TrainStateUnreadable(
            f"{directory} holds no {missing[0]}, which this run needs: it was saved by a run with other options; "
            "resume with those, or start a new run from its weights"
        )
    expanded, _, _ = load_preprocess(wanted)
    for one in nested_values(expanded):
        stored, key = index.get(one.key), one.key
        dtype = str(one.dtype).removeprefix("torch.")
        if stored is None:
            raise _of_another_model(directory, f"it has no {key!r}")
        if stored.dtype != dtype:
            raise _of_another_model(directory, f"{key!r} is {stored.dtype} instead of {dtype}")
        shape = tuple(one.global_shape)
        if stored.shape != shape and not (one.allow_shape_mismatch and len(stored.shape) == len(shape)):
            raise _of_another_model(directory, f"{key!r} is {stored.shape} instead of {shape}")


def _of_another_model(directory: Path, difference: str) -> TrainStateUnreadable:
    return TrainStateUnreadable(
        f"{directory} is of another model or precision: {difference}; resume with the --hf-checkpoint and "
        "--train-dtype that the run was started with"
    )


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
                str(directory / STATE_DIR),
                sharded_strategy=strategies.TorchDistLoadShardedStrategy(),
                common_strategy=NoCommon(),
                validate_access_integrity=False,  # each process reads what it needs, also what others read
            )
        )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise TrainStateUnreadable(
            f"{directory} is damaged: its tensors cannot be read ({first_line(error)}); resume from another checkpoint"
        ) from error
    finally:
        strategies._get_filesystem_reader = usual


def _random(device: torch.device) -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    return random_state(device) | {f"tracked/{name}": state.clone() for name, state in tracked.items()}


def _load_random(directory: Path, state: MegatronState, device: torch.device) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import load_file

    if state.layout != parallel_layout():
        return
    tensors = load_file(directory / f"random-{torch.distributed.get_rank():05d}.safetensors")
    restore_random_state(tensors, device)
    tracked = {name.removeprefix("tracked/"): one for name, one in tensors.items() if name.startswith("tracked/")}
    get_cuda_rng_tracker().set_states(tracked)
