"""Engines and routers that die, hang or go away in mid-run: it goes on, the books balance, the ends are counted."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import (
    ROOT,
    SIMULATED,
    SIMULATED_TRAINER,
    SMALL,
    Finished,
    alive,
    check_token,
    environment,
    files_with,
    finish,
    here,
    made_model,
    start,
)
from scripted_run import Scripted, scripted
from test_kill import kill, nothing_left, pids, steps_done, wait_for_steps, wait_until

import launch as program
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.engines.client import EngineClient, WeightsUpdated
from models.errors import EngineRefused
from pipeline.facts.run_directory import RunDir, ServerInfo, read_fleet
from pipeline.record.journal import Ended, audit, read_journal
from stages.sampling import routes
from stages.train.saved_groups import read_file
from tests.hostile_engine import LIES, MARK, NOISE, Liar, SpoiltEngine, serving
from tests.other_programs import free_port
from tests.sglang_server import needs_sglang
from tests.stages.stage_rig import until

QUICK_LOOKS = [
    "--rollout-health-check-interval", "0.3", "--rollout-health-check-timeout", "1.5", "--max-restarts", "20",
]  # fmt: skip


def fleet(run_dir: Path) -> dict[str, ServerInfo]:
    return read_fleet(RunDir(run_dir))


def started_again(run_dir: Path, name: str, incarnation: int) -> Callable[[], bool]:
    return lambda: fleet(run_dir)[name].incarnation >= incarnation


@pytest.mark.slow
@pytest.mark.parametrize(
    "backends", [pytest.param([], id="embedded", marks=pytest.mark.full), pytest.param(SIMULATED, id="simulated")]
)
def test_engines_that_die_and_hang_are_started_again(tmp_path: Path, backends: list[str]) -> None:
    """Every request brings the run's token, also to the engines that are started again, and nobody shows it."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, *made_model(), *QUICK_LOOKS, *backends, "--num-rollout", "2000", "--scale", "engine=2"]
    process = start(run_dir, *flags, "--use-tensorboard", "--no-preload")  # so that /proc shows whole command lines
    wait_for_steps(process, run_dir, 2)
    check_token(run_dir, process.pid, engine_0="/server_info", engine_1="/model_info")
    [hung] = pids(run_dir, "engine-1")
    kill(run_dir, "engine-0", signal.SIGKILL)
    kill(run_dir, "engine-1", signal.SIGSTOP)  # for a while there is no engine at all
    for name in ("engine-0", "engine-1"):
        wait_until(process, started_again(run_dir, name, 1), f"{name} serves again")
    assert not alive(hung), "what hung is ended before its successor is announced"
    wait_for_steps(process, run_dir, steps_done(run_dir) + 2)
    token = check_token(run_dir, process.pid, engine_0="/server_info", engine_1="/model_info")
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    assert not Path(token.path).exists()
    assert token.token.text not in done.out + done.err
    assert files_with(run_dir, token.token.text) == []
    summary = done.summary
    assert summary["engine"]["restarts"] == 2
    assert summary["engine"]["count"] == 2
    assert {name: summary["restarts"][name] for name in ("engine-0", "engine-1")} == {"engine-0": 1, "engine-1": 1}
    assert summary["groups"]["failed"] == 0
    assert "engine-0 ended with signal SIGKILL" in done.out
    assert "engine-1 ended with 3 failed health checks in a row (/health gave no answer within 1.5 s)" in done.out
    nothing_left(run_dir)


@pytest.mark.full
def test_a_router_that_dies_and_hangs_is_started_again(tmp_path: Path) -> None:
    """The real sglang-router before simulated engines."""
    python, run_dir = needs_sglang(), tmp_path / "run"
    router = ["--sglang-python", str(python), "--router", "sglang", "--scale", "engine=2"]
    process = start(run_dir, *SMALL, *made_model(), *QUICK_LOOKS, *SIMULATED, *router, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 2)
    assert fleet(run_dir)["router"].kind == "sglang"
    for incarnation, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        kill(run_dir, "router", number)
        wait_until(process, started_again(run_dir, "router", incarnation), "the router serves again")
        wait_for_more_steps(process, run_dir)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    assert done.summary["router"]["kind"] == "sglang"
    assert done.summary["router"]["version"].count(".") == 2
    assert done.summary["restarts"]["router"] == 2
    assert done.summary["groups"]["failed"] == 0
    assert (run_dir / "logs" / "router.log").exists()
    nothing_left(run_dir)


def wait_for_more_steps(process: subprocess.Popen[str], run_dir: Path) -> None:
    wait_for_steps(process, run_dir, steps_done(run_dir) + 5)


@pytest.mark.slow
def test_a_killed_controller_takes_the_router_with_it(tmp_path: Path) -> None:
    python, run_dir = needs_sglang(), tmp_path / "run"
    router = ["--sglang-python", str(python), "--router", "sglang"]
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, *router, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 1)
    process.kill()
    process.communicate()
    nothing_left(run_dir)


# ------------------------------------------------------------------ engines of somebody else


class Outside:
    """An engine that does not belong to the run, always at the same address."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, model: str) -> None:
        ready = self.directory / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "models.engines.serve", "--model-path", model, "--port", str(self.port)]
        command += ["--ready-file", str(ready)]
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment())
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline, "the engine does not start"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def two_outside(tmp_path: Path) -> Iterator[list[Outside]]:
    engines = [Outside(tmp_path, f"outside-{i}") for i in range(2)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.kill)
            engine.start(made_model()[1])
        yield engines


@pytest.mark.full
def test_external_engines_are_used_left_and_taken_back(tmp_path: Path, two_outside: list[Outside]) -> None:
    run_dir, model = tmp_path / "run", made_model()
    addresses = [word for engine in two_outside for word in ("--rollout-external-engine-addrs", engine.url)]
    engines = ["--engine", "sglang", "--router", "none", *addresses]  # ours speak SGLang's protocol
    process = start(run_dir, *SMALL, *model, *QUICK_LOOKS, *engines, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 2)
    up: dict[str, Any] = fleet(run_dir)
    assert {up["engine-0"].url, up["engine-1"].url} == {engine.url for engine in two_outside}
    two_outside[1].kill()
    wait_for_more_steps(process, run_dir)
    time.sleep(2.5)  # longer than three looks: else it would come back before it was missed
    two_outside[1].start(model[1])
    wait_until(process, started_again(run_dir, "engine-1", 1), "the engine is taken back")
    wait_for_more_steps(process, run_dir)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir).check(130)
    engine = done.summary["engine"]
    assert (engine["kind"], engine["version"], engine["count"]) == ("embedded", "0.5.23+embedded", 2)
    assert engine["restarts"] == 0
    assert f"engine-1: {two_outside[1].url} is lost after 3 failed health checks in a row" in done.out
    assert f"engine-1: {two_outside[1].url} answers again" in done.out
    for engine in two_outside:
        assert engine.process.poll() is None, "engines of somebody else outlive the run"
    assert not list((run_dir / "replicas").glob("engine-*.pid"))
    nothing_left(run_dir)


# A run whose engine takes no weights: it ends with the reason, in bounded time, instead of standing still.


def test_an_engine_that_refuses_the_second_version_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineClient.update_weights_from_disk

    async def update(
        client: EngineClient, path: str, label: str | None, flush_cache: bool = True, **claim: Any
    ) -> WeightsUpdated:
        if label == "0.0":
            return await original(client, path, label, flush_cache, **claim)
        raise EngineRefused(client.base_url, 400, "no room for them")

    monkeypatch.setattr(EngineClient, "update_weights_from_disk", update)
    monkeypatch.setattr("stages.engines.engine_control.RETRY_S", 0.01)
    limits = ["--deadline-s", "60", "--update-weight-max-failures", "3"]  # the first, should it stand still after all
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *limits)
    assert done.code == 1
    assert "engine-0: 3 failures in a row: the update to version" in done.err
    assert "no room for them" in done.err


# One engine that works beside one that lies in every way: the run finishes, and nothing of the lies is trained.


REQUEST_S = 1.5  # an answer that drips or never comes costs this
# What each kind of answer is refused with, in the log and as the reason of what it fails.
REASONS = {
    "longer": "new tokens, and 6 were allowed",
    "fewer log-probs": "are of other tokens than its output_ids",
    "nan": "has the log-prob None; it must be finite and at most 0",
    "no log-prob": "has the log-prob None; it must be finite and at most 0",
    "impossible log-prob": "has the log-prob 2.0; it must be finite and at most 0",
    "beyond the vocabulary": "holds token 1048576, outside the vocabulary",
    "negative": "holds token -3",
    "beyond 32 bits": "holds token 4294967301",
    "future": "are newer than any that were published",
    "another run": "are of another run",
    "no version": "is not of the form generation.version",
    "gap": "the spans of versions end at token 2 of 3",
    "nested": "maximum recursion depth exceeded",
    "endless": "without an end of line",
    "endless events": "and no end",
    "silent": "gave no answer within",
}
# Of requests that are lost or refused, not of answers; "past" is told as one of two, by how many versions there are.
OTHERS = ("broke the protocol", "cannot be reached", "refused the call with 404", "are older than")


def reasons(run_dir: Path) -> Counter[str]:
    """Why groups failed: each of the reasons of their members."""
    ended = [event for event in read_journal(run_dir / "ledger.jsonl") if isinstance(event, Ended)]
    details = [event.detail for event in ended if event.outcome == "failed"]
    return Counter(re.sub(r"http://\S+|response '\S+'", "_", detail) for detail in details)


def check(run_dir: Path, trained: Path) -> None:
    """Batches were trained, and no token of them is a lie."""
    batches = sorted(trained.glob("*.bin"))
    assert len(batches) == len(audit(run_dir / "ledger.jsonl").batches) > 0
    for path in batches:
        samples = [sample for group in read_file(path) for sample in group.samples]
        assert sum(int(np.count_nonzero(s.loss_mask)) for s in samples) > 0
        assert not any((s.log_probs == np.float32(MARK)).any() for s in samples), path


def flags(trained: Path, *engines: SpoiltEngine) -> list[str]:
    return [
        "--engine", "sglang", "--router", "none", "--router-policy", "round_robin",
        "--rollout-external-engine-addrs", *(engine.url for engine in engines),
        "--request-timeout-secs", str(REQUEST_S), "--max-filter-rounds", "100000", "--update-weight-rolling", "2",
        "--save-debug-rollout-data", str(trained / "{rollout_id}.bin"),
    ]  # fmt: skip


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("an answer of ")]


def unnamed(refused: Sequence[str]) -> set[str]:
    """The kinds of answers that no line gives a reason for."""
    return {kind for kind, words in REASONS.items() if not any(words in line for line in refused)}


@pytest.mark.slow
def test_nothing_of_a_hostile_engine_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stages.sampling.routes.LONGEST_AVOIDED_S", 0.0)  # every second request is its own
    simulated = SimulatedEngineConfig(vocab_size=32, length_mean=6.0, update_s=0.01)
    config, model = EngineConfig(engine="simulated", simulated=simulated), made_model()[1]
    trained, run_dir, ended = tmp_path / "trained", tmp_path / "run", list[Finished]()
    with serving(SpoiltEngine(config, model, {})) as good, serving(Liar(config, model, seed=3)) as liar:

        async def every_kind_has_its_turn(run: Scripted) -> None:
            await until(lambda: set(liar.told) == {*LIES, *NOISE})
            await run.steps(1)  # something is trained beside them
            while unnamed(refusals(caplog)):  # a slow machine may have met the time limit before it read an answer
                await run.steps(1)

        def begin(run_dir: Path) -> int:
            many = ["--num-rollout", "5000", "--rollout-batch-size", "32"]
            # Groups of one: a request that is never answered ends with its group where another member has failed.
            many += ["--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce_plus_plus"]
            ended.append(here(run_dir, *SMALL, *made_model(), *SIMULATED_TRAINER, *flags(trained, good, liar), *many))
            return ended[0].code

        scripted(monkeypatch, run_dir, every_kind_has_its_turn, begin)
    [done] = ended
    assert unnamed(refusals(caplog)) == set(), "the run ended before each kind was refused"
    done.check_books()
    check(run_dir, trained)
    assert done.summary["groups"]["trained"] == 32 * len(list(trained.glob("*.bin")))
    refused = refusals(caplog)
    assert [line for line in refused if "engine-1" not in line and "gave no answer" not in line] == []
    strange = [why for why in reasons(run_dir) if not any(words in why for words in (*REASONS.values(), *OTHERS))]
    assert strange == [], "nobody else failed"


def main() -> None:
    """The embedded engine beside a liar, with rewards by chance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("seconds", type=float)
    requested = parser.parse_args()
    routes.LONGEST_AVOIDED_S = 1.0  # type: ignore[misc]  # else it would be asked once in half a minute
    model, trained = made_model()[1], requested.run_dir.with_name(f"{requested.run_dir.name}-trained")
    with serving(SpoiltEngine(EngineConfig(), model, {})) as good, serving(Liar(EngineConfig(), model, seed=3)) as liar:
        run = [*SMALL, *made_model(), "--num-rollout", "100000", "--deadline-s", str(requested.seconds)]
        code = program.main(
            ["--run-dir", str(requested.run_dir), *run, *flags(trained, good, liar), "--runner", "inprocess"]
        )
    Finished(code, "", "", requested.run_dir).check_books()
    check(requested.run_dir, trained)
    sys.stdout.write(f"exit code {code}, told {dict(liar.told)}\n")
    for detail, count in reasons(requested.run_dir).most_common():
        sys.stdout.write(f"{count:6} {detail}\n")


if __name__ == "__main__":
    main()
