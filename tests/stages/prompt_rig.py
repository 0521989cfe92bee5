"""The prompt stage among real streams, with the controller's part played by a list of what it was told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from configs.schema import Config
from stages.data.prepare import PreparedPrompt
from stages.data.rows import LoadReport
from stages.messages import CheckpointReady, EvalDone, Int32Array, PromptGroup, Report, Settled, StepDone, wire
from stages.prompts.ledger import Ledger, LedgerSnapshot, OpenGroup
from stages.prompts.stage import PromptStage
from stages.staleness_gate import StalenessGate
from tests.stages.stage_rig import REPORT, Rig, idle, make_context, open_rig, running, take
from transport.stream import Inlet, Outlet


class Rows:
    """Prompts whose ids are their index."""

    report = LoadReport()

    def __init__(self, *rows: PreparedPrompt, n: int = 100) -> None:
        self.rows = rows or tuple(PreparedPrompt(f"q{i}", wire([i], Int32Array), f"a{i}", "{}", "[]") for i in range(n))

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int) -> PreparedPrompt:
        return self.rows[index]


@dataclass
class Hooks:
    """What the controller was told."""

    admissions: list[OpenGroup] = field(default_factory=list)
    terminal: list[tuple[int, Settled]] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)
    evaluations: list[EvalDone] = field(default_factory=list)
    commits: list[tuple[CheckpointReady, LedgerSnapshot]] = field(default_factory=list)
    on_admission: Callable[[], None] = lambda: None

    def admitted(self, group: OpenGroup) -> None:
        self.admissions.append(group)
        self.on_admission()

    def settled(self, groups: Sequence[tuple[int, Settled]]) -> None:
        self.terminal += groups

    async def step(self, report: StepDone) -> None:
        self.steps.append(report)

    async def evaluated(self, report: EvalDone) -> None:
        self.evaluations.append(report)

    async def commit(self, report: CheckpointReady, ledger: LedgerSnapshot) -> None:
        self.commits.append((report, ledger))


@dataclass
class PromptDesk:
    """The stage with everything around it."""

    rig: Rig
    stage: PromptStage
    hooks: Hooks
    groups: Inlet[Any]
    reports: Outlet[Any]
    sent: int = 0

    async def report(self, *reports: Report) -> None:
        """Deliver reports, each under a key of its own, and wait until they have had their effect."""
        for report in reports:
            self.sent += 1
            await self.reports.send(report, str(self.sent))
        await idle()

    async def land(self, version: int, engine: int = 0) -> None:
        self.rig.applied(version, engine=engine)
        await idle()

    async def admitted_at(self, version: int, engine: int = 0) -> list[int]:
        """Group ids that come out when a version lands."""
        await self.land(version, engine)
        return await self.admitted()

    async def admitted(self) -> list[int]:
        """Group ids that came out since the last call."""
        await idle()
        return [(await take(self.groups)).group_id for _ in range(self.rig.hubs["generate"].stats().queued + self.held)]

    @property
    def held(self) -> int:
        return self.rig.hubs["generate"].stats().leased


def step_done(step: int, *groups: int, pinned: bool = False) -> StepDone:
    return StepDone(step, step, groups, {}, tokens=10 * len(groups), pinned=pinned)


@asynccontextmanager
async def prompting(
    *,
    batch: int = 2,
    eta: int = 1,
    total: int | None = 10,
    config: Config | None = None,
    prompts: Rows | None = None,
    schema: type[Any] = PromptGroup,
    **options: Any,
) -> AsyncIterator[PromptDesk]:
    async with open_rig() as rig:
        ports = await rig.join({"settle": ("settle", REPORT)}, {"out": ("generate", schema)})
        hooks = Hooks()
        stage = PromptStage(make_context(config), prompts or Rows(), StalenessGate(batch, eta, total), hooks, **options)
        async with running(stage, ports):
            yield PromptDesk(rig, stage, hooks, await rig.inlet("generate"), await rig.outlet("settle"))


def balanced(ledger: Ledger) -> bool:
    """I1."""
    return ledger.admitted == sum(ledger.counts.values()) + ledger.open
