"""The commands of the user on a running run.

A change is checked by the rules of the configuration, as if the run were resumed with a flag for it. Then it is made,
journalled, and written into `config.toml` of the run directory. So a resumed run begins with the newest changes, and a
flag of the resume outranks them.

Invariants: of several changes in one command either all are made or none; a refused command changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Final

from configs.layers import ConfigError
from pipeline.control.autoscale import Adviser
from pipeline.control.changed_config import FILTER, SAMPLED, STALENESS, keep, with_flags, with_settings
from pipeline.control.endpoint import (
    Command,
    Drain,
    EngineStatus,
    Pause,
    QueueStatus,
    Reply,
    Resume,
    RunStatus,
    Save,
    Scale,
    Set,
    Status,
)
from pipeline.control.monitor import Monitor, RunParts
from pipeline.errors import UsageError
from stages.topic_values import (
    POLICY,
    RUNNING,
    SETTINGS,
    WAITING,
    Sampling,
    Settings,
    addresses,
    entries,
    write_settings,
)
from stages.train.checkpoints import SAVE
from transport import Hub

AUTOSCALE_LOOK_S: Final = 1.0


class RunControl:
    """Executes commands on one run. `drain`: the callback of Ctrl-C."""

    def __init__(self, parts: RunParts, monitor: Monitor, adviser: Adviser, drain: Callable[[], None]) -> None:
        self.stage, self.recorder, self.runner = parts.stage, parts.recorder, parts.runner
        self.hubs, self.topic, self.rundir = parts.hubs, parts.topic, parts.recorder.rundir
        self.monitor, self.adviser, self.drain = monitor, adviser, drain
        self._saves = 0
        self._settings: tuple[Settings, ...] = ()
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, command: Command) -> Reply:
        """Execute a command. The reply has its error, if any."""
        if isinstance(command, Status):
            return Reply(True, status=self.status())
        async with self._one_at_a_time:
            if self.stage.draining is not None:
                return Reply(False, (f"the run is ending: {self.stage.draining}",))
            try:
                done = await self._do(command)
                self._tell_autoscale(command)
                return Reply(True, done)
            except ConfigError as error:
                return Reply(False, tuple(error.faults))
            except UsageError as error:
                return Reply(False, (str(error),))

    async def autoscale(self) -> None:
        """Make the changes of `--autoscale`. Waits for the clock and for a running command; runs until cancelled."""
        autoscale = self.adviser.autoscale
        while autoscale is not None:
            await asyncio.sleep(AUTOSCALE_LOOK_S)
            async with self._one_at_a_time:
                if self.stage.draining is not None:
                    return
                counts, why = self.adviser.change()
                if not counts:
                    continue
                try:
                    await self._scale(counts, "autoscale")
                    self.recorder.say(f"autoscale: {why}")
                except (ConfigError, UsageError) as error:
                    autoscale.refused(counts)
                    self.recorder.say(f"autoscale: {why}; but {error}")

    def _tell_autoscale(self, command: Command) -> None:
        """`--autoscale` does not judge changes of the user, and leaves stages alone that the user scales."""
        autoscale = self.adviser.autoscale
        if autoscale is not None and isinstance(command, Scale):
            autoscale.users(command.counts)
        elif autoscale is not None and not isinstance(command, Save):
            autoscale.forget()

    async def _do(self, command: Command) -> tuple[str, ...]:
        match command:
            case Scale():
                return await self._scale(command.counts)
            case Set():
                return await self._set(command.changes)
            case Pause():
                return self._pause(True)
            case Resume():
                return self._pause(False)
            case Save():
                return self._save()
            case Drain():
                self.recorder.changed("drain", "")
                self.drain()
                return (f"finishing what is in flight, at most {self.runner.config.run.drain_s:g} s",)
        raise UsageError("status is not among the changes")

    # ------------------------------------------------------------------ changes

    async def _scale(self, counts: Mapping[str, int], by: str = "scale") -> tuple[str, ...]:
        self._check_started()
        wanted = [f"{stage}={count}" for stage, count in counts.items()]
        config = await asyncio.to_thread(with_flags, self.rundir, ["--scale", *wanted])
        refused = [why for stage, n in counts.items() if (why := self.runner.refusal(stage, n)) is not None]
        if refused:
            raise ConfigError(refused)
        lines = []
        for stage, count in sorted(
            counts.items(), key=lambda item: item[0] != "engine"
        ):  # a GPU may be missing for engines
            before = len(self.runner.replicas(stage))
            self.runner.scale(stage, count)
            if count != before:
                self.recorder.changed(f"{by} {stage}", str(count))
            lines.append(f"{stage}: {before} -> {count}")
        keep(self.rundir, config, self.runner.config)
        return tuple(lines)

    def _pause(self, paused: bool) -> tuple[str, ...]:
        if self.stage.paused == paused:
            return ("the run is paused already" if paused else "the run is not paused",)
        self.stage.pause(paused)
        self.recorder.changed("pause" if paused else "resume", "")
        if not paused:
            return ("new groups are admitted again",)
        return (f"no new group is admitted; {self.stage.ledger.open} are in flight and will be finished",)

    def _save(self) -> tuple[str, ...]:
        self._check_started()
        self._saves += 1
        self.topic.publish(SAVE, str(self._saves).encode())
        self.recorder.changed("save", "")
        later = "; the run is paused, so that step may not end before it is resumed" if self.stage.paused else ""
        return (f"a checkpoint follows step {self.stage.steps + 1}{later}",)

    def _check_started(self) -> None:
        if self.recorder.training_started is None:
            raise UsageError("the run is still starting; try again when its trainer has its weights")

    # ------------------------------------------------------------------ settings

    async def _set(self, changes: Mapping[str, str]) -> tuple[str, ...]:
        self._check_started()
        config, changed = await asyncio.to_thread(with_settings, self.rundir, changes)
        if not changed:
            return ("nothing differs from what is set",)
        bound = config.asynchrony.max_staleness or 0
        self._check_room(bound)
        # The trainer collects the batch after the last reported batch, or, if a report is on its way, the batch after
        # that. The following batch is the first that certainly gets the change in time.
        step = self.stage.steps + 3
        started = self.runner.config
        scale = config.train.lr / started.train.lr if config.train.lr != started.train.lr else 1.0
        self._settings = (*self._settings, Settings(step, bound, scale, config.filter.dynamic_sampling_filter))
        self.topic.publish(SETTINGS, write_settings(self._settings))
        if STALENESS in changed:
            self.stage.bound(bound, step)
            self.recorder.bound(bound)
        self.stage.sampling = Sampling(config.rollout.rollout_temperature, config.rollout.rollout_top_p)
        keep(self.rundir, config, started)
        groups = {FILTER: "that are judged", **dict.fromkeys(SAMPLED, "that are admitted")}
        lines = []
        for key, value in changed.items():
            shown = " ".join(value) if isinstance(value, tuple) else f"{value:g}"
            when = f"for groups {groups[key]} from now on" if key in groups else f"from step {step} on"
            self.recorder.changed(f"set {key.rpartition('.')[2]}", f"{shown} {when}")
            lines.append(f"{key.rpartition('.')[2]}: {shown}, {when}")
        return tuple(lines)

    def _check_room(self, bound: int) -> None:
        """Raises UsageError if groups in flight would exceed the room that the stages which join got at the start."""
        gate = dataclasses.replace(self.stage.gate, max_staleness=bound)
        members = self.runner.config.rollout.n_samples_per_prompt
        room = self.runner.placement.room // (2 * members)
        if gate.most_open > room:
            raise UsageError(
                f"max_staleness {bound} lets {gate.most_open} groups out, and the streams of this run have room for "
                f"{room}; drain it and resume it with --max-staleness {bound}"
            )

    # ------------------------------------------------------------------ status

    def status(self) -> RunStatus:
        """The present state of the run."""
        self.monitor.refresh()
        snapshot = self.recorder.view.snapshot(time.monotonic())
        state = "running" if self.stage.trainer_up else "starting"
        if self.stage.draining is not None:
            state = f"stopping: {self.stage.draining}"
        elif self.stage.paused:
            state = "paused"
        return RunStatus(
            run=str(self.rundir.path),
            state=state,
            snapshot=snapshot,
            engines=self._engines(),
            queues=tuple(self._queue(name, hub) for name, hub in self.hubs.items()),
            replicas={row.stage: len(self.runner.replicas(row.stage)) for row in snapshot.stages},
            changes=tuple(self.recorder.changes),
            advice=self.monitor.advice,
        )

    def _engines(self) -> tuple[EngineStatus, ...]:
        there, known = addresses(self.topic, POLICY), entries(self.topic, POLICY)
        rows = {row.name: row for row in self.recorder.view.engine_rows()}
        found = []
        for name in sorted({*self.runner.replicas("engine"), *there}, key=lambda name: (len(name), name)):
            entry, row = known.get(name), rows.get(name)
            found.append(
                EngineStatus(
                    name=name,
                    state=entry.state if entry is not None else "starting",
                    version=entry.version if entry is not None and entry.version >= 0 else None,
                    running=int(self.recorder.view.extra("engines", f"{name}{RUNNING}")),
                    waiting=int(self.recorder.view.extra("engines", f"{name}{WAITING}")),
                    limit=entry.limit if entry is not None else 0,
                    idle=row.idle if row is not None else None,
                )
            )
        return tuple(found)

    def _queue(self, name: str, hub: Hub) -> QueueStatus:
        stats = hub.stats()
        return QueueStatus(name, stats.queued, stats.leased, stats.consumers)
