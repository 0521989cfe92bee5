"""`python -m tests.chaos --kills 100 --seed 7`: prints each run and a table. Exit code 1 if a fault was found."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.kills import MOMENTS
from tests.chaos.oracle import KINDS
from tests.chaos.suite import BROKEN, LEFT, Running, Verdict, auto_cases, cases, stop_cases


def table(verdicts: Sequence[Verdict]) -> str:
    """Kills by moment and victim, and what the oracle found."""
    done = Counter((kill.moment, kill.victim.split("-")[0]) for verdict in verdicts for kill in verdict.done)
    victims = tuple(dict.fromkeys(who for _, who in sorted(done)))
    lines = [f"{'killed':12}" + "".join(f"{victim:>11}" for victim in victims) + f"{'all':>7}"]
    for moment in (*MOMENTS, "all"):
        row = [sum(n for (at, who), n in done.items() if who == victim and moment in (at, "all")) for victim in victims]
        lines.append(f"{moment:12}" + "".join(f"{n:>11}" for n in row) + f"{sum(row):>7}")
    found = Counter(fault.kind for verdict in verdicts for fault in verdict.faults)
    compared, resumes = (sum(getattr(verdict, name) for verdict in verdicts) for name in ("compared", "resumes"))
    lines.append(f"{len(verdicts)} runs, {resumes} resumes, {compared} rollbacks compared with their checkpoint")
    lines.append(", ".join(f"{found[kind]} {kind}" for kind in dict.fromkeys((*KINDS, LEFT, BROKEN, *found))))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000, help="of the plan; it is printed")
    parser.add_argument("--keep", type=Path, help="where runs with a fault are kept (default: a temporary directory)")
    parser.add_argument("--calls", action="store_true", help="an environment with calls that change the world")
    parser.add_argument("--sync", action="store_true", help="sync runs, compared with undisturbed ones bit for bit")
    parser.add_argument("--agents", action="store_true", help="as --sync, with agents that ask the gateway")
    parser.add_argument("--auto", action="store_true", help="runs with --auto-resume, each kill ends the whole run")
    parser.add_argument("--stops", action="store_true", help="processes are stopped for 45 or 90 s, not killed")
    arguments = parser.parse_args()
    sys.stdout.write(f"make chaos KILLS={arguments.kills} SEED={arguments.seed}\n")
    home = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    verdicts: list[Verdict] = []
    kind = next((kind for kind in ("agents", "sync", "calls") if getattr(arguments, kind)), "")
    made = cases(arguments.seed, arguments.kills, kind, home)
    made = auto_cases(made) if arguments.auto else stop_cases(made) if arguments.stops else made
    for number, case in enumerate(made):
        started, place = time.monotonic(), home / f"{arguments.seed}-{number}"
        verdict = Running(case, place).run()
        verdicts.append(verdict)
        sys.stdout.write(f"{case.name}: {verdict.kills} kills, {verdict.resumes} resumes, ")
        sys.stdout.write(f"{time.monotonic() - started:.0f} s: {'; '.join(map(str, verdict.done))}\n")
        more = [verdict.figures] if verdict.figures else []
        more += [f"not reached: {kill}" for kill in verdict.missed]
        more += [f"{fault.kind.upper()}: {fault.text}" for fault in verdict.faults]
        sys.stdout.write("".join(f"  {line}\n" for line in more))
        if verdict.faults:
            sys.stdout.write(f"  kept in {place}\n")
        else:
            shutil.rmtree(place)
        sys.stdout.flush()
        if sum(one.kills for one in verdicts) >= arguments.kills:
            break
    sys.stdout.write(f"{table(verdicts)}\n")
    return 1 if any(verdict.faults for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
