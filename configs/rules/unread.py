"""Options that are set although nothing reads them, or that exclude each other as numbers: told by tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from configs.cli.flags import flags_by_key, show
from configs.layers import value_at
from configs.schema import Config

# The first must not be above the second.
_PAIRS: Final = (
    ("train.min_lr", "train.lr"),
    ("correction.tis_clip_low", "correction.tis_clip"),
    ("correction.tis_seq_low", "correction.tis_seq_high"),
    ("data.curriculum_low", "data.curriculum_high"),
)


def unread_faults(config: Config) -> Iterator[str]:
    """Whoever sets such an option believes that it does something."""
    for readers, read, keys in (*_of_the_trainer(config), *_of_the_loss(config), *_of_the_rest(config)):
        for key in () if read else keys:
            flag, value = flags_by_key()[key], value_at(config, key)
            if value != flag.default:
                yield f"{flag.label} is {show(value)}, but only {readers} reads it; choose that, or leave it out"


def bound_faults(config: Config) -> Iterator[str]:
    for low, high in _PAIRS:
        least, most = value_at(config, low), value_at(config, high)
        if least > most:
            label, other = flags_by_key()[low].label, flags_by_key()[high].label
            yield f"{label} is {show(least)}, but must not be above {other} {show(most)}; lower it"


# What reads some options, whether the run has it, and their keys.
_Readers = tuple[str, bool, tuple[str, ...]]


def _of_the_trainer(config: Config) -> Iterator[_Readers]:
    backend, megatron = config.train.train_backend, config.megatron
    yield "--train-backend fsdp", backend == "fsdp", _section("fsdp")
    yield "--train-backend megatron", backend == "megatron", _section("megatron")
    yield "--train-backend torch, fsdp or megatron", backend != "simulated", _section("parallel")
    yield "--train-backend fsdp or megatron", backend in ("fsdp", "megatron"), ("checkpoint.async_save",)
    yield "--lora-rank above 0", config.lora.lora_rank > 0, ("lora.lora_alpha", "lora.lora_target_modules")
    if backend != "simulated":
        by_number = not config.parallel.use_dynamic_batch_size
        yield "--no-use-dynamic-batch-size", by_number, ("parallel.micro_batch_size",)
    if backend == "megatron":
        yield "--optimizer-cpu-offload", megatron.optimizer_cpu_offload, ("megatron.optimizer_offload_fraction",)
        recomputed = ("megatron.recompute_method", "megatron.recompute_num_layers")
        yield "--recompute-granularity full", megatron.recompute_granularity == "full", recomputed


def _of_the_loss(config: Config) -> Iterator[_Readers]:
    if config.train.loss_type == "sft_loss":
        return
    algorithm, correction = config.algorithm, config.correction
    estimator, loss = algorithm.advantage_estimator, algorithm.policy_loss
    critic, returns = estimator == "ppo", estimator in ("ppo", "reinforce_plus_plus")
    of_critic = tuple(key for key in _section("critic") if key != "critic.critic_load")  # derived, if not set
    yield "--advantage-estimator ppo or reinforce_plus_plus", returns, ("algorithm.gamma",)
    yield "--advantage-estimator ppo", critic, ("algorithm.lambd", "algorithm.bootstrap_truncated", *of_critic)
    for name, options in (
        ("ppo", ("eps_clip_c",)),
        ("dppo", ("dppo_threshold", "dppo_kl_coef")),
        ("aipo", ("aipo_clip",)),
        ("m2po", ("m2po_threshold",)),
        ("kimi", ("kimi_tau",)),
    ):
        own = ":" in loss  # a loss of the user's may read anything
        yield f"--policy-loss {name}", own or loss == name, tuple(f"algorithm.{option}" for option in options)
    custom = config.train.loss_type == "custom_loss"
    yield "--loss-type custom_loss", custom, ("algorithm.custom_loss_function_path",)
    yield "--use-kl-loss", algorithm.use_kl_loss, ("algorithm.kl_loss_coef", "algorithm.use_unbiased_kl")
    reference = algorithm.use_kl_loss or algorithm.kl_coef > 0
    yield "--use-kl-loss or --kl-coef", reference, ("algorithm.ref_update_interval",)
    yield "--prox loglinear", correction.prox == "loglinear", ("correction.prox_alpha",)
    yield "--use-opsm", correction.use_opsm, ("correction.opsm_delta",)


def _of_the_rest(config: Config) -> Iterator[_Readers]:
    correction, filters = config.correction, config.filter
    of_sequences = ("correction.tis_seq_low", "correction.tis_seq_high")
    yield "--tis-mode seq_mask", correction.tis_mode == "seq_mask", of_sequences
    yield "--use-tis", bool(correction.use_tis), ("correction.custom_tis_function_path",)
    rejects = bool(correction.rollout_rs) or correction.rs_veto is not None
    of_rules = ("correction.rs_unit", "correction.renormalize_after_rejection")
    yield "--rollout-rs or --rs-veto", rejects, of_rules
    yield "--runner ray", config.run.runner == "ray", _section("ray")
    yield "--use-opd", config.distill.use_opd, ("distill.opd_teacher",)
    delta = config.update.update_weight_transport == "delta"
    yield "--update-weight-transport delta", delta, ("update.update_weight_delta_dir",)
    drops = bool(filters.dynamic_sampling_filter) or filters.dynamic_sampling_filter_path is not None
    yield "--dynamic-sampling-filter", drops, ("filter.over_sampling_batch_size",)
    curriculum = tuple(f"data.curriculum_{name}" for name in ("low", "high", "keep"))
    yield "an [[environment]]", bool(config.environment), ("tools.tool_call_parser",)
    own = config.data.data_source_path is None
    yield "a run without --data-source-path", own, ("data.curriculum", "data.rollout_shuffle")
    yield "--curriculum pass_rate", config.data.curriculum == "pass_rate", curriculum


def _section(name: str) -> tuple[str, ...]:
    return tuple(key for key in flags_by_key() if key.startswith(f"{name}."))
