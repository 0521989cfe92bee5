"""I2 where it is kept: whatever arrives, in whatever order groups are taken, no token is trained beyond the bound.

A state machine drives a real train stage on real streams and looks at what the backend is given, the last place that a
token passes. The rule of the gate is then changed by one, in both directions, and the machine has to find it.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from models.train.interface import TrainSequence
from stages.base import TrainOptions
from stages.messages import RolloutSlice, Settled, StepDone
from stages.staleness_gate import StalenessGate
from stages.train.saved_groups import write_groups
from tests.stages.stage_rig import LIMIT_S, make_sample, make_slice, take
from tests.stages.train_rig import Recorder, TrainDesk, open_training

TOTAL = 6
ORDERS = ("oldest_first", "ready_first", "priority", "tests.stages.custom_parts:newest_first")

# Versions by age in batches (0: of the newest weights), and how many tokens of each; the last part may be a tool's.
AGES = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 3)), min_size=1, max_size=3)
GROUP = st.tuples(AGES, st.booleans())


def group(group_id: int, step: int, ages: list[tuple[int, int]], tool: bool) -> RolloutSlice:
    """Two rollouts, one with the given parts and one of the newest weights. A last part of a `tool` is not trained."""
    runs = [(max(step - age, 0), n) for age, n in ages]
    mask = [1] * sum(n for _, n in runs[:-1]) + [0 if tool else 1] * runs[-1][1]
    return make_slice(
        group_id, make_sample(0, runs=runs, mask=mask, reward=1.0), make_sample(1, version=step, reward=0.0)
    )


def trainable_versions(slice_: RolloutSlice) -> list[list[int]]:
    """Of each sample, counted token by token, as a reader of the rule would."""
    versions = []
    for sample in slice_.samples:
        of_token = [run.version for run in sample.version_runs for _ in range(run.n_tokens)]
        versions.append([version for version, on in zip(of_token, sample.loss_mask, strict=True) if on])
    return versions


class Given(Recorder):
    """A backend that keeps each batch with the version that it was begun with, and begins one for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = 0
        self.permits = threading.Semaphore(0)
        self.trained: list[tuple[int, TrainSequence]] = []

    def begin_batch(self, *, rollouts: int, steps: int, version: int = 0, lr_scale: float = 1.0) -> None:
        assert self.permits.acquire(timeout=LIMIT_S)
        self.batch = version

    def accumulate(self, sequences: Sequence[TrainSequence]) -> None:
        self.trained += [(self.batch, sequence) for sequence in sequences]


class TrainerBuffer(RuleBasedStateMachine):
    """Groups of random ages arrive, before a batch is begun or while it is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        self.place = tempfile.TemporaryDirectory()
        self.closing = asyncio.Event()
        self.sent: dict[int, RolloutSlice] = {}
        self.ended: dict[int, str] = {}
        self.step = 0

    @initialize(
        order=st.sampled_from(ORDERS),
        eta=st.integers(0, 3),
        batch=st.integers(1, 2),
        deterministic=st.booleans(),
        start=st.integers(0, 3),
        restored=st.lists(GROUP, max_size=3),
        masked=st.booleans(),
    )
    def begin(
        self, order: str, eta: int, batch: int, deterministic: bool, start: int, restored: list[Any], masked: bool
    ) -> None:
        """A run, perhaps one that is resumed with groups in its checkpoint."""
        self.eta, self.batch, self.step, self.masked = eta, batch, start, masked
        handler = "train_masked" if masked else "requeue"
        path = Path(self.place.name)
        self.backend = Given()
        groups = [self.made(*one) for one in restored]
        write_groups(path, groups)
        self.patch.setattr("tests.stages.train_rig.Recorder", lambda: self.backend)
        rig = open_training(
            path,
            self.patch,
            batch=batch,
            total=TOTAL,
            eta=eta,
            options=TrainOptions(start, 1, str(path), frozenset(self.sent)),
            asynchrony={
                "buffer_order": order,
                "update_weights_interval": TOTAL,
                "async_unused_samples_handler": handler,
            },
            run={"deterministic": deterministic},
        )
        ready = self.loop.create_future()

        async def hold() -> None:
            """What is open is closed in the task that opened it."""
            async with rig as desk:
                ready.set_result(desk)
                await self.closing.wait()

        self.held = self.loop.create_task(hold())
        self.loop.run_until_complete(asyncio.wait({self.held, ready}, return_when=asyncio.FIRST_COMPLETED))
        self.desk: TrainDesk = ready.result()

    def made(self, ages: list[tuple[int, int]], tool: bool) -> RolloutSlice:
        group_id = len(self.sent)
        self.sent[group_id] = group(group_id, self.step, ages, tool)
        return self.sent[group_id]

    @rule(groups=st.lists(GROUP, min_size=1, max_size=3), backwards=st.booleans())
    def arrive(self, groups: list[Any], backwards: bool) -> None:
        """After the last batch too: they are discarded then."""
        made = [self.made(*one) for one in groups]
        self.loop.run_until_complete(self.deliver(made[::-1] if backwards else made))

    async def deliver(self, groups: list[RolloutSlice]) -> None:
        arrived = self.desk.stage.activity.items_in + len(groups)
        await self.desk.send(*groups)
        await self.desk.arrived(arrived)

    @rule(early=st.booleans())
    @precondition(lambda self: self.step < TOTAL)
    def train(self, early: bool) -> None:
        """One batch. It is begun before or after enough groups have come that the gate cannot refuse."""
        self.loop.run_until_complete(self.one_batch([self.made([(0, 2)], False) for _ in range(self.batch)], early))

    async def one_batch(self, enough: list[RolloutSlice], early: bool) -> None:
        if early:
            self.backend.permits.release()
        await self.deliver(enough)
        if not early:
            self.backend.permits.release()
        while not isinstance(await self.report(), StepDone):
            pass

    async def report(self) -> object:
        """The next one, reports are in the order of what they tell."""
        report = await take(self.desk.reports)
        match report:
            case Settled():
                self.end(report.group_id, report.outcome)
                # Nothing that could be trained is refused: the batch in hand is the one after the last report.
                sent = self.sent[report.group_id]
                versions = [version for of_sample in trainable_versions(sent) for version in of_sample]
                too_old = self.step - (max if self.masked else min)(versions) > self.eta
                made_up = max(run.version for sample in sent.samples for run in sample.version_runs) > self.step
                reported = report.outcome == "discarded" or (report.outcome == "failed" and made_up)
                assert too_old or reported, f"group {report.group_id} was refused: {report.detail}"
            case StepDone():
                for group_id in report.groups:
                    self.end(group_id, "trained")
                self.step = report.step
        return report

    def end(self, group_id: int, outcome: str) -> None:
        assert group_id not in self.ended, f"group {group_id} ended as {self.ended.get(group_id)} and as {outcome}"
        self.ended[group_id] = outcome

    def teardown(self) -> None:
        try:
            if hasattr(self, "desk"):
                self.check_trained()
            if self.step == TOTAL:
                self.loop.run_until_complete(self.all_ended())
        finally:
            self.closing.set()
            if hasattr(self, "held"):
                self.backend.permits.release(TOTAL)  # the thread must end
                self.loop.run_until_complete(self.held)
            self.loop.close()
            self.patch.undo()
            self.place.cleanup()

    def check_trained(self) -> None:
        for batch, sequence in self.backend.trained:
            ages = batch - sequence.versions[sequence.loss_mask > 0]
            assert np.all(ages >= 0), f"batch {batch} trains tokens of weights that nobody has made"
            assert np.all(ages <= self.eta), f"batch {batch} trains tokens of ages {ages}, the bound is {self.eta}"
            versions = trainable_versions(self.sent[sequence.group_id])[sequence.rollout_id % 2]
            fresh = sum(batch - version <= self.eta for version in versions)
            assert len(ages) == fresh, f"batch {batch} trains {len(ages)} of {fresh} tokens within the bound"

    async def all_ended(self) -> None:
        while len(self.ended) < len(self.sent):
            await self.report()


QUICK = settings(
    max_examples=30, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.full)], ids=["few", "many"])
def test_no_token_older_than_the_bound_is_trained(examples: int) -> None:
    run_state_machine_as_test(TrainerBuffer, settings=settings(QUICK, max_examples=examples))


@pytest.mark.full
@pytest.mark.parametrize("by", [1, -1], ids=["one version too many", "one too few"])
def test_the_machine_finds_a_rule_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    rule_ = StalenessGate.batches_left
    monkeypatch.setattr(StalenessGate, "batches_left", lambda gate, **requested: rule_(gate, **requested) + by)
    once = settings(QUICK, max_examples=100, phases=[hypothesis.Phase.generate], derandomize=True)
    with pytest.raises((AssertionError, FlakyFailure)) as found:
        run_state_machine_as_test(TrainerBuffer, settings=once)
    # A batch begun early races with its groups, so hypothesis may not see the failure again and wraps the first one.
    errors = found.value.exceptions if isinstance(found.value, FlakyFailure) else [found.value]
    assert any(re.search("the bound is|was refused", str(error)) for error in errors), errors
