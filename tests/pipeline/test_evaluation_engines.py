"""Evaluations on engines of their own: they alone answer, of one version, and training does not wait for them."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from launching import SIMULATED, SMALL, Finished, finish, made_model, start, status, succeed_here

from configs.layers import ConfigError
from configs.plan.plan import make_plan, render
from configs.rules.validate import checked_flags
from configs.schema.notation import repeated
from configs.schema.rollout import EngineConfig
from models.engines.serve import EngineServer
from pipeline.control.client import ask
from pipeline.control.endpoint import Status
from pipeline.facts.trace import Span, read_records
from pipeline.record.metrics import read_metrics
from stages.messages import EVAL_BASE
from tests.pipeline.test_kill import kill_and_await, steps_done, wait_for_steps

SAME = ["http://localhost:1"]
HELD = ["--eval-prompt-data", "held=arithmetic@[0:6]", "--eval-interval", "2"]


def evaluated(run_dir: Path) -> dict[int, dict[str, float]]:
    """The rows of evaluations by version, without what tells of the moment at which they were written: the tokens are
    those that were trained then, exactly."""
    steps = list(read_metrics(run_dir / "metrics.jsonl"))
    rows = [row for row in steps if "eval/version" in row]
    tokens = {0: 0.0} | {int(row["step"]): row["trained_tokens"] for row in steps if "reward/mean" in row}
    for row in rows:
        assert row["trained_tokens"] == tokens[int(row["eval/version"] + row["eval/lag_steps"])], row
    assert not list(repeated(int(row["eval/version"]) for row in rows))
    timed = ("eval/time_s", "eval/lag_steps", "step", "wall_s", "trained_tokens")
    return {int(r["eval/version"]): {k: v for k, v in r.items() if k not in timed} for r in rows}


def requests(run_dir: Path, *, evaluation: bool) -> list[str]:
    """What the trace says of the requests: engine, and tokens of which versions."""
    found = [one for one in read_records(run_dir / "trace") if isinstance(one, Span) and one.name == "request"]
    return [span.detail for span in found if (span.group_id >= EVAL_BASE) is evaluation]


@pytest.mark.slow
def test_a_dedicated_engine_alone_answers_and_its_rows_are_those_of_shared_engines(tmp_path: Path) -> None:
    flags = [*SMALL, *made_model(), *HELD, "--mode", "sync", "--deterministic"]
    succeed_here(tmp_path / "shared", *flags)
    succeed_here(tmp_path / "apart", *flags, "--eval-engines", "1")
    shared, apart = evaluated(tmp_path / "shared"), evaluated(tmp_path / "apart")
    assert list(shared) == [0, 2, 4]
    assert {0, 4} <= set(apart), "the version between may find the first one's evaluation under way"
    assert apart == {version: shared[version] for version in apart}
    assert all(row["eval/complete"] == 1 and row["eval/held-mixed_versions"] == 0 for row in apart.values())
    assert {detail.split(",")[0] for detail in requests(tmp_path / "apart", evaluation=True)} == {"eval-engine-0"}
    assert {detail.split(",")[0] for detail in requests(tmp_path / "apart", evaluation=False)} == {"engine-0"}
    assert {detail.split(",")[0] for detail in requests(tmp_path / "shared", evaluation=True)} == {"engine-0"}


def slow_evaluation(run_dir: Path, *flags: str, prompts: int = 40) -> subprocess.Popen[str]:
    """A run whose evaluations take longer than many of its steps."""
    return start(
        run_dir, *SMALL, *made_model(), *SIMULATED, "--eval-prompt-data", f"held=arithmetic@[0:{prompts}]",
        "--eval-interval", "2", "--eval-max-in-flight", "1", "--num-rollout", "60", *flags,
    )  # fmt: skip


def check_slow(done: Finished) -> None:
    rows, steps = evaluated(done.run_dir), list(read_metrics(done.run_dir / "metrics.jsonl"))
    skipped = [int(row["step"]) for row in steps if row.get("eval/skipped")]
    assert sorted([*rows, *skipped]) == list(range(0, 61, 2)), "each is evaluated or skipped"
    assert {0, 60} <= set(rows), "the last weights are evaluated in any case"
    assert 2 in skipped
    assert all(row["eval/complete"] == 1 and row["eval/held-mixed_versions"] == 0 for row in rows.values())


@pytest.mark.slow
def test_a_killed_engine_of_an_evaluation_gets_its_version_again_while_training_goes_on(tmp_path: Path) -> None:
    process = slow_evaluation(tmp_path / "run", "--eval-engines", "1")
    wait_for_steps(process, tmp_path / "run", 5)  # both slots hold later versions
    assert not evaluated(tmp_path / "run")
    engines = {engine.name: engine.version for engine in ask(tmp_path / "run", Status()).status.engines}
    assert (engines["eval-engine-0"], list(engines)) == (0, ["engine-0", "eval-engine-0"])
    kill_and_await(process, tmp_path / "run", "eval-engine-0")
    trained = steps_done(tmp_path / "run")
    wait_for_steps(process, tmp_path / "run", trained + 3)
    done = finish(process, tmp_path / "run").check()
    check_slow(done)
    assert done.summary["restarts"] == {"eval-engine-0": 1}


@pytest.mark.slow
@pytest.mark.full
def test_an_evaluation_whose_weights_went_with_the_trainer_is_given_up_and_the_last_is_whole(tmp_path: Path) -> None:
    process = slow_evaluation(tmp_path / "run", "--eval-engines", "1", "engine.simulated.a_ms=30", prompts=256)
    wait_for_steps(process, tmp_path / "run", 3)
    kill_and_await(process, tmp_path / "run", "train-0")
    wait_for_steps(process, tmp_path / "run", steps_done(tmp_path / "run") + 1)
    assert not evaluated(tmp_path / "run")
    engines = {engine.name: engine.version for engine in ask(tmp_path / "run", Status()).status.engines}
    assert (engines["eval-engine-0"], list(engines)) == (0, ["engine-0", "eval-engine-0"])
    kill_and_await(process, tmp_path / "run", "eval-engine-0")
    done = finish(process, tmp_path / "run").check()
    rows = evaluated(tmp_path / "run")
    assert (rows[0]["eval/complete"], rows[60]["eval/complete"]) == (0, 1)
    assert done.summary["restarts"] == {"train-0": 1, "eval-engine-0": 1}


@pytest.mark.slow
async def test_an_engine_that_runs_already_evaluates_and_outlives_the_run(tmp_path: Path) -> None:
    settings = EngineConfig(engine="embedded", engine_device="cpu")
    async with EngineServer(settings, made_model()[1], max_context_len=None, seed=0) as server:
        flags = [*SMALL, *made_model(), *HELD, "--eval-external-engine-addrs", server.url]
        done = await asyncio.to_thread(finish, start(tmp_path / "run", *flags), tmp_path / "run")
        assert await asyncio.to_thread(status, f"{server.url}/health") == 200
    done.check()
    rows = evaluated(tmp_path / "run")
    assert {0, 4} <= set(rows)
    assert all(row["eval/complete"] == 1 and row["eval/held-mixed_versions"] == 0 for row in rows.values())
    assert {detail.split(",")[0] for detail in requests(tmp_path / "run", evaluation=True)} == {"eval-engine-0"}
    assert {detail.split(",")[0] for detail in requests(tmp_path / "run", evaluation=False)} == {"engine-0"}


def test_the_plan_shows_them() -> None:
    flags = [*SMALL, *HELD, "--engine-device", "cpu", "--train-device", "cpu"]
    shared = make_plan(checked_flags(flags))
    started = make_plan(checked_flags([*flags, "--eval-engines", "2"]))
    assert "  eval-engine  x2   process with an HTTP server\n" in render(started)
    assert started.processes == shared.processes + 2
    running = make_plan(checked_flags([*flags, "--eval-external-engine-addrs", "http://localhost:7001"]))
    assert "  eval-engine  x1   not started here, asked at http://localhost:7001\n" in render(running)
    assert running.processes == shared.processes
    assert "eval-engine" not in render(shared)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--eval-engines", "1", "--mode", "sync", "--colocate"],
            "--eval-engines 1 with --colocate: .* trainer's turn",
        ),
        (
            ["--eval-engines", "1", "--eval-external-engine-addrs", "http://localhost:1"],
            "--eval-engines 1 with --eval-external-engine-addrs http://localhost:1: both say which engines evaluate",
        ),
        (["--eval-external-engine-addrs", "localhost"], "holds 'localhost', but an address must have the form"),
        (
            ["--eval-external-engine-addrs", *SAME, "--rollout-external-engine-addrs", *SAME, "--engine", "sglang"],
            "--eval-external-engine-addrs holds 'http://localhost:1', as does --rollout-external-engine-addrs",
        ),
        (["--eval-external-engine-addrs", "http://far:1"], "--eval-external-engine-addrs http://far:1 is another mach"),
    ],
)
def test_what_contradicts_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_flags([*SMALL, *HELD, *flags])
