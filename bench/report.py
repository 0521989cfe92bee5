"""What every benchmark writes: the machine, all values of all rounds, a table with median and range.

No figure is printed without its range and a baseline of the same run. `python -m bench.report` writes the tables of
docs/benchmarks.md again from the documents in docs/benchmarks; copy the one that a benchmark wrote there first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

ROOT: Final = Path(__file__).resolve().parent.parent
QUICKSTART: Final = ["--config", "quickstart", "--no-live", "--no-trace", "--no-use-tensorboard", "--no-use-plot"]

# A run whose engines and trainer take the time that they are told and compute nothing.
SIMULATED: Final = [
    "--prompt-data", "arithmetic", "--label-key", "label", "--rm-type", "random:0.5", "--engine", "simulated",
    "--train-backend", "simulated", "--no-live", "--no-use-plot", "--log-interval", "100000",
]  # fmt: skip


class Machine(msgspec.Struct, frozen=True):
    cores: int
    load_1min: float
    cpu: str
    python: str
    system: str
    versions: dict[str, str]
    started_unix_s: float

    @property
    def load(self) -> str:
        """A remark."""
        return f"load {self.load_1min:.1f} on {self.cores} cores at the start"


class Series(msgspec.Struct, frozen=True):
    """All rounds of one contender in one setting. `values` in `unit`; more is better unless the unit is a time."""

    setting: str
    name: str
    unit: str
    values: list[float]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Document(msgspec.Struct, frozen=True):
    benchmark: str
    machine: Machine
    command: list[str]
    remarks: list[str]
    series: list[Series]
    baseline: str | None = None


class NoSpans:
    """Takes the spans of a stage, whose times no benchmark reads."""

    def add(self, *_: object, **__: object) -> None:
        pass


def arguments(
    description: str | None, name: str, quick: str, *, rounds: str = "number of rounds"
) -> argparse.ArgumentParser:
    """The options that benchmarks share. `quick`, `rounds`: their help; no `rounds` where there are none."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if rounds:
        parser.add_argument("--rounds", type=int, default=0, help=rounds)
    parser.add_argument("--output", type=Path, default=Path(f"bench_results/{name}.json"))
    return parser


def launch(flags: Sequence[str]) -> str:
    """What `launch.py` with these flags prints. Ends the benchmark with the end of its output if it fails."""
    done = subprocess.run([sys.executable, "launch.py", *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"launch.py {' '.join(flags)}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def machine(packages: Sequence[str]) -> Machine:
    """Cores and load as they are now, and the versions of the packages that matter."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    cpu = [*Path("/proc/cpuinfo").read_text().splitlines(), f"model name: {platform.machine()}"]  # where there is none
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        load_1min=os.getloadavg()[0],
        cpu=next(line.partition(":")[2].strip() for line in cpu if line.startswith("model name")),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
        started_unix_s=time.time(),
    )


def markdown(document: Document) -> str:
    """The table of a document, with how it was measured."""
    lines = ["| | contender | median | lowest | highest | by baseline |", "|---|---|---|---|---|---|"]
    bases = {one.setting: one.median for one in document.series if one.name == document.baseline}
    for one in document.series:
        values = one.median, min(one.values), max(one.values)
        median, lowest, highest = (f"{value:{',.0f' if value >= 1000 else '.3g'}}" for value in values)
        ratio = f"{one.median / bases[one.setting]:.2f}" if bases.get(one.setting) else ""
        lines.append(f"| {one.setting} | {one.name} | {median} {one.unit} | {lowest} | {highest} | {ratio} |")
    return "\n".join([*lines, "", f"`{' '.join(document.command)}`: {'; '.join(document.remarks)}."])


def rendered(page: str, documents: Path) -> str:
    """A page whose tables between `<!-- NAME -->` and `<!-- end -->` are those of NAME.json in the folder."""

    def table(match: re.Match[str]) -> str:
        document = msgspec.json.decode((documents / f"{match[1]}.json").read_bytes(), type=Document)
        return f"<!-- {match[1]} -->\n{markdown(document)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def print_table(series: Sequence[Series], baseline: str) -> None:
    """One block per setting; the last column is the ratio of medians to the baseline of the same setting."""
    width = max(len(one.name) for one in series)
    for setting in dict.fromkeys(one.setting for one in series):
        rows = [one for one in series if one.setting == setting]
        base = next((one.median for one in rows if one.name == baseline), None)
        print(f"\n{setting}")
        print(f"  {'':{width}}  {'median':>12} {'min':>12} {'max':>12}  {'of baseline':>11}")
        for one in rows:
            ratio = "" if base is None else f"{one.median / base:.2f}x"
            values = (one.median, min(one.values), max(one.values))
            figures = " ".join(f"{value:12,.{0 if value >= 1000 else 1}f}" for value in values)
            print(f"  {one.name:{width}}  {figures}  {ratio:>11}  {one.unit} {one.note}")


def finish(
    output: Path, about: Machine, remarks: list[str], series: list[Series], *, baseline: str | None = None
) -> None:
    """Print the table, where a contender is the baseline, and the remarks, and write all of it.

    The command is written without the place of the files.
    """
    if baseline is not None and series:
        print_table(series, baseline)
    name = Path(sys.argv[0]).stem
    document = Document(name, about, ["python", "-m", f"bench.{name}", *sys.argv[1:]], remarks, series, baseline)
    print("\n" + "\n".join(remarks))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    print(f"written to {output}")


if __name__ == "__main__":
    PAGE = ROOT / "docs" / "benchmarks.md"
    PAGE.write_text(rendered(PAGE.read_text(), PAGE.with_suffix("")))
