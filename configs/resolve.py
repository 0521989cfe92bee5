"""Derive what the user left open, after all overrides. Looks only at the clock, the terminal and the run directory.

    rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout      (rollouts)
    max_staleness = async_buffer_size + update_weights_interval - 1                            (weights versions)

Invariants: what the user wrote is never changed, only contradicted with an error; resolving twice changes nothing; no
None stays where a value can be derived. `num_rollout` from `num_epoch` needs the data: `num_rollout_for`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import astuple

from configs.graph import replicas
from configs.layers import ConfigError, build, given_by_difference, preset_values, value_at
from configs.plan.goodput import UNMEASURED_AHEAD, choose_ahead, planned_workload
from configs.schema import Config
from configs.schema.algorithm import LOSS_OF_ESTIMATOR, SAMPLER_LOSSES, WHITENED
from configs.sources import BUILT_IN_LABEL, IMPORT_PATHS, NAMED, parse_source

# The settings of a `Batch`.
_BATCH: Final = (
    "rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "train.global_batch_size",
    "train.num_steps_per_rollout",
)  # fmt: skip
_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


class Batch(Struct, frozen=True):
    """The four numbers of a rollout batch."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    global_batch_size: int
    num_steps_per_rollout: int


def resolve(config: Config, given: Mapping[str, str] | None = None) -> Config:
    """A new configuration with all open values derived. Raises `ConfigError` on a contradiction.

    `given`: dotted key -> how the user wrote it; without it, whatever differs from its default counts as written.
    """
    resolved, faults = derive(config, given)
    if faults:
        raise ConfigError(faults)
    return resolved


def derive(config: Config, given: Mapping[str, str] | None = None) -> tuple[Config, list[str]]:
    """As `resolve`, but returns the faults beside what could be derived, so that all can be shown at once."""
    written = given_by_difference(config) if given is None else given
    values, faults = preset_values(config, written)
    config = build({**values, **_import_paths(config)}, config)
    config = build(_staleness(config, {*written, *values}), config)
    try:
        config = build(_batch(config, written), config)
    except ConfigError as error:
        faults.extend(error.faults)
    config = build(_policy(config, written), config)
    config = build(_recompute(config), config)
    return build(_defaults(config), config), faults


def _import_paths(config: Config) -> dict[str, Any]:
    """`package.module.name`, as slime writes import paths, as `package.module:name`, which all readers expect."""
    written = {key: value_at(config, key) for key in (*IMPORT_PATHS, *NAMED)}
    return {key: ":".join(text.rsplit(".", 1)) for key, text in written.items() if text and _DOTTED.fullmatch(text)}


def num_rollout_for(config: Config, prompts: int) -> int:
    """Rollout batches of a run over a data set with so many prompts: num_rollout, or whole batches of each epoch."""
    if config.rollout.num_rollout is not None:
        return config.rollout.num_rollout
    batch = config.rollout.rollout_batch_size
    epochs = config.rollout.num_epoch
    if epochs is None:
        raise ConfigError("--num-rollout is not set, but the length of the run must be known; set it, or --num-epoch")
    if prompts < batch:
        raise ConfigError(
            f"--rollout-batch-size is {batch}, but an epoch has only {prompts} prompts, less than one batch; lower it "
            f"to {max(prompts, 1)} or give more --prompt-data"
        )
    return epochs * (prompts // batch)


def batch_arithmetic(
    groups: int | None, samples: int | None, size: int | None, steps: int | None, defaults: tuple[int, int] = (32, 8)
) -> Batch:
    """Complete the four numbers of a `Batch`; None = not given. `defaults`: of the first two. Raises `ConfigError` with
    the numbers and the cure.

    With both right-hand numbers given, a missing left-hand one follows from them; else the defaults of the left-hand
    side hold and the right-hand side follows, with one step per rollout batch if neither is given.
    """
    if size is not None and steps is not None:
        total = size * steps
        if groups is None:
            samples = samples or defaults[1]
            groups = _divided(total, samples, "--rollout-batch-size", "--n-samples-per-prompt", samples)
        elif samples is None:
            samples = _divided(total, groups, "--n-samples-per-prompt", "--rollout-batch-size", groups)
    groups, samples = groups or defaults[0], samples or defaults[1]
    rollouts = groups * samples
    left = f"rollout_batch_size {groups} x n_samples_per_prompt {samples} = {rollouts} rollouts"
    if steps is None:
        if size is not None and rollouts % size:
            raise ConfigError(
                f"{left}, which --global-batch-size {size} does not divide into whole optimizer steps; set "
                f"--global-batch-size {_near_size(rollouts, samples, size)}"
            )
        steps = 1 if size is None else rollouts // size
    if size is None:
        if rollouts % steps:
            raise ConfigError(
                f"{left}, which --num-steps-per-rollout {steps} does not divide into equal steps; set "
                f"--num-steps-per-rollout {_near_size(groups, 1, steps)}"
            )
        size = rollouts // steps
    if size * steps != rollouts:
        right = f"global_batch_size {size} x num_steps_per_rollout {steps} = {size * steps}"
        cure = f"--global-batch-size {rollouts // steps}" if rollouts % steps == 0 else "--num-steps-per-rollout 1"
        raise ConfigError(f"{left}, but {right}, and both must be equal; set {cure}, or leave one of the four out")
    if size % samples:
        raise ConfigError(
            f"--global-batch-size is {size}, but must be a multiple of n_samples_per_prompt {samples}, for a step "
            f"trains whole groups; set --global-batch-size {_near_size(rollouts, samples, size)}, or leave it and "
            "--num-steps-per-rollout out"
        )
    return Batch(groups, samples, size, steps)


def _divided(total: int, by: int, wanted: str, other: str, value: int) -> int:
    if total % by:
        raise ConfigError(
            f"global_batch_size x num_steps_per_rollout = {total} rollouts, which {other} {value} does not divide, so "
            f"that {wanted} cannot be derived; set --global-batch-size to a multiple of {by}"
        )
    return total // by


def _near_size(rollouts: int, samples: int, requested: int) -> int:
    """The valid global batch size (whole groups, whole steps) nearest to the requested size."""
    sizes = [samples * groups for groups in range(1, rollouts // samples + 1) if rollouts // samples % groups == 0]
    return min(sizes, key=lambda size: abs(size - requested))


def _batch(config: Config, written: Mapping[str, str] | set[str]) -> dict[str, Any]:
    groups, samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    batch = batch_arithmetic(
        groups if _BATCH[0] in written else None,
        samples if _BATCH[1] in written else None,
        config.train.global_batch_size,
        config.train.num_steps_per_rollout,
        defaults=(groups, samples),
    )
    return dict(zip(_BATCH, astuple(batch), strict=True))


def _staleness(config: Config, written: set[str]) -> dict[str, Any]:
    """The bound from buffer and interval; or the buffer from the bound, if only that was written."""
    gate = config.asynchrony
    if gate.max_staleness is None:
        if gate.async_buffer_size == "auto":
            ahead = choose_ahead(planned_workload(config))[0]
            if config.engine.engine != "simulated":  # a guess at the lengths is no reason to train old tokens
                ahead = min(ahead, UNMEASURED_AHEAD)
        else:
            ahead = int(gate.async_buffer_size)
        return {"asynchrony.max_staleness": ahead + gate.update_weights_interval - 1}
    ahead = gate.max_staleness - gate.update_weights_interval + 1
    if "asynchrony.async_buffer_size" not in written and ahead >= 0:
        return {"asynchrony.async_buffer_size": ahead}
    return {}


def _policy(config: Config, written: Mapping[str, str]) -> dict[str, Any]:
    algorithm, correction = config.algorithm, config.correction
    bypass, mode, tis = correction.use_rollout_logprobs, correction.policy_mode, correction.use_tis
    loss = LOSS_OF_ESTIMATOR.get(algorithm.advantage_estimator, "ppo")
    loss = loss if algorithm.policy_loss == "auto" else algorithm.policy_loss
    if "correction.use_rollout_logprobs" not in written:
        # A loss on theta / mu corrects by itself: its ratio is against the sampler.
        bypass = bypass or mode == "bypass" or (mode == "auto" and loss in SAMPLER_LOSSES)
    supervised = config.train.loss_type == "sft_loss"
    if tis is None:
        stale = (config.asynchrony.max_staleness or 0) > 0
        tis = stale and not bypass and mode in ("auto", "decoupled") and not supervised
        own = loss in SAMPLER_LOSSES or config.train.loss_type == "custom_loss"
        tis = tis and not own and not correction.allow_uncorrected
    if mode == "auto":
        mode = "decoupled" if tis or (correction.rejects and not bypass) else "bypass" if bypass else "onpolicy"
    whiten = algorithm.normalize_advantages
    return {
        "algorithm.policy_loss": loss,
        "algorithm.normalize_advantages": algorithm.advantage_estimator in WHITENED if whiten is None else whiten,
        "correction.use_tis": tis,
        "correction.use_rollout_logprobs": bypass,
        "correction.policy_mode": mode,
        "algorithm.eps_clip_high": algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
    }


def _recompute(config: Config) -> dict[str, Any]:
    """Megatron's three options of recomputation from one of them, or from `--gradient-checkpointing`."""
    megatron = config.megatron
    if config.train.train_backend != "megatron":
        return {}
    granularity = megatron.recompute_granularity or ("selective" if megatron.recompute_activations else None)
    if granularity is None and config.train.gradient_checkpointing:
        granularity = "full"
    values: dict[str, Any] = {"megatron.recompute_granularity": granularity}
    if granularity == "full":
        values["megatron.recompute_method"] = megatron.recompute_method or "uniform"
        values["megatron.recompute_num_layers"] = megatron.recompute_num_layers or 1
    return values


def _defaults(config: Config) -> dict[str, Any]:
    """Defaults that are another setting's value, or the surroundings'."""
    rollout, data = config.rollout, config.data
    built_in = bool(data.prompt_data) and all(parse_source(text).built_in for text in data.prompt_data)
    label = BUILT_IN_LABEL if data.label_key is None and built_in else data.label_key
    context = rollout.rollout_max_context_len
    derived: dict[str, Any] = {
        "run.run_dir": config.run.resume if config.run.resume is not None else _new_run_dir,
        "data.rollout_max_prompt_len": context - 1 if context is not None else None,
        "train.ref_load": config.train.hf_checkpoint,
        "critic.critic_load": config.train.hf_checkpoint,
        "critic.critic_lr": min(10 * config.train.lr, 3e-4) if config.algorithm.advantage_estimator == "ppo" else None,
        "eval.eval_max_response_len": rollout.rollout_max_response_len,
        "eval.eval_input_key": data.input_key,
        "data.label_key": label,
        "eval.eval_label_key": label,
        "eval.eval_interval": 1 if rollout.num_rollout == 0 and config.eval.eval_prompt_data else None,
        "engine.engine_memory_fraction": _cache_share(config),
        "observe.live": sys.stdout.isatty,
    }
    values = {}
    for key, value in derived.items():
        if value_at(config, key) is None:
            values[key] = value() if callable(value) else value
    if 0 < config.reward.overlong_buffer_len < 1:
        part = config.reward.overlong_buffer_len * rollout.rollout_max_response_len
        values["reward.overlong_buffer_len"] = float(max(1, round(part)))
    if not config.warm_start.warm_start_data:
        values["warm_start.warm_start_data"] = data.prompt_data
    return values


def _cache_share(config: Config) -> float:
    """Of a GPU, for the KV cache of each embedded engine: all are on one, which may be that of the trainer."""
    trains = config.train.train_backend != "simulated" and not config.asynchrony.colocate
    first = ("auto", "cuda", "cuda:0")
    ours, theirs = config.train.train_device, config.engine.engine_device
    shared = trains and ours != "cpu" and (ours == theirs or (ours in first and theirs in first))
    return (0.3 if shared else 0.8) / max(1, replicas(config).get("engine", 1))


def _new_run_dir() -> str:
    """`runs/<time>`, with a number behind it if two runs begin in one second."""
    base = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return str(path)
