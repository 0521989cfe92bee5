"""All faults of a resolved configuration at once, and its warnings; among the faults, options that nothing reads.

Invariants: each fault is one sentence with key, value, rule and cure; a rule is checked in one place; checks read the
resolved values, so it does not matter where a value came from.

What makes an option be read stands at its field, as `ReadBy("condition")`, or as `READ_BY` of its section. A condition
is a list of alternatives, joined by commas and `or`:

    --use-tis, --lora-rank above 0    the flag is on, not empty, not 0
    --no-use-dynamic-batch-size       the flag is off
    --train-backend fsdp or megatron  the flag has one of these values
    a judge                           a fact of `_FACTS`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from msgspec import Struct

from configs.flags import flags_by_key, show
from configs.graph import autoscale_limits, engine_count, loops
from configs.layers import ConfigError, build, given_by_difference, value_at
from configs.load import CONFIG_FILE, load
from configs.plan.gpus import trainer_processes
from configs.resolve import derive
from configs.rules import algorithm, engine, files, parallel, placement, reward, run
from configs.schema import Config

# The first must not be above the second.
_PAIRS: Final = (
    ("train.min_lr", "train.lr"),
    ("correction.tis_clip_low", "correction.tis_clip"),
    ("correction.tis_seq_low", "correction.tis_seq_high"),
    ("data.curriculum_low", "data.curriculum_high"),
)
# Conditions that must not hold together, and why. The cure is to leave one of them out, unless another is given.
_CONTRADICTIONS: Final = (
    ("--kl-coef above 0", "--use-kl-loss",
     "both hold the policy near the reference, once in the reward and once in the loss"),
    ("--use-tis", "--loss-type custom_loss",
     "a loss of your own is not weighted; leave --use-tis out and correct inside the loss"),
    ("--rollout-rs, --rs-veto or --use-opsm", "--loss-type custom_loss", "it acts on a policy loss; leave it out"),
    ("--tis-batch-normalize", "--tis-level geometric",
     "a geometric mean is no importance weight whose mean should be 1"),
    ("--reward-component", "--custom-rm-path",
     "both say how to grade; leave one out, or make your function a component, as own=FUNCTION@1.0"),
    ("--group-rm", "--reward-component", "both say what a response earns"),
    ("--reward-key", "--reward-component", "both say what a response earns"),
    ("--custom-reward-post-process-path", "--advantage-estimator ppo, reinforce_plus_plus or on_policy_distillation",
     "it replaces a group's normalisation, which this estimator does not have; choose a group estimator such as grpo"),
    ("--deterministic", "--over-sampling-batch-size",
     "which groups are trained then depends on the order in which they finish"),
    ("--deterministic", "--dynamic-sampling-early-after",
     "which rollouts end first then decides which groups are trained"),
    ("--group-rm", "--dynamic-sampling-early-after", "rewards are there only when the group is whole"),
    ("--dynamic-sampling-filter nonzero_std", "--dynamic-sampling-filter nonzero_std_fallback",
     "the first drops what the second would keep for a batch that is short"),
    ("--tools", "an [[environment]]",
     "both answer the model's turns; leave --tools out, and let the environment offer its tools"),
    ("--ref-update-interval", "--lora-rank above 0",
     "the reference is the model without adapters, which no update changes; leave --ref-update-interval out"),
    ("--rollout-num-gpus", "--rollout-external-engine-addrs", "no engine is started"),
    ("--colocate", "--rollout-external-engine-addrs",
     "engine and trainer take turns on their devices, but engines that run already keep theirs; leave out --colocate "
     "or --rollout-external-engine-addrs"),
    ("--eval-engines above 0", "--eval-external-engine-addrs", "both say which engines evaluate"),
    ("--eval-engines above 0 or --eval-external-engine-addrs", "--colocate",
     "engine and trainer take turns on their devices, and an evaluation would run in the trainer's turn"),
)  # fmt: skip
_OF_POLICY_LOSS: Final = ("algorithm.", "correction.", "critic.")  # supervised training does not judge by these
_WORK: Final = ("train.loss_type", "debug.load_debug_rollout_data")  # which may need no engine


def _generates_by_function(config: Config) -> bool:
    """The samples of a data source may name a function each."""
    rollout = config.rollout
    functions = (rollout.custom_generate_function_path, rollout.rollout_function_path, config.data.data_source_path)
    return any(function is not None for function in functions)


def _graders(config: Config) -> set[str]:
    """Names of the graders, without `boxed_` in front and arguments behind."""
    components = (text.partition("=")[2].rpartition("@")[0] for text in config.reward.reward_component)
    return {name.partition(":")[0].removeprefix("boxed_") for name in (config.reward.rm_type, *components)}


def _judges(config: Config) -> bool:
    """A row may name any frozen engine as its judge."""
    return bool(config.reward.judge_engine or config.engine.frozen_engine) or "judge" in _graders(config)


def _engines(config: Config) -> int:
    """The most engines that the run may have."""
    return max(engine_count(config), autoscale_limits(config).get("engine", (0, 0))[1])


_GRADER: Final = ("reward.rm_", "reward.reward_component")
# What a condition may name beside flags: whether the run has it, and the settings that decide it.
_FACTS: Final[Mapping[str, tuple[Callable[[Config], bool], tuple[str, ...]]]] = {
    "a run without --data-source-path": (lambda c: c.data.data_source_path is None, ("data.data_source_path",)),
    "an [[environment]]": (lambda c: bool(c.environment), ("environment",)),
    "a loop stage": (lambda c: bool(loops(c)), ("environment", "stage", "tools.", *_WORK)),
    "a function of yours that generates": (
        _generates_by_function,
        ("rollout.custom_", "rollout.rollout_function_path"),
    ),
    "a judge": (_judges, (*_GRADER, "reward.judge_engine", "engine.frozen_engine")),
    "a remote grader": (lambda c: c.reward.rm_url is not None or "remote" in _graders(c), _GRADER),
    # With `auto` rows may name it.
    "the grader math": (lambda c: not {"auto", "math"}.isdisjoint(_graders(c)), _GRADER),
    "several engines": (lambda c: _engines(c) > 1, ("run.scale", "run.autoscale", "sglang.", *_WORK)),
    "a trainer in processes of its own": (lambda c: trainer_processes(c) > 0, ("train.train_backend", "parallel.")),
}


def unread_faults(config: Config, given: Mapping[str, str] | None = None) -> Iterator[str]:
    """One sentence for each option that was written, differs from its default, and is not read.

    `given`: dotted key -> how the user wrote it; without it, whatever differs from its default counts as written.
    """
    written = given_by_difference(config) if given is None else given
    for key, wrote in written.items():
        flag, value = flags_by_key()[key], value_at(config, key)
        condition = next((text for text in flag.read_by if not _written(config, text)), None)
        if condition is None or value == flag.default or _may_stay(wrote, condition, written):
            continue
        if config.train.loss_type == "sft_loss" and key.startswith(_OF_POLICY_LOSS):
            continue
        if value != _derived(config, key, written):
            yield f"{flag.label} is {show(value)}, but only {condition} reads it; choose that, or leave it out"


def contradictions(config: Config) -> Iterator[str]:
    for first, second, why in _CONTRADICTIONS:
        one, other = _written(config, first), _written(config, second)
        if one and other:
            yield f"{one} with {other}: {why}" + ("" if ";" in why else "; leave one of them out")


def bound_faults(config: Config) -> Iterator[str]:
    for low, high in _PAIRS:
        least, most = value_at(config, low), value_at(config, high)
        if least > most:
            label, bound = flags_by_key()[low].label, flags_by_key()[high].label
            yield f"{label} is {show(least)}, but must not be above {bound} {show(most)}; lower it"


def _derived(config: Config, key: str, written: Mapping[str, str]) -> Any:
    """The value that the option has if it is left out."""
    left = {other: label for other, label in written.items() if other != key}
    return value_at(derive(build({key: flags_by_key()[key].default}, config), left)[0], key)


def _may_stay(wrote: str, condition: str, written: Mapping[str, str]) -> bool:
    """Whether the option comes from a recipe, and another layer changed the setting that makes it be read.

    A run's own config.toml is the dump of all its layers, and so holds such options as well.
    """
    place = wrote.partition(" in ")[2]
    if place == CONFIG_FILE:
        return True
    switches = tuple(
        start for key, text, _ in _alternatives(condition) for start in ([key] if key else _FACTS[text][1])
    )
    changed = (label.partition(" in ")[2] for key, label in written.items() if key.startswith(switches))
    return bool(place) and any(layer != place for layer in changed)


def _written(config: Config, condition: str) -> str:
    """The first alternative that holds, as a user writes it; empty if none does."""
    for key, text, wanted in _alternatives(condition):
        if not key and _FACTS[text][0](config):
            return text
        if key and _has(config, key, text, wanted=wanted):
            flag = flags_by_key()[key]
            value = "" if flag.kind == "bool" else f" {text or show(value_at(config, key))}"
            return f"--{'' if wanted else 'no-'}{flag.name}{value}"
    return ""


def _has(config: Config, key: str, text: str, *, wanted: bool) -> bool:
    value = value_at(config, key)
    if not text:
        return bool(value) is wanted
    if isinstance(value, tuple):
        return text in value
    return str(value) == text or (key == "algorithm.policy_loss" and ":" in str(value))  # a custom loss may read all


@cache
def _alternatives(condition: str) -> tuple[tuple[str, str, bool], ...]:
    """(Key, value, on or off) of each alternative; of a fact ("", its words, True)."""
    found: list[tuple[str, str, bool]] = []
    names = {flag.name: key for key, flag in flags_by_key().items()}
    for text in re.split(r", | or ", condition):
        name, _, value = text.removeprefix("--").partition(" ")
        if text in _FACTS:
            found.append(("", text, True))
        elif text.startswith("--"):
            off = name not in names
            found.append((names[name.removeprefix("no-") if off else name], value.removeprefix("above 0"), not off))
        else:
            found.append((found[-1][0], text, True))
    return tuple(found)


Check = Callable[[Config], Iterator[str]]

_FAULTS: Final[tuple[Check, ...]] = (
    run.length_faults, run.staleness_faults, run.resume_faults,
    algorithm.name_faults, algorithm.estimator_faults, algorithm.loss_faults, algorithm.kl_faults,
    algorithm.correction_faults, algorithm.weight_faults, algorithm.rejection_faults, algorithm.sampling_faults,
    reward.engine_faults, reward.reward_faults, reward.filter_faults,
    files.data_faults, files.checkpoint_faults, files.import_path_faults,
    placement.scale_faults, placement.chain_faults, placement.autoscale_faults, placement.stage_faults,
    reward.tool_faults, reward.environment_faults, reward.custom_args_faults, placement.device_faults,
    engine.fleet_faults, engine.router_faults, engine.update_faults,
    files.preset_faults, files.engine_checkpoint_faults, files.family_faults, files.model_args_faults,
    files.save_faults, placement.ray_faults,
    parallel.layout_faults, parallel.megatron_faults, parallel.lora_faults,
    run.tracker_faults, run.otel_faults, run.debug_faults, bound_faults, contradictions,
)  # fmt: skip
_WARNINGS: Final[tuple[Check, ...]] = (
    run.run_warnings, run.greedy_warnings, algorithm.algorithm_warnings,
    placement.scale_warnings, reward.environment_warnings,
    engine.warnings, files.save_warnings, parallel.warnings,
)  # fmt: skip

NO_MODEL: Final = (
    "--hf-checkpoint is not set, but a run trains a model; give a Hugging Face directory or hub id such as "
    "Qwen/Qwen3-0.6B, --model with the name of a preset, or a small random one: tiny, or tiny-arithmetic for the "
    "built-in data"
)


class Findings(Struct, frozen=True):
    faults: tuple[str, ...]
    warnings: tuple[str, ...]


def findings(config: Config, given: Mapping[str, str] | None = None) -> Findings:
    """Check a resolved configuration. `given`: dotted key -> how the user wrote it."""
    return Findings(
        (*(fault for check in _FAULTS for fault in check(config)), *unread_faults(config, given)),
        tuple(warning for check in _WARNINGS for warning in check(config)),
    )


def checked(config: Config, given: Mapping[str, str] | None = None) -> tuple[Config, tuple[str, ...]]:
    """Resolve and validate in one; contradictions and broken rules are listed together. Raises `ConfigError`."""
    resolved, found = examined(config, given)
    if found.faults:
        raise ConfigError(found.faults)
    return resolved, found.warnings


def checked_flags(argv: Sequence[str]) -> Config:
    """The resolved and checked configuration of a command line. Raises `ConfigError`."""
    loaded = load(argv)
    return checked(loaded.config, loaded.given)[0]


def examined(config: Config, given: Mapping[str, str] | None = None) -> tuple[Config, Findings]:
    """As `checked`, with the faults beside what could be resolved, so that other checks may add theirs."""
    resolved, faults = derive(config, given)
    found = findings(resolved, given_by_difference(config) if given is None else given)
    if given is not None and "train.hf_checkpoint" not in given:
        faults.append(NO_MODEL)
    return resolved, Findings((*faults, *found.faults), found.warnings)
