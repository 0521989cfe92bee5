"""The end of a run: summary.json, learning curve, merged trace, and what the user reads last."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from statistics import fmean

from msgspec.structs import replace

from configs.graph import engine_count
from configs.schema import Config, router_kind
from models.checkpoint import latest_checkpoint
from models.disk import write_json
from models.fault_injection import injected
from pipeline.facts.run_directory import read_fleet
from pipeline.facts.run_log import PROGRAM, log_line
from pipeline.facts.stats import visible
from pipeline.facts.trace import merge
from pipeline.observe import summary as summaries
from pipeline.observe.plot import curve_from_rows, plot_learning_curve
from pipeline.record.kept_files import best_text, uncertain_in
from pipeline.record.metrics import read_metrics
from pipeline.record.recorder import Recorder
from stages.sample_log import SAMPLES_FILE


def conclude(recorder: Recorder, config: Config, reason: str) -> None:
    """Write what the run leaves behind and print where it is."""
    rundir = recorder.rundir
    summary = summarise(recorder, config, reason)
    write_json(rundir.summary, summary)
    curve = rundir.path / "learning_curve.png"
    if config.observe.use_plot and (recorder.rewards or recorder.evals):
        bound = recorder.staleness_bound
        title = f"{config.run.mode}, {summary.steps} rollout batches"
        rows = read_metrics(rundir.metrics)
        plot_learning_curve(curve_from_rows(rows, title=title, staleness_bound=bound), curve)
    trace = rundir.path / "trace.json"
    if config.observe.trace:
        recorder.spans.flush()
        merge(rundir.trace, trace)
    checkpoint = latest_checkpoint(rundir.checkpoints)
    places = {
        "run": rundir.path,
        "checkpoint": None if checkpoint is None else checkpoint / "hf",
        "curve": curve,
        "metrics": rundir.metrics,
        "trace": trace,
        "samples": rundir.path / SAMPLES_FILE,
        "summary": rundir.summary,
    }
    made = {name: path for name, path in places.items() if path is not None and path.exists()}
    resume = f"{PROGRAM} --resume {shlex.quote(str(rundir.path))}" if reason != "finished" else None
    text = summaries.closing_text(summary, made, rundir.tensorboard if config.observe.use_tensorboard else None, resume)
    sys.stdout.write(f"{visible(text)}\n")
    log_line(visible(text))


def engines_of(recorder: Recorder, config: Config) -> summaries.EngineSummary:
    """The engines that generate, as they last came up; a phase without engines has none."""
    if engine_count(config) == 0:
        return summaries.EngineSummary()
    count = len(recorder.view.engine_rows()) or engine_count(config)
    up = {name: facts for name, facts in read_fleet(recorder.rundir).items() if facts.role == "engine"}
    return summaries.EngineSummary(
        kind=", ".join(sorted({facts.kind for facts in up.values()}) or [config.engine.engine]),
        version=", ".join(sorted({facts.version for facts in up.values() if facts.version})),
        count=count,
        restarts=sum(n for name, n in recorder.restarts.items() if name.startswith("engine-")),
        reused_tokens=int(recorder.view.extra("generate", "reused_tokens")),
    )


def summarise(recorder: Recorder, config: Config, reason: str) -> summaries.RunSummary:
    """The figures of a finished phase."""
    view = recorder.view
    snapshot = view.snapshot(recorder.last_step_s)
    training_s = recorder.last_step_s - (recorder.training_started or recorder.started)
    trained, before = snapshot.trained_tokens, recorder.before
    waste = Counter({n.removeprefix("waste/"): int(v) for n, v in before.items() if n.startswith("waste/")})
    waste = +(waste + view.waste)
    del waste["recomputed_prefill"]  # no tokens of responses
    made = trained + int(before["trained_tokens"]) + waste.total()
    versions, router = recorder.versions, read_fleet(recorder.rundir).get("router")
    shares = view.busy_shares(max(engine_count(config), view.most_engines))
    return summaries.RunSummary(
        mode=config.run.mode,
        exit_reason="completed" if reason == "finished" else reason,
        steps=snapshot.step,
        wall_s=round(before["wall_s"] + recorder.wall_s, 3),
        groups=recorder.counts(),
        staleness=summaries.summarise_staleness(view.staleness, recorder.staleness_bound),
        reward=summaries.summarise_reward(recorder.rewards),
        eval=summaries.summarise_evals(recorder.points),
        best=best_text(recorder.points, recorder.rundir.checkpoints),
        alarms=tuple(recorder.health.active.values()),
        tokens_per_s=round(trained / training_s, 1) if training_s > 0 else 0.0,
        generated_tokens_per_s=round((trained + snapshot.wasted_tokens) / training_s, 1) if training_s > 0 else 0.0,
        effective_training_time=round(recorder.effective.share(time.time()), 4),
        # A pipeline of K stages cannot take less than T* = max_k W_k / c_k, W_k being the work of stage k and c_k its
        # replicas. A stage's share is W_k / c_k over the time it was watched, so the largest is T* over that time: 1.0
        # means that no schedule of the same work on the same replicas would have been faster.
        efficiency_vs_bound=max(shares.values(), default=None),
        busiest_stage=max(shares, key=shares.__getitem__, default=""),
        goodput=replace(recorder.goodput.figures(), waste=dict(waste)),
        wasted_tokens=waste.total(),
        wasted_share=waste.total() / made if made else 0.0,
        resumed_from=recorder.resume_step,
        failed_rollouts=snapshot.failed_rollouts,
        weight_versions=summaries.WeightVersions(
            first=min(versions, default=0),
            last=max(versions, default=0),
            published=len(set(versions)),
            transport=config.update.update_weight_transport if engine_count(config) else "",
            delta_ratio=round(fmean(recorder.delta_ratios), 2) if recorder.delta_ratios else None,
        ),
        engine=engines_of(recorder, config),
        router=summaries.RouterSummary(router_kind(config), router.version if router is not None else ""),
        restarts=dict(recorder.restarts),
        changes=tuple(recorder.changes),
        advice=snapshot.advice,
        stalls=recorder.stalls.stalls(time.monotonic()),
        faults_injected=injected(recorder.rundir.path),
        uncertain_calls=uncertain_in(recorder.rundir.episodes),
        environment_outages=recorder.outages.summary(),
        seed=config.run.seed,
        config_hash=recorder.identity.config_hash,
        versions=summaries.package_versions(),
    )
