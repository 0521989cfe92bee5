"""The train stage among real streams and weight slots; its backend only writes down what it is told."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from configs.schema import Config
from models.train.interface import TrainSequence, WeightExporter
from stages.base import TrainOptions
from stages.messages import CheckpointReady, RolloutSlice, StepDone
from stages.train.stage import TrainStage
from tests.models.weights.made_up import checkpoint, values
from tests.stages import stage_rig
from tests.stages.stage_rig import REPORT, Fed, make_config, make_context, make_graded, open_rig, running, take, until
from transport.stream import Inlet


@dataclass
class Recorder(WeightExporter):
    """A backend whose weights are the number of its steps. `begin`, `steps` and `exports` may hold it up."""

    log: list[str] = field(default_factory=list)
    sequences: list[TrainSequence] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # of the learning rate, by batch
    begin: threading.Event = field(default_factory=threading.Event)
    may_step: threading.Event = field(default_factory=threading.Event)
    may_export: threading.Event = field(default_factory=threading.Event)
    steps: int = 0
    calls: int = 0  # of accumulate
    scored: list[tuple[int, int, int]] = field(default_factory=list)  # (group, sequences handed over, steps before it)

    def setup(self) -> None:
        self.log.append("setup")

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
        self.scored += [(sequences[0].group_id, len(self.sequences), self.steps)]
        return [s.rollout_log_probs[s.prompt_length :] for s in sequences]

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        assert self.begin.wait(stage_rig.LIMIT_S)
        self.scales.append(lr_scale)

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        self.sequences += sequences
        self.calls += 1
        self.log += [f"group {group_id}" for group_id in dict.fromkeys(one.group_id for one in sequences)]

    def step(self) -> dict[str, float]:
        self.log.append("step")
        assert self.may_step.wait(stage_rig.LIMIT_S)
        self.steps += 1
        return {"train/loss": 0.5}

    def flush(self) -> None:
        self.log.append("flush")

    def discard(self) -> None:
        self.log.append("discard")

    def finish_save(self) -> None:
        self.log.append("finish save")

    def close(self) -> None:
        self.log.append("close")

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.log.append("export")
        pairs = list(values(self.steps).items())
        yield from pairs[:2]
        assert self.may_export.wait(stage_rig.LIMIT_S)
        yield from pairs[2:]

    def save(self, directory: Path) -> None:
        self.log.append("save")
        directory.mkdir(parents=True)
        (directory / "weights").write_text(str(self.steps))

    def load(self, directory: Path) -> None:
        self.log.append(f"load {directory.name}")

    @property
    def batches(self) -> list[list[int]]:
        """Group ids between the steps."""
        found: list[list[int]] = [[]]
        for entry in self.log:
            if entry == "step":
                found.append([])
            elif entry.startswith("group"):
                found[-1].append(int(entry.split()[1]))
        return found[:-1]


def aged(group_id: int, version: int) -> RolloutSlice:
    """Made by one version of the weights."""
    return make_graded(group_id, version=version)


@dataclass
class TrainDesk(Fed):
    stream = "train"
    backend: Recorder
    reports: Inlet[Any]

    async def arrived(self, n: int) -> None:
        await until(lambda: self.stage.activity.items_in >= n)

    async def begin_with(self, *slices: RolloutSlice) -> None:
        """The first batch begins when all of these have come; opened with `hold=["begin"]`."""
        await self.send(*slices)
        await self.arrived(len(slices))
        self.backend.begin.set()

    async def report(self, kind: type[Any], passing: tuple[type[Any], ...] = ()) -> Any:
        """The next report, which must be of `kind`; those of the kinds `passing` may come before it."""
        found = await take(self.reports)
        while isinstance(found, passing):
            found = await take(self.reports)
        assert isinstance(found, kind), found
        return found


Training = Callable[..., AbstractAsyncContextManager[TrainDesk]]  # `open_training` in the directory of the test


@asynccontextmanager
async def open_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    batch: int = 2,
    total: int = 1,
    eta: int = 1,
    hold: Sequence[str] = (),
    options: TrainOptions | None = None,
    waiting: Sequence[RolloutSlice] = (),
    **sections: dict[str, object],
) -> AsyncIterator[TrainDesk]:
    """`waiting`: groups that are in the stage's stream when it begins."""
    backend = Recorder()
    for name in {"begin", "may_step", "may_export"} - set(hold):
        getattr(backend, name).set()
    monkeypatch.setattr("models.train.build.build_backend", lambda config, total, run_dir: backend)
    sections["rollout"] = {"rollout_batch_size": batch, "num_rollout": total, "n_samples_per_prompt": 2}
    sections["asynchrony"] = {"max_staleness": eta, **sections.get("asynchrony", {})}
    source = checkpoint(tmp_path / "source")
    sections["train"] = {"hf_checkpoint": str(source), **sections.get("train", {})}
    config: Config = make_config(**sections)
    options = msgspec.structs.replace(options or TrainOptions(), slots=str(tmp_path / "slots"))
    stage = TrainStage(make_context(config, tmp_path, built_in=options))
    async with open_rig() as rig:
        ports = await rig.join({"in": ("train", RolloutSlice)}, {"settle": ("settle", REPORT)})
        reports, feed = await rig.inlet("settle"), await rig.outlet("train")
        for slice_ in waiting:
            await feed.send(slice_, slice_.key)
        try:
            async with running(stage, ports) as task:
                first = await take(reports)
                while isinstance(first, CheckpointReady):
                    first = await take(reports)
                assert isinstance(first, StepDone)
                assert first.groups == ()
                yield TrainDesk(rig, stage, task, feed, backend, reports)
        finally:
            for event in (backend.begin, backend.may_step, backend.may_export):
                event.set()  # the thread must end, whatever the test found
