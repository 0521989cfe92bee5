"""What is killed, and when: a plan drawn from a seed, in which a run may also be told to go back to a checkpoint; and
what of a run is still there after its end.

How each moment is recognised from outside. Processes are found by the mark in their environment, files in shared memory
by the processes that mapped them. Other runs on the machine are never looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

START, WARM, RUNNING, SAVE, PRUNE, RESUME, END = "start", "warm start", "running", "save", "prune", "resume", "end"
MOMENTS = (START, WARM, RUNNING, SAVE, PRUNE, RESUME, END)
CONTROLLER, TRAIN = "controller", "train-0"
ROLLBACK = "rollback"  # no kill: the user has the run go back to one of its checkpoints
EVERYTHING = "everything"  # all processes of the run at once, but the parent of --auto-resume
WITHIN = ("generate-0", "generate-1", "reward-0", "group-0", "evaluate-0", "engines-0", "engine-0", "engine-1")
CHAINED = ("generate-1", "reward-0", "group-0")  # may be in the process of another one
FATAL = (CONTROLLER, EVERYTHING)  # the run ends and is resumed
MAY_END = (TRAIN,)  # it does if the newest step is not in a checkpoint
WORST = (CONTROLLER, *MAY_END)
STOP_S, STOP_ALL_S = 90.0, 45.0


@dataclass(frozen=True)
class Kill:
    victim: str
    moment: str
    step: int  # batches that the journal has by then, of the phase that is meant
    delay_s: float  # after the moment was seen
    stop_s: float = 0.0  # stopped for so long (SIGSTOP) in place of killed

    def __str__(self) -> str:
        if self.victim == ROLLBACK:
            return f"rollback (step {self.step} + {self.delay_s * 1000:.0f} ms)"
        stopped = f" stopped for {self.stop_s:.0f} s" if self.stop_s else ""
        return f"{self.victim}{stopped} at {self.moment} (step {self.step} + {self.delay_s * 1000:.0f} ms)"


# Who is killed at a moment, the more often the more often it is named, and within how many seconds of it.
OFTEN = (CONTROLLER, CONTROLLER, TRAIN, *WITHIN)
HOW = {
    START: (OFTEN, 2.0), RESUME: (OFTEN, 2.0), WARM: ((CONTROLLER, TRAIN), 0.2), END: ((*WORST, *WITHIN), 0.8),
    RUNNING: ((*WORST, *WITHIN, *WITHIN), 0.3),
    SAVE: ((*WORST, *WORST, *WITHIN), 0.01), PRUNE: ((*WORST, *WORST, *WITHIN), 0.01),
}  # fmt: skip


def draw(rng: random.Random, *, steps: int, warm_steps: int, kills: int, backs: int = 0) -> list[Kill]:
    """So many kills of one run, in the order in which their moments come.

    A kill during a resume follows one that ended the run; start and warm start come first, the end last. `backs`: how
    often the run goes back to a checkpoint, half of the times with a kill while it does.
    """
    plan: list[Kill] = []
    moments = rng.choices(MOMENTS, weights=(1, 3 if warm_steps else 0, 5, 3, 3, 3, 2), k=kills)
    order = {START: 0, WARM: 1, END: 3}
    drawn = [(order.get(moment, 2), rng.randrange(1, steps - 2), moment) for moment in moments]
    for _, step, moment in sorted(drawn):
        if moment == RESUME:
            plan.append(Kill(CONTROLLER, RUNNING, step, rng.uniform(0, 0.3)))
        at = {START: 0, RESUME: 0, WARM: step % max(1, warm_steps), END: steps}.get(moment, step)
        victims, within_s = HOW[moment]
        plan.append(Kill(rng.choice(victims), moment, at, rng.uniform(0, within_s)))
    return with_rollbacks(rng, plan[:kills], steps=steps, backs=backs)


def with_rollbacks(rng: random.Random, plan: list[Kill], *, steps: int, backs: int) -> list[Kill]:
    """The same plan with rollbacks at random steps. Each takes the number of a step: the end has fewer lines."""
    for step in sorted(rng.sample(range(2, steps - 6), backs), reverse=True):
        later = (i for i, kill in enumerate(plan) if kill.moment not in (START, WARM) and kill.step >= step)
        place = next(later, len(plan))
        back = [Kill(ROLLBACK, RUNNING, step, rng.uniform(0, 0.3))]
        if rng.random() < 0.5:
            back.append(Kill(rng.choice((*WORST, *WITHIN)), RUNNING, step, rng.uniform(0, 4.0)))
        plan[place:place] = back
    return [replace(kill, step=kill.step - backs) if kill.moment == END else kill for kill in plan]


def draw_fatal(rng: random.Random, *, steps: int, kills: int) -> list[Kill]:
    """So many kills at such moments, each of the controller or of everything."""
    plan = draw(rng, steps=steps, warm_steps=0, kills=kills)
    return [replace(kill, victim=rng.choice((CONTROLLER, EVERYTHING))) for kill in plan]


def draw_stops(rng: random.Random, *, steps: int) -> list[Kill]:
    """Two processes are stopped, one after the other, or all of them at once: no run may end by it."""
    victims = rng.choice(((EVERYTHING,), tuple(rng.sample((*WORST, *WITHIN), 2))))
    stop_s = STOP_ALL_S if victims == (EVERYTHING,) else STOP_S
    at = sorted(rng.randrange(1, steps - 4) for _ in victims)
    return [Kill(who, RUNNING, step, rng.uniform(0, 0.3), stop_s) for who, step in zip(victims, at, strict=True)]


class Seen:
    """What can be seen of a run from outside, by its files."""

    def __init__(self, run_dir: Path, keep_last_n: int) -> None:
        self.run_dir, self._keep = run_dir, keep_last_n
        self._tails: dict[Path, tuple[int, int]] = {}  # journal -> bytes read, steps in them

    def steps(self, *, warm: bool = False) -> int:
        """Batches in the journal, those of earlier lives included: lines are only counted."""
        path = self.run_dir / ("warm_start/ledger.jsonl" if warm else "ledger.jsonl")
        place, found = self._tails.get(path, (0, 0))
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(place)
            new = file.read()
        found += new.count(b'{"type":"step"')
        place += len(new)
        # The start of a line is cut off where the file was read while it was written; that one comes a step late.
        self._tails[path] = place, found
        return found

    def reached(self, kill: Kill) -> Callable[[], bool]:
        """Whether a kill's moment is there, asked again and again."""
        checkpoints = self.run_dir / "checkpoints"
        before = self.steps() if kill.moment == RUNNING else 0

        def names(pattern: str) -> Iterator[Path]:
            return checkpoints.glob(pattern)

        match kill.moment:
            case "warm start":
                home = self.run_dir / "warm_start" / "logs"
                return lambda: home.is_dir() and self.steps(warm=True) >= kill.step
            case "start" | "resume":
                return lambda: True
            case "save":
                return lambda: self.steps() >= kill.step and any(names(".step-*.draft"))
            case "prune":
                return lambda: (
                    self.steps() >= kill.step
                    and (any(names(".step-*.removed")) or sum(1 for _ in names("step-*")) > self._keep)
                )
        return lambda: self.steps() >= max(kill.step, before)


MARK = "SLUICE_CHAOS_MARK"
SHARED = Path("/dev/shm")
GRACE_S = 20.0


def marked(mark: str) -> Iterator[int]:
    """Living processes whose environment at their start held the mark; those that only wait to be counted are none."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended in between
            environment = Path(entry.path, "environ").read_bytes().split(b"\0")
            if wanted in environment and Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                yield int(entry.name)


class Watch:
    """Remembers what a run had in shared memory, to look for it when the run is over."""

    def __init__(self, mark: str, runtime: Path) -> None:
        """`runtime`: a directory of the run's own in which it puts its sockets (XDG_RUNTIME_DIR)."""
        self.mark, self.runtime = mark, runtime
        self._names: set[str] = set()

    def look(self) -> None:
        """Take note of what is there now."""
        self._names |= {path.name for path in self.runtime.iterdir()}
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):  # it ended in between
                for line in Path("/proc", str(pid), "maps").read_text().splitlines():
                    path = Path(line.split(maxsplit=5)[-1].removesuffix(" (deleted)"))
                    if path.is_relative_to(SHARED) and path != SHARED:
                        self._names.add(path.relative_to(SHARED).parts[0])

    def left(self, grace_s: float = GRACE_S) -> list[str]:
        """What is still there of it; processes get a time of grace."""
        deadline = time.monotonic() + grace_s
        while (alive := list(marked(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"process {pid}: {command(pid)}" for pid in alive]
        found += [f"{path} in shared memory" for name in sorted(self._names) if (path := SHARED / name).exists()]
        return found + [f"{path} of its sockets" for path in sorted(self.runtime.iterdir())]


def told(run_dir: Path, **command: object) -> bool:
    """Send a command to a run, over its control socket; whether the run did it."""
    try:
        address = json.loads((run_dir / "control.json").read_bytes())
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(30)
            link.connect(address["socket"])
            link.sendall(json.dumps({"token": address["token"], "command": command}).encode() + b"\n")
            return bool(json.loads(link.makefile("rb").readline())["ok"])
    except (OSError, ValueError):  # it is not up, or ends just now
        return False


def command(pid: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended just now"
