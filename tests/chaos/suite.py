"""Runs that are killed again and again, resumed, and judged: `make chaos KILLS=100 SEED=7`.

Each run is the program as a user starts it, in a process of its own, with simulated engines and trainer (one in five
computes). It gets a few kills of kills.py; where one ends it, it is resumed, by the suite or by `--auto-resume`, until
it is complete. Then the oracle reads what it left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import asking, calls, kills
from tests.chaos.compared import Rollbacks, Trained, judge_same, trained_by
from tests.chaos.kills import CHAINED, EVERYTHING, FATAL, MARK, MAY_END, PRUNE, ROLLBACK, RUNNING, SAVE, Kill
from tests.chaos.oracle import Expected, Fault, judge

ROOT = Path(__file__).parent.parent.parent
LEFT, BROKEN = "left over", "did not end"
STEPS, WARM_STEPS, BATCH, BOUND, KEEP = 20, 4, 4, 2, 2
AGENT_STEPS = 10
AUTO = ("--auto-resume", "50")
STOPPED_STEP_S = "6"  # in place of 0.1: 20 steps outlast a stop
LIMIT_S = 600.0  # of one start of the program: only what hangs meets it

_EVERY_RUN = [
    "--hf-checkpoint", "tiny-arithmetic", "--prompt-data", "arithmetic", "--label-key", "label", "--lr", "1e-4",
    "--rm-type", "random:0.5", "--rollout-batch-size", str(BATCH), "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "6", "--num-rollout", str(STEPS), "--max-staleness", str(BOUND),
    "--keep-last-n", str(KEEP), "--eval-prompt-data", "held=arithmetic@[0:4]",
    "--eval-interval", "5", "--scale", "engine=2", "--max-restarts", "20",
    "--no-live", "--no-use-tensorboard", "--no-use-plot", "--log-interval", "50",
]  # fmt: skip
# Which stages share a process: reward and group, or generate too, or none.
_CHAINS = (["--scale", "generate=2"], [], ["--chain", "none", "--scale", "generate=2"])
_SIMULATED = [
    "--engine", "simulated", "engine.simulated.vocab_size=32", "engine.simulated.length_mean=6",
    "engine.simulated.update_s=0.01", "--train-backend", "simulated", "--simulated-step-s", "0.1",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run and its kills."""

    name: str
    flags: tuple[str, ...]
    kills: tuple[Kill, ...]
    warm: bool = False
    calls: bool = False  # its environment writes a counter: calls.py
    steps: int = STEPS
    bound: int = BOUND
    undisturbed: Trained | None = None  # what it has to train, whatever is killed
    auto: bool = False  # it resumes itself

    @property
    def expected(self) -> Expected:
        return Expected(self.steps, BATCH, self.bound, KEEP)


@dataclass
class Verdict:
    """What became of a case."""

    done: list[Kill] = field(default_factory=list)
    missed: list[Kill] = field(default_factory=list)  # their moment never came
    resumes: int = 0
    compared: int = 0  # rollbacks whose checkpoint was seen, and has the weights of the one that was chosen
    faults: list[Fault] = field(default_factory=list)
    figures: str = ""

    @property
    def kills(self) -> int:
        return sum(kill.victim != ROLLBACK for kill in self.done)


def flags(*, seed: int, save_interval: int = 1, computes: bool = False, warm: bool = False) -> list[str]:
    """Of one run. `computes`: a real model is trained and sampled; `warm`: after a supervised warm start."""
    found = [*_EVERY_RUN, *([] if computes else _SIMULATED), *_CHAINS[seed % len(_CHAINS)]]
    found += ["--async-unused-samples-handler", ("requeue", "train_masked")[seed % 2]]
    found += ["--seed", str(seed), "--save-interval", str(save_interval)]
    if warm:
        found += ["--warm-start-steps", str(WARM_STEPS), "--warm-start-batch-size", str(BATCH)]
    return found


def without(given: list[str], *names: str) -> list[str]:
    """The flags without these and their values."""
    places = [given.index(name) for name in names]
    return [text for at, text in enumerate(given) if at not in places and at - 1 not in places]


def sync_flags(*, seed: int, save_interval: int = 1) -> list[str]:
    """Of a sync run that computes: what it trains depends on nothing but its flags."""
    found = flags(seed=seed, save_interval=save_interval, computes=True)
    return ["--mode", "sync", "--deterministic", *without(found, "--max-staleness")]


_OF_ROWS = ("--prompt-data", "--label-key", "--eval-prompt-data", "--eval-interval", "--num-rollout")


def calls_flags(*, seed: int, steps: int) -> list[str]:
    """Of a run whose environment writes a counter."""
    found = without(flags(seed=seed), *_OF_ROWS, "--rm-type")
    return ["--config", str(calls.RECIPE), *found, "--num-rollout", str(steps), "--scale", "agents=2"]


def agent_flags(home: Path, *, seed: int) -> list[str]:
    """Of a sync run that computes, whose rollouts are made by agents of the gateway. `home`: a new directory."""
    found = without(sync_flags(seed=seed), *_OF_ROWS, "--rollout-max-response-len")
    return [*asking.write(home), *found, "--num-rollout", str(AGENT_STEPS)]


def cases(seed: int, count: int, kind: str = "", home: Path = ROOT) -> Iterator[Case]:
    """Enough runs for so many kills; each gets some of those that a run with its seed draws.

    Args:
        kind: of runs: with `calls` that change the world, `sync`, or sync with `agents` of the gateway.
        home: where the last two have an undisturbed run of the same flags, which runs first.
    """
    for number in range(10 * count):
        rng = random.Random(seed * 1_000_003 + number)
        name = f"{seed}.{number} {kind}".strip()
        if kind == "calls":
            given = calls_flags(seed=rng.randrange(1 << 30), steps=STEPS)
            yield Case(name, tuple(given), tuple(calls.draw(rng, STEPS, rng.randrange(8, 14))), calls=True)
        elif kind == "sync":
            given = sync_flags(seed=rng.randrange(1 << 30), save_interval=rng.randrange(1, 4))
            alone = Case(name, tuple(given), (), bound=0)
            drawn = kills.draw(rng, steps=STEPS, warm_steps=0, kills=rng.randrange(4, 8))
            yield replace(alone, kills=tuple(drawn), undisturbed=undisturbed(alone, home))
        elif kind == "agents":
            given = agent_flags(home / f"asking-{number}", seed=rng.randrange(1 << 30))
            alone = Case(name, tuple(given), (), bound=0, steps=AGENT_STEPS)
            drawn = calls.draw(rng, AGENT_STEPS, rng.randrange(6, 10))
            yield replace(alone, kills=tuple(drawn), calls=True, undisturbed=undisturbed(alone, home))
        else:
            warm, computes = rng.random() < 0.3, number % 5 == 4
            given = flags(seed=rng.randrange(1 << 30), save_interval=rng.randrange(1, 4), computes=computes, warm=warm)
            many, backs = rng.randrange(4, 10), rng.choice((0, 1, 1, 2))
            drawn = kills.draw(rng, steps=STEPS, warm_steps=WARM_STEPS if warm else 0, kills=many, backs=backs)
            yield Case(f"{name}{' computes' if computes else ''}", tuple(given), tuple(drawn), warm)


def undisturbed(alone: Case, home: Path) -> Trained:
    """What a run without kills trains, below `home`."""
    place = home / f"undisturbed-{alone.name}".replace(" ", "-")
    verdict = Running(alone, place).run()
    if verdict.faults:
        raise RuntimeError(f"{place.name}: {verdict.faults[0].text}; kept in {place}")
    trained = trained_by(place / "run", alone.expected)
    shutil.rmtree(place)
    return trained


def auto_cases(made: Iterable[Case]) -> Iterable[Case]:
    """The same runs with `--auto-resume`: each kill ends the run, and nobody but the run itself starts it again."""
    for case in made:
        rng = random.Random(case.name)
        drawn = kills.draw_fatal(rng, steps=STEPS, kills=rng.randrange(4, 8))
        yield replace(case, flags=(*case.flags, *AUTO), kills=tuple(drawn), auto=True)


def stop_cases(made: Iterable[Case]) -> Iterable[Case]:
    """The same runs, longer than a stop, with processes that are stopped for a while: none may end."""
    for case in made:
        flags = tuple(STOPPED_STEP_S if flag == "0.1" else flag for flag in case.flags)
        yield replace(case, flags=flags, kills=tuple(kills.draw_stops(random.Random(case.name), steps=STEPS)))


class Running:
    """A case while it runs. `home`: an empty directory."""

    def __init__(self, case: Case, home: Path) -> None:
        self.case, self.verdict = case, Verdict()
        self._left = list(case.kills)
        home.mkdir(parents=True, exist_ok=True)
        self._run_dir = home / "run"
        runtime = Path(tempfile.mkdtemp(prefix="chaos-"))  # a path of sockets is short, whatever `home` is
        self._mark = secrets.token_hex(8)
        self._watch = kills.Watch(self._mark, runtime)
        self._seen, self._backs = kills.Seen(self._run_dir, KEEP), Rollbacks(self._run_dir)
        self._calls = home / "calls"
        self._calls.mkdir()
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        self._environment |= {"XDG_RUNTIME_DIR": str(runtime), calls.DIRECTORY: str(self._calls)}
        self._log = home / "terminal.log"

    def run(self) -> Verdict:
        """To its end, with all kills whose moment comes, then judged."""
        case, faults = self.case, self.verdict.faults
        command = ["--run-dir", str(self._run_dir), *case.flags]
        while self._once(command):
            self.verdict.resumes += 1
            begun = (self._run_dir / "config.toml").exists()  # killed before it had anything, it is begun anew
            command = ["--resume", str(self._run_dir)] if begun else command
        if not faults:
            restarts = json.loads((self._run_dir / "summary.json").read_bytes())["restarts"]
            self.verdict.resumes += restarts.get("controller", 0)
            faults += judge(self._run_dir, case.expected)
            if not faults and case.undisturbed is not None:
                faults += judge_same(trained_by(self._run_dir, case.expected), case.undisturbed)
            if case.calls:
                faults += calls.judge_calls(self._run_dir, self._calls)
                self.verdict.figures = calls.figures(self._run_dir, self._calls)
            if case.warm:
                faults += judge(self._run_dir / "warm_start", Expected(WARM_STEPS, BATCH, BOUND, KEEP))
        faults += [Fault(LEFT, text) for text in self._watch.left()]
        shutil.rmtree(self._watch.runtime)
        self.verdict.missed, self.verdict.compared = self.verdict.missed + self._left, self._backs.compared
        return self.verdict

    def _once(self, flags: Sequence[str]) -> bool:
        """One life of the program; whether it has to be resumed."""
        deadline, killed, self._may_end = time.monotonic() + LIMIT_S, False, False
        self._backs.forget()
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch.py"), *flags],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
            )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if killed or not self._left:
                    self._wait(process)
                else:
                    killed = self._next_kill(process, deadline)
        finally:
            if process.poll() is None:
                self.verdict.faults.append(Fault(BROKEN, f"not within {LIMIT_S:g} s: {self._last_words()}"))
                process.kill()
                process.wait()
        return self._goes_on(process.returncode, killed or self._may_end)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """For the end, and look at what the run holds meanwhile."""
        self._watch.look()
        self.verdict.faults += self._backs.look()
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            return

    def _next_kill(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Wait for its moment and make it; whether the run ends by it."""
        kill = self._left[0]
        reached, looked = self._seen.reached(kill), 0.0
        while not reached():
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            self.verdict.faults += self._backs.look()
            if self._overtaken():
                self.verdict.missed.append(self._left.pop(0))
                return False
            if time.monotonic() > looked + 0.5:
                self._watch.look()
                looked = time.monotonic()
            time.sleep(0.002)
        until = time.monotonic() + kill.delay_s
        while (left_s := until - time.monotonic()) > 0:
            self.verdict.faults += self._backs.look()  # a checkpoint may be there for a moment only
            time.sleep(min(left_s, 0.002))
        if kill.victim == ROLLBACK:
            self.verdict.done += [self._left.pop(0)] if self._backs.ask(kill) else []
            return False
        victims = self._victims(kill, process)
        if not victims or process.poll() is not None:
            return False
        try:
            for pid in victims:
                os.kill(pid, signal.SIGSTOP if kill.stop_s else signal.SIGKILL)
        except ProcessLookupError:  # it is just being started anew, or ends by the first of these kills
            if kill.victim != EVERYTHING:
                return False
        self.verdict.done.append(self._left.pop(0))
        if kill.stop_s:
            time.sleep(kill.stop_s)
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):  # its supervisor has replaced it
                    os.kill(pid, signal.SIGCONT)
            return False
        self._may_end = self._may_end or kill.victim in MAY_END
        return kill.victim in FATAL and not self.case.auto

    def _victims(self, kill: Kill, process: subprocess.Popen[bytes]) -> list[int]:
        """None while there is no such process."""
        controller, children = [process.pid], ""
        if self.case.auto:
            with contextlib.suppress(OSError):  # the parent has just ended
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            started = map(int, children.split())
            controller = [pid for pid in started if "launch.py" in kills.command(pid)]  # not its servers
        if kill.victim == EVERYTHING and controller:
            return [pid for pid in kills.marked(self._mark) if pid != process.pid or not self.case.auto]
        if kill.victim in FATAL:
            return controller
        found = self._pid(kill)
        return [] if found is None else [found]

    def _overtaken(self) -> bool:
        """Whether a moment that lasts milliseconds was not seen, and that of the next kill is past."""
        if self._left[0].moment not in (SAVE, PRUNE) or len(self._left) < 2:
            return False
        after = self._left[1]
        return after.moment in (RUNNING, SAVE, PRUNE) and self._seen.steps() > after.step

    def _pid(self, kill: Kill) -> int | None:
        if kill.victim == "environment":
            hosts = re.compile(r"stages\.agents\.worker \d")  # others only describe a class, before a start
            found = [pid for pid in kills.marked(self._mark) if hosts.search(kills.command(pid))]
            return found[int(kill.delay_s * 1000) % len(found)] if found else None
        home = self._run_dir / "warm_start" if kill.moment == "warm start" else self._run_dir
        replicas = home / "replicas"
        shared = ("reward-0", "generate-0") if kill.victim in CHAINED else ()  # the process that it is in
        for name in (kill.victim, *shared):  # the file of an earlier life may lie there still
            with contextlib.suppress(OSError, ValueError):  # not started yet, or ended
                pid = int((replicas / f"{name}.pid").read_text())
                if f"{MARK}={self._mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid  # else the number is another's by now
        return None

    def _goes_on(self, code: int, killed: bool) -> bool:
        if self.verdict.faults or code == 0:
            return False
        if killed and code in (1, -signal.SIGKILL):
            return True
        self.verdict.faults.append(Fault(BROKEN, f"exit code {code} without a kill that ends it: {self._last_words()}"))
        return False

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-600:]
