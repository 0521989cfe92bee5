"""From configuration to exit code: prepare the run directory, warm start, train, sum up.

A run has one or two phases, each a graph of its own under one `Controller`: the supervised warm start (prompts ->
train) if `warm_start_steps` asks for it, then the reinforcement learning. A resumed run continues in the phase in
which it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from configs.graph import replicas
from configs.layers import supervised, untrained, with_model
from configs.load import config_hash, dump_toml
from configs.schema import Config, generates
from models.checkpoint import Manifest, latest_checkpoint, remove_leftovers, resumable_checkpoint
from models.disk import write_json
from models.families.source import context_limit
from models.import_path import add_working_directory
from models.weights.slot_directory import SHARED_MEMORY, remove_if_stale, remove_stale, slots_directory
from pipeline.controller import Controller
from pipeline.errors import Interrupted, RunError, UsageError, for_user, leaf
from pipeline.facts.run_directory import RunDir, disk_error
from pipeline.facts.run_log import PROGRAM, log_line, loop_watched, named, release, run_log, show_line
from pipeline.graph import Placement, threads
from pipeline.hosts.fork_server import ForkServer
from pipeline.hosts.launcher import Launcher
from pipeline.hosts.local_launcher import KeptProcesses, LocalLauncher
from pipeline.hosts.machine import collect_less, gpus_used, interruptible, raise_file_limit
from pipeline.observe.report import conclude, summarise
from pipeline.preflight.data import check_frozen, check_vocabularies, prepare, training_prompts, with_data
from pipeline.preflight.machine import check_targets
from pipeline.preflight.refusals import refuse
from pipeline.record.journal import RolledBack, last_run_generation
from pipeline.record.kept_files import keeps_rollouts, read_lives, write_lives
from pipeline.record.recorder import ANY_RUN, Recorder
from pipeline.supervise.auto_resume import Resumed
from pipeline.supervise.external_servers import read_policy_config
from pipeline.view.beside import viewed
from stages.base import GenerateOptions, StageContext, TrainOptions
from stages.chat.formats import with_stops
from stages.chat.tokenizer import load_tokenizer
from stages.prompts.ledger import LedgerSnapshot
from stages.prompts.prompt_sources import DrawnPrompts
from stages.prompts.stage import PromptStage
from stages.staleness_gate import StalenessGate
from stages.train.checkpoints import FOLDER as RECOVERY
from stages.train.saved_groups import SavedBatches, restorable

Launchers = Callable[[RunDir, int], Launcher]  # where processes run, with so many threads each
Saved = tuple[Path, Manifest] | None  # the checkpoint of a resume


def run(
    config: Config,
    launchers: Launchers | None = None,
    *,
    resumed: Resumed | None = None,
    forks: ForkServer | None = None,
) -> int:
    """Run to the end; return the exit code: 0 done, 130 interrupted. Raises RunError with one sentence for the user.

    `launchers`: instead of the launcher that `--runner` names. `resumed`: by the parent of `--auto-resume`, if there is
    one. `forks`: starts the processes of this machine that it can.
    """
    add_working_directory()  # for graders, filters, tools and stages of the user, as in the workers
    raise_file_limit(sum(replicas(config).values()))
    run_dir = RunDir(Path(config.run.resume or config.run.run_dir or time.strftime("runs/%Y%m%d-%H%M%S")))
    directory = run_dir.path
    try:
        with interruptible(), run_dir.open(resume=config.run.resume is not None) as rundir:
            try:
                with run_log(rundir.path, level=config.observe.log_level), viewed(rundir.path, config.observe.view):
                    log_line(f"starts: pid {os.getpid()} on {socket.gethostname()}, sluice {release()}")
                    with named("functions, environments and options are checked; ended by a limit of 120 s for each"):
                        refuse(config)  # now, not after a warm start
                        check_targets(config)
                    with _connected(config, launchers, resumed, forks) as connected_launchers:
                        return _run(config, rundir, connected_launchers, resumed.times if resumed else 0)
            except Exception as error:
                if rundir.gone:  # the cause of any other error
                    raise UsageError(
                        f"the run directory {rundir.path} was removed or replaced while the run used it, so nothing of "
                        "it can be resumed; start a new run, and leave its directory alone until it has ended"
                    ) from error
                raise
    except RunError:
        raise
    except asyncio.CancelledError:
        sys.stderr.write(f"stopped at once; continue with --resume {directory}\n")
        return 130
    except BaseException as error:
        cause = leaf(error)
        if isinstance(cause, OSError) and cause.errno is not None:
            # The files of the run are at fault where no path is named, or one inside that is there.
            inside = directory in Path(str(cause.filename)).absolute().parents
            if cause.filename is None or (inside and not isinstance(cause, FileNotFoundError)):
                raise disk_error(directory, cause) from error
        if (ended := for_user(cause)) is None:
            raise
        raise ended from error


@contextlib.contextmanager
def _connected(
    config: Config, launchers: Launchers | None, resumed: Resumed | None, forks: ForkServer | None
) -> Iterator[Launchers]:
    """The launchers of the run, for the time of the block."""
    if launchers is not None or config.run.runner != "ray":
        keeps = resumed is not None and resumed.connection >= 0
        kept = KeptProcesses(resumed.connection, resumed.directory) if resumed is not None and keeps else None
        yield launchers or partial(LocalLauncher, kept=kept, forks=forks)
        return
    from pipeline.hosts.ray.cluster import connected, nodes
    from pipeline.hosts.ray.launcher import RayLauncher

    with connected(config) as placements:
        yield partial(RayLauncher, placements, nodes)


def _run(config: Config, rundir: RunDir, launchers: Launchers, resumed: int) -> int:
    given = config
    for place in (SHARED_MEMORY, rundir.path):
        remove_stale(place)  # weight slots that killed runs left
    with named(f"models, tasks and checkpoints in {rundir.path} are made ready and verified; slow disks take longest"):
        config = prepare(config, rundir.path / "assets")
        check_vocabularies(config)
        if config.engine.frozen_engine and generates(config):
            asyncio.run(check_frozen(config, load_tokenizer(config.train.hf_checkpoint)))
        checkpoint = resumable_checkpoint(rundir.checkpoints, show_line)
    if config.warm_start.warm_start_steps and checkpoint is None:
        if config.run.resume is None:
            rundir.write_config(dump_toml(given))
        config = _warm_start(config, rundir, launchers)
    elif config.warm_start.warm_start_steps:
        config = with_model(config, rundir.path / "warm_start" / "model")
    if config.debug.debug_rollout_only:
        config = untrained(config)
    phase = Phase(config, rundir, launchers, checkpoint, given)
    with phase.recorder:
        if resumed:
            phase.recorder.restarts["controller"] = resumed
        try:
            reason = phase.run()
        except BaseException as error:
            if phase.refused or rundir.gone:
                raise
            why = f"{'' if isinstance(leaf(error), asyncio.CancelledError) else 'failed: '}{leaf(error)}"
            with contextlib.suppress(OSError):  # the disk may have failed; the first error is reported
                write_json(rundir.summary, summarise(phase.recorder, phase.config, why))
            if why.startswith("failed: ") and "--resume" not in why:
                show_line(f"the run is in {rundir.path}; continue it with {PROGRAM} --resume {rundir.path}")
            raise
        conclude(phase.recorder, phase.config, reason)
    return 130 if reason == "interrupted" else 0


def _warm_start(config: Config, rundir: RunDir, launchers: Launchers) -> Config:
    """Supervised training on prompt + label; returns the configuration with its model as the starting point."""
    home = rundir.path / "warm_start"
    model = home / "model"
    if not model.is_dir():
        shutil.rmtree(home, ignore_errors=True)
        with RunDir(home).open(resume=False) as phase_dir:
            phase = Phase(supervised(config), phase_dir, launchers)
            with phase.recorder:
                reason = phase.run()
            if reason != "finished":
                raise Interrupted(f"{reason} in the warm start; start it again with --resume {rundir.path}")
            trained = latest_checkpoint(phase_dir.checkpoints)
            if trained is None:
                raise RunError(f"the warm start left no checkpoint in {phase_dir.checkpoints}")
            shutil.copytree(trained / "hf", home / "model.draft", dirs_exist_ok=True)
            (home / "model.draft").rename(model)
    return with_model(config, model)


class Phase:
    """One graph run to its end. Its files are open while its recorder is, which is a context manager."""

    def __init__(
        self, config: Config, rundir: RunDir, launchers: Launchers, saved: Saved = None, given: Config | None = None
    ) -> None:
        """`given`: the configuration for the run directory; a phase inside a run keeps none."""
        self.rundir, self.given = rundir, given
        checkpoint, manifest = saved if saved is not None else (None, None)
        self.checkpoint = checkpoint
        tokenizer = self.tokenizer = load_tokenizer(config.train.hf_checkpoint, config.data.chat_template_path)
        with named("rows of --prompt-data are read and counted; fewer rows take less: path@[0:1000]"):
            self.prompts = training_prompts(config, tokenizer, rundir)
        self.eos_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        self.config = with_stops(with_data(config, self.prompts, show_line))
        known = max(manifest.run_generation if manifest else 0, last_run_generation(rundir.ledger))
        self.run_generation = known + 1 if config.run.resume else 0
        self.snapshot = msgspec.json.decode(manifest.ledger, type=LedgerSnapshot) if manifest else None
        if manifest is not None and manifest.cursor != self.prompts.fingerprint:  # the cursor counts other prompts
            raise UsageError(
                f"the prompts are not those of the checkpoint of step {manifest.step} (fingerprint "
                f"{self.prompts.fingerprint}, was {manifest.cursor}); restore --prompt-data, or start a new run "
                f"from its model with --hf-checkpoint {self.checkpoint}/hf"
            )
        if isinstance(self.prompts, DrawnPrompts) and manifest and self.snapshot:
            self.prompts.resume(self.snapshot.drawn, self.snapshot.cursor, manifest.step)
        self.reopened = tuple(group.group_id for group in self.snapshot.open) if self.snapshot else ()
        kept = restorable(checkpoint, config.rollout.n_samples_per_prompt) if checkpoint is not None else frozenset()
        self.restored = tuple(group_id for group_id in self.reopened if group_id in kept)
        self.start = manifest.step if manifest else 0  # the step from which this start of the run goes on
        experiment, cursor = config_hash(given) if given is not None else "", self.prompts.fingerprint
        identity = replace(ANY_RUN, run_generation=self.run_generation, config_hash=experiment, cursor=cursor)
        resumed, gpus = self.start if config.run.resume else None, gpus_used(self.config)
        self.recorder = Recorder(self.config, rundir, resumed, identity, gpus)
        self.lives = (*read_lives(rundir.episodes), self.start) if keeps_rollouts(config) else ()
        # The name cannot be guessed, so no other process can take it before the trainer does.
        name = f"{rundir.run_id}-{secrets.token_hex(8)}"
        self.slots = slots_directory(
            name, rundir.path, self.config.train.hf_checkpoint, evaluated=self.config.eval.apart
        )
        self.launcher = launchers(rundir, threads(self.config))
        self.placement = self._place()

    def run(self) -> str:
        """Run it; return why it ended. Raises RunError."""
        import uvloop

        warming = self.config.train.loss_type == "sft_loss" and self.config.warm_start.warm_start_steps
        if self.config.run.runner != "inprocess":
            collect_less()
        what = f"warm start of {self.config.rollout.num_rollout} supervised steps at the most" if warming else "run"
        show_line(f"{what} in {self.rundir.path}: starting its processes, which log to {self.rundir.logs}")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(self._main())
        finally:
            remove_if_stale(self.slots)  # a killed trainer could not
            with contextlib.suppress(OSError):  # it has files that no checkpoint replaces, or was never made
                (self.rundir.path / RECOVERY).rmdir()

    def _place(self) -> Placement:
        """Raises UsageError for what does not fit on the machine."""
        resume_from = str(self.checkpoint) if self.checkpoint is not None else None
        policy = read_policy_config(Path(self.config.train.hf_checkpoint))
        vocab_size = policy.vocab_size if policy is not None else None
        train = TrainOptions(self.start, self.run_generation, resume_from, frozenset(self.restored), str(self.slots))
        if self.snapshot and self.snapshot.rollbacks:
            train = msgspec.structs.replace(train, floor=self.snapshot.rollbacks[-1])
        generation = GenerateOptions(context_limit(self.config) or 1 << 30, vocab_size, self.lives)
        return Placement(self.config, self.rundir, train, generation, self.launcher.controller)

    @property
    def refused(self) -> bool:
        """Whether a resume ended before it changed anything."""
        return self.config.run.resume is not None and self.recorder.training_started is None

    def _keep_config(self) -> None:
        if self.given is not None:
            self.rundir.write_config(dump_toml(self.given))
        if self.lives:
            write_lives(self.rundir.episodes, self.lives)
        (self.rundir.path / "config.json").write_bytes(msgspec.json.encode(self.config))  # for people

    def _begun(self) -> None:
        """A resumed run has its weights. Their version numbers must not be used again, however soon it is killed."""
        self._keep_config()
        self.recorder.journal.write()
        self.recorder.journal.sync()

    async def _main(self) -> str:
        if self.config.run.resume is None:
            self._keep_config()
            self.recorder.journal.begin_with(self.recorder.began)
        else:
            self.recorder.begun = self._begun  # the trainer may refuse, and a refused resume changes nothing
            remove_leftovers(self.rundir.checkpoints)
            next_group = self.snapshot.next_group if self.snapshot else 0
            self.recorder.journal.begin_with(
                RolledBack(self.start, self.run_generation, next_group, self.reopened, self.restored),
                self.recorder.began,
            )
        loads = self.config.debug.load_debug_rollout_data is not None
        gate = StalenessGate.of(self.config)
        stage = PromptStage(
            StageContext(self.config, self.rundir.path, "prompts-0", self.recorder.spans),
            self.prompts,
            dataclasses.replace(gate, max_staleness=0) if loads else gate,  # batch by batch, as they were saved
            self.recorder,
            snapshot=self.snapshot,
            restored=self.restored,
            eos_id=self.eos_id,
            encode=self.tokenizer.encode,
            saved=SavedBatches(self.config) if loads else None,
        )
        self.recorder.ledger = stage.ledger
        controller = Controller(self.placement, stage, self.recorder, self.launcher)
        with loop_watched(asyncio.get_running_loop()):
            await controller.run()
        return controller.reason
