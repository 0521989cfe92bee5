"""Which changes of the code does no test see? docs/contributing.md says how to run this."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.mutation import runner
from tests.mutation.mutants import PACKAGES, Mutant, Site, all_sites, find_again, product_files, sample

STORE: Final = Path(__file__).with_name("mutants.json")
MOST_TESTS: Final = 40
THRICE: Final = 3
KILLED: Final = ("killed", "timeout")
COMMANDS: Final = ("sample", "map", "run", "run-all", "report", "compare", "redundant", "serve")
STATES: Final = (*KILLED, "survived", "uncovered", "gone", "crashed")
Result = dict[str, Any]


class Covered:
    """Which tests cover a line: for each file, a number of bits for each test. The test "" is the import."""

    def __init__(self, path: Path) -> None:
        self.files: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.size: Counter[str] = Counter()
        base = sqlite3.connect(path)
        rows = base.execute("select path, context, numbits from line_bits join file on file.id = file_id "
                            "join context on context.id = context_id").fetchall()  # fmt: skip
        root = os.path.commonpath([file for file, _, _ in rows])
        for file, context, bits in rows:
            test = re.sub(r"\|(setup|run|teardown)$", "", context)
            self.files[os.path.relpath(file, root)][test] |= int.from_bytes(bits, "little")
            self.size[test] += int.from_bytes(bits).bit_count()

    def covering(self, file: str, lines: Iterable[int]) -> set[str]:
        mask = sum(1 << line for line in lines)
        return {test for test, number in self.files.get(file, {}).items() if number & mask}

    def choose(self, site: Site, texts: dict[str, str]) -> list[str]:
        """Tests for a mutant: half are those that cover least, the rest from all over, a file's tests together.

        For what runs at import, tests that cover a use of its name.
        """
        found = self.covering(site.mutant.file, site.lines) - {""}
        uses = re.compile(r"\b(" + "|".join(re.findall(r"\w+", re.split("[:=(]", site.mutant.statement)[0])) + r")\b")
        if site.at_import and site.mutant.operator != "default":
            for file, text in texts.items():
                lines = (number for number, line in enumerate(text.splitlines(), 1) if uses.search(line))
                found |= self.covering(file, lines) - {""}
        cases: Counter[str] = Counter()
        ranked = []
        for test in sorted(found):
            cases[test.split("[")[0]] += 1
            afar = site.at_import and not uses.search(texts.get(test.split("::")[0], ""))
            ranked.append((afar, cases[test.split("[")[0]], self.size[test], test))
        tests = [test for *_, test in sorted(ranked)]
        half, rest = tests[: MOST_TESTS // 2], tests[MOST_TESTS // 2 :]
        tests = half + rest[:: max(1, -(-2 * len(rest) // MOST_TESTS))]
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        return sorted(tests, key=lambda test: files.index(test.split("::")[0]))


class Run:
    """The mutants of the store on the tree of the current directory. Results are appended as they come."""

    def __init__(self, covered: Covered, out: Path, every: bool) -> None:
        self.root, self.covered, self.out, self.every = Path.cwd(), covered, out, every
        self.sound: set[str] = set()
        self.unsound: set[str] = set()
        self.lock = threading.Lock()
        self.jobs: queue.PriorityQueue[tuple[bool, str, Site, list[str], Result]] = queue.PriorityQueue()

    def prepare(self, before: dict[str, Result]) -> None:
        """Find the mutants and their tests; those that killed a mutant before come first, wherever they are now."""
        moved = {test.partition("::")[2]: test for test in self.covered.size}
        mutants = {f"m{at:03}": Mutant(**fields) for at, fields in enumerate(json.loads(STORE.read_text()))}
        paths = [*product_files(self.root), *self.root.glob("tests/**/*.py")]
        texts = {path.relative_to(self.root).as_posix(): path.read_text() for path in paths}
        done = read(self.out)
        for name, site, how in find_again(mutants, all_sites(self.root)[0]):
            mutant = mutants[name]
            about = {"id": name, "package": mutant.package, "found": how, "operator": mutant.operator}
            about |= {"where": mutant.file, "qualname": mutant.qualname, "statement": mutant.statement[:160]}
            if name in done:
                continue
            if site is None:
                self.note(about | {"status": "gone"})
                continue
            old, about["where"] = texts[site.mutant.file], f"{site.mutant.file}:{site.lines[0]}"
            codes = (compile(text, "", "exec") for text in (old, site.apply(old.encode())))
            cold = "" in self.covered.covering(site.mutant.file, site.lines) or runner.swaps(*codes) is None
            killers = (test.partition("::")[2] for test in before.get(name, {}).get("failed", ()))
            first = [moved[test] for test in killers if test in moved]
            if tests := list(dict.fromkeys([*first, *self.covered.choose(site, texts)])):
                self.jobs.put((cold, name, site, tests, about))
            else:
                self.note(about | {"status": "uncovered"})

    def note(self, result: Result) -> None:
        with self.lock, self.out.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def work(self) -> None:
        worker = runner.Worker(self.root)
        try:
            while True:
                cold, _, site, tests, about = self.jobs.get_nowait()
                began = time.monotonic()
                result = self.judge(worker, "cold" if cold else "warm", site, tests)
                self.note(about | result | {"seconds": round(time.monotonic() - began, 2)})
        except queue.Empty:
            pass
        finally:
            worker.close()

    def judge(self, worker: runner.Worker, kind: str, site: Site, tests: list[str]) -> Result:
        """Run the tests; a test that fails on the code as it is does not count."""
        old = (self.root / site.mutant.file).read_bytes()
        ask = {"file": site.mutant.file, "old": old.decode(), "new": site.apply(old).decode(), "all": self.every}
        while True:
            ask["ids"] = [test for test in tests if test not in self.unsound]
            answer = worker.ask(kind, ask)
            if answer["status"] == "cold" != kind:
                kind = "cold"
                continue
            failed = [test for test in answer["failed"] if test in tests]
            for test in set(failed) - self.sound:
                again = worker.ask(kind, ask | {"new": ask["old"], "ids": [test]})
                (self.sound if again["status"] == "survived" else self.unsound).add(test)
            if self.unsound.isdisjoint(failed):
                break
        return answer | {"kind": kind, "tests": len(ask["ids"])}


def cover(out: Path, workers: int) -> None:
    """Run the fast tests, and note the lines of each."""
    folders = (f"--cov={folder}" for folder in dict.fromkeys(package.split("/")[0] for package in PACKAGES))
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-m", runner.FAST, "--cov-context=test"]
    environment = os.environ | {"COVERAGE_FILE": str(out)}
    subprocess.run([*command, "--cov-report=", *folders], env=environment, check=False)


def read(path: Path) -> dict[str, Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["id"]: result for result in map(json.loads, lines)}


def table(results: dict[str, Result]) -> str:
    rows = [["package", "mutants", *STATES, "killed of covered"], ["---"] * (len(STATES) + 3)]
    for package in (*PACKAGES, "all"):
        seen = Counter(result["status"] for result in results.values() if package in (result["package"], "all"))
        killed = sum(seen[state] for state in KILLED)
        share = f"{killed / max(1, killed + seen['survived']):.1%}"
        rows.append([package, str(seen.total()), *(str(seen[state]) for state in STATES), share])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def compare(before: dict[str, Result], after: dict[str, Result]) -> str:
    parts = [f"Before:\n\n{table(before)}\n\nAfter:\n\n{table(after)}\n\nKilled before and not now:\n"]
    for name, now in sorted(after.items()):
        was = before.get(name, {"status": ""})
        if was["status"] in KILLED and now["status"] not in (*KILLED, "gone"):
            what = f"{now['where']} {now['qualname']}: {now['operator']} `{now['statement']}`"
            parts.append(f"- {name} {what}: {now['status']}; before: {was['failed'][:1]}")
    return "\n".join(parts) + f"\n\nFound again: {dict(Counter(result['found'] for result in after.values()))}"


def redundant(covered: Covered, results: Iterable[dict[str, Result]]) -> list[str]:
    """Test functions that can go together: tests that stay cover each of their lines thrice, and kill their mutants."""
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for file, tests in covered.files.items():
        for test, number in tests.items():
            lines[test.split("[")[0]] |= {(file, at) for at in range(number.bit_length()) if number >> at & 1}
    kills: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for at, each in enumerate(results):
        for name, result in each.items():
            for test in result.get("failed", ()):
                kills[test.split("[")[0]].add((at, name))
    covering = Counter(line for found in lines.values() for line in found)
    killing = Counter(mutant for found in kills.values() for mutant in found)
    gone = []
    for test in sorted(set(lines) - {""}, key=lambda test: (len(kills[test]), len(lines[test]), test)):
        if all(covering[line] > THRICE for line in lines[test]) and all(killing[mutant] > 1 for mutant in kills[test]):
            gone.append(test)
            covering.subtract(lines[test])
            killing.subtract(kills[test])
    return gone


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("files", nargs="*", help="results, a line of JSON each")
    parser.add_argument("--coverage", type=Path, default=Path("runs/mutation.coverage"), help="lines of each test")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    flags = parser.parse_args()
    results = [read(Path(path)) for path in flags.files]
    text = ""
    if flags.command == "serve":
        runner.serve_here(flags.files[0])
    elif flags.command == "sample":
        lines = (json.dumps(asdict(mutant)) for mutant in sample(Path.cwd(), flags.count, flags.seed))
        STORE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    elif flags.command == "map":
        cover(flags.coverage.absolute(), flags.workers)
    elif flags.command.startswith("run"):
        run = Run(Covered(flags.coverage), Path(flags.files[0]), flags.command == "run-all")
        run.prepare(results[1] if len(results) > 1 else {})
        threads = [threading.Thread(target=run.work) for _ in range(flags.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text = f"{table(read(run.out))}\n\nTests that failed on the unchanged code: {sorted(run.unsound)}"
    elif flags.command == "redundant":
        text = "\n".join(redundant(Covered(flags.coverage), results))
    else:
        text = compare(*results) if flags.command == "compare" else table(results[0])
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()
