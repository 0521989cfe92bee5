"""Arithmetic of what a run may be expected to do: staleness, step time, parameters, memory. Pure.

Notation: B groups per rollout batch, n rollouts per group, N batches ahead, K batches between publications of weights,
C groups in flight, Q groups finished and not yet trained.

    bound of staleness       S = N + K - 1                        versions
    mean staleness           (C + Q) / B + (K - 1) / 2            Little's law, exact in steady state
    step, fixed split        max(W_g / c_g, W_t / c_t)            work by capacity, the slower side decides
    efficiency               that bound / the measured step time
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from configs.graph import replicas
from configs.schema import Config, SimulatedEngineConfig

__all__ = [
    "Memory",
    "Staleness",
    "StepTime",
    "capped_lognormal_mean",
    "efficiency",
    "mean_staleness",
    "memory",
    "parameters",
    "predicted_staleness",
    "simulated_generation_s",
    "simulated_training_s",
    "staleness_line",
    "step_bound_s",
]

TRAINER_BYTES: Final = 16  # per parameter in fp32: 4 weights, 8 Adam moments, 4 gradients


class Staleness(Struct, frozen=True):
    """In weights versions. The mean lies near `mean_low` if generation is the slower side, `mean_high` if training "
    "is."""

    bound: int
    ahead: int  # N that the bound stands for
    interval: int  # K
    mean_low: float
    mean_high: float
    useful: int  # smallest bound that keeps all engine slots busy


def mean_staleness(in_flight: float, queued: float, batch: int, interval: int = 1) -> float:
    """Mean versions between the start of a group and its training. All three counts in groups. Little's law."""
    return (in_flight + queued) / batch + (interval - 1) / 2


def predicted_staleness(config: Config) -> Staleness:
    """From the gate and the engines' slots alone.

    If training is the slower side the gate is always full: C + Q = N * B plus, between publications, (K - 1) / 2
    batches on average. If generation is, all slots run and nothing queues: C = slots / n groups, at most what the
    gate admits.
    """
    gate, rollout = config.asynchrony, config.rollout
    interval = gate.update_weights_interval
    bound = gate.max_staleness if gate.max_staleness is not None else gate.async_buffer_size + interval - 1
    batch = rollout.rollout_batch_size
    slots = replicas(config).get("engine", 0) * min(config.engine.engine_slots, rollout.server_concurrency)
    running = slots / rollout.n_samples_per_prompt
    ahead = max(bound - interval + 1, 0)
    high = mean_staleness(0, ahead * batch, batch, interval)
    return Staleness(
        bound=bound,
        ahead=ahead,
        interval=interval,
        mean_low=min(high, mean_staleness(running, 0, batch, interval)),
        mean_high=high,
        useful=math.ceil(running / batch) + interval - 1,
    )


def staleness_line(config: Config) -> str:
    """The line that a run prints at its start: the bound, and the mean to expect."""
    found = predicted_staleness(config)
    if found.bound == 0:
        return "staleness: 0, every token is trained by the weights version that made it"
    line = (
        f"staleness: at most {found.bound} version{'s' if found.bound > 1 else ''} (N + K - 1 with N = "
        f"{found.ahead}, K = {found.interval}); predicted mean {found.mean_high:.2g} if training is the slower side"
    )
    if found.mean_low < found.mean_high:
        line += f", about {found.mean_low:.2g} if generation is"
    return line


def step_bound_s(generation_s: float, training_s: float) -> float:
    """Shortest possible time per rollout batch, seconds, with generation and training on resources of their own."""
    return max(generation_s, training_s)


def efficiency(generation_s: float, training_s: float, measured_s: float) -> float:
    """Share of the bound that a measured step time reaches (1 = nothing is lost)."""
    return step_bound_s(generation_s, training_s) / measured_s


class StepTime(Struct, frozen=True):
    """Seconds per rollout batch by component, where known."""

    generation_s: float | None
    training_s: float | None

    @property
    def bound_s(self) -> float | None:
        if self.generation_s is None or self.training_s is None:
            return None
        return step_bound_s(self.generation_s, self.training_s)


def simulated_generation_s(config: Config) -> float:
    """Seconds that the simulated engines need per rollout batch with all slots busy: W_g / c_g.

    A decode step of b requests takes a + c * b, so b requests make b tokens in that time; prefill is left out.
    """
    rollout, model = config.rollout, config.engine.simulated
    engines = replicas(config).get("engine", 1)
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    bound = config.asynchrony.max_staleness or 0
    admitted = math.ceil(rollouts * (bound + 1) / engines)
    running = min(config.engine.engine_slots, rollout.server_concurrency, admitted)
    step_s = (model.a_ms + model.c_ms * running) / 1000 * model.time_scale
    return rollouts * response_tokens(model, rollout.rollout_max_response_len) / (running * engines) * step_s


def simulated_training_s(config: Config) -> float:
    """Seconds that the simulated trainer needs per rollout batch: W_t / c_t."""
    return config.train.simulated_step_s * (config.train.num_steps_per_rollout or 1)


def response_tokens(model: SimulatedEngineConfig, limit: int) -> float:
    """Mean response of the simulated engine, tokens, cut at its cap and at `--rollout-max-response-len`."""
    return capped_lognormal_mean(model.length_mean, model.length_sigma, min(model.length_cap, limit))


def capped_lognormal_mean(mean: float, sigma: float, cap: float) -> float:
    """E[min(L, cap)] of a lognormal L with this mean and this sigma of its logarithm; sigma 0 is a constant."""
    if sigma == 0:
        return min(mean, cap)
    mu = math.log(mean) - sigma * sigma / 2
    z = (math.log(cap) - mu) / sigma
    return mean * _normal(z - sigma) + cap * (1 - _normal(z))


def _normal(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def parameters(model: Mapping[str, Any]) -> int | None:
    """Parameters of a Hugging Face config.json of the shapes qwen2, qwen3, qwen3_moe and llama; None for others."""
    kind = model.get("model_type")
    if kind not in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        return None
    try:
        hidden, layers, vocabulary = model["hidden_size"], model["num_hidden_layers"], model["vocab_size"]
        wide, narrow, head = _attention(model)
        biased = kind == "qwen2" or bool(model.get("attention_bias", False))
        attention = 2 * hidden * wide + 2 * hidden * narrow
        if biased:
            attention += wide + 2 * narrow + (0 if kind == "qwen2" else hidden)
        if kind.startswith("qwen3"):
            attention += 2 * head
        feed_forward = sum(_feed_forward(model, layer) for layer in range(layers))
        embeddings = vocabulary * hidden * (1 if model.get("tie_word_embeddings", False) else 2)
    except (KeyError, TypeError):
        return None
    return int(embeddings + layers * (attention + 2 * hidden) + feed_forward + hidden)


def _attention(model: Mapping[str, Any]) -> tuple[int, int, int]:
    """Widths of queries and of keys (all heads), and of one head."""
    heads = model["num_attention_heads"]
    head = model.get("head_dim") or model["hidden_size"] // heads
    return heads * head, (model.get("num_key_value_heads") or heads) * head, head


def _feed_forward(model: Mapping[str, Any], layer: int) -> int:
    hidden = int(model["hidden_size"])
    count = model.get("num_experts") or model.get("num_local_experts") or 0  # as published, or as saved again
    experts = int(count) if model["model_type"] == "qwen3_moe" else 0
    sparse = experts > 0 and (layer + 1) % int(model.get("decoder_sparse_step", 1)) == 0
    if sparse and layer not in model.get("mlp_only_layers", ()):
        return experts * 3 * hidden * int(model["moe_intermediate_size"]) + hidden * experts
    biases = 2 * int(model["intermediate_size"]) + hidden if model.get("mlp_bias") else 0
    return 3 * hidden * int(model["intermediate_size"]) + biases


class Memory(Struct, frozen=True):
    """Bytes. Activations, logits and the runtime itself come on top."""

    parameters: int
    trainer: int  # fp32 weights, Adam, gradients
    engine_weights: int  # of one engine
    kv_bytes_per_token: int
    kv_tokens: int  # all slots of one engine at full length
    weight_slots: int  # two versions in shared memory

    @property
    def engine(self) -> int:
        return self.engine_weights + self.kv_bytes_per_token * self.kv_tokens


def memory(config: Config, model: Mapping[str, Any]) -> Memory | None:
    """Estimate for a model's config.json; None if its shape is not known."""
    count = parameters(model)
    if count is None:
        return None
    width = 2 if config.engine.engine_dtype == "bfloat16" else 4
    rollout = config.rollout
    limit = model.get("max_position_embeddings")
    length = rollout.rollout_max_context_len
    if length is None:
        prompt = config.data.rollout_max_prompt_len
        length = prompt + rollout.rollout_max_response_len if prompt is not None else limit
    if isinstance(limit, int) and isinstance(length, int):
        length = min(length, limit)
    per_token = 2 * int(model["num_hidden_layers"]) * _attention(model)[1] * width
    slots = min(config.engine.engine_slots, rollout.server_concurrency)
    return Memory(
        parameters=count,
        trainer=count * TRAINER_BYTES,
        engine_weights=count * width,
        kv_bytes_per_token=per_token,
        kv_tokens=slots * int(length or 0),
        weight_slots=2 * count * width,
    )
