"""Profile of a window of rollout batches by torch's profiler, and the memory history of a GPU, of one rank.

Invariant: everything is called in the thread that trains, because torch profiles the thread that began it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import torch

from configs.schema.run import DebugConfig
from models.errors import TrainConfigInvalid

FOLDER: Final = "profile"  # in the directory of the run
MOST_EVENTS: Final = 1_000_000  # allocations in a memory history

log = logging.getLogger("sluice.profile")


class Profiler:
    """Writes `rank-N.json.gz` (Chrome's trace format) and `rank-N-<memory_snapshot_path>` into `directory`."""

    def __init__(self, debug: DebugConfig, directory: Path) -> None:
        self._debug, self._directory = debug, directory
        self._running: torch.profiler.profile | None = None
        self._records = False  # a memory history, from which a snapshot will be written

    def setup(self) -> None:
        """Begin the memory history, before a model is loaded. Raises TrainConfigInvalid without a GPU."""
        if not self._debug.record_memory_history:
            return
        if not torch.cuda.is_available():
            raise TrainConfigInvalid(
                "record_memory_history=True, but this process sees no CUDA device, whose memory it records; leave "
                "--record-memory-history out"
            )
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._snapshot())
        self._records = True

    def begin(self, batch: int) -> None:
        """Rollout batch number `batch`, from 0, begins."""
        debug = self._debug
        inside = debug.use_pytorch_profiler and debug.profile_step_start <= batch < debug.profile_step_end
        if inside and self._running is None:
            self._running = torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True)
            self._running.start()

    def end(self, batches: int) -> None:
        """So many batches are trained."""
        if self._running is not None and batches >= self._debug.profile_step_end:
            running, self._running = self._running, None
            running.stop()
            path = self._place(".json.gz")
            running.export_chrome_trace(str(path))
            log.info("the profile up to batch %d is in %s", batches, path)
        if self._records and batches >= self._debug.memory_snapshot_num_steps:
            self._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records = False

    def _snapshot(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._place(f"-{self._debug.memory_snapshot_path}")))

    def _place(self, ending: str) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self._directory / f"rank-{rank}{ending}"
