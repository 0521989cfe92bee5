"""Sampling that is changed while the run goes on: every token is trained at the temperature at which it was drawn."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from launching import SMALL, made_model
from launching import here as run_here
from scripted_run import Scripted, scripted

from configs.load import load
from pipeline.control.client import ask
from pipeline.control.endpoint import Set
from pipeline.observe.metrics import read_metrics
from stages.train.saved_groups import load_batch

pytestmark = pytest.mark.slow


def test_batches_of_two_temperatures_are_trained_at_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights hardly move, so that log-probs of engine and trainer differ only where the temperatures do."""
    run_dir, batches = tmp_path / "run", f"{tmp_path}/batches/{{rollout_id}}.msgpack"
    flags = [*SMALL, *made_model(), "--lr", "1e-12", "--num-rollout", "4000", "--save-debug-rollout-data", batches]
    flags += ["--dynamic-sampling-filter", "nonzero_std"]  # new groups are admitted in the middle of a batch
    seen: list[set[float | None]] = []

    def look() -> set[float | None]:
        """Temperatures of the newest batch."""
        while Path(batches.format(rollout_id=len(seen))).exists():
            seen.append({slice_.group.temperature for slice_ in load_batch(batches, len(seen))})
        return seen[-1] if seen else set()

    async def script(run: Scripted) -> None:
        await run.until(lambda: run.controller.recorder.training_started is not None)
        await run.until(lambda: look() == {1.0})
        for value in itertools.cycle(("0.3", "2.5")):
            reply = await asyncio.to_thread(ask, run_dir, Set({"temperature": value}))
            assert reply.ok, reply.lines
            assert reply.lines == (f"rollout_temperature: {value}, for groups that are admitted from now on",)
            await run.until(lambda value=value: look() == {float(value)})
            if any(len(one) == 2 for one in seen) and value == "2.5":
                return

    scripted(monkeypatch, run_dir, script, lambda place: run_here(place, *flags).code)
    look()
    rows = list(read_metrics(run_dir / "metrics.jsonl"))
    gaps = [row[name] for row in rows if (name := "train/train_rollout_logprob_abs_diff_max") in row]
    assert len(gaps) == len(seen)
    assert max(gaps) < 1e-4
    assert load(["--resume", str(run_dir)]).config.rollout.rollout_temperature == 2.5
