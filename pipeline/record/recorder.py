"""The recorder: what the prompt stage learns becomes journal, metrics, checkpoints and figures of the run.

It implements `stages.prompts.stage.RunHooks`. Invariants: a terminal state is journalled before it counts; a checkpoint
holds the trainer's files and the ledger of the same moment, in one atomic rename; metrics rows appear in the order of
the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from configs.graph import loops, path
from configs.schema import Config
from models.checkpoint import Manifest, commit_directory, final_path, manifests, prune, write_manifest
from pipeline.facts.otel import ROOT, span_writer
from pipeline.facts.run_directory import RunDir
from pipeline.facts.run_log import log_line, named
from pipeline.facts.stats import STATS_PREFIX, Changed, LedgerCounts, RunSnapshot, StageStats, outage_text, visible
from pipeline.record import journal
from pipeline.record.goodput import Goodput, GroupOutcomes
from pipeline.record.health import Alarm, HealthWatch, OutageWatch, StallWatch
from pipeline.record.kept_files import best_text, forget_ended, forget_responses, keeps_rollouts, save_hf
from pipeline.record.metrics import TOKEN_LAGS, VERSION, Metrics, Point, evaluations, read_metrics, scores, totals
from pipeline.record.trackers import trackers
from pipeline.record.view import RunView
from stages.messages import CheckpointReady, EvalDone, Settled, StepDone
from stages.prompts.ledger import Ledger, LedgerSnapshot, OpenGroup
from stages.topic_values import POLICY, addresses, carrying
from stages.train.checkpoints import remove_superseded
from transport import TopicServer

BIAS_FILE = "bias.json"
ANY_RUN: Final = Manifest(step=0, version=0, run_generation=0, ledger="", config_hash="", cursor="")


class Recorder:
    """Writes the records of one phase of a run. A context manager."""

    def __init__(
        self,
        config: Config,
        rundir: RunDir,
        resume_step: int | None = None,
        identity: Manifest = ANY_RUN,
        gpus: int = 0,
    ) -> None:
        """`identity`: what all checkpoints of this start say of the run. `gpus`: of the whole run; 0: none, or not
        known."""
        self.config, self.rundir, self.identity, self.gpus = config, rundir, identity, gpus
        self.started = time.monotonic()
        self.began = journal.Began(time.time(), bound=config.asynchrony.max_staleness)
        self.effective = journal.EffectiveTime(self.began.unix_s)
        self.training_started: float | None = None  # when the trainer's first weights were out
        self.last_step_s = self.started
        self._without_trainer_s: float | None = None  # since when
        self.outages = OutageWatch()
        self.stalls = StallWatch(config.run.stall_notice_s, config.run.stall_limit_s, self.started)
        self.ledger = Ledger()
        supervised = config.train.loss_type == "sft_loss"
        phase = "warm start" if config.warm_start.warm_start_steps else "supervised"
        mode, bound = phase if supervised else config.run.mode, config.asynchrony.max_staleness
        begins = RunSnapshot(mode, resume_step or 0, config.rollout.num_rollout)
        begins.staleness_bound, begins.supervised = bound, supervised
        stages = [name for name in (*path(config), *loops(config)) if name != "prompts"]
        self.view = RunView(begins, self.started, stages)
        self.goodput = Goodput(config, self.view)
        self.rewards: list[float] = []  # per step, over all groups graded for it, trained or not
        self.group_outcomes = GroupOutcomes(config.rollout.n_samples_per_prompt)
        self.evals: list[EvalDone] = []
        self.points: list[Point] = []  # scores of complete evaluations, also before a resume
        self.health = HealthWatch(config)
        self.versions: list[int] = []
        self.restarts: dict[str, int] = {}
        self.dead_letters: list[str] = []
        self.staleness_bound = bound  # the largest that applied, also before a resume
        self.changes: list[Changed] = []  # by the user, also before a resume
        self.delta_ratios: list[float] = []  # per step, where weights travel as differences
        self._topic: TopicServer | None = None
        self.lines: Callable[[str], None] = lambda line: None  # takes a message for the user
        self.begun: Callable[[], None] = lambda: None  # called once the trainer has its weights, after all refusals
        self.resume_step = resume_step
        self.before = Counter[str]()  # what earlier starts took and made; see `totals`
        self.committed = resume_step or 0  # step of the newest checkpoint, or of the start
        self.spared = set[int]()  # steps of checkpoints that the run may be about to go back to: they stay until then
        self._responses = keeps_rollouts(config)
        self._ended: list[tuple[int, int]] = []  # (batches trained, group) since the newest checkpoint
        self._admitted_s: dict[int, float] = {}  # unix time, of open groups
        self._metrics: Metrics | None = None

    def _open_metrics(self) -> Metrics:
        """Called once the trainer has its weights: a refused resume drops no row."""
        if self._metrics is None:
            tensorboard = self.config.observe.use_tensorboard
            more = trackers(self.config, self.rundir.path)
            self._metrics = Metrics(self.rundir.path, tensorboard=tensorboard, resume_step=self.resume_step, more=more)
            rows = list(read_metrics(self.rundir.metrics))  # of the starts before
            self.before = totals(rows)
            for row in rows:
                lags = {int(n.rpartition("/")[2]): int(v) for n, v in row.items() if n.startswith(TOKEN_LAGS)}
                self.view.staleness.update(lags)
                self.rewards += [row["reward/mean"]] if "reward/mean" in row else []
                points = evaluations([row])
                self.points += points
                for point in points:
                    self.health.evaluated(*point)
                if VERSION not in row:
                    self.health.step(int(row["step"]), row)
        return self._metrics

    @property
    def newest_metrics(self) -> dict[str, float]:
        return {} if self._metrics is None else self._metrics.newest

    def __enter__(self) -> Recorder:
        ledger = self.rundir.ledger
        files = [file for file in (ledger, self.rundir.metrics, self.rundir.summary) if file.exists()]
        before_s = max((file.stat().st_mtime for file in files), default=0.0)  # last sign of the start before
        self.journal = journal.Journal(ledger)
        if self.resume_step is not None:
            for event in journal.read_journal(ledger):
                if isinstance(event, Changed):
                    self.changes.append(event)
                    if event.what.endswith("max_staleness"):
                        self._count_bound(int(event.value.split()[0]))
                elif isinstance(event, journal.Began):
                    self._count_bound(event.bound or 0)
            self.began = replace(self.began, before_s=before_s)
            self.effective = journal.resumed_time(journal.read_journal(ledger), self.began, self.resume_step)
        self.spans = span_writer(self.config, self.rundir.run_id, self.rundir.path, "prompts-0", "prompts")
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.__exit__(None, None, None)
        if self._metrics is not None:
            self._metrics.close()
        self.spans.close()
        if self.rewards and self.group_outcomes.by_outcome:
            with contextlib.suppress(OSError):  # a full disk was reported before, and this file is a by-product
                self.group_outcomes.write(self.rundir.path / BIAS_FILE)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started

    def say(self, line: str) -> None:
        """A line for the user."""
        log_line(visible(line))
        self.lines(visible(line))

    # ------------------------------------------------------------------ RunHooks

    def admitted(self, group: OpenGroup) -> None:
        self.journal.write(journal.Admitted(group.group_id, group.position, group.requeued))
        self._admitted_s[group.group_id] = time.time()

    def settled(self, groups: Sequence[tuple[int, Settled]]) -> None:
        self.journal.write(*(journal.Ended(s.group_id, s.outcome, max(s.step, at), s.detail) for at, s in groups))
        self.journal.flush()
        if self._responses:
            self._ended += [(max(report.step, at), report.group_id) for at, report in groups]
        for _, report in groups:
            begun_s = self._admitted_s.pop(report.group_id, time.time())
            self.spans.export(ROOT, begun_s, group=report.group_id, detail=report.outcome)
            self.group_outcomes.settled(report)
            if report.outcome != "trained":
                self.goodput.settled(report)
                self._report(self.health.ended(report.outcome, report.detail))

    async def step(self, report: StepDone) -> None:
        now = time.monotonic()
        if report.publishes and report.version not in self.versions[-1:]:
            self.versions.append(report.version)
        if report.rolled_back:
            self.journal.write(journal.WentBack(report.step))
        if not report.groups:
            if self.training_started is None:
                self._open_metrics()
                self.begun()
                self.training_started = self.last_step_s = now
                self.view.begin()
                # The start before may have been killed when it had not yet removed what its last checkpoint replaced.
                spare = self.spared | {self.resume_step or 0}
                await asyncio.to_thread(prune, self.rundir.checkpoints, self.config.checkpoint.keep_last_n, spare)
            elif self._without_trainer_s is not None:  # no step includes the time without a trainer
                self.last_step_s += now - self._without_trainer_s
            self._without_trainer_s = None
            return
        took_s, self.last_step_s = now - self.last_step_s, now
        self.effective.steps[report.step] = took_s
        self.spans.export("batch", time.time() - took_s, detail=f"step {report.step}")
        outcomes = {} if self.config.train.loss_type == "sft_loss" else self.group_outcomes.step(report)
        self.goodput.step(report.metrics)
        metrics = {**report.metrics, **outcomes, **self._ledger_metrics(), **self._weights_metrics()}
        metrics |= self.goodput.metrics() | self.view.stage_metrics()
        metrics["perf/tokens_per_s"] = report.tokens / max(took_s, 1e-6)
        if self.gpus:
            metrics["perf/tokens_per_gpu_per_s"] = metrics["perf/tokens_per_s"] / self.gpus
        metrics["perf/effective_training_time"] = self.effective.share(time.time())
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        oldest = max(report.staleness, default=0)
        self.journal.write(journal.Stepped(report.step, report.token_hash, oldest, round(took_s, 3)))
        self.view.step(report.step, at_s=now, metrics=metrics, tokens=report.tokens, staleness=report.staleness)
        trained_tokens = self.view.run.trained_tokens
        self._open_metrics().write(report.step, metrics, wall_s=self.wall_s, trained_tokens=trained_tokens)
        self._report(self.health.step(report.step, metrics))
        await self._forget_responses()

    async def _forget_responses(self) -> None:
        """Remove responses and answers of groups that ended so long after the newest checkpoint that only newer
        weights can have made them: a resume from the checkpoint could use none of their tokens."""
        last = self.committed + (self.staleness_bound or 0) + 1
        ended = [group for step, group in self._ended if step > last]
        if ended:
            self._ended = [(step, group) for step, group in self._ended if step <= last]
            await asyncio.to_thread(forget_responses, self.rundir.episodes, ended)

    def _report(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            best = best_text(self.points, self.rundir.checkpoints)
            self.say(f"step {self.health.at}: alarm {alarm.sentence}" + (f"; best so far: {best}" if best else ""))

    async def evaluated(self, report: EvalDone) -> None:
        self.evals.append(report)
        run = self.view.run
        values = {**report.metrics, "eval/version": float(report.version), "eval/complete": float(report.complete)}
        values["eval/lag_steps"] = float(max(run.step - report.version, 0))
        self._open_metrics().write(report.version, values, wall_s=self.wall_s, trained_tokens=run.trained_tokens)
        for point in scores(report.metrics, report.version):
            self.view.evaluated(*point)
            if report.complete:
                self.points.append(point)
                self._report(self.health.evaluated(*point))
        if not report.complete:
            self.say(f"evaluation of version {report.version} is incomplete: {report.detail}")

    async def commit(self, report: CheckpointReady, ledger: LedgerSnapshot) -> None:
        draft, final = Path(report.path), final_path(self.rundir.checkpoints, report.step)
        groups = msgspec.json.encode(ledger).decode()
        manifest = replace(self.identity, step=report.step, version=report.version, ledger=groups)

        def seal() -> None:
            write_manifest(draft, manifest)
            commit_directory(draft, final)

        def tidy() -> None:
            if self.config.checkpoint.save_hf is not None:
                save_hf(final, self.config.checkpoint.save_hf, report.step)
            prune(self.rundir.checkpoints, self.config.checkpoint.keep_last_n, self.spared)
            remove_superseded(self.rundir.path, report.step)
            if keeps_rollouts(self.config):
                forget_ended(self.rundir.episodes, manifests(self.rundir.checkpoints))

        with named(f"checkpoint {final} is written; if its disk hangs, a kill and --resume end it"):
            await asyncio.to_thread(self.journal.sync)  # after a kill behind the rename, a resume takes this checkpoint
            await asyncio.to_thread(seal)
            self.journal.write(journal.Committed(report.step))  # before what takes long, in which the run may be killed
            await asyncio.to_thread(self.journal.sync)
            self.committed, self._ended = report.step, []  # checkpoints decide on groups that ended before
            if report.step in ledger.rollbacks:
                self.spared.clear()
            await asyncio.to_thread(tidy)

    # ------------------------------------------------------------------ from the controller

    def lost(self, stage: str, replica: str, why: str) -> None:
        self.restarts[replica] = self.restarts.get(replica, 0) + 1
        if stage == "train" and self._without_trainer_s is None:
            self._without_trainer_s = time.monotonic()
        self.view.restarted(stage)
        self.say(f"{replica} ended with {why}; restarting it, {outage_text(self.config, stage)}")

    def changed(self, what: str, value: str) -> None:
        """The user changed the running run. Journalled before the reply to the user."""
        change = Changed(self.view.run.step, what, value)
        self.changes.append(change)
        self.journal.write(change)
        self.journal.flush()
        self.say(f"changed: {what} {value}".rstrip())

    def bound(self, max_staleness: int) -> None:
        """The bound of staleness was changed."""
        self._count_bound(max_staleness)
        self.view.run.staleness_bound = max_staleness

    def _count_bound(self, max_staleness: int) -> None:
        self.staleness_bound = max(self.staleness_bound or 0, max_staleness)

    def dead_letter(self, stream: str, key: str, reason: str) -> None:
        self.dead_letters.append(f"{stream} {key}: {reason}")

    def observe(self, topic: TopicServer, queues: Mapping[str, int], capacity: int, version: int) -> None:
        """Bring the view up to date from the topic."""
        for value in topic.items(STATS_PREFIX).values():
            self.view.stage(msgspec.msgpack.decode(value, type=StageStats))
        self.view.queues = dict(queues)
        run = self.view.run
        run.ledger, run.in_flight, run.may_enter, run.version = self.counts(), self.ledger.open, capacity, version
        run.alarms = tuple(alarm.sentence for alarm in self.health.active.values())
        carried = carrying(topic)
        reports = {name: (entry.version, entry.update_s) for name, entry in carried.items()}
        self.view.engines({name: reports.get(name) for name in addresses(topic, POLICY)})
        if self.training_started is not None:
            self.goodput.look(time.monotonic(), carried, capacity)
        run.goodput = self.goodput.figures()
        self._topic = topic

    def counts(self) -> LedgerCounts:
        return LedgerCounts(admitted=self.ledger.admitted, open=self.ledger.open, **self.ledger.counts)

    def _weights_metrics(self) -> dict[str, float]:
        """Of the newest version on its way to the engines."""
        ratio = self.view.extra("train", "delta_ratio")
        if ratio > 0:
            self.delta_ratios.append(ratio)
        # Read now: steps may be shorter than the time from one observation to the next.
        serving = {} if self._topic is None else carrying(self._topic)
        values = {
            "perf/delta_ratio": ratio,
            "perf/publish_weights_time": self.view.extra("train", "publish_s"),
            "perf/update_weights_time": max((row.update_s or 0.0 for row in self.view.engine_rows()), default=0.0),
            "perf/update_stall_time": max((entry.stall_s for entry in serving.values()), default=0.0),
        }
        proofs = [entry.proof for entry in serving.values() if entry.proof is not None]
        found = {name: value for name, value in values.items() if value > 0}
        if proofs:
            found["train/policy_proof_max_diff"] = max(proof.largest for proof in proofs)
            found["train/policy_proof_mean_diff"] = max(proof.mean for proof in proofs)
            found["train/policy_proof_time"] = max(proof.seconds for proof in proofs)
        return found

    def _ledger_metrics(self) -> dict[str, float]:
        ledger = self.ledger
        others = {"open": ledger.open, "duplicates": ledger.duplicates, "skipped": ledger.skipped}
        return {f"ledger/{name}": float(n) for name, n in (*ledger.counts.items(), *others.items())}
