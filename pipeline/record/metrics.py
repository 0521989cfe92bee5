"""Metrics by step: a JSONL file that survives a crash, and TensorBoard events. No torch.

Experiment trackers get the same rows under the same names (pipeline/record/trackers.py).

Invariants:
- one row is one line of strict JSON, handed to the kernel by a single write: a killed run loses no written row, and
  at most its last line is torn (it is cut off when the file is opened again);
- a value that is not finite becomes null, and the row names the value under `nonfinite`: nothing is dropped silently;
- a resumed run drops the rows of steps after the one it resumed from: they never happened.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from models.disk import open_file, write_whole
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

METRICS_FILE: Final = "metrics.jsonl"
TOKEN_LAGS: Final = "staleness/token_hist/"  # trained tokens of a step, by their staleness
TENSORBOARD_DIRECTORY: Final = "tensorboard"
_RESERVED: Final = ("step", "wall_s", "trained_tokens", "nonfinite")


class JsonlMetrics:
    """`{"step":12,"wall_s":3.4,"trained_tokens":5600,"train/loss":0.1,...}`, one line per call, in `metrics.jsonl`.

    Args:
        path: the file; created if missing, continued if present.
        resume_step: keep only rows up to this step (what `--resume` passes); None keeps all.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # cut off a torn last line, and rows after the resumed step; whole, or left alone
            kept = b"".join(line for step, line in _rows(path) if resume_step is None or step <= resume_step)
            if len(kept) != path.stat().st_size:
                write_whole(path, kept, durable=True)
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, step: int, values: Mapping[str, float], *, wall_s: float, trained_tokens: int) -> None:
        row: dict[str, float | int | dict[str, str] | None] = {"step": step, "wall_s": round(wall_s, 3)}
        row["trained_tokens"] = trained_tokens
        nonfinite: dict[str, str] = {}
        for name, value in values.items():
            if name in _RESERVED:
                raise UsageError(f"metric {name!r} would overwrite the row's own field; give it a name with a prefix")
            number = float(value)
            if not math.isfinite(number):
                nonfinite[name] = str(number)
            row[name] = number if math.isfinite(number) else None
        if nonfinite:
            row["nonfinite"] = nonfinite
        line = memoryview(self._encoder.encode(row) + b"\n")
        try:
            while line:  # a regular file takes all at once unless the disk is full, and then raises
                line = line[self._file.write(line) :]
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written ({error.strerror}); free space on that disk or choose another --run-dir"
            ) from error

    def close(self) -> None:
        self._file.close()


class TensorBoardMetrics:
    """TensorBoard events through tensorboard's own writer: the step axis is `step`, the clock is real time.

    A resumed run marks its start, so that TensorBoard hides the rows after `resume_step`.
    """

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._make_summary = Summary
        self._make_event = event_pb2.Event
        self._writer = EventFileWriter(str(directory))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(session_log=start), resume_step + 1)

    def write(self, step: int, values: Mapping[str, float], *, wall_s: float, trained_tokens: int) -> None:
        summary = self._make_summary()
        axes = {"axis/wall_s": wall_s, "axis/trained_tokens": float(trained_tokens)}
        for name, value in (*values.items(), *axes.items()):
            summary.value.add(tag=name, simple_value=float(value))
        self._add(self._make_event(summary=summary), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event, step: int) -> None:
        event.wall_time = time.time()
        event.step = step
        self._writer.add_event(event)


class Writer(Protocol):
    """Takes a row of scalars; see `Metrics.write`."""

    def write(self, step: int, values: Mapping[str, float], *, wall_s: float, trained_tokens: int) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """The metrics of a run: always JSONL, TensorBoard and other writers on request.

    Takes one row of scalars per step. Several rows of one step are allowed (an evaluation beside the training).
    """

    def __init__(
        self, run_dir: Path, *, tensorboard: bool, resume_step: int | None = None, more: Iterable[Writer] = ()
    ) -> None:
        self._writers: list[Writer] = [JsonlMetrics(run_dir / METRICS_FILE, resume_step), *more]
        self.newest: dict[str, float] = {}  # value of each metric
        if tensorboard:
            self._writers.append(TensorBoardMetrics(run_dir / TENSORBOARD_DIRECTORY, resume_step))

    def write(self, step: int, values: Mapping[str, float], *, wall_s: float, trained_tokens: int) -> None:
        """Record values at a step. `wall_s` counts from the start of the run, resumed parts included."""
        self.newest |= values
        for writer in self._writers:
            writer.write(step, values, wall_s=wall_s, trained_tokens=trained_tokens)

    def close(self) -> None:
        """Flush and close. May be called twice."""
        for writer in self._writers:
            writer.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Rows of a JSONL metrics file, finite values only. Stops before a torn last line; raises UsageError for a bad
    line elsewhere."""
    for _, row in _rows(path):
        values = msgspec.json.decode(row, type=dict[str, float | dict[str, str] | None])
        yield {name: value for name, value in values.items() if isinstance(value, float)}


def totals(rows: Iterable[Mapping[str, float]]) -> Counter[str]:
    """Seconds, trained tokens and wasted tokens by cause, which count from each start of the run, over all starts."""
    whole, newest = Counter[str](), dict[str, float]()
    for row in rows:
        before = row["trained_tokens"] - sum(v for n, v in row.items() if n.startswith(TOKEN_LAGS))
        if before < newest.get("trained_tokens", 0.0) or row["wall_s"] < newest.get("wall_s", 0.0):  # the next start
            whole.update(newest)
            newest = {}
        newest |= {n: v for n, v in row.items() if n in ("wall_s", "trained_tokens") or n.startswith("waste/")}
    whole.update(newest)
    return whole


class _Row(msgspec.Struct):
    step: int


def _rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """Step and line of each row, up to a torn last line."""
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = msgspec.json.decode(line, type=_Row)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"{path}, line {number} is no metrics row ({error}); remove the line or choose another --run-dir"
                ) from error
            yield row.step, line


VERSION: Final = "eval/version"  # marks the row of an evaluation
ABOUT: Final = frozenset((VERSION, "eval/complete", "eval/lag_steps", "eval/time_s"))
Point = tuple[str, int, float]  # data set, version, score


def scores(metrics: Mapping[str, float], version: int) -> list[Point]:
    """The score of each data set; companions such as `eval/x-truncated_ratio` are left out."""
    names = [n for n in metrics if n.startswith("eval/") and n not in ABOUT and n.rpartition("-")[0] not in metrics]
    return [(name.removeprefix("eval/"), version, metrics[name]) for name in names]


def evaluations(rows: Iterable[Mapping[str, float]]) -> list[Point]:
    """Of the complete evaluations among rows of `metrics.jsonl`, in their order."""
    complete = (row for row in rows if row.get("eval/complete"))
    return [point for row in complete for point in scores(row, int(row[VERSION]))]
