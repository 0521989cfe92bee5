"""Expected staleness and step time of a run, by arithmetic. No I/O, no clock.

Notation: B groups per rollout batch, n rollouts per group, N batches ahead, K batches between publications of weights,
C groups in flight, Q groups finished and not yet trained.

    bound of staleness       S = N + K - 1                        versions
    mean staleness           (C + Q) / B + (K - 1) / 2            Little's law, exact in steady state
    step, fixed split        max(W_g / c_g, W_t / c_t)            work by capacity, the slower side decides
    efficiency               that bound / the measured step time
"""

from __future__ import annotations

import math

from msgspec import Struct

from configs.graph import replicas
from configs.schema import Config


class Staleness(Struct, frozen=True):
    """In weights versions. The mean lies near `mean_low` if generation is the slower side, near `mean_high` if
    training is."""

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


def simulated_times(config: Config) -> dict[str, float]:
    """Seconds per rollout batch of the sides that are simulated; those of the others are measured during the run."""
    times = {}
    if config.engine.engine == "simulated":
        times["generation"] = simulated_generation_s(config)
    if config.train.train_backend == "simulated":
        times["training"] = config.train.simulated_step_s * (config.train.num_steps_per_rollout or 1)
    return times


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
    longest = min(model.length_cap, rollout.rollout_max_response_len)
    tokens = rollouts * capped_lognormal_mean(model.length_mean, model.length_sigma, longest)
    return tokens / (running * engines) * step_s


def capped_lognormal_mean(mean: float, sigma: float, cap: float) -> float:
    """E[min(L, cap)] of a lognormal L with this mean and this sigma of its logarithm; sigma 0 is a constant."""
    if sigma == 0:
        return min(mean, cap)
    mu = math.log(mean) - sigma * sigma / 2
    z = (math.log(cap) - mu) / sigma
    return mean * _normal(z - sigma) + cap * (1 - _normal(z))


def _normal(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2
