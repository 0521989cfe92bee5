"""What the user sees of a running run: the live table or plain lines, its status, the facts behind /metrics, and what a
run that stands still waits for.

`Waits` reads what is known anyway: hubs know which replica has held which message since when, the directory knows what
each engine carries, replicas report how busy they are. So its sentence holds for each stage, stages of the user and
stages that hang included; no replica has to answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from configs.graph import loops
from configs.plan.gpus import trainer_processes
from configs.schema import Config
from pipeline.control.advice import Advice
from pipeline.control.endpoint import EngineStatus, QueueStatus, RunStatus
from pipeline.facts.run_directory import read_fleet
from pipeline.facts.stats import QUEUED
from pipeline.graph import JOINERS, Placement
from pipeline.hosts.launcher import Launcher
from pipeline.observe.prometheus import Facts
from pipeline.observe.table import open_display
from pipeline.record.recorder import Recorder
from pipeline.supervise.runner import Runner
from stages.messages import WeightsAnnouncement, group_of
from stages.ports import read_value
from stages.prompts.stage import PromptStage
from stages.topic_values import POLICY, RUNNING, SLOW, WAITING, Complaint, EngineEntry, addresses, entries
from transport import Held, Hub, TopicServer


@dataclass(frozen=True)
class RunParts:
    """The parts of one phase of a run, made by the controller: the view and the commands of the user work on them."""

    placement: Placement
    stage: PromptStage
    recorder: Recorder
    hubs: Mapping[str, Hub]  # by stream
    topic: TopicServer
    launcher: Launcher
    runner: Runner


MOST_HOLDERS: Final = 3


class Waits:
    """Answers for one run."""

    def __init__(self, parts: RunParts) -> None:
        self.placement, self.config, self.graph = parts.placement, parts.placement.config, parts.placement.graph
        self.stage, self.view, self.hubs, self.topic = parts.stage, parts.recorder.view, parts.hubs, parts.topic
        self._consumer = {stream.name: stream.consumer[0] for stream in self.graph.streams}
        self.lacking = parts.launcher.waiting  # processes for which no host has room, and what they need

    def sentence(self, now_s: float, quiet_s: float) -> str:
        """The sentence for a stall of `quiet_s` seconds. A message that was held for less than half of it, and for
        less than --stall-notice-s, is left out."""
        least_s = min(quiet_s / 2, self.config.run.stall_notice_s)
        held = self._held()
        places = self._places(held)
        parts = [self._trainer(places, now_s), self._groups(places), *self._holders(held, least_s)]
        return "; ".join([*parts, *self._unattended(), *self._engines(least_s)])

    def _held(self) -> dict[str, list[Held]]:
        """The messages of each stream. Hubs know those of a chain by its first stage: its others report what is theirs,
        and what several have is with the last of them."""
        held = {name: hub.held() for name, hub in self.hubs.items() if name != "settle"}
        chained: dict[str, tuple[str, str, float]] = {}
        reports = {stats.stage: stats for stats in self.view.newest()}
        for node in self.graph.nodes:
            if (stats := reports.get(node.name)) is not None:
                chained |= {group: (node.name, stats.replica, age_s) for group, age_s in stats.held.items()}
        for name, items in held.items() if chained else ():
            held[name] = [item for item in items if group_of(item.key)[0] not in chained]
        for group, (stage, replica, age_s) in chained.items():
            held[stage].append(Held(group, replica, age_s))
        return held

    def _places(self, held: Mapping[str, list[Held]]) -> dict[str, str]:
        """Group -> the earliest stage with a part of it, because the whole group waits there."""
        order = {node.name: place for place, node in enumerate(self.graph.nodes)}
        order |= {name: order["generate"] for name in loops(self.config)}  # a loop sends a rollout back to generate
        places: dict[str, str] = {}
        for name, items in held.items():
            stage = self._consumer[name]
            for item in items:
                group, _ = group_of(item.key)
                if group not in places or order[stage] < order[places[group]]:
                    places[group] = stage
        return places

    def _trainer(self, places: Mapping[str, str], now_s: float) -> str:
        if not self.stage.trainer_up:
            return "train is starting, or loads its model"
        rows = {row.stage: row for row in self.view.snapshot(now_s).stages}
        if "train" in rows and rows["train"].busy > 0.5:
            return f"train computes batch {self.stage.steps + 1}{bound_of(self.config, 'train')}"
        here, batch = sum(stage == "train" for stage in places.values()), self.stage.gate.batch
        if here >= batch:
            return f"train has {here} groups and stands still"
        return f"train waits for groups, it has {here} of {batch}"

    def _groups(self, places: Mapping[str, str]) -> str:
        counts = Counter(place for group, place in places.items() if group_of(group)[1] is not None)
        others = len(places) - counts.total()
        parts = [f"{count} in {place}" for place, count in counts.items() if place != "train"]
        open_ = self.stage.ledger.open
        text = f"{open_ or 'no'} groups are under way" + (f" ({', '.join(parts)})" if parts else "")
        if not open_ and not self.stage.capacity and self.stage.trainer_up:
            carry = f"carry version {self.stage.version}" if self.stage.version >= 0 else "have no weights yet"
            text += f", for no prompt may enter: the engines {carry}, train has done {self.stage.steps} batches"
        elif not open_ and self.stage.capacity and (source := self.config.data.data_source_path):
            text += f", for --data-source-path {source} is asked for prompts"
        if others:
            text += f"; {others} prompts of an evaluation are under way"
        elif self.stage.evals_pending:
            text += "; an evaluation is not over"
        return text

    def _holders(self, held: Mapping[str, list[Held]], least_s: float) -> Iterator[str]:
        """The replicas that have held a message longest. Stages that join are left out: they hold messages by their
        nature."""
        longest: dict[str, tuple[float, str, str]] = {}
        for name, items in held.items():
            stage = self._consumer[name]
            for item in items if stage not in JOINERS else ():
                if item.holder and item.seconds > max(least_s, longest.get(item.holder, (0.0,))[0]):
                    longest[item.holder] = (item.seconds, group_of(item.key)[0], stage)
        for holder, (seconds, group, stage) in sorted(longest.items(), key=lambda entry: -entry[1][0])[:MOST_HOLDERS]:
            yield f"{holder} has had group {group} for {seconds:.0f} s{bound_of(self.config, stage)}"

    def _unattended(self) -> Iterator[str]:
        for stream in self.graph.streams:
            stats = self.hubs[stream.name].stats()
            if stats.queued and not stats.consumers:
                yield f"{stats.queued} messages wait for {stream.consumer[0]}, of which no replica answers"

    def _engines(self, least_s: float) -> Iterator[str]:
        """Engines that are not ready for the newest published weights, or do not answer."""
        found, known = addresses(self.topic), entries(self.topic)
        newest = read_value(self.topic, "weights", WeightsAnnouncement)
        pending_s = self.view.pending_s()
        engines = [spec.name for spec in self.placement.engines]
        yield from (f"{name} is not up: {why}" for name, why in self.lacking.items() if name not in engines)
        for name in engines:
            if name not in found:
                yield f"{name} is not up" + (f": {why}" if (why := self.lacking.get(name)) else "")
            elif (trouble := _trouble(known.get(name), newest)) is not None:
                yield f"{name} {trouble}"
            elif pending_s.get(name, 0.0) > least_s:
                yield f"{name} has not answered a request for {pending_s[name]:.0f} s"


def _trouble(entry: EngineEntry | None, newest: WeightsAnnouncement | None) -> str | None:
    """The fault of an engine that has an address, None if there is none."""
    detail = f": {entry.detail}" if entry is not None and entry.detail else ""
    if entry is not None and entry.state in ("leaving", "left"):
        return "is leaving"
    if entry is None or (entry.version < 0 and newest is None):
        return f"has no weights yet{detail}"
    if entry.state == "away":
        return f"is left out{detail}"
    if newest is None or (entry.run_generation, entry.version) >= (newest.run_generation, newest.version):
        return None
    has = f"has version {entry.version}" if entry.version >= 0 else "has no weights yet"
    return f"{has} and {'takes' if entry.fetching >= 0 else 'lacks'} version {newest.version}{detail}"


def bound_of(config: Config, stage: str) -> str:
    """The settings that end a wait in a stage, in brackets; empty for a custom stage, where --stall-limit-s ends it."""
    reward = config.reward
    match stage:
        case "generate":
            rollout = config.rollout
            return f" (--request-timeout-secs {rollout.request_timeout_secs:g}, --max-retries {rollout.max_retries})"
        case "reward":
            outside = f", outside --rm-timeout-s {reward.rm_timeout_s:g}, --rm-retries {reward.rm_retries}"
            asks = reward.rm_url or reward.judge_engine
            return f" (--reward-deadline-s {reward.reward_deadline_s:g}{outside if asks else ''})"
        case "agents" if config.tools.tools:
            return f" (--tool-deadline-s {config.tools.tool_deadline_s:g})"
        case "agents":
            return " (step_deadline_s, retries and outage_s of its environment)"
        case "train" if trainer_processes(config):
            minutes = config.parallel.distributed_timeout_minutes
            return f" (a silent rank ends by --distributed-timeout-minutes {minutes:g})"
    return ""


REFRESH_S = 0.5


class Monitor:
    """Feeds a display twice a second. A context manager."""

    def __init__(self, parts: RunParts, advise: Callable[[], Advice | None] = lambda: None) -> None:
        self.stage, self.recorder, self.hubs, self.topic = parts.stage, parts.recorder, parts.hubs, parts.topic
        self.runner, self.waits, self._advise = parts.runner, Waits(parts), advise
        self._beside = parts.placement.beside
        self.advice: Advice | None = None
        observe = self.recorder.config.observe
        self.display = open_display(observe.live, log_interval=observe.log_interval)
        self._slow: set[tuple[str, int]] = set()
        self._engines: dict[str, str | None] = {}  # every engine seen, with its address while it has one

    def __enter__(self) -> Monitor:
        self.display.__enter__()
        self.recorder.lines = self.display.note
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self.display.__exit__(None, None, None)

    async def run(self) -> None:
        """Waits for the clock; runs until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        queues: dict[str, int] = {}
        for name, hub in self.hubs.items():
            stage = name.split(".", 1)[0]
            queues[stage] = queues.get(stage, 0) + hub.stats().queued
        for stage in queues:
            queues[stage] += int(self.recorder.view.extra(stage, QUEUED))
        self.recorder.observe(self.topic, queues, self.stage.capacity, self.stage.version)
        self.advice = self._advise()
        parts = [alarm.cure for alarm in self.recorder.health.active.values()]
        parts += [self.advice.sentence] if self.advice is not None else []
        self.recorder.view.run.advice = "; ".join(parts)
        self.display.update(self.recorder.view.snapshot(time.monotonic()))
        self._watch_engines()
        self._watch_progress()
        self._name_slow_engines()
        for line in self.recorder.outages.look(self.topic):
            self.recorder.say(line)

    def status(self) -> RunStatus:
        """The present state of the run."""
        self.refresh()
        snapshot = self.recorder.view.snapshot(time.monotonic())
        state = "running" if self.stage.trainer_up else "starting"
        if self.stage.draining is not None:
            state = "stopping"
        elif self.stage.paused:
            state = "paused"
        return RunStatus(
            run=str(self.recorder.rundir.path),
            state=state,
            snapshot=snapshot,
            exit_reason=self.stage.draining,
            engines=tuple(self._engine_statuses()),
            queues=tuple(
                QueueStatus(name, stats.queued, stats.leased, stats.consumers)
                for name, stats in ((name, hub.stats()) for name, hub in self.hubs.items())
            ),
            replicas={row.stage: len(self.runner.replicas(row.stage)) for row in snapshot.stages},
            changes=tuple(self.recorder.changes),
            advice=self.advice,
            waits=self.recorder.stalls.waits,
        )

    def _engine_statuses(self) -> Iterator[EngineStatus]:
        known, view = entries(self.topic), self.recorder.view
        there = [spec.name for spec in self._beside if spec.evaluates] + [*addresses(self.topic, POLICY)]
        idle = {row.name: row.idle for row in view.engine_rows()}
        for name in sorted({*self.runner.replicas("engine"), *there}, key=lambda name: (len(name), name)):
            entry = known.get(name)
            yield EngineStatus(
                name=name,
                state=entry.state if entry is not None else "starting",
                version=entry.version if entry is not None and entry.version >= 0 else None,
                running=int(view.extra("engines", f"{name}{RUNNING}")),
                waiting=int(view.extra("engines", f"{name}{WAITING}")),
                limit=entry.limit if entry is not None else 0,
                idle=idle.get(name),
            )

    def facts(self) -> Facts:
        """What /metrics reports of the run."""
        self._watch_engines()
        router = read_fleet(self.recorder.rundir).get("router")
        # The metrics address of the run's router; that of a router started by the user is unknown.
        address = router.metrics or None if router is not None else None
        view, restarts, lost = self.recorder.view, self.recorder.restarts, len(self.recorder.dead_letters)
        run, metrics = view.snapshot(time.monotonic()), self.recorder.newest_metrics
        return Facts(run, view.staleness, restarts, lost, self._engines, address, metrics)

    def _watch_progress(self) -> None:
        """Report what waits for what, where nothing was trained for long."""
        now, ledger = time.monotonic(), self.stage.ledger
        paused_s = now if self.stage.paused else 0.0  # the user paused the run
        ended = ledger.admitted - ledger.open
        done = (ended, self.stage.steps, self.stage.trainer_up, len(self.recorder.evals), paused_s)
        moved = sum(hub.stats().accepted for hub in self.hubs.values())
        line = self.recorder.stalls.look(now, done, moved, lambda quiet_s: self.waits.sentence(now, quiet_s))
        if line is not None:
            self.recorder.say(line)

    def _name_slow_engines(self) -> None:
        """Report once per incarnation of an engine that its answer came very slowly, or not at all."""
        for key in self.topic.items(SLOW):
            slow = read_value(self.topic, key, Complaint)
            if slow is not None and (about := (slow.engine, slow.incarnation)) not in self._slow:
                self._slow.add(about)
                self.recorder.say(f"{slow.engine}: {slow.reason}; the request is sent again, to another engine if any")

    def _watch_engines(self) -> None:
        """An engine without an address keeps its place: it is lost, unless it was scaled away."""
        left = self.recorder.view.engines_left
        self._engines = {name: None for name in self._engines if name not in left}
        self._engines |= {name: address.url for name, address in addresses(self.topic).items()}
