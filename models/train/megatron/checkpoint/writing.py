"""Writing the tensors of a training state: planned together, written by a thread of each process.

Megatron's own asynchronous writer is not used: it forks a process from one that has threads, starts a manager by spawn
(which hangs without an `if __name__ == "__main__"` guard in the script, and fails in a daemonic process) and needs a
collective to complete, which waits for training. Here a thread writes, and agrees with those of the others.
"""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.train.huggingface.hf_files import write_tensors
from models.train.megatron.checkpoint.files import MegatronState, Written, complete, index_of, written_by_all


class Plan:
    """What this process writes, and in the first one, what all do."""

    def __init__(self, directory: Path, group: Any | None = None) -> None:
        """`group`: over which `write` agrees, on the CPU; None = the default one."""
        self._directory, self._group = directory, group
        self._first = torch.distributed.get_rank() == 0
        self._writer: Any = None
        self._metadata: Any = None
        self._own: dict[str, dict[str, Tensor]] = {}

    def prepare(self, tensors: dict[str, Any]) -> None:
        """Agree on who writes what; collective."""
        from megatron.core import parallel_state as ps
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        class Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
            made: tuple[Any, Any]

            def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> None:
                self.made = writer, planned[1]

        strategy = Strategy("torch_dist", 1, thread_count=1)
        sharded, _ = save_preprocess(tensors)
        group = ps.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:  # every replica writes a part of the weights; optimizer states are assigned already
            FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(sharded["weights"])
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = queue.SimpleQueue()  # else a process is spawned for a queue that is idle
        strategy.async_save(sharded, self._directory)
        self._writer, self._metadata = strategy.made

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """A file of this process's own, in safetensors format; the tensors are not copied."""
        self._own[name] = tensors

    def copy(self, live: set[int]) -> None:
        """Make a copy on the host of all that training goes on to change."""

        def own(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor.detach().cpu()
            return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in live else tensor

        self._writer.write_buckets = [
            (path, name, (data, [(item, own(tensor)) for item, tensor in tensors]))
            for path, name, (data, tensors) in self._writer.write_buckets
        ]

    def write(self, state: MegatronState) -> None:
        """Write this process's part, and in the first one, what makes the files of all a state; collective.

        Raises `OSError` in all processes if one cannot write its part.
        """
        failure: Exception | None = None
        try:
            own = Written(self._write_part())
        except Exception as error:  # raised again once the others know
            failure, own = error, Written(error=f"{type(error).__name__}: {error}")
        finally:
            self._writer.write_buckets = []
        try:
            written = written_by_all(own, self._group)
        except OSError as told:
            raise failure or told from None
        if self._first:
            self._write_for_others(written)
            complete(self._directory, state, index_of(self._metadata.state_dict_metadata, written))

    def _write_part(self) -> list[tuple[str, tuple[int, ...], str, int, int]]:
        for name, tensors in self._own.items():
            write_tensors(self._directory / name, tensors)
        return [
            (one.index.fqn, tuple(one.index.offset), stored.relative_path, stored.offset, stored.length)
            for bucket in self._writer.write_buckets
            for one in self._write_bucket(bucket)
            for stored in (one.storage_data,)
        ]

    def _write_bucket(self, bucket: Any) -> list[Any]:
        from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

        path, name, (_, tensors) = bucket
        results = []
        with open(path, "wb") as stream:
            for item, tensor in tensors:
                form = SerializationFormat.TORCH_SAVE
                host = tensor.detach().cpu()
                results.append(_write_item(self._writer.transforms, stream, host, item, name, form))
            stream.flush()
            os.fsync(stream.fileno())
        return results

    def _write_for_others(self, written: list[Written]) -> None:
        """The files by which Megatron's own programs know a checkpoint."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult

        self._metadata.__dict__.pop("all_local_plans", None)  # only of use to who saves in the same layout again
        results = [
            [
                WriteResult(MetadataIndex(name, torch.Size(offsets)), length, _StorageInfo(file, start, length))
                for name, offsets, file, start, length in one.places
            ]
            for one in written
        ]
        self._writer.finish(self._metadata, results)
        torch.save({"checkpoint_version": 3.0}, self._directory / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
