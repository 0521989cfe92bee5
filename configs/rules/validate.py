"""All that is wrong with a resolved configuration, at once; and what is only doubtful, as warnings.

Invariants: each fault is one sentence with key, value, rule and cure; a rule is checked here and nowhere else; checks
read the resolved values, so it does not matter where a value came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from configs.layers import ConfigError, given_by_difference
from configs.resolve import derive
from configs.rules import algorithm, correction, engine, files, parallel, placement, reward, run, unread
from configs.schema import Config

Check = Callable[[Config], Iterator[str]]

_FAULTS: Final[tuple[Check, ...]] = (
    run.length_faults, run.staleness_faults, run.resume_faults,
    algorithm.name_faults, algorithm.estimator_faults, algorithm.loss_faults, algorithm.kl_faults,
    correction.correction_faults, correction.weight_faults, correction.rejection_faults, correction.sampling_faults,
    reward.engine_faults, reward.reward_faults, reward.filter_faults,
    files.data_faults, files.checkpoint_faults, files.import_path_faults,
    placement.scale_faults, placement.autoscale_faults, placement.stage_faults,
    reward.tool_faults, reward.environment_faults, placement.device_faults,
    engine.fleet_faults, engine.router_faults, engine.update_faults, engine.deadline_faults,
    files.preset_faults, files.save_faults, placement.ray_faults,
    parallel.layout_faults, parallel.pipeline_faults, parallel.expert_faults, parallel.model_faults,
    parallel.recompute_faults, parallel.lora_faults,
    run.debug_faults, unread.bound_faults,
)  # fmt: skip
_WARNINGS: Final[tuple[Check, ...]] = (
    run.run_warnings, algorithm.warnings, correction.warnings, placement.scale_warnings, reward.environment_warnings,
    engine.warnings, files.model_warnings, files.save_warnings, parallel.warnings,
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
        (*(fault for check in _FAULTS for fault in check(config)), *unread.unread_faults(config, given)),
        tuple(warning for check in _WARNINGS for warning in check(config)),
    )


def validate(config: Config) -> tuple[str, ...]:
    """Return the warnings of a resolved configuration. Raises `ConfigError` that lists every fault."""
    found = findings(config)
    if found.faults:
        raise ConfigError(found.faults)
    return found.warnings


def checked(config: Config, given: Mapping[str, str] | None = None) -> tuple[Config, tuple[str, ...]]:
    """Resolve and validate in one; contradictions and broken rules are listed together. Raises `ConfigError`."""
    resolved, found = examined(config, given)
    if found.faults:
        raise ConfigError(found.faults)
    return resolved, found.warnings


def examined(config: Config, given: Mapping[str, str] | None = None) -> tuple[Config, Findings]:
    """As `checked`, with the faults beside what could be resolved, so that other checks may add theirs."""
    resolved, faults = derive(config, given)
    found = findings(resolved, given_by_difference(config) if given is None else given)
    if given is not None and "train.hf_checkpoint" not in given:
        faults.append(NO_MODEL)
    return resolved, Findings((*faults, *found.faults), found.warnings)
