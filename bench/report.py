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
    how = f"`{' '.join(document.command)}`: {'; '.join(document.remarks)}."
    if several := by_unit(document.series):
        return "\n".join([*several, "", how])
    lines = ["| | contender | median | lowest | highest | by baseline |", "|---|---|---|---|---|---|"]
    bases = {one.setting: one.median for one in document.series if one.name == document.baseline}
    for one in document.series:
        median, lowest, highest = map(figure, (one.median, min(one.values), max(one.values)))
        ratio = f"{one.median / bases[one.setting]:.2f}" if bases.get(one.setting) else ""
        name = f"{one.name} ({one.note.strip('()')})" if one.note else one.name
        lines.append(f"| {one.setting} | {name} | {median} {one.unit} | {lowest} | {highest} | {ratio} |")
    return "\n".join([*lines, "", how])


def figure(value: float) -> str:
    return f"{value:{',.0f' if value >= 1000 else '.3g'}}"


def by_unit(series: Sequence[Series]) -> list[str]:
    """A table with a line for each contender and a column for each unit, of medians with their range; none if all have
    one unit."""
    units, rows = dict.fromkeys(one.unit for one in series), dict[tuple[str, str], dict[str, str]]()
    for one in series:
        spread = f" ({figure(min(one.values))} to {figure(max(one.values))})" if len(one.values) > 1 else ""
        rows.setdefault((one.setting, one.name), {})[one.unit] = figure(one.median) + spread
    if all(len(cells) == 1 for cells in rows.values()):
        return []
    lines = [f"| | contender | {' | '.join(units)} |", "|---|---" + "|---" * len(units) + "|"]
    return lines + [
        f"| {' | '.join((*place, *(row.get(unit, '') for unit in units)))} |" for place, row in rows.items()
    ]


def rendered(page: str, documents: Path) -> str:
    """A page whose tables between `<!-- NAME -->` and `<!-- end -->` are those of NAME.json in the folder."""

    def table(match: re.Match[str]) -> str:
        document = msgspec.json.decode((documents / f"{match[1]}.json").read_bytes(), type=Document)
        return f"<!-- {match[1]} -->\n{markdown(document)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def finish(
    output: Path, about: Machine, remarks: list[str], series: list[Series], *, baseline: str | None = None
) -> None:
    """Print the table, as the page of benchmarks has it, and write all of it."""
    name = Path(sys.argv[0]).stem
    flags = [flag for at, flag in enumerate(sys.argv[1:]) if "--output" not in (sys.argv[at], flag)]
    document = Document(name, about, ["python", "-m", f"bench.{name}", *flags], remarks, series, baseline)
    rows = [line.split("|") for line in markdown(document).splitlines()]
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    print("", *("|".join(map(str.ljust, row, widths)) if len(row) > 1 else row[0] for row in rows), "", sep="\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    print(f"written to {output}")


if __name__ == "__main__":
    PAGE = ROOT / "docs" / "benchmarks.md"
    PAGE.write_text(rendered(PAGE.read_text(), PAGE.with_suffix("")))
