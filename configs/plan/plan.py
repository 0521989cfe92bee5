"""The plan that `--dry-run` prints: graph, placement, batch arithmetic, staleness, bounds, memory. No I/O, no clock.

Invariant: the plan is made from the resolved configuration and the model's config.json or preset alone; nothing is
loaded or started.

Staleness and step time by arithmetic. Notation: B groups per rollout batch, n rollouts per group, N batches ahead, K
batches between publications of weights, C groups in flight, Q groups finished and not yet trained.

    bound of staleness       S = N + K - 1                        versions
    mean staleness           (C + Q) / B + (K - 1) / 2            Little's law, exact in steady state
    step, fixed split        max(W_g / c_g, W_t / c_t)            work by capacity, the slower side decides
    efficiency               that bound / the measured step time
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from msgspec import Struct

from configs.graph import evaluation_engines, frozen_engines, is_address, joined_to, path, replicas, streams
from configs.load import config_hash
from configs.plan.goodput import SIGMA, attainable, lognormal_lengths, planned_workload
from configs.plan.gpus import gpus_of, layout_of, trainer_processes
from configs.plan.run_estimate import RunEstimate, estimate_run, model_lines, size_text
from configs.schema import Config, router_kind
from configs.schema.run import read_fault
from configs.sources import described_model, known_model

WORTH: Final = 0.1  # of goodput, to advise another N


class StagePlan(Struct, frozen=True):
    """`where`: what a replica is."""

    name: str
    replicas: int
    where: str


class FrozenPlan(Struct, frozen=True):
    """An engine whose weights never change. `started`: with the run, else it runs already."""

    name: str
    place: str
    started: bool
    nbytes: int | None = None  # estimate, where its config.json is at hand


class Plan(Struct, frozen=True):
    """What follows from a resolved configuration."""

    config: Config
    stages: tuple[StagePlan, ...]
    processes: int
    estimate: RunEstimate | None
    frozen: tuple[FrozenPlan, ...]


def make_plan(config: Config) -> Plan:
    """Plan a resolved configuration."""
    model, stages = known_model(config), _stages(config)
    frozen = tuple(_frozen(config, name, place) for name, place in frozen_engines(config).items())
    started = sum(engine.started for engine in frozen) + evaluation_engines(config).count("")
    started = started if _own_processes(config) else 0
    estimate = estimate_run(config, model) if model is not None else None
    return Plan(config, stages, _processes(config, stages) + started, estimate, frozen)


def _frozen(config: Config, name: str, place: str) -> FrozenPlan:
    model = None if is_address(place) else described_model(place)
    found = estimate_run(config, model) if model is not None else None
    engine = found.engine if found is not None else None
    nbytes = engine.total * engine.gpus if engine is not None else None
    return FrozenPlan(name, place, not is_address(place), nbytes)


def _stages(config: Config) -> tuple[StagePlan, ...]:
    local = config.run.runner != "inprocess"
    first, found = joined_to(config, replicas(config)), []
    for name, count in replicas(config).items():
        where = "in the controller's process" if name == "prompts" else "process" if local else "task"
        if local and name in first:
            where = f"in the process of {first[name]}"
        if name == "engine":
            where = _engine(config)
        if name == "train" and (trainer_group := trainer_processes(config)):
            processes = "processes" if trainer_group > 1 else "process"
            where += f" and a trainer group of {trainer_group} {processes} ({layout_of(config)})"
        if name == "reward" and (graders := config.reward.reward_workers):
            where += f" and {graders} grader process{'es' if graders > 1 else ''} each"
        if name in {stage.name for stage in config.stage}:
            where += " (custom stage)"
        found.append(StagePlan(name, count, where))
    return tuple(found)


def _own_processes(config: Config) -> bool:
    """Whether an engine of this run is a process."""
    return config.run.runner != "inprocess" or config.engine.engine == "sglang"


def _engine(config: Config) -> str:
    """What one engine is."""
    sglang = config.sglang
    if sglang.rollout_external_engine_addrs:
        return f"not started here, asked at {', '.join(sglang.rollout_external_engine_addrs)}"
    if config.engine.engine == "sglang":
        gpus = sglang.rollout_num_gpus_per_engine
        return f"SGLang server in its own processes, {gpus} GPU{'s' if gpus > 1 else ''} where there are any"
    return "process with an HTTP server" if config.run.runner != "inprocess" else "thread with an HTTP server"


def _router(config: Config) -> str:
    """What the router in front of the engines is; empty if there is none."""
    kind, address = router_kind(config), config.router.router_address
    if kind == "none":
        return ""
    name = "smg" if kind == "smg" else "sglang-router"
    return f"{name}, not started here, asked at {address}" if address is not None else f"{name} in a process of its own"


def _processes(config: Config, stages: tuple[StagePlan, ...]) -> int:
    """The controller, and what it starts. A server of SGLang counts as one, though it starts more itself."""
    graders = sum(stage.replicas * config.reward.reward_workers for stage in stages if stage.name == "reward")
    router = 1 if router_kind(config) != "none" and config.router.router_address is None else 0
    trainer_group = trainer_processes(config) if "train" in path(config) else 0
    elsewhere = {"prompts"} | ({"engine"} if config.sglang.rollout_external_engine_addrs else set())
    if config.run.runner == "inprocess":  # all but SGLang's servers
        elsewhere |= {stage.name for stage in stages if stage.name != "engine" or config.engine.engine != "sglang"}
    elsewhere |= joined_to(config, replicas(config)).keys()
    return 1 + graders + router + trainer_group + sum(one.replicas for one in stages if one.name not in elsewhere)


def render(plan: Plan, left_out: Sequence[str] = ()) -> str:
    """The plan as text. `left_out`: checks that this machine could not make."""
    blocks = [block(plan) for block in (_head, _graph, _placement, _arithmetic, _learning, _bounds, _model)]
    blocks += [["not looked at", *(f"  {line}" for line in left_out)]] if left_out else []
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(plan: Plan) -> list[str]:
    config, rollout = plan.config, plan.config.rollout
    batches, epochs = f"{rollout.num_rollout} rollout batches", f"{rollout.num_epoch} epochs of the prompts"
    return [
        f"mode {config.run.mode}, {batches if rollout.num_rollout is not None else epochs}, model "
        f"{config.train.hf_checkpoint}, engine {config.engine.engine}",
        f"run directory {config.run.run_dir}, configuration {config_hash(config)}",
    ]


def _graph(plan: Plan) -> list[str]:
    edges = streams(plan.config)
    counts = {stage.name: stage.replicas for stage in plan.stages}
    label = {name: f"{name} x{count}" if count > 1 else name for name, count in counts.items()}
    forward = [s.consumer[0] for s in edges if not s.feedback]
    main = [label[name] for name in forward if name not in ("evaluate", "prompts")]
    lines = ["stages", "  " + " -> ".join([label["prompts"], *main])]
    for stream in edges:
        if stream.feedback and stream.producers[0][0] == "generate":
            lines.append(f"  generate -> {label[stream.consumer[0]]} -> generate   (loop, inlets of its own)")
    if "evaluate" in label:
        lines.append("  evaluate -> generate ... group -> evaluate   (held-out prompts, one pinned version)")
        if evaluation_engines(plan.config):
            lines.append("  generate <-> eval-engine   (HTTP, held-out prompts alone)")
    if "engine" in label:
        router = "router <-> " if _router(plan.config) else ""
        lines.append(f"  generate <-> {router}{label['engine']}   (HTTP)")
        lines.append("  train -> weights -> engine   (by version)")
    if "teacher" in label:
        lines.append("  teacher <-> frozen engines   (HTTP)")
    reporters = ", ".join(name for s in edges if s.name == "settle" for name, _ in s.producers)
    lines.append(f"  {reporters} -> prompts   (each group's outcome, once)")
    return lines


def _placement(plan: Plan) -> list[str]:
    several = "es" if plan.processes > 1 else ""
    lines = [f"placement: runner {plan.config.run.runner}, {plan.processes} process{several}"]
    for stage in plan.stages:
        lines.append(f"  {stage.name:<12} x{stage.replicas:<3} {stage.where}")
    if router := _router(plan.config):
        lines.append(f"  {'router':<12} x1   {router}")
    server = "process" if _own_processes(plan.config) else "thread"
    if asked := evaluation_engines(plan.config):
        what = f"{server} with an HTTP server" if "" in asked else f"not started here, asked at {', '.join(asked)}"
        lines.append(f"  {'eval-engine':<12} x{len(asked):<3} {what}")
    for engine in plan.frozen:
        where = f"{server} with an HTTP server, weights of" if engine.started else "not started here, asked at"
        lines.append(f"  frozen-{engine.name:<5} x1   {where} {engine.place}")
    if faults := plan.config.debug.fault_inject:
        text = "; ".join(str(read_fault(text)) for text in faults)
        if plan.config.engine.engine == "sglang":
            text = text.replace("of requests", "of health checks")
        lines.append(f"  faults on purpose: {text}")
    return lines


def _arithmetic(plan: Plan) -> list[str]:
    rollout, train = plan.config.rollout, plan.config.train
    rollouts, steps = rollout.rollout_batch_size * rollout.n_samples_per_prompt, train.num_steps_per_rollout or 0
    lines = [
        "batch",
        f"  rollout_batch_size {rollout.rollout_batch_size} x n_samples_per_prompt {rollout.n_samples_per_prompt} = "
        f"{rollouts} rollouts = global_batch_size {train.global_batch_size} x num_steps_per_rollout {steps}",
        f"  at most {rollouts * rollout.rollout_max_response_len:,} response tokens per rollout batch",
    ]
    if (batches := rollout.num_rollout) is not None:
        lines.append(f"  {batches * rollouts:,} rollouts and {batches * steps:,} steps in all")
    return lines


def _learning(plan: Plan) -> list[str]:
    """What a recipe for another model or problem would have wrong."""
    config, train, warm, reward = plan.config, plan.config.train, plan.config.warm_start, plan.config.reward
    warmup = f", {train.lr_warmup_iters} steps of warm-up" if train.lr_warmup_iters else ""
    if train.lr_warmup_fraction is not None:
        warmup = f", warm-up over {train.lr_warmup_fraction:.0%} of the steps"
    critic = f"; critic {config.critic.critic_lr:g}" if config.algorithm.advantage_estimator == "ppo" else ""
    grader = reward.custom_rm_path or ", ".join(reward.reward_component) or reward.rm_type
    if grader == "auto":
        grader = "chosen by the first labels"
    context, prompt = config.rollout.rollout_max_context_len, config.data.rollout_max_prompt_len
    return [
        "learning",
        f"  lr {train.lr:g}, {train.lr_decay_style}{warmup}{critic}; "
        f"{train.loss_type if train.loss_type != 'policy_loss' else config.algorithm.advantage_estimator}",
        f"  warm start: {warm.warm_start_steps} supervised steps at lr {warm.warm_start_lr:g}"
        if warm.warm_start_steps
        else "  no warm start",
        f"  grader: {grader}",
        f"  context: {context or 'what the model has positions for'}, responses up to "
        f"{config.rollout.rollout_max_response_len} tokens" + (f", prompts up to {prompt}" if prompt else ""),
    ]


def _bounds(plan: Plan) -> list[str]:
    stale, times = predicted_staleness(plan.config), simulated_times(plan.config)
    lines = ["asynchrony", f"  {staleness_line(plan.config)}"]
    if stale.bound:
        gate, longest = plan.config.asynchrony, plan.config.rollout.rollout_max_response_len
        work = planned_workload(plan.config, plan.estimate.engine if plan.estimate is not None else None)
        ahead = max(stale.bound - gate.update_weights_interval + 1, 0)
        found = {n: attainable(work, n).goodput for n in sorted({1, 2, 4, 6, 8, ahead})}
        why = f"a quarter of --rollout-max-response-len {longest}, lognormal with sigma {SIGMA} and cut there"
        lines += [
            f"  attainable goodput by N: {', '.join(f'{share:.2f} at {n}' for n, share in found.items())}",
            f"  assumed: {work.slots} slots, a trainer as fast as these, responses of {fmean(work.lengths):.0f} tokens "
            f"({why if plan.config.engine.engine != 'simulated' else 'those of the simulated engine'})",
        ]
        if gate.async_buffer_size != "auto" and max(found.values()) > found[ahead] + WORTH:
            lines.append("  a larger N would add much: --async-buffer-size auto chooses it by the lengths of the run")
    known = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times.items())
    lines.append("  step time bound = max(generation, training) per batch; efficiency = bound / measured step time")
    if len(times) == 2:
        lines.append(f"  {known}: no step can take less than {max(times.values()):.3g} s")
    elif times:
        lines.append(f"  {known}: no step can take less; the other side is measured during the run")
    return lines


def _model(plan: Plan) -> list[str]:
    train = plan.config.train
    if plan.estimate is None:
        name = train.hf_checkpoint
        return [
            f"memory: not estimated, for {name} is no checkpoint of a preset, and has no local config.json of a known "
            "shape; --model names a preset"
        ]
    frozen = [
        f"  frozen-{engine.name:<11} {size_text(engine.nbytes)}   weights + KV cache"
        for engine in plan.frozen
        if engine.nbytes is not None
    ]
    lines = model_lines(plan.estimate, layout_of(plan.config), train.train_backend, gpus_of(plan.config))
    return [*lines, *frozen]


class Staleness(Struct, frozen=True):
    """In weights versions. The mean lies near `mean_low` if generation is the slower side, near `mean_high` if
    training is."""

    bound: int
    mean_low: float
    mean_high: float


def predicted_staleness(config: Config) -> Staleness:
    """From the gate and the engines' slots alone, by Little's law.

    If training is the slower side the gate is always full: C + Q = N * B plus, between publications, (K - 1) / 2
    batches on average. If generation is, all slots run and nothing queues: C = slots / n groups, at most what the
    gate admits.
    """
    gate, rollout = config.asynchrony, config.rollout
    bound, between = gate.max_staleness or 0, (gate.update_weights_interval - 1) / 2
    slots = replicas(config).get("engine", 0) * min(config.engine.engine_slots, rollout.server_concurrency)
    running = slots / rollout.n_samples_per_prompt / rollout.rollout_batch_size
    high = max(bound - gate.update_weights_interval + 1, 0) + between
    return Staleness(bound, min(high, running + between), high)


def staleness_line(config: Config) -> str:
    """The line that a run prints at its start: the bound, and the mean to expect."""
    found, interval = predicted_staleness(config), config.asynchrony.update_weights_interval
    if found.bound == 0:
        return "staleness: 0, every token is trained by the weights version that made it"
    line = (
        f"staleness: at most {found.bound} version{'s' if found.bound > 1 else ''} (N + K - 1 with N = "
        f"{max(found.bound - interval + 1, 0)}, K = {interval}); predicted mean {found.mean_high:.2g} if training is "
        "the slower side"
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
    tokens = rollouts * fmean(lognormal_lengths(model.length_mean, model.length_sigma, longest))
    return tokens / (running * engines) * step_s
