"""Layers of settings and their merging: command line > recipe > preset of the model > preset of the mode > default.

Invariants: a layer holds typed values under dotted keys, each with the place where the user wrote it; objects merge key
by key, everything else is replaced whole; a later check can tell what was written from what was derived.

The presets of the modes are data: what each mode fixes in the staleness gate. No other file asks which mode a run is
in. The last functions make the configurations of a run's phases, such as the warm start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from configs.flags import Flag, flags, flags_by_key, holds_null, show
from configs.schema import Config, DebugConfig
from configs.schema.notation import cure

S = TypeVar("S", bound=Struct)

GATE = ("asynchrony.async_buffer_size", "asynchrony.update_weights_interval", "asynchrony.max_staleness")
# Two settings of one fact: the setting of the higher layer replaces the other setting.
_LENGTH = ("rollout.num_rollout", "rollout.num_epoch")


class ConfigError(Exception):
    """The configuration cannot be used: everything that is wrong with it, at once.

    `faults`: one sentence each, which names the key, the value, the rule and the cure; in the order found, without
    repetition.
    """

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(dict.fromkeys(faults))
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return (ConfigError, (self.faults,))


class Layer(Struct, frozen=True, kw_only=True):
    """What one source sets. `labels[key]` is how the user wrote it, for messages.

    `edits`: values of `stage.<name>.<field>` and `environment.<name>.<field>` on the command line, still as text.
    """

    values: Mapping[str, Any] = {}
    labels: Mapping[str, str] = {}
    edits: Mapping[str, str] = {}

    def without(self, keys: Collection[str]) -> Layer:
        return msgspec.structs.replace(self, values={key: self.values[key] for key in self.values if key not in keys})


class Loaded(Struct, frozen=True):
    """A merged configuration before anything is derived. `given`: dotted key -> how the user wrote it."""

    config: Config
    given: Mapping[str, str]


def merge(layers: Iterable[Layer]) -> Loaded:
    """Lay the layers over the defaults, lowest first. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    edits: dict[str, str] = {}
    mode = flags_by_key()["run.mode"].default
    for layer in layers:
        chosen = layer.values.get("run.mode", mode)
        if chosen != mode:
            _forget(values, given, GATE)  # they belonged to the mode of the layer below
        mode = chosen
        if any(key in layer.values for key in _LENGTH):
            _forget(values, given, _LENGTH)
        for key, value in layer.values.items():
            old = values.get(key)
            values[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            given[key] = layer.labels.get(key, key)
        edits.update(layer.edits)
    return Loaded(_edited(build(values), edits), given)


def build(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """`base` (the defaults) with typed values put in under dotted keys."""
    config = base or Config()
    for key, value in values.items():
        config = _with(config, key.split("."), value)
    return config


def _with(struct: S, path: Sequence[str], value: Any) -> S:
    name, *inner = path
    return msgspec.structs.replace(struct, **{name: _with(getattr(struct, name), inner, value) if inner else value})


def value_at(config: Config, key: str) -> Any:
    """The value under a dotted key."""
    return attrgetter(key)(config)


def given_by_difference(config: Config) -> Mapping[str, str]:
    """For a configuration made in Python: a value that differs from the default counts as written."""
    return {flag.key: flag.key for flag in flags() if value_at(config, flag.key) != flag.default}


def refusal(flag: Flag, label: str, value: object, rule: str) -> str:
    """One sentence: key, value, rule, cure."""
    shown = repr(value) if isinstance(value, str) else show(value)
    if flag.choices and isinstance(value, str):
        hint = cure(value, flag.choices, f"choose for example {flag.choices[0]}")
    elif flag.kind in ("list", "tables", "json"):
        hint = "see docs/configuration.md for an example"
    elif flag.kind == "bool":
        hint = f"write --{flag.name} or --no-{flag.name}" if flag.name else "write true or false"
    else:
        hint = f"give for example {flag.example()}"
    return f"{label} is {shown}, but {rule}; {hint}"


def _forget(values: dict[str, Any], given: dict[str, str], keys: Iterable[str]) -> None:
    for key in keys:
        values.pop(key, None)
        given.pop(key, None)


_TABLE_WORDS = {"stage": "custom stage", "environment": "environment"}


def _edited(config: Config, edits: Mapping[str, str]) -> Config:
    faults = []
    for key, text in edits.items():
        section, name, field = key.split(".")
        tables = {table.name: table for table in getattr(config, section)}
        if name not in tables:
            known, word = ", ".join(tables) or "none", _TABLE_WORDS[section]
            faults.append(
                f"{key} names no {word}, only those of the recipe can be changed (there: {known}); add a "
                f"[[{section}]] table with name = {name!r}"
            )
            continue
        try:
            tables[name] = _edit(tables[name], field, text)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            faults.append(f"{key} is {text!r}, which does not fit: {error}")
        config = msgspec.structs.replace(config, **{section: tuple(tables.values())})
    if faults:
        raise ConfigError(faults)
    return config


def _edit(table: S, field: str, text: str) -> S:
    fields = msgspec.to_builtins(table)
    fields[field] = msgspec.json.decode(text) if field == "options" else text
    if holds_null(fields["options"]):
        raise msgspec.ValidationError("options hold no null, for recipes are TOML, which has none")
    if field in ("after", "loop", "python") and text == "none":
        fields[field] = None
    return msgspec.convert(fields, type=type(table), strict=False)


# Each mode in words, and the values under dotted keys that it means: something else written beside it is a
# contradiction.
PRESETS: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = {
    "async": ("generation runs ahead as far as the gate allows; the defaults of the schema hold", {}),
    "one_step": ("batch k + 1 is generated while batch k is trained", dict.fromkeys(GATE, 1)),
    "sync": (
        "every batch is generated by the newest weights, and trained before the next begins",
        dict.fromkeys(GATE, 0) | {"asynchrony.update_weights_interval": 1},
    ),
}


def preset_values(config: Config, given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """What the mode sets, and the faults: values written by the user that contradict it."""
    mode = config.run.mode
    values: dict[str, Any] = {}
    faults: list[str] = []
    summary, means = PRESETS[mode]
    for key, fixed in means.items():
        written = value_at(config, key)
        if key in given and written not in (fixed, None):
            name = key.rpartition(".")[2].replace("_", "-")
            faults.append(
                f"{given[key]} is {written}, but --mode {mode} means {fixed} "
                f"({summary}); leave --{name} out, or choose --mode async"
            )
        else:
            values[key] = fixed
    return values, faults


def with_model(config: Config, model: Path) -> Config:
    """The configuration with another starting point; a reference or critic that had none of its own follows."""
    checkpoints = ("train.hf_checkpoint", "train.ref_load", "critic.critic_load")
    start = (None, config.train.hf_checkpoint)
    return build({key: str(model) for key in checkpoints if value_at(config, key) in start}, config)


def untrained(config: Config) -> Config:
    """The configuration with a trainer that takes no time and gives the weights of the start as every version."""
    values = {"train.train_backend": "simulated", "train.simulated_step_s": 0.0, "checkpoint.save_interval": None}
    return build(values, config)


def supervised(config: Config) -> Config:
    """The configuration of the warm start: the same machine with loss = sft and no engines."""
    warm = config.warm_start
    values: dict[str, Any] = {
        "data.prompt_data": warm.warm_start_data or config.data.prompt_data,
        "data.prompt_data_weights": () if warm.warm_start_data else config.data.prompt_data_weights,
        "data.label_key": warm.warm_start_label_key or config.data.label_key,
        "data.rollout_shuffle": True,
        # Labels are trained as they are: nothing is graded, and functions for rollouts would spoil them.
        "data.curriculum": "none",
        "asynchrony.buffer_order": "oldest_first",
        "reward.custom_convert_samples_to_train_data_path": None,
        "megatron.custom_megatron_before_train_step_hook_path": None,
        "rollout.num_rollout": warm.warm_start_steps,
        "rollout.num_epoch": None,
        "rollout.rollout_batch_size": warm.warm_start_batch_size,
        "rollout.n_samples_per_prompt": 1,
        "train.loss_type": "sft_loss",
        "train.lr": warm.warm_start_lr,
        "train.global_batch_size": warm.warm_start_batch_size,
        "train.num_steps_per_rollout": 1,
        "asynchrony.max_staleness": 2,
        "asynchrony.update_weights_interval": 1,
        "eval.eval_interval": None,
        "eval.eval_prompt_data": (),
        "tools.tools": (),
        "checkpoint.save_interval": None,
        "checkpoint.save_hf": None,
        "observe.use_tensorboard": False,
        "debug": DebugConfig(),
        "run.scale": {},
        "stage": (),
        "environment": (),
    }
    return build(values, config)
