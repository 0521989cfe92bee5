"""Plans a cluster: simulates every split of its GPUs between trainer and engines, and names the best.

    python -m bench.plan [--model qwen3-32b --gpu h100 --gpus 64 --engine-gpus 4 ...] [--quick]

Printed: the best splits with step time, staleness and what stands idle, the same GPUs in turns without asynchrony, and
the effect of each single change. All figures are simulated (`configs.plan.goodput`); no GPU takes part.

Seconds follow from the model and the GPUs:

    decode step of b rollouts   a + c b      a = weights read / bandwidth + overhead
                                             c = KV cache read / bandwidth + operations that this read does not hide
    trainer, per token          passes * forward operations / (GPUs * peak * utilisation)

Peaks and bandwidths are those of the data sheets, dense bfloat16. `Efficiency` holds the shares of them that are
reached, calibrated on published runs (docs/benchmarks.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from statistics import fmean
from typing import Final

import msgspec
from msgspec.structs import replace

from bench.report import Series, arguments, finish, machine
from configs.help import preset_config
from configs.plan.goodput import SIGMA, Attained, Workload, attainable, lognormal_lengths
from configs.plan.gpus import NODE_GPUS
from configs.plan.run_estimate import STATIC_FRACTION
from configs.schema.model_shapes import ModelShape, forward_flops, matrices, read_shape, total_parameters


class Gpu(msgspec.Struct, frozen=True):
    """Of one GPU: dense bfloat16 operations and bytes of memory per second, bytes of memory."""

    flops: float
    bandwidth: float
    memory: float


GPUS: Final = {  # the makers' data sheets, SXM where there are several
    "a100": Gpu(312e12, 2.04e12, 80e9),
    "h20": Gpu(148e12, 4.0e12, 96e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9),
}


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Reached shares of the data sheet's figures, and times that no data sheet has. Defaults: calibrated on H100."""

    train: float = 0.31  # of the peak, training a dense model
    train_experts: float = 0.061  # the same where layers have experts
    bandwidth: float = 0.80  # of the memory, decoding
    prefill: float = 0.40  # of the peak, with many tokens in a pass
    overhead_s: float = 0.007  # of a decode step: launches, sampling, scheduling
    reduce_s: float = 15e-6  # of one sum over the GPUs of an engine within a node, two for each layer
    far_reduce_s: float = 80e-6  # the same over several nodes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be trained, and on what. Lengths in tokens; `sigma` of the logarithm of the response's length."""

    model: str = "qwen2.5-7b"
    gpu: str = "h100"
    gpus: int = 16
    engine_gpus: int = 1  # of one engine: its tensor parallel size
    trainer_unit: int = 1  # GPUs by which the trainer grows: its model parallel size
    groups: int = 64
    members: int = 16
    prompt: int = 300
    mean: float = 4000.0
    sigma: float = SIGMA
    cap: int = 16384
    staleness: int = 2
    interval: int = 1
    tool_s: float = 0.0  # that a rollout waits for its tools and its grader, in all
    filtered: float = 0.0  # share of the groups
    passes: float = 4.0  # forward passes that a trained token costs: 3 and one to recompute; each log-prob pass is 1
    update_s: float = 2.0  # that an engine stands still for new weights
    slots: int = 256  # of one engine
    fixed_s: float = 0.0  # of the trainer for a batch, whatever its size
    efficiency: Efficiency = Efficiency()

    @property
    def length(self) -> float:
        """Mean tokens of a response, the cap considered."""
        return fmean(lognormal_lengths(self.mean, self.sigma, self.cap))


@cache
def shape_of(model: str) -> ModelShape:
    """The shape of a preset of `--model`. Raises ConfigError, which names the presets."""
    return read_shape(preset_config(model).model.architecture)


def weight_bytes(shape: ModelShape, running: float) -> float:
    """Bytes of weights that a decode step of so many rollouts reads: of experts, those that its tokens are routed
    to."""
    routed = sum(m.parameters for i in range(shape.layers) for m in matrices(shape, i) if m.split == "expert")
    touched = 1 - (1 - shape.active_experts / shape.experts) ** running if shape.experts else 1.0
    return 2.0 * (total_parameters(shape) - routed * (1 - touched))


class Speed(msgspec.Struct, frozen=True):
    """Of a split: `slots` of one engine, whose decode step takes `a_s` + `c_s` for each rollout; `prefill_s` of a
    rollout's prompt; `token_s`: the trainer's time per token."""

    slots: int
    a_s: float
    c_s: float
    prefill_s: float
    token_s: float


def speed_of(job: Job, engines: int, trainer_gpus: int) -> Speed:
    """Raises ValueError where an engine has no room for one rollout of full length."""
    shape, gpu, share = shape_of(job.model), GPUS[job.gpu], job.efficiency
    kv_bytes, left = 2 * shape.key_values * shape.layers, gpu.memory * STATIC_FRACTION * job.engine_gpus
    room = max(0, int((left - 2 * total_parameters(shape)) / kv_bytes))  # tokens of the KV cache of one engine
    if room < job.prompt + job.cap:
        raise ValueError(
            f"an engine of {job.engine_gpus} x {job.gpu} has room for {room:,} tokens of {job.model}'s KV cache, and "
            f"one rollout may have {job.prompt + job.cap:,}; raise --engine-gpus"
        )
    # Tokens in the cache of a running rollout, mean over its time: E[L^2] / 2 E[L] of the response, the cap left out.
    context = job.prompt + min(job.length * math.exp(job.sigma**2) / 2, job.cap / 2)
    slots = max(1, min(job.slots, int(room / context)))
    running = max(1.0, min(slots, job.groups * job.members * (job.staleness / job.interval + 1) / engines))
    bandwidth = gpu.bandwidth * share.bandwidth * job.engine_gpus
    # A step of the matrices takes max(weights read, b * operations): a line through both ends of it.
    weights_s = weight_bytes(shape, running) / bandwidth
    prefill_s = forward_flops(shape, int(context)) / context / (gpu.flops * share.prefill * job.engine_gpus)
    reduce_s = share.reduce_s if job.engine_gpus <= NODE_GPUS else share.far_reduce_s  # of tensor parallelism
    whole = job.prompt + job.length
    peak = trainer_gpus * gpu.flops * (share.train_experts if shape.experts else share.train)
    return Speed(
        slots=slots,
        a_s=weights_s + share.overhead_s + (2 * shape.layers * reduce_s if job.engine_gpus > 1 else 0.0),
        c_s=kv_bytes * context / bandwidth + max(0.0, prefill_s - weights_s / running),
        prefill_s=prefill_s * job.prompt / job.members,  # the members of a group share it
        token_s=job.passes * forward_flops(shape, int(whole)) / whole / peak,
    )


STATE_BYTES = 18  # of the trainer for each parameter: bfloat16 weights, fp32 gradients, weights and moments
QUICK = Job(gpus=8, groups=16, members=8, mean=1000.0, cap=8192, slots=64, update_s=0.5)


class Plan(msgspec.Struct, frozen=True):
    """One split and what came of it. `step_s`: of a publication; `bound_s`: no schedule of this split is faster, were
    all slots always full; `train_s`: of it, what the trainer works; `unused`: share of what full engines could make."""

    engines: int
    trainer_gpus: int
    step_s: float
    bound_s: float
    train_s: float
    unused: float
    attained: Attained


def splits(job: Job) -> Iterator[tuple[int, int]]:
    """(engines, GPUs of the trainer) that use as many of the GPUs as they can; the trainer's memory suffices."""
    least = STATE_BYTES * total_parameters(shape_of(job.model)) / (0.8 * GPUS[job.gpu].memory)
    for engines in range(1, job.gpus // job.engine_gpus + 1):
        trainer = (job.gpus - engines * job.engine_gpus) // job.trainer_unit * job.trainer_unit
        if trainer >= max(least, job.trainer_unit):
            yield engines, trainer


def measure(job: Job, engines: int, trainer_gpus: int, *, turns: bool = False) -> Plan:
    """Simulates one split. `turns`: engines and trainer have the same GPUs, and one of them works at a time."""
    job = replace(job, staleness=0, interval=1) if turns else job
    speed, rollouts = speed_of(job, engines, trainer_gpus), job.groups * job.members
    slots, full_s = engines * speed.slots, speed.a_s + speed.c_s * speed.slots
    lengths = lognormal_lengths(job.mean, job.sigma, job.cap)
    # What else takes time of the engines makes their decode steps longer: prefill and new weights.
    batch_s = rollouts * job.length / slots * full_s
    prefill_s = rollouts * speed.prefill_s / engines
    engines_s = batch_s + prefill_s + job.update_s / job.interval
    train_s = rollouts * (job.length + job.prompt) * speed.token_s + job.fixed_s
    work = Workload(
        lengths=lengths, slots=slots, groups=job.groups, members=job.members, train_ratio=train_s / engines_s,
        growth=speed.c_s * speed.slots / full_s, interval=job.interval, wait=job.tool_s / full_s * batch_s / engines_s,
        filtered=job.filtered, streams=not turns,
    )  # fmt: skip
    attained = attainable(work, max(0, job.staleness - job.interval + 1))
    running = min(speed.slots, rollouts * (job.staleness / job.interval + 1) / engines)
    token_s = (speed.a_s + speed.c_s * running) / running
    generate_s = rollouts * (job.length * token_s + speed.prefill_s) / engines / (1 - job.filtered)
    bound_s = generate_s + train_s if turns else max(generate_s, train_s)
    step_s = engines_s / attained.goodput
    unused = max(0.0, 1 - attained.goodput / (1 - attained.stale) / (1 - job.filtered))
    step_s, bound_s, train_s = (seconds * job.interval for seconds in (step_s, bound_s, train_s))
    return Plan(engines, trainer_gpus, step_s, bound_s, train_s, unused, attained)


def search(job: Job) -> list[Plan]:
    """All splits, the fastest first. Raises ValueError where none has the memory."""
    plans = [measure(job, *split) for split in splits(job)]
    if not plans:
        raise ValueError(
            f"{job.gpus} x {job.gpu} have no room for a trainer of {job.model} ({STATE_BYTES} bytes each parameter) "
            f"beside an engine of {job.engine_gpus}; raise --gpus or choose a smaller --model"
        )
    return sorted(plans, key=lambda plan: (plan.step_s, plan.attained.staleness))


def changes(job: Job, best: Plan) -> Iterator[tuple[str, Job, int, int]]:
    """(the change, the job, engines, GPUs of the trainer), with a single change each."""
    engines, trainer = best.engines, best.trainer_gpus
    yield f"one engine more (+{job.engine_gpus} GPU)", job, engines + 1, trainer
    yield f"a larger trainer (+{job.trainer_unit} GPU)", job, engines, trainer + job.trainer_unit
    if engines > 1:
        yield "one engine less", job, engines - 1, trainer
    if trainer > job.trainer_unit:
        yield "a smaller trainer", job, engines, trainer - job.trainer_unit
    yield "a longer tail (sigma + 0.3)", replace(job, sigma=job.sigma + 0.3), engines, trainer
    if job.staleness >= job.interval:
        yield f"staleness bound {job.staleness - 1}", replace(job, staleness=job.staleness - 1), engines, trainer
    yield f"staleness bound {job.staleness + 1}", replace(job, staleness=job.staleness + 1), engines, trainer
    yield "weights twice as slow", replace(job, update_s=2 * job.update_s), engines, trainer
    if job.tool_s:
        yield "tools twice as slow", replace(job, tool_s=2 * job.tool_s), engines, trainer


def figures(plan: Plan, base: Plan) -> dict[str, float]:
    """By unit."""
    return {
        "s/step": plan.step_s,
        "by the best": plan.step_s / base.step_s,
        "% of bound": 100 * plan.bound_s / plan.step_s,
        "goodput": plan.attained.goodput,
        "staleness": plan.attained.staleness,
        "% of engines unused": 100 * plan.unused,
        "% trainer idle": 100 * max(0.0, 1 - plan.train_s / plan.step_s),
        "% too old": 100 * plan.attained.stale,
    }


def report(job: Job, most: int) -> list[Series]:
    """The best splits, all in turns, and the best split with one change each."""
    plans = search(job)
    best, unit, turns = plans[0], job.engine_gpus, (job.gpus // job.engine_gpus, job.gpus // job.trainer_unit)
    rows = [("split", f"{plan.engines} x {unit} engines, {plan.trainer_gpus} trainer", plan) for plan in plans[:most]]
    in_turns = measure(job, turns[0], turns[1] * job.trainer_unit, turns=True)
    rows.append(("split", f"all {job.gpus} in turns, synchronous", in_turns))
    for change, changed, engines, trainer in changes(job, best):
        rows.append(("the best split, but", change, measure(changed, engines, trainer)))
    return [
        Series(setting, name, unit, [value])
        for setting, name, plan in rows
        for unit, value in figures(plan, best).items()
    ]


def main() -> None:
    parser = arguments(__doc__, "plan", "a small cluster", rounds="")
    parser.add_argument("--most", type=int, default=6, help="splits that are printed")
    for field in msgspec.structs.fields(Job):
        if field.type in (int, float, str):
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=field.type, default=None, help=f"default {field.default}")
    options = parser.parse_args()
    given = {name: value for name in Job.__struct_fields__ if (value := getattr(options, name, None)) is not None}
    job = replace(QUICK if options.quick else Job(), **given)
    if job.gpu not in GPUS:
        raise SystemExit(f"--gpu is {job.gpu}; choose one of {', '.join(GPUS)}")
    about = machine(["msgspec", "numpy"])
    try:
        series = report(job, 3 if options.quick else options.most)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    remarks = [
        f"job: {msgspec.json.encode(job).decode()}",
        f"shares of the data sheets: {msgspec.json.encode(Efficiency()).decode()}",
        "simulated in virtual time: the load of this machine moves no figure",
    ]
    finish(options.output, about, remarks, series)


if __name__ == "__main__":
    main()
