"""The commands of the user on a running run.

A change is checked by the rules of the configuration, as if the run were resumed with a flag for it. Then it is made,
journalled, and written into `config.toml` of the run directory. So a resumed run begins with the newest changes, and a
flag of the resume outranks them.

Invariants: of several changes in one command either all are made or none; a refused command changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from configs.flags import flags
from configs.layers import ConfigError, value_at
from configs.load import dump_toml, load
from configs.plan.goodput import choose_ahead, chosen_line
from configs.rules.validate import checked
from configs.schema import Config
from configs.schema.notation import cure
from models.errors import UserFault
from models.fault_injection import FAULTS_FILE, InjectedFault, noted
from pipeline.control.autoscale import Adviser
from pipeline.control.endpoint import Command, Drain, Kill, Pause, Reply, Resume, Rollback, Save, Scale, Set, Status
from pipeline.control.monitor import Monitor, RunParts
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from stages.group.filters import parse_filters
from stages.topic_values import SETTINGS, Sampling, Settings, write_settings
from stages.train.checkpoints import SAVE

AUTOSCALE_LOOK_S: Final = 1.0
STALENESS: Final = "asynchrony.max_staleness"
BY_USER: Final = "set max_staleness"  # what a change of the bound is called in the journal
LEARNING_RATE: Final = "train.lr"
FILTER: Final = "filter.dynamic_sampling_filter"
FOLLOWS: Final = frozenset({"asynchrony.async_buffer_size"})  # derived from settable keys
SAMPLED: Final = ("rollout.rollout_temperature", "rollout.rollout_top_p")
SETTABLE: Final = {
    "max_staleness": STALENESS,
    "lr": LEARNING_RATE,
    "dynamic_sampling_filter": FILTER,
    **{key.rpartition(".")[2]: key for key in SAMPLED},
}


class RunControl:
    """Executes commands on one run. `drain`: the callback of Ctrl-C."""

    def __init__(self, parts: RunParts, monitor: Monitor, adviser: Adviser, drain: Callable[[], None]) -> None:
        self.stage, self.recorder, self.runner = parts.stage, parts.recorder, parts.runner
        self.topic, self.rundir = parts.topic, parts.recorder.rundir
        self.launcher = parts.launcher
        self.monitor, self.adviser, self.drain = monitor, adviser, drain
        self._saves = self._steps_at_change = 0
        self._settings: tuple[Settings, ...] = ()
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, command: Command) -> Reply:
        """Execute a command. The reply has its error, if any."""
        if isinstance(command, Status):
            return Reply(True, status=self.monitor.status())
        async with self._one_at_a_time:
            if self.stage.draining is not None:
                return Reply(False, (f"the run is ending: {self.stage.draining}",))
            try:
                done = await self._do(command)
                autoscale = self.adviser.autoscale
                if autoscale is not None and isinstance(command, Scale):
                    autoscale.users(command.counts)
                elif autoscale is not None and not isinstance(command, Save):
                    autoscale.forget()
                return Reply(True, done)
            except ConfigError as error:
                return Reply(False, tuple(error.faults))
            except (UsageError, UserFault) as error:
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

    async def follow_lengths(self) -> None:
        """Choose N again by what was measured, for `--async-buffer-size auto`. Waits for the clock and for a running
        command; runs until cancelled, or until the user sets the bound."""
        gate = self.runner.config.asynchrony
        while gate.async_buffer_size == "auto" and not any(one.what == BY_USER for one in self.recorder.changes):
            await asyncio.sleep(AUTOSCALE_LOOK_S)
            if (work := self.recorder.goodput.take_workload()) is None:
                continue
            ahead, found = await asyncio.to_thread(choose_ahead, work)
            now = self.stage.gate.max_staleness - gate.update_weights_interval + 1
            line = chosen_line(work, found, now, ahead)
            async with self._one_at_a_time:
                settled = self.stage.steps > self.stage.gate.max_staleness + self._steps_at_change
                if line is None or not settled or self.stage.draining is not None:
                    continue
                self._steps_at_change = self.stage.steps
                try:
                    await self._set({"max_staleness": str(ahead + gate.update_weights_interval - 1)}, by="auto")
                    self.recorder.say(line)
                except (ConfigError, UsageError) as error:
                    self.recorder.say(f"{line}; but {error}")
                if self.adviser.autoscale is not None:
                    self.adviser.autoscale.forget()

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
            case Rollback():
                return await self._rollback(command.step)
            case Kill():
                return await self._kill(command.replica)
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
        engines_first = sorted(counts.items(), key=lambda item: item[0] != "engine")  # a GPU may be missing for one
        for stage, count in engines_first:
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

    async def _rollback(self, step: int) -> tuple[str, ...]:
        self._check_started()
        await self.runner.rollback(step)
        self.recorder.changed("rollback", f"to step {step}")
        return (f"the trainer starts again from the checkpoint of step {step}, whose weights become the next version",)

    async def _kill(self, replica: str) -> tuple[str, ...]:
        """As --fault-inject does; only where that says that the run is disturbed on purpose."""
        if not self.runner.config.debug.fault_inject:
            raise UsageError(
                f"{replica} is not killed: this run is not disturbed on purpose; start one with --fault-inject, "
                "such as reward:0.000001:kill"
            )
        handles = {name: handle for name, handle in self.launcher.handles.items() if handle.alive}
        if replica not in handles:
            raise UsageError(f"there is no process {replica}; choose one of {', '.join(sorted(handles))}")
        fault = InjectedFault(replica.rpartition("-")[0], "kill", replica, "command", 1, time.time())
        await asyncio.to_thread(noted, self.rundir.path / FAULTS_FILE, fault)
        self.recorder.changed("kill", replica)
        await handles[replica].kill()
        return (f"{replica} was killed; the log says when it is back",)

    def _check_started(self) -> None:
        if self.recorder.training_started is None:
            raise UsageError("the run is still starting; try again when its trainer has its weights")

    # ------------------------------------------------------------------ settings

    async def _set(self, changes: Mapping[str, str], by: str = "set") -> tuple[str, ...]:
        self._check_started()
        config, changed = await asyncio.to_thread(with_settings, self.rundir, changes, self.runner.config)
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
            self.recorder.changed(f"{by} {key.rpartition('.')[2]}", f"{shown} {when}")
            lines.append(f"{key.rpartition('.')[2]}: {shown}, {when}")
        return tuple(lines)

    def _check_room(self, bound: int) -> None:
        """Raises UsageError if groups in flight would exceed the room that the stages which join got at the start."""
        gate = dataclasses.replace(self.stage.gate, max_staleness=bound)
        room = self.runner.placement.room // (2 * self.runner.config.rollout.n_samples_per_prompt)
        if gate.most_open > room:
            raise UsageError(
                f"max_staleness {bound} lets {gate.most_open} groups out, and the streams of this run have room for "
                f"{room}; drain it and resume it with --max-staleness {bound}"
            )


# A change of a running run is a change of its configuration: what a resume with the same flags would have. So a change
# is read, resolved and checked as a command line is, and refused with the same errors.


def with_flags(rundir: RunDir, given: Sequence[str]) -> Config:
    """The configuration that a resume with these flags would have. Raises ConfigError with all faults."""
    if not rundir.config.exists():
        raise UsageError("a warm start has no settings of its own; try again when it is over")
    loaded = load(["--resume", str(rundir.path), *given])
    return checked(loaded.config, loaded.given)[0]


def keep(rundir: RunDir, config: Config, running: Config) -> None:
    """Write the configuration that a resume reads before its own flags. `running`: that of the running run."""
    run = msgspec.structs.replace(config.run, run_dir=running.run.run_dir, resume=running.run.resume)
    rundir.write_config(dump_toml(msgspec.structs.replace(config, run=run)))


def with_settings(rundir: RunDir, changes: Mapping[str, str], running: Config) -> tuple[Config, dict[str, object]]:
    """The changed configuration, and the settings that differ by their key. `running`: with which the processes were
    started. Raises ConfigError, UsageError or FilterNameError."""
    names = {name: _name(name) for name in changes}
    given: list[str] = []
    for name, value in changes.items():
        texts = value.replace(",", " ").split() if SETTABLE[names[name]] == FILTER else [value]
        given += [f"--{names[name].replace('_', '-')}", *texts]
    before, after = with_flags(rundir, ()), with_flags(rundir, given)
    changed = {
        flag.key: value_at(after, flag.key)
        for flag in flags()
        if value_at(after, flag.key) != value_at(before, flag.key)
    }
    others = changed.keys() - set(SETTABLE.values()) - FOLLOWS
    if others:
        raise UsageError(
            f"{', '.join(changes)} would change {', '.join(sorted(others))} as well; resume the run with it"
        )
    _check_filters(before, after)
    if after.train.lr != before.train.lr:
        _check_learning_rate(running, after)
    _check_sampling(after, changed.keys())
    return after, {key: value for key, value in changed.items() if key not in FOLLOWS}


def _name(given: str) -> str:
    """The setting that a key means: its name, its flag or its place in a recipe."""
    name = given.removeprefix("--").replace("-", "_")
    short = name if "." not in name else next((s for s, key in SETTABLE.items() if key == name), name)
    if short in SETTABLE:
        return short
    if f"rollout_{short}" in SETTABLE:  # temperature, top_p
        return f"rollout_{short}"
    names = [name.removeprefix("rollout_") for name in SETTABLE]
    hint = cure(short, names, f"what can be set is {', '.join(names)}")
    raise UsageError(f"{given} cannot be set in a running run; {hint}, or drain the run and resume it with the flag")


def _check_filters(before: Config, after: Config) -> None:
    old, new = before.filter.dynamic_sampling_filter, after.filter.dynamic_sampling_filter
    if [text.partition(":")[0] for text in old] != [text.partition(":")[0] for text in new]:
        raise UsageError(
            f"dynamic_sampling_filter is {' '.join(old) or 'empty'}: of filters that are there the numbers can be "
            "changed, not which there are; name the same ones, or resume the run with others"
        )
    parse_filters(new)


def _check_sampling(config: Config, changed: AbstractSet[str]) -> None:
    """A group is sampled and trained with the settings of its admission, unless user code keeps those of the start."""
    others = {
        "--custom-generate-function-path": config.rollout.custom_generate_function_path,
        "--rollout-function-path": config.rollout.rollout_function_path,
        "--use-opd": config.distill.use_opd or config.algorithm.advantage_estimator == "on_policy_distillation",
    }
    fixed = [flag for flag, given in others.items() if given]
    if fixed and not changed.isdisjoint(SAMPLED):
        raise UsageError(
            f"{fixed[0]} goes by the temperature and top-p with which the run was started; drain the run and resume it "
            "with --rollout-temperature or --rollout-top-p"
        )


def _check_learning_rate(running: Config, after: Config) -> None:
    """The schedule is scaled as a whole, by a factor of what the run was started with; a resume would move its upper
    end alone."""
    train, started = after.train, running.train.lr
    if train.min_lr and train.lr_decay_style != "constant":
        raise UsageError(
            f"lr decays to --min-lr {train.min_lr:g} (--lr-decay-style {train.lr_decay_style}), and would be scaled "
            "together with it; drain the run and resume it with --lr"
        )
    if train.lr != started and not (started and math.isfinite(train.lr / started)):
        raise UsageError(
            f"the run was started with --lr {started:g}, of which no finite factor makes {train.lr:g}; drain the run "
            f"and resume it with --lr {train.lr:g}"
        )
