"""Rules of the product that are broken on purpose, each in one place, and what sees it: a test that cannot fail proves
nothing. docs/reliability.md has the table, with the mutants that other tests keep beside their subject.

Some are seen by the oracle of the chaos suite, in the books of three steps that are killed after the second and
resumed (`live`), kept by the product's own recorder, journal and checkpoints. Others are seen by an existing test,
which is called here under the mutant and must fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from configs.schema import Config
from models import checkpoint
from models.checkpoint import draft_path, remove_leftovers, resumable_checkpoint
from pipeline.facts.run_directory import RunDir
from pipeline.record import journal as journal_module
from pipeline.record.journal import Journal, RolledBack
from pipeline.record.recorder import ANY_RUN, Recorder
from stages.generate.stage import GenerateStage
from stages.graders import grade
from stages.group.stage import GroupStage
from stages.messages import CheckpointReady, Outcome, Settled, StepDone, VersionRun, WeightsAnnouncement
from stages.ports import read_value
from stages.prompts.ledger import Ledger, LedgerSnapshot
from stages.prompts.stage import PromptStage
from stages.sampling import requests
from stages.staleness_gate import StalenessGate
from stages.train.held_groups import GroupBuffer, HeldGroups
from stages.train.stage import TrainStage
from stages.train.weights import WeightPublisher
from tests.chaos.oracle import DISAGREE, LOST, STALE, TWICE, Expected, judge
from tests.stages.stage_rig import open_desk, open_rig
from tests.stages.train_rig import open_training
from transport.core.session import Session

EXPECTED = Expected(steps=3, groups_per_step=2, bound=2)
CONFIG = msgspec.convert({"observe": {"use_tensorboard": False, "trace": False}}, Config)


# ---------------------------------------------------------------------- what the oracle sees


class Life:
    """One start of a run of which only the books are kept, as the prompt stage keeps them."""

    def __init__(self, rundir: RunDir) -> None:
        self.rundir = rundir
        remove_leftovers(rundir.checkpoints)
        found = resumable_checkpoint(rundir.checkpoints, lambda line: None)
        manifest = found[1] if found is not None else None
        snapshot = msgspec.json.decode(manifest.ledger, type=LedgerSnapshot) if manifest is not None else None
        resumed = rundir.ledger.exists()
        self.run_generation = journal_module.last_run_generation(rundir.ledger) + 1 if resumed else 0
        step = manifest.step if manifest is not None else 0
        self.recorder = Recorder(
            CONFIG,
            rundir,
            step if resumed else None,
            msgspec.structs.replace(ANY_RUN, run_generation=self.run_generation),
        )
        self.ledger = self.recorder.ledger = Ledger(snapshot)
        self._first: tuple[journal_module.Event, ...] = ()
        if resumed and snapshot is not None:
            reopened = tuple(group.group_id for group in snapshot.open)
            self._first = (RolledBack(step, self.run_generation, snapshot.next_group, reopened),)

    def __enter__(self) -> Life:
        self.recorder.__enter__()
        self.recorder.journal.begin_with(*self._first, self.recorder.began)
        return self

    def __exit__(self, *_: object) -> None:
        self.recorder.__exit__(None, None, None)

    def admit(self, count: int) -> None:
        for _ in range(count):
            self.recorder.admitted(self.ledger.admit(position=self.ledger.cursor))

    def end(self, step: int, outcome: Outcome, *groups: int) -> None:
        self.recorder.settled([(step, Settled(group, outcome, step=step)) for group in groups])
        for group in groups:
            self.ledger.settle(group, outcome)

    async def step(self, number: int, *groups: int, lag: int = 0) -> None:
        self.end(number, "trained", *groups)
        metrics, oldest = {"staleness/max": float(lag)}, {lag: 10}
        await self.recorder.step(
            StepDone(number, number, groups, metrics, 10, token_hash=f"{groups}", staleness=oldest)
        )

    def draft(self, number: int) -> Path:
        path = draft_path(self.rundir.checkpoints, number)
        path.mkdir()
        (path / "buffer.msgpack").write_bytes(b"0" * 16)
        return path

    async def save(self, number: int) -> None:
        ready = CheckpointReady(number, number, str(self.draft(number)))
        await self.recorder.commit(ready, self.ledger.snapshot())


async def live(home: Path) -> None:
    """Three steps of two groups; killed after the second, while its checkpoint is written, and resumed."""
    with RunDir(home).open(resume=False) as rundir:
        with Life(rundir) as first:
            await first.recorder.step(StepDone(0, 0, (), {}, 0))
            first.admit(6)
            await first.step(1, 0, 1)
            await first.save(1)
            first.admit(1)
            first.end(1, "filtered", 2)
            await first.step(2, 3, 4, lag=1)
            first.draft(4)  # of a step that the second life does not reach, and so does not write over
        with Life(rundir) as second:
            await second.recorder.step(StepDone(1, 1, (), {}, 0))
            second.admit(2)
            await second.step(2, 2, 3, lag=1)
            await second.save(2)
            second.end(2, "failed", 4)
            await second.step(3, 5, 6, lag=2)
            second.end(3, "discarded", 7)
            await second.save(3)


# How a mutant does it: what it is given as it was, then its arguments. The attribute of an object that it replaces.
Change = tuple[object, str, object]
commit, make_ledger, settled, step = Recorder.commit, Ledger.__init__, Recorder.settled, Recorder.step
open_metrics = Recorder._open_metrics


async def keeps_from_before(self: Recorder, report: CheckpointReady, ledger: LedgerSnapshot) -> None:
    """The ids that a checkpoint holds are written apart from it, and so of another moment."""
    before = getattr(self, "before", ledger)
    self.before = ledger  # type: ignore[attr-defined]
    await commit(self, report, before if report.step == EXPECTED.steps else ledger)


def forgets_open_groups(self: Ledger, snapshot: LedgerSnapshot | None = None) -> None:
    """What was settled after the checkpoint stays settled after the roll-back."""
    make_ledger(self, snapshot)
    self._open = {}


def loses_ends(self: Recorder, groups: Any) -> None:
    settled(self, [(at, report) for at, report in groups if report.outcome != "filtered" and at != 3])


def keeps_rows(self: Recorder) -> Any:
    """Rows of steps that never happened stay."""
    self.resume_step = None
    return open_metrics(self)


async def ages_late(self: Recorder, report: StepDone) -> None:
    """The bound of consumption is off by one: what was two versions old is three."""
    lag = {age + 1: n for age, n in report.staleness.items()}
    await step(self, msgspec.structs.replace(report, staleness=lag))


SEEN_BY_THE_ORACLE: dict[str, tuple[Change, str, str]] = {
    "checkpoint and ids in two files": (
        (Recorder, "commit", keeps_from_before), DISAGREE, "books that the journal never had",
    ),
    "dedup set not rolled back": ((Ledger, "__init__", forgets_open_groups), DISAGREE, "the journal"),
    "version number reused after restore": (
        (journal_module, "last_run_generation", lambda path: -1), DISAGREE, "labels of weights repeat",
    ),
    "no roll-back is written down": (
        (Journal, "begin_with", lambda self, *events: None), TWICE, "step 2 is there again",
    ),
    "an end that is not journaled": ((Recorder, "settled", loses_ends), LOST, "has no end"),
    "rows of undone steps stay": ((Recorder, "_open_metrics", keeps_rows), TWICE, "2 rows of step 2"),
    "consumption off by one": ((Recorder, "step", ages_late), STALE, "trained tokens 3 versions old, over 2"),
    "half a checkpoint is left": (
        (sys.modules[__name__], "remove_leftovers", lambda root: None), DISAGREE, "step-00000004.draft was left behind",
    ),
}  # fmt: skip


async def test_the_oracle_has_nothing_to_say_of_the_rules_as_they_are(tmp_path: Path) -> None:
    await live(tmp_path / "run")
    assert judge(tmp_path / "run", EXPECTED) == []


@pytest.mark.parametrize("name", SEEN_BY_THE_ORACLE)
async def test_the_oracle_sees_the_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, kind, words = SEEN_BY_THE_ORACLE[name]
    monkeypatch.setattr(*change)
    await live(tmp_path / "run")
    faults = judge(tmp_path / "run", EXPECTED)
    assert [fault for fault in faults if fault.kind == kind and words in fault.text], faults


# ---------------------------------------------------------------------- what a test sees


add, take, write, publish, serve = (
    HeldGroups.add, GroupStage._take, WeightPublisher.write, TrainStage._publish, GenerateStage._serve,
)  # fmt: skip
set_option = zmq.Socket.set


def trains_again(self: HeldGroups, lease: Any) -> None:
    self._seen.clear()
    add(self, lease)


async def releases_at_once(self: GroupStage, lease: Any, ports: Any) -> Any:
    lease.done()
    self._release = lambda open_: None  # type: ignore[method-assign]
    return await take(self, lease, ports)


def frees_slots_at_the_step(self: PromptStage) -> int:
    if self.version < 0:
        return 0
    return self.gate.capacity(version=self.steps, trained=self.ledger.trained, open_groups=self.ledger.open)


async def publishes_early(self: TrainStage, ports: Any, due: Any) -> None:
    """The next version is announced as soon as its step is done, with the slot that is still to be written."""
    if self.weights is not None and self.weights.newest >= 0:
        reported = read_value(ports.topic, "weights", WeightsAnnouncement)
        assert reported is not None
        early = msgspec.structs.replace(reported, version=self.steps)
        await ports.topic.publish("weights", msgspec.msgpack.encode(early))
    await publish(self, ports, due)


def stamped_by_the_client(had: Any, runs: Any) -> tuple[VersionRun, ...]:
    """All tokens of an answer get the version that the engine has when the answer is there."""
    every = (*had, *runs)
    return (VersionRun(every[-1].version, sum(run.n_tokens for run in every)),) if every else ()


async def one_inlet_for_prompts_and_turns(self: GenerateStage, inlet: Any, ports: Any) -> None:
    places = vars(self).setdefault("places", asyncio.Semaphore(2))
    async with asyncio.TaskGroup() as tasks:
        while True:
            await places.acquire()
            if (lease := await inlet.receive()) is None:
                return
            tasks.create_task(serve(self, lease, ports)).add_done_callback(lambda _: places.release())


TRAIN, LOOPS = "tests.stages.test_train_stage:", "tests.stages.test_generate_loops:"
ANNOUNCED = f"{TRAIN}test_a_version_is_announced_only_when_its_slot_is_complete"
SEEN_BY_A_TEST: dict[str, tuple[str, *tuple[Change, ...]]] = {
    "a group delivered twice is trained twice": (
        TRAIN + "test_a_group_is_trained_once_however_often_it_is_delivered", (HeldGroups, "add", trains_again),
    ),
    "released before it is handed over": (
        "tests.stages.test_group_stage:test_leases_are_released_only_after_the_group_has_left",
        (GroupStage, "_take", releases_at_once),
    ),
    "newest first": (
        TRAIN + "test_the_oldest_groups_here_are_trained_first",
        (GroupBuffer, "_place", lambda self, waiting: (-waiting.group_id, waiting.arrival, waiting)),
    ),
    "consumption check off": (
        TRAIN + "test_a_group_is_refused_exactly_beyond_the_bound", (StalenessGate, "fresh", lambda self, **ask: True),
    ),
    "slot freed at batch take": (
        "tests.stages.test_prompt_stage:test_the_gate_follows_the_formula_and_frees_only_when_weights_have_landed",
        (PromptStage, "capacity", property(frees_slots_at_the_step)),
    ),
    "version label off by one": (
        ANNOUNCED,
        (WeightPublisher, "write", lambda self, version, *rest, **named: write(self, version + 1, *rest, **named)),
    ),
    "label published before weights": (ANNOUNCED, (TrainStage, "_publish", publishes_early)),
    "version stamped by client": (
        "tests.stages.test_generate_stage:test_version_runs_are_the_engines_spans_and_neighbours_are_joined",
        (requests, "join_runs", stamped_by_the_client),
    ),
    "shared feedback inlet": (
        LOOPS + "test_the_feedback_edge_flows_while_prompts_fill_the_window",
        (GenerateStage, "_pump", one_inlet_for_prompts_and_turns),
    ),
    "ROUTER_MANDATORY off": (
        "tests.transport.test_transport_security:test_a_route_to_no_peer_is_reported",
        (zmq.Socket, "set",
         lambda self, option, value: option == zmq.ROUTER_MANDATORY or set_option(self, option, value)),
    ),
    "oversize not checked by sender": (
        LOOPS + "test_a_slice_above_the_limit_goes_on_failed_with_the_reason_and_the_replica_lives",
        (Session, "max_message_bytes", property(lambda self: 1 << 40, lambda self, size: None)),
    ),
    "rename without fsync": (
        "tests.models.test_checkpoint:test_files_then_directory_then_rename_then_parent",
        (checkpoint, "sync_tree", lambda path: None),
    ),
    "journal not synced before the checkpoint": (
        "tests.pipeline.test_journal:"
        "test_what_came_before_a_checkpoint_is_in_the_journal_when_the_checkpoint_appears",
        (Journal, "sync", lambda self: None), (Journal, "flush", lambda self: None),
    ),
    "NaN reward accepted": (
        "tests.stages.graders.test_rule_graders:test_what_a_grader_may_not_return",
        (grade, "math", SimpleNamespace(isfinite=lambda value: True)),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN_BY_A_TEST)
async def test_a_test_sees_the_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, *changes = SEEN_BY_A_TEST[name]
    module, _, function = where.partition(":")
    test = getattr(importlib.import_module(module), function)
    fixtures: dict[str, Any] = {"tmp_path": tmp_path, "run_dir": tmp_path, "monkeypatch": monkeypatch}
    fixtures["training"] = functools.partial(open_training, tmp_path, monkeypatch)
    fixtures |= {"value": math.nan, "words": "'score' is nan"}  # of a table of cases
    wanted = {name: value for name, value in fixtures.items() if name in inspect.signature(test).parameters}
    monkeypatch.setattr("tests.stages.stage_rig.LIMIT_S", 2.0)  # what hangs under the mutant shall not do so for long
    for change in changes:
        monkeypatch.setattr(*change, raising=False)
    try:
        async with contextlib.AsyncExitStack() as stack:
            for fixture, opened in (("rig", open_rig), ("desk", open_desk)):  # a part that is set up under the mutant
                if fixture in inspect.signature(test).parameters:
                    wanted[fixture] = await stack.enter_async_context(opened())
            found = test(**wanted)
            if inspect.isawaitable(found):
                await found
    except Exception as error:
        if not any(isinstance(one, AssertionError | TimeoutError) for one in leaves(error)):
            raise  # it fails by the patch, not by what it says
    else:
        pytest.fail(f"{where} does not see it")


def leaves(error: BaseException) -> list[BaseException]:
    """An error, or those that a group of them holds."""
    if isinstance(error, BaseExceptionGroup):
        return [one for part in error.exceptions for one in leaves(part)]
    return [error]
