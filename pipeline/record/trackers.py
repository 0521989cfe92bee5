"""Experiment trackers (Weights & Biases, MLflow, Trackio): they get the rows of metrics.jsonl under the same names.

Invariants: a tracker has a thread of its own, so that a slow network delays nothing; a tracker that cannot be reached
costs a warning and ends no run; a resumed run continues the tracker's run, whose id lies in the run's directory.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from configs.schema import Config
from models.disk import write_whole

log = logging.getLogger("sluice.trackers")

IDS: Final = "trackers.json"  # in the run's directory: tracker -> id of its run
CLOSE_S: Final = 30.0  # for the last rows to be sent
Values = Mapping[str, float]


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
