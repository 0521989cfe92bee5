"""A change of a running run as a change of its configuration: what a resume with the same flags would have.

So a change is read, resolved and checked as a command line is, and refused with the same errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from configs.flags import flags
from configs.layers import ConfigError, value_at
from configs.load import dump_toml, load
from configs.rules.validate import examined
from configs.schema import Config
from configs.schema.notation import cure
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from stages.errors import FilterNameError
from stages.group.filters import parse_filters

STALENESS: Final = "asynchrony.max_staleness"
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


def with_flags(rundir: RunDir, given: Sequence[str]) -> Config:
    """The configuration that a resume with these flags would have. Raises ConfigError with all faults."""
    if not rundir.config.exists():
        raise UsageError("a warm start has no settings of its own; try again when it is over")
    loaded = load(["--resume", str(rundir.path), *given])
    config, findings = examined(loaded.config, loaded.given)
    if findings.faults:
        raise ConfigError(findings.faults)
    return config


def keep(rundir: RunDir, config: Config, running: Config) -> None:
    """Write the configuration that a resume reads before its own flags. `running`: that of the running run."""
    run = msgspec.structs.replace(config.run, run_dir=running.run.run_dir, resume=running.run.resume)
    rundir.write_config(dump_toml(msgspec.structs.replace(config, run=run)))


def with_settings(rundir: RunDir, changes: Mapping[str, str]) -> tuple[Config, dict[str, object]]:
    """The changed configuration, and the settings that differ by their key. Raises ConfigError or UsageError."""
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
    _check_learning_rate(before, after)
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
    try:
        parse_filters(new)
    except FilterNameError as error:
        raise UsageError(str(error)) from None


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


def _check_learning_rate(before: Config, after: Config) -> None:
    """The schedule is scaled as a whole; a resume would move its upper end alone."""
    train = after.train
    if train.lr != before.train.lr and train.min_lr and train.lr_decay_style != "constant":
        raise UsageError(
            f"lr decays to --min-lr {train.min_lr:g} (--lr-decay-style {train.lr_decay_style}), and would be scaled "
            "together with it; drain the run and resume it with --lr"
        )
    if train.lr != before.train.lr and not before.train.lr:
        raise UsageError("lr is 0, of which no factor makes another one; drain the run and resume it with --lr")
