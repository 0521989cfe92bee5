"""Plans a cluster: simulates its splits in virtual time with the production scheduling code, and says which is best.

    python -m bench.plan [--model qwen3-32b --gpu h100 --gpus 64 --engine-gpus 4 ...] [--quick] [--published]

Every split of the GPUs between trainer and engines whose memory suffices is bounded by arithmetic, those near the best
bound are simulated. Printed: the best splits with step time, staleness and idle shares, the same GPUs in turns without
asynchrony, what one change more or less would do, and (`--published`, `--quick`) published cases beside what the
planner says of them. Simulated: no GPU was asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from bench.plan_cluster import simulate
from bench.plan_hardware import GPUS, Efficiency, Job, bounds, cluster_of, shape_of
from bench.plan_published import Row, rows
from bench.plan_types import Result
from bench.report import Series, arguments, finish, machine
from configs.plan.parameters import total_parameters

STATE_BYTES = 18  # of the trainer for each parameter: bfloat16 weights, fp32 gradients, weights and moments
NEAR = 1.4  # splits whose bound is within this of the best one are simulated
GPU_HELP = ", ".join(GPUS)
QUICK = Job(gpus=8, groups=16, members=8, mean=1000.0, cap=8192, slots=64, update_s=0.5)


class Plan(msgspec.Struct, frozen=True):
    """One split and what came of it. `bound_s`: no schedule of this split is faster, were all slots always full."""

    engines: int
    trainer_gpus: int
    bound_s: float
    result: Result

    @property
    def of_bound(self) -> float:
        return self.bound_s / self.result.step_s


def splits(job: Job) -> Iterator[tuple[int, int]]:
    """(engines, GPUs of the trainer) that use as many of the GPUs as they can; the trainer's memory suffices."""
    least = STATE_BYTES * total_parameters(shape_of(job.model)) / (0.8 * GPUS[job.gpu].memory)
    for engines in range(1, job.gpus // job.engine_gpus + 1):
        trainer = (job.gpus - engines * job.engine_gpus) // job.trainer_unit * job.trainer_unit
        if trainer >= max(least, job.trainer_unit):
            yield engines, trainer


def measure(job: Job, engines: int, trainer_gpus: int, batches: int) -> Plan:
    result = simulate(cluster_of(job, engines, trainer_gpus, batches=batches * job.interval))
    return Plan(engines, trainer_gpus, max(bounds(job, engines, trainer_gpus)) * job.interval, result)


def search(job: Job, *, most: int, batches: int) -> list[Plan]:
    """The simulated splits, the fastest first. Raises ValueError where no split has the memory."""
    found = {split: max(bounds(job, *split)) for split in splits(job)}
    if not found:
        raise ValueError(
            f"{job.gpus} x {job.gpu} have no room for a trainer of {job.model} ({STATE_BYTES} bytes each parameter) "
            f"beside an engine of {job.engine_gpus}; raise --gpus or choose a smaller --model"
        )
    least = min(found.values())
    near = sorted((bound, split) for split, bound in found.items() if bound <= NEAR * least)[:most]
    plans = [measure(job, *split, batches) for _, split in near]
    return sorted(plans, key=lambda plan: (plan.result.step_s, plan.result.staleness_mean))


def changes(job: Job, best: Plan) -> Iterator[tuple[str, Job, int, int]]:
    """(what is changed, the job, engines, GPUs of the trainer): one thing each."""
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
    if job.turns > 1:
        yield "tools twice as slow", replace(job, tool_s=2 * job.tool_s), engines, trainer


HEAD = (
    f"{'':34} {'s/step':>8} {'of bound':>8} {'staleness mean':>14} {'p99':>4} {'max':>4} {'engines idle':>12} "
    f"{'slots empty':>11} {'trainer idle':>12} {'wasted':>7}"
)


def line(name: str, plan: Plan, base: Plan | None = None) -> str:
    r = plan.result
    against = "" if base is None else f"  {r.step_s / base.result.step_s - 1:+.1%}"
    return (
        f"{name:34} {r.step_s:8.1f} {plan.of_bound:8.0%} {r.staleness_mean:14.2f} {r.staleness_at(0.99):4} "
        f"{r.staleness_at(1.0):4} {1 - r.engine_busy:12.0%} {1 - r.slots_busy:11.0%} {1 - r.trainer_busy:12.0%} "
        f"{r.wasted:7.1%}{against}"
    )


def report(job: Job, *, most: int, batches: int) -> list[Series]:
    """Search, print, and return what the JSON file holds."""
    plans = search(job, most=most, batches=batches)
    best = plans[0]
    print(f"\n{HEAD}")
    series: list[Series] = []

    def tell(setting: str, name: str, plan: Plan, base: Plan | None = None) -> None:
        print(line(name, plan, base))
        series.append(Series(setting, name, "s/step", [plan.result.step_s]))
        series.append(Series(setting, name, "staleness", [plan.result.staleness_mean]))

    for plan in plans:
        tell("split", f"{plan.engines} x {job.engine_gpus} engines, {plan.trainer_gpus} trainer", plan)
    turns = replace(job, staleness=0, interval=1)
    engines, trainer = job.gpus // job.engine_gpus, job.gpus // job.trainer_unit * job.trainer_unit
    sync = simulate(cluster_of(turns, engines, trainer, colocated=True, batches=batches))
    tell(
        "split",
        f"all {job.gpus} in turns, synchronous",
        Plan(engines, trainer, sum(bounds(turns, engines, trainer)), sync),
    )
    shares = ", ".join(f"{s}: {n / sum(best.result.staleness.values()):.0%}" for s, n in best.result.staleness.items())
    print(
        f"\nbest split: {best.engines} engines of {job.engine_gpus} GPU and {best.trainer_gpus} for the trainer; "
        f"trained tokens by staleness: {shares} (bound {job.staleness})\n\nand with one change:"
    )
    for name, changed, engines, trainer in changes(job, best):
        tell("sensitivity", name, measure(changed, engines, trainer, batches), best)
    return series


def published_table(found: Sequence[Row]) -> str:
    """Markdown: predicted beside published, the relative error, and its mean over what was not calibrated."""
    lines = ["| source | case | published | predicted | error | calibrated on it |", "|---|---|---|---|---|---|"]
    for row in found:
        digits = 0 if row.published >= 50 else 2
        lines.append(
            f"| {row.source} | {row.case} | {row.published:.{digits}f} | {row.predicted:.{digits}f} | {row.error:+.0%} "
            f"| {row.note or '-'} |"
        )
    free = [abs(row.error) for row in found if not row.note]
    return "\n".join(lines) + f"\n\nmean error of the {len(free)} rows without calibration: {sum(free) / len(free):.0%}"


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "plan", "a small cluster and the published cases of seconds", rounds="")
    parser.add_argument("--published", action="store_true", help="all published cases, and no plan")
    parser.add_argument("--most", type=int, default=6, help="splits that are simulated")
    parser.add_argument("--batches", type=int, default=12, help="publications of each simulation, 3 of them warm-up")
    for field in msgspec.structs.fields(Job):
        if field.type in (int, float, str):
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=field.type, default=None, help=f"default {field.default}")
    return parser.parse_args()


def main() -> None:
    options = parse()
    given = {name: value for name in Job.__struct_fields__ if (value := getattr(options, name, None)) is not None}
    job = replace(QUICK if options.quick else Job(), **given)
    if job.gpu not in GPUS:
        raise SystemExit(f"--gpu is {job.gpu}; choose one of {GPU_HELP}")
    about = machine(["msgspec", "numpy"])
    series: list[Series] = []
    if not options.published:
        try:
            series += report(job, most=3 if options.quick else options.most, batches=options.batches)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    if options.published or options.quick:
        found = rows(options.quick)
        print("\n" + published_table(found))
        for row in found:
            series.append(Series("published", f"{row.source}: {row.case}", "published", [row.published], row.note))
            series.append(Series("published", f"{row.source}: {row.case}", "predicted", [row.predicted], row.note))
    remarks = [
        f"job: {msgspec.json.encode(job).decode()}" if not options.published else "",
        f"shares of the data sheets: {msgspec.json.encode(Efficiency()).decode()}",
        "simulated in virtual time: the load of this machine moves no figure",
    ]
    finish(options.output, about, [remark for remark in remarks if remark], series)


if __name__ == "__main__":
    main()
