"""Metrics by step: a JSONL file that survives a crash, TensorBoard events, and experiment trackers (Weights & Biases,
MLflow, Trackio), which get the same rows under the same names. No torch.

Invariants:
- one row is one line of strict JSON, handed to the kernel by a single write: a killed run loses no written row, and
  at most its last line is torn (it is cut off when the file is opened again);
- a value that is not finite becomes null, and the row names the value under `nonfinite`: nothing is dropped silently;
- a resumed run drops the rows of steps after the one it resumed from: they never happened;
- a tracker lives in a thread of its own, so that a slow network delays nothing; one that cannot be reached costs a
  warning and ends no run; a resumed run goes on in the tracker's run, whose id lies in the run's directory.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from configs.schema import Config
from models.disk import open_file, write_whole
from pipeline.errors import UsageError

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

METRICS_FILE: Final = "metrics.jsonl"
TENSORBOARD_DIRECTORY: Final = "tensorboard"
_RESERVED: Final = ("step", "wall_s", "trained_tokens", "nonfinite")
Values = Mapping[str, float]


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
        if tensorboard:
            self._writers.append(TensorBoardMetrics(run_dir / TENSORBOARD_DIRECTORY, resume_step))

    def write(self, step: int, values: Mapping[str, float], *, wall_s: float, trained_tokens: int) -> None:
        """Record values at a step. `wall_s` counts from the start of the run, resumed parts included."""
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


log = logging.getLogger("sluice.trackers")

IDS: Final = "trackers.json"  # in the run's directory: tracker -> id of its run
CLOSE_S: Final = 30.0  # for the last rows to be sent


class Tracker(Protocol):
    """One run in one tracker. Every method may block and raise."""

    def log(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class TrackerThread:
    """Hands rows to a tracker; the `Writer` that never waits."""

    def __init__(self, name: str, make: Callable[[], Tracker], *, close_s: float = CLOSE_S) -> None:
        self._name, self._make, self._close_s = name, make, close_s
        self._rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Values, *, wall_s: float, trained_tokens: int) -> None:
        """Finite values only; a tracker shows no others."""
        row = {**values, "axis/wall_s": wall_s, "axis/trained_tokens": float(trained_tokens)}
        self._rows.put((step, {name: float(value) for name, value in row.items() if math.isfinite(value)}))

    def close(self) -> None:
        """Waits until all is sent, for a bounded time. May be called twice."""
        self._rows.put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("%s has not taken all rows within %g s; metrics.jsonl has them", self._name, self._close_s)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (row := self._rows.get()) is not None:
                tracker.log(*row)
            tracker.close()
        except Exception as error:  # whatever a library raises concerns the tracker alone
            text = f"{type(error).__name__}: {error}"
            log.warning("nothing goes to %s any more (%s); metrics.jsonl has all rows", self._name, text)


def trackers(config: Config, run_dir: Path) -> list[TrackerThread]:
    """Those of `--report-to`, each started."""
    made: dict[str, Callable[[Config, Path], Tracker]] = {
        "wandb": WandbTracker,
        "mlflow": MlflowTracker,
        "trackio": TrackioTracker,
    }
    return [TrackerThread(name, partial(made[name], config, run_dir)) for name in config.observe.report_to]


def run_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """The id of this run in a tracker; made once and kept, so that a resume finds it."""
    path = run_dir / IDS
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.exists() else {}
    if tracker not in known:
        known[tracker] = make()
        write_whole(path, msgspec.json.encode(known), durable=True)
    return known[tracker]


class WandbTracker:
    """Weights & Biases. `WANDB_API_KEY` and the other variables of its library apply."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        observe = config.observe
        if observe.wandb_host is not None:
            os.environ["WANDB_BASE_URL"] = observe.wandb_host
        self._run = wandb.init(
            project=observe.project,
            name=observe.run_name or run_dir.name,
            group=observe.run_group,
            entity=observe.wandb_team,
            mode=observe.wandb_mode,
            dir=run_dir,
            id=run_id(run_dir, "wandb", lambda: uuid.uuid4().hex),
            resume="allow",
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        # After a resume steps begin again before the last one that was sent, which its own counter would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow; `MLFLOW_TRACKING_URI` names the server, else files lie in the run's directory.

    Its names may hold no `@`: `pass@4` is `pass_at_4` there.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        here = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", here))
        self._id = run_id(run_dir, "mlflow", lambda: self._begin(config, run_dir))

    def _begin(self, config: Config, run_dir: Path) -> str:
        observe = config.observe
        experiment = self._client.get_experiment_by_name(observe.project)
        number = self._client.create_experiment(observe.project) if experiment is None else experiment.experiment_id
        tags = {"group": observe.run_group} if observe.run_group else {}
        made = self._client.create_run(number, run_name=observe.run_name or run_dir.name, tags=tags)
        for section, values in msgspec.to_builtins(config).items():
            self._client.log_param(made.info.run_id, section, msgspec.json.encode(values).decode()[:6000])
        return str(made.info.run_id)

    def log(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioTracker:
    """Trackio. `TRACKIO_DIR`, `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL` and the other variables of its library apply."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import trackio

        observe = config.observe
        name = f"{observe.run_name or run_dir.name}-{uuid.uuid4().hex[:8]}"  # by which it resumes
        self._run = trackio.init(
            project=observe.project,
            name=run_id(run_dir, "trackio", lambda: name),
            group=observe.run_group,
            config=msgspec.to_builtins(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
