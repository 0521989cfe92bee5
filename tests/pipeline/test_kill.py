"""Replicas killed in mid-run: the run finishes, the books balance, nothing is trained twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from launching import NO_DATA, SIMULATED, SMALL, alive, finish, launch, made_model, start
from scripted_run import Scripted, scripted

import launch as program
from configs.schema.run import read_fault
from models.checkpoint import manifests
from models.fault_injection import FaultPlan, InjectedError, injected
from pipeline.facts.trace import Span, read_records
from pipeline.hosts.machine import living
from pipeline.hosts.worker import FaultyInlet
from pipeline.record.journal import Admitted, Ended, RolledBack, Stepped, audit, read_journal
from stages.messages import PromptGroup
from stages.prompts.ledger import LedgerSnapshot
from stages.records.growing_records import RESPONSES, GrowingRecords, Key, Piece
from stages.records.once import EPISODES_DIR, groups_in
from stages.records.unfinished import RESPONSE_KIND
from stages.sampling.requests import SampleResult
from stages.train.saved_groups import load_batch
from tests.chaos.oracle import Expected, judge
from tests.stages.stage_rig import Held, make_config, make_group, make_sample, make_slice

TOOLS = [
    *NO_DATA, "--prompt-data", "arithmetic-tools", "--tools", "calculator", "--tool-call-open", "[",
    "--tool-call-close", "]", "--tool-result-template", "{result}", "--max-turns", "3",
    "--rollout-max-response-len", "24",
]  # fmt: skip


def steps_done(run_dir: Path) -> int:
    journal = run_dir / "ledger.jsonl"
    return sum(isinstance(e, Stepped) for e in read_journal(journal)) if journal.exists() else 0


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, steps: int, timeout_s: float = 120) -> None:
    wait_until(process, lambda: steps_done(run_dir) >= steps, f"{steps} steps", timeout_s, 0.02)


def wait_until(
    process: subprocess.Popen[str] | None, met: Callable[[], bool], what: str, timeout_s: float = 90,
    poll_s: float = 0.05,
) -> None:  # fmt: skip
    """Fails when it takes too long, or when the process, if one is given, ends before."""
    deadline = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        assert process is None or process.poll() is None, f"the run ended before: {what}"
        time.sleep(poll_s)


def kill(run_dir: Path, replica: str, number: int = signal.SIGKILL) -> None:
    os.kill(*pids(run_dir, replica), number)


def pids(run_dir: Path, *names: str) -> list[int]:
    return [int((run_dir / "replicas" / f"{name}.pid").read_text()) for name in names]


@pytest.mark.slow
def test_without_the_process_that_others_are_copied_from_they_are_started_by_their_command_lines(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--num-rollout", "2000")
    wait_for_steps(process, run_dir, 2)
    place = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started = {int(path.read_text()) for path in (run_dir / "replicas").glob("*.pid")}
    [server] = {int(number) for number in place.read_text().split()} - started
    [copy] = pids(run_dir, "generate-0")
    assert Path(f"/proc/{copy}/comm").read_text() == "generate-0\n"
    os.kill(server, signal.SIGKILL)
    kill_and_await(process, run_dir, "generate-0")
    [restarted] = pids(run_dir, "generate-0")
    assert Path(f"/proc/{restarted}/comm").read_text() != "generate-0\n"
    wait_for_steps(process, run_dir, steps_done(run_dir) + 3)
    process.send_signal(signal.SIGINT)
    finish(process, run_dir).check(130)


def kill_and_await(process: subprocess.Popen[str], run_dir: Path, name: str) -> None:
    """Kill a process of a run and wait for its successor."""
    file = run_dir / "replicas" / f"{name}.pid"
    old = file.read_text()
    kill(run_dir, name)
    wait_until(process, lambda: file.exists() and file.read_text() not in ("", old), f"{name} is started anew")


@contextlib.contextmanager
def killed_after(run_dir: Path, steps: int, replica: str) -> Iterator[None]:
    """A replica of a run in this process is killed as soon as there are so many steps."""

    def wait() -> None:
        deadline = time.monotonic() + 180
        while steps_done(run_dir) < steps and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(run_dir, replica)

    killer = threading.Thread(target=wait)
    killer.start()
    try:
        yield
    finally:
        killer.join()


def nothing_left(run_dir: Path, patience_s: float = 10) -> None:
    """Every process of the run has ended, with all that it started."""
    started = {file.stem: int(file.read_text()) for file in (run_dir / "replicas").glob("*.pid")}
    deadline = time.monotonic() + patience_s  # who dies with the controller needs a moment
    while time.monotonic() < deadline and any(alive(pid) or living(pid) for pid in started.values()):
        time.sleep(0.05)
    assert [name for name, pid in started.items() if alive(pid) or living(pid)] == []


@pytest.mark.full
def test_killed_replicas_lose_nothing(tmp_path: Path) -> None:
    """With tools and models that compute; tests/chaos kills the other stages."""
    rng = random.Random(1)
    flags = [*TOOLS, *made_model(), "--num-rollout", "28", "--seed", "1", "--scale", "generate=2",
             "--scale", "reward=2", "--scale", "engine=2", "--max-restarts", "20"]  # fmt: skip
    process = start(tmp_path / "run", *flags)
    victims = ["generate-0", "reward-0", "agents-0", "generate-1", "group-0", "reward-1", "engine-0"]
    rng.shuffle(victims)
    for i, victim in enumerate(victims):
        wait_for_steps(process, tmp_path / "run", 2 + 3 * i)
        kill(tmp_path / "run", victim)
    done = finish(process, tmp_path / "run").check()
    assert done.summary["groups"]["trained"] == 28 * 4
    assert sum(done.summary["restarts"].values()) >= len(victims) - 1
    assert len(done.audit.trained) == 28 * 4


@pytest.mark.slow
def test_a_killed_chain_is_taken_apart_and_joined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(run: Scripted) -> None:
        await run.until((run.run_dir / "ledger.jsonl").exists)
        await run.steps(2)
        assert not {"reward-0", "group-0"} & set(run.runner.alive())
        run.kill("generate-0", signal.SIGKILL)
        await run.until(lambda: {"generate-0", "reward-0", "group-0"} <= set(run.runner.alive()))
        await run.steps(4)
        run.kill("reward-0", signal.SIGKILL)
        await run.steps(4)
        run.runner.scale("reward", 1)
        await run.until(lambda: run.generating() == ["generate-1"] and "group-0" not in run.runner.alive())
        await run.steps(4)

    # On a busy machine a group may wait for a new process for seconds: none may grow too old for it.
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000", "--max-staleness", "12"]
    flags += ["--simulated-step-s", "0.5"]
    run = scripted(monkeypatch, tmp_path / "run", script, lambda place: program.main(["--run-dir", str(place), *flags]))
    assert run.controller.recorder.restarts == {"generate-0": 1, "reward-0": 1}
    assert run.controller.recorder.dead_letters == []
    said = (tmp_path / "run" / "run.log").read_text()
    assert said.count("generate, reward, group shared a process that was lost, they get one each from now on") == 1
    books = audit(tmp_path / "run" / "ledger.jsonl")
    assert books.outcomes.keys() <= {"trained", "discarded"}, books
    assert books.staleness_max <= 12, "the bound"


@pytest.mark.slow
def test_engines_outlive_their_stage_and_a_stopped_replica_does_not_fail_a_run_that_is_complete(tmp_path: Path) -> None:
    """Killed again and again, also in the middle of updates: engines keep their processes, nothing is lost."""
    run_dir, engines, kills = tmp_path / "run", ("engine-0", "engine-1"), 4
    flags = [*SMALL, *made_model(), *SIMULATED, "--scale", "engine=2", "--scale", "generate=2", "--num-rollout", "9"]
    flags += ["--simulated-step-s", "2", "--max-restarts", "20", "--drain-s", "6", "--max-staleness", "4"]
    # The trainer has to be at its end within --drain-s: on a busy machine that took it more than 3 s.
    process = start(run_dir, *flags)
    wait_for_steps(process, run_dir, 2)
    before = pids(run_dir, *engines)
    for i in range(kills):
        kill_and_await(process, run_dir, "engines-0")
        wait_for_steps(process, run_dir, 3 + i)  # gate and engines move on
    assert pids(run_dir, *engines) == before
    wait_for_steps(process, run_dir, 8)  # two seconds before the last one ends, and the replica with it
    [stopped] = pids(run_dir, "generate-1")
    os.kill(stopped, signal.SIGSTOP)
    done = finish(process, run_dir).check()
    assert (done.summary["groups"]["trained"], done.summary["groups"]["failed"]) == (36, 0)
    assert done.summary["restarts"] == {"engines-0": kills}
    assert "keeps its weights 0." in (run_dir / "logs" / "engines-0.log").read_text()
    assert "generate-1 did not end within --drain-s 6" in done.out, done.err
    assert not alive(stopped)


# Engines are faster than this trainer: complete groups wait for it, also when a checkpoint is written.
SLOW_TRAINER = [*SIMULATED, "--simulated-step-s", "0.4", "--async-buffer-size", "3"]


def check_restored(run_dir: Path) -> RolledBack:
    """Groups that the resumed trainer found in its checkpoint were not admitted or generated again, but trained."""
    events = list(read_journal(run_dir / "ledger.jsonl"))
    (at,) = [i for i, event in enumerate(events) if isinstance(event, RolledBack)]
    resumed = events[at]
    assert isinstance(resumed, RolledBack)
    restored = set(resumed.restored)
    assert restored
    assert restored <= set(resumed.reopened)
    assert not restored & {e.group for e in events[at:] if isinstance(e, Admitted)}
    trained = {e.group for e in events[at:] if isinstance(e, Ended) and e.outcome == "trained"}
    assert restored & trained
    spans = [r for r in read_records(run_dir / "trace") if isinstance(r, Span) and r.name == "generate"]
    generated = {span.group_id for span in spans}
    assert not restored & generated, "generation requests for restored groups"
    assert trained - restored <= generated
    return resumed


def forget_trace(run_dir: Path) -> None:
    """What is traced from now on is of the resumed run."""
    (run_dir / "trace").rename(run_dir / "trace-before")


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_groups_that_waited_for_its_trainer(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SLOW_TRAINER, "--num-rollout", "9", "--save-interval", "2")
    wait_for_steps(process, run_dir, 5)
    process.kill()
    process.wait()
    saved = int(max((run_dir / "checkpoints").glob("step-*")).name.removeprefix("step-"))
    forget_trace(run_dir)
    done = finish(start(None, "--resume", str(run_dir)), run_dir).check()
    assert check_restored(run_dir).step == saved > 0
    assert sorted(done.audit.batches) == list(range(1, 10))
    assert len(done.audit.trained) == 9 * 4


@pytest.mark.slow
def test_ctrl_c_drains_and_can_be_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SLOW_TRAINER, "--num-rollout", "500")
    wait_for_steps(process, run_dir, 3)
    process.send_signal(signal.SIGINT)
    done = finish(process, run_dir, 60).check(130)
    assert done.summary["exit_reason"] == "interrupted"
    steps = done.summary["steps"]
    forget_trace(run_dir)
    process = start(None, "--resume", str(run_dir), "--num-rollout", str(steps + 3))
    again = finish(process, run_dir).check()
    assert again.summary["steps"] == steps + 3
    assert check_restored(run_dir).step == steps


# A run with faults on purpose in generation, grading and training: it ends, and its books balance.


FAULTS = ("generate:0.05:kill", "reward:0.05:error", "train:0.05:kill")
SEED = "8237"  # with it, groups 1 to 4 meet all of them in the first life of the run, and hardly any one in the second


@pytest.mark.full
def test_faults_in_three_stages_lose_nothing(tmp_path: Path) -> None:
    flags = [flag for fault in FAULTS for flag in ("--fault-inject", fault)]
    first = [*SMALL, *SIMULATED, *made_model(), "--save-interval", "1", "--max-restarts", "20", "--seed", SEED, *flags]
    run_dir, resumes = tmp_path / "run", 0
    done = launch(run_dir, *first)
    while done.code == 6 and "train-0 ended with signal SIGKILL" in done.err and resumes < 5:
        done, resumes = finish(start(None, "--resume", str(run_dir)), run_dir), resumes + 1
    done.check()
    lines = [json.loads(line) for line in (run_dir / "faults.jsonl").read_text().splitlines()]
    met = {(line["stage"], line["kind"]) for line in lines}
    assert met == {("generate", "kill"), ("reward", "error"), ("train", "kill")}
    assert sum(line["stage"] == "train" for line in lines) >= max(1, resumes)
    assert sum(done.summary["faults_injected"].values()) == len(lines)
    assert "faults on purpose  generate kill" in done.out


# A controller that is killed in the middle of long responses: what they had is trained, with its versions.


STEPS, GROUPS, BOUND, EVERY = 5, 4, 2, 16


def pieces(run_dir: Path, group: PromptGroup) -> dict[Key, list[Piece[SampleResult]]]:
    """What a first life has left of a group, by response."""
    records = GrowingRecords(run_dir / EPISODES_DIR, RESPONSE_KIND, make_config(), (0, 0))
    found: dict[Key, list[Piece[SampleResult]]] = {}
    for _, kept in records.pieces(group, this_life=False):
        for piece in kept:
            found.setdefault(piece.key, []).append(piece)
    return found


def left(run_dir: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Tokens and versions by group and rollout."""
    found = {}
    for name in groups_in(run_dir / EPISODES_DIR):
        for turn, kept in pieces(run_dir, make_group(int(name))).items():
            ids = [token for piece in kept for token in piece.body.token_ids]
            versions = [run.version for run in kept[-1].body.runs for _ in range(run.n_tokens)]
            assert len(ids) == len(versions)
            found[int(name), turn[0]] = ids, versions
    return found


def still(run_dir: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """The same, once the controller's processes, which end with it, write no more."""
    now = None
    while now != (now := left(run_dir)):
        time.sleep(1.0)
    return now


@pytest.mark.full
def test_tokens_of_before_the_kill_are_trained_with_their_versions(tmp_path: Path) -> None:
    run_dir, batches = tmp_path / "run", str(tmp_path / "batch-{rollout_id}.msgpack")
    flags = [
        *SMALL, *made_model(), *SIMULATED, "--num-rollout", str(STEPS), "--save-interval", "1",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", "2", "--async-buffer-size", str(BOUND),
        "--rollout-max-response-len", "200", "--rollout-max-context-len", "256", "engine.simulated.length_mean=150",
        "engine.simulated.a_ms=25", "--response-journal-tokens", str(EVERY), "--save-debug-rollout-data", batches,
    ]  # fmt: skip
    process = start(run_dir, *flags)
    wait_until(process, lambda: steps_done(run_dir) >= 2 and len(left(run_dir)) >= GROUPS, "responses are written")
    process.kill()
    process.communicate()
    before = still(run_dir)
    assert all(len(ids) >= EVERY for ids, _ in before.values())
    finish(start(None, "--resume", str(run_dir)), run_dir).check()
    assert judge(run_dir, Expected(STEPS, GROUPS, BOUND)) == []
    saved = 0
    for number in range(STEPS):
        for slice_ in load_batch(batches, number):
            for sample in slice_.samples:
                if not sample.reused_tokens:
                    continue
                ids, versions = before[slice_.group.group_id, sample.index]
                start_, end = sample.prompt_length, sample.prompt_length + sample.reused_tokens
                assert sample.token_ids[start_:end].tolist() == ids[: sample.reused_tokens]
                assert sample.versions[start_:end].tolist() == versions[: sample.reused_tokens]
                saved += sample.reused_tokens
    assert saved >= GROUPS * EVERY
    kept = {int(path.parent.name) for path in (run_dir / EPISODES_DIR).glob(f"*/{RESPONSES}-0-*")}
    ledgers = [msgspec.json.decode(m.ledger, type=LedgerSnapshot) for m in manifests(run_dir / "checkpoints")]
    open_ = {group.group_id for ledger in ledgers for group in ledger.open}
    later = {group for group in kept if group >= min(ledger.next_group for ledger in ledgers)}
    assert kept <= open_ | later, "others have ended in each checkpoint"
    assert {group for group, _ in before} - kept


# Faults on purpose where messages come in.


class Fixed:
    """An inlet with these leases."""

    def __init__(self, *leases: Held) -> None:
        self._left = list(leases)

    async def receive(self) -> Held | None:
        return self._left.pop(0) if self._left else None


async def test_a_message_may_meet_a_fault_at_each_delivery(tmp_path: Path) -> None:
    plan = FaultPlan((read_fault("reward:0.5:error"),), 1, 0, "reward-0", str(tmp_path / "faults.jsonl"))
    message, met = make_slice(0, make_sample(0)), list[str]()
    for attempt in (1, 2):
        for key in map(str, range(20)):
            inlet = FaultyInlet(Fixed(held := Held(message, key, attempt)), plan)
            if plan.draw(key, attempt) is None:
                assert await inlet.receive() is held
            else:
                with pytest.raises(InjectedError):
                    await inlet.receive()
                assert held.ends == [], "it is the hub's, which gives it to another replica"
                met.append(key)
    assert 0 < len(met) < 40
    assert injected(tmp_path) == {"reward error": len(met)}
    assert await FaultyInlet(Fixed(), plan).receive() is None


@pytest.mark.full
@pytest.mark.parametrize(("victim", "stop_s"), [("controller", 40.0), ("train-0", 90.0), ("everything", 45.0)])
def test_a_run_that_stands_still_goes_on(tmp_path: Path, victim: str, stop_s: float) -> None:
    """As under Ctrl-Z, `docker pause`, or on a machine that sleeps."""
    run_dir = tmp_path / "run"
    process = start(run_dir, *SMALL, *made_model(), *SIMULATED, "--num-rollout", "60")
    wait_for_steps(process, run_dir, 3)
    named = {path.stem: int(path.read_text()) for path in (run_dir / "replicas").glob("*.pid")}
    pids = [process.pid, *named.values()] if victim == "everything" else [named.get(victim, process.pid)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(stop_s if number == signal.SIGSTOP else 0.0)
    done = finish(process, run_dir).check()
    assert judge(run_dir, Expected(60, 4, 2)) == []
    assert done.summary["restarts"] == {}
