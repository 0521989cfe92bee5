"""Whole runs that change while they run: replicas come and go by command and by `--autoscale`, sampling is set.

No group is lost; replicas do not change what a synchronous run trains; each token is trained at its own temperature. A
run that scales itself becomes as fast as the simulation says.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from launching import SIMULATED, SMALL, finish, made_model, running, succeed, succeed_here
from launching import here as run_here
from scripted_run import Scripted, done, scripted, until

from configs.load import load
from configs.plan.goodput import Workload, attainable, lognormal_lengths
from pipeline.control.client import NotRunning, ask
from pipeline.control.endpoint import Command, Drain, Pause, Reply, Resume, Save, Scale, Set, Status
from pipeline.errors import UsageError
from pipeline.facts.run_directory import read_fleet
from pipeline.facts.stats import QUEUED, Changed
from pipeline.facts.trace import Span, read_records
from pipeline.record.journal import Committed, audit, read_journal
from pipeline.record.metrics import read_metrics
from pipeline.supervise.servers import Servers
from stages.topic_values import LEAVE, addresses, carrying
from stages.train.saved_groups import load_batch
from tests.chaos.oracle import Expected, judge
from tests.other_programs import free_port
from tests.pipeline.observe.test_prometheus import checked

pytestmark = pytest.mark.slow

# What the simulated engine writes behind a partial output is another text than it would have written in one piece; so
# here an aborted response is begun anew. tests/stages/test_engine_control.py has one that goes on elsewhere.
SYNC = [
    *SMALL, *made_model(), *SIMULATED, "--mode", "sync", "--deterministic",
    "--rollout-max-response-len", "48", "engine.simulated.length_mean=30", "--simulated-step-s", "0.01",
    "--no-partial-rollout", "--dynamic-sampling-filter", "length:20_48",
]  # fmt: skip
# A batch takes a quarter of a second, so that all this is under load.
LOADED = [*SYNC, "engine.simulated.a_ms=6", "--num-rollout", "4000"]
FIRST = {"engine": "2", "reward": "4", "group": "2", "generate": "2"}


def passed_on(run_dir: Path) -> set[str]:
    """Replicas of the group stage that have put a group together."""
    records = read_records(run_dir / "trace")
    return {record.replica for record in records if isinstance(record, Span) and record.name == "group"}


def joined(run_dir: Path, replica: str) -> bool:
    return not (run_dir / "replicas" / f"{replica}.pid").exists()


def committed(run_dir: Path) -> bool:
    return any(isinstance(event, Committed) for event in read_journal(run_dir / "ledger.jsonl"))


def test_scaled_up_and_down_under_load_the_same_is_trained(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, *LOADED) as process:
        until(process, run_dir, lambda status: status.snapshot.step >= 2)
        done(run_dir, Scale({"reward": 4, "group": 2, "generate": 2, "engine": 2}))
        wide = until(process, run_dir, lambda s: [e.state for e in s.engines] == ["serving"] * 2)
        assert all(engine.version is not None for engine in wide.engines)
        rows = {"reward": 4, "group": 2, "generate": 2}
        until(process, run_dir, lambda s: all(r.replicas == rows.get(r.stage, 1) for r in s.snapshot.stages))
        until(process, run_dir, lambda s: s.engines[1].running > 0)
        until(process, run_dir, lambda _: "group-1" in passed_on(run_dir))
        done(run_dir, Scale({"engine": 1, "reward": 2, "group": 1, "generate": 1}))
        until(process, run_dir, lambda s: [engine.name for engine in s.engines] == ["engine-0"])
        done(run_dir, Save())
        until(process, run_dir, lambda s: {r.stage: r.replicas for r in s.snapshot.stages}["group"] == 1)
        done(run_dir, Scale({"engine": 2}))
        until(process, run_dir, lambda s: [engine.name for engine in s.engines] == ["engine-0", "engine-2"])
        done(run_dir, Scale({"reward": 1}))  # all three stages are in one process again
        until(process, run_dir, lambda _: any(joined(run_dir, name) for name in passed_on(run_dir) - {"group-0"}))
        until(process, run_dir, lambda _: committed(run_dir))  # as was asked: nothing else saves before the end
        done(run_dir, Drain())  # however quick or slow the machine is, all of this was within the run
    ended = finish(process, run_dir).check(130)
    steps = max(ended.audit.batches)
    assert judge(run_dir, Expected(steps=steps, groups_per_step=4, bound=0)) == []
    fast = [*SYNC, "engine.simulated.a_ms=0", "--num-rollout", str(steps)]
    assert ended.audit.batches == succeed_here(tmp_path / "alone", *fast).audit.batches, (
        "who generates, grades and filters changes nothing of a synchronous run"
    )
    assert ended.summary["restarts"] == {}
    assert ended.summary["groups"]["filtered"] > 0
    changes = [(change["what"], change["value"]) for change in ended.summary["changes"]]
    assert changes[:4] == [(f"scale {stage}", n) for stage, n in FIRST.items()]
    with pytest.raises(NotRunning, match="is not running"):
        ask(run_dir, Status())


async def figures_are_served(run: Scripted, port: int) -> None:
    await run.steps(2)
    looks = []
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                looks.append(checked(await answer.text()))
            await run.steps(2)
    first, last = looks
    assert last['sluice_engine_up{engine="engine-0"}'] == 1
    assert last["sluice_step"] > first["sluice_step"] > 0
    assert last['sluice_metric{name="train/optimizer_steps"}'] > 0, "under the names of metrics.jsonl"
    assert last['sglang:generation_tokens_total{engine="engine-0"}'] >= last["sluice_trained_tokens_total"] > 0


async def engines_come_and_go(run: Scripted, seen: list[bool]) -> None:
    """An engine ends when it has given back what it held."""
    control, topic = control_of(run), run.runner.topic
    assert (await control(Scale({"engine": 2}))).ok
    await run.until(lambda: len(carrying(topic)) == 2)
    await run.steps(2)
    assert (await control(Scale({"engine": 1}))).ok
    await run.until(lambda: list(addresses(topic)) == ["engine-0"])
    assert seen[-1], "it was not waited for, or not told to leave"
    await run.until(lambda: not topic.items(LEAVE))
    await run.steps(2)
    status = (await control(Status())).status
    assert [engine.name for engine in status.engines] == ["engine-0"], "it is gone, and not lost"
    assert read_fleet(run.controller.rundir).keys() == {"engine-0"}


async def replicas_come_and_go(run: Scripted) -> None:
    topic, several = run.runner.topic, ["generate-1", "generate-2", "generate-3"]
    run.runner.scale("generate", 3)  # what was one task with reward and group
    assert run.runner.replicas("generate") == several
    assert topic.get("scale/generate") == b"3"
    await run.until(lambda: run.generating() == several and all(run.answered(name) > 0 for name in several))
    run.runner.scale("generate", 1)
    await run.until(lambda: run.generating() == ["generate-4"])
    assert [run.runner.replicas(stage) for stage in ("reward", "group")] == [["reward-2"], ["group-2"]]
    assert topic.get("scale/generate") == b"1"
    assert not [key for key in topic.items("") if key.endswith(tuple(several))]
    await run.steps(2)
    for stage, count in (("generate", 0), ("train", 2), ("nothing", 1)):
        with pytest.raises(UsageError, match=f"{stage} cannot be scaled"):
            run.runner.scale(stage, count)


async def pauses_and_is_set(run: Scripted) -> None:
    control, stage = control_of(run), run.controller.stage
    assert (await control(Scale({"generate": 2}))).ok
    assert not (await control(Scale({"train": 2, "generate": 3}))).ok
    assert len(run.runner.replicas("generate")) == 2, "of what is refused nothing is done"
    assert (await control(Pause())).ok
    counts, batch = stage.ledger.counts, run.controller.config.rollout.rollout_batch_size
    before = sum(counts.values()) - counts["trained"]
    # None is left, but beside each that was too old from now on, as on a busy machine: its batch stays incomplete.
    await run.until(lambda: stage.ledger.open == (before + counts["trained"] - sum(counts.values())) % batch)
    admitted = stage.ledger.admitted
    status = (await control(Status())).status
    assert status.state == "paused"
    await asyncio.sleep(0.3)
    assert stage.ledger.admitted == admitted
    assert (await control(Resume())).ok
    assert not (await control(Set({"max_staleness": "3", "n_samples_per_prompt": "8"}))).ok
    assert stage.gate.max_staleness == 2, "of what is refused nothing is done"
    reply = await control(Set({"max_staleness": "3", "lr": "5e-5"}))
    assert reply.ok, reply.lines
    await run.steps(5)
    assert stage.gate.max_staleness == 3


def test_a_run_is_scaled_paused_and_set_and_a_resumed_one_begins_with_that(tmp_path: Path) -> None:
    seen, has_left, port = list[bool](), Servers._has_left, free_port()
    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000", "--prometheus-port", str(port)]

    def noted(servers: Servers, name: str) -> bool:
        seen.append(has_left(servers, name))
        return seen[-1]

    async def first(run: Scripted) -> None:
        await begun(run)
        await figures_are_served(run, port)
        await engines_come_and_go(run, seen)
        await replicas_come_and_go(run)
        await pauses_and_is_set(run)
        assert run.controller.recorder.restarts == {}

    async def second(run: Scripted) -> None:
        await run.until(lambda: len(run.generating()) == 2)
        assert run.controller.stage.gate.max_staleness == 3
        assert run.controller.config.train.lr == 5e-5
        await begun(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Servers, "_has_left", noted)
        scripted(patch, tmp_path / "run", first, lambda run_dir: run_here(run_dir, *flags).code)
    with pytest.MonkeyPatch.context() as patch:
        again = scripted(
            patch, tmp_path / "run", second, lambda run_dir: run_here(run_dir, "--resume", str(run_dir)).code
        )
    kept = [(change.what, change.value) for change in again.controller.recorder.changes]
    named = ["scale engine", "scale engine", "scale generate", "pause", "resume", "set lr", "set max_staleness"]
    assert [what for what, _ in kept] == named
    assert kept == [
        (e.what, e.value) for e in read_journal(tmp_path / "run" / "ledger.jsonl") if isinstance(e, Changed)
    ]


async def begun(run: Scripted) -> None:
    """Wait until the trainer has its weights."""
    await run.until(lambda: run.controller.recorder.training_started is not None)


def control_of(run: Scripted) -> Callable[[Command], asyncio.Future[Reply]]:
    """The run's endpoint, asked through its socket from another thread."""
    loop = asyncio.get_running_loop()
    return lambda command: loop.run_in_executor(None, ask, run.run_dir, command)


FLAGS = [
    *SMALL, *made_model(), *SIMULATED, "--rm-type", "sleep:0.06", "--num-rollout", "4000", "--autoscale", "reward=1..2",
    "--autoscale-window-s", "1", "--simulated-step-s", "0.01", "--log-interval", "100",
]  # fmt: skip


@pytest.mark.full
def test_the_slow_stage_is_scaled_and_the_user_outranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, *FLAGS) as process:
        until(process, run_dir, lambda status: status.replicas.get("reward") == 2)
        refused = ask(run_dir, Scale({"reward": 3}))
        assert not refused.ok
        assert "--autoscale reward=1..2 does not hold the 3 replicas" in refused.lines[0]
        assert done(run_dir, Scale({"reward": 1})).lines == ("reward: 2 -> 1",)
        by_hand = until(process, run_dir, lambda _: True).snapshot.step
        later = until(process, run_dir, lambda s: s.snapshot.step >= by_hand + 8 and s.advice is not None)
        assert later.replicas["reward"] == 1, "it is the user's own"
        assert later.advice.kind not in ("up", "down"), "there is nothing left to scale"
        assert later.snapshot.advice == later.advice.sentence
        done(run_dir, Drain())
    ended = finish(process, run_dir).check(130)
    assert ended.summary["restarts"] == {}
    assert ended.summary["groups"]["failed"] == 0
    changes = [(change["what"], change["value"]) for change in ended.summary["changes"]]
    assert changes == [("autoscale reward", "2"), ("scale reward", "1"), ("drain", "")]
    messages = next(line for line in ended.out.splitlines() if line.startswith("autoscale: "))
    assert "reward 1 -> 2" in messages
    assert ended.summary["advice"]


def graded(run_dir: Path, replica: str, since_s: float) -> int:
    """Slices that a replica has begun to grade later."""
    spans = [record for record in read_records(run_dir / "trace") if isinstance(record, Span)]
    return sum(span.replica == replica and span.name == "RewardStage" and span.start_s > since_s for span in spans)


def test_what_waits_in_a_chain_for_the_slow_stage_is_shared_by_its_new_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at: list[float] = []
    queued: list[float] = []

    async def script(run: Scripted) -> None:
        async def apart(chain: str) -> None:
            """Give reward a second replica where many groups wait for the first."""
            await run.until(lambda: run.generating() == [chain])
            await run.until(lambda: run.controller.recorder.view.extra("reward", QUEUED) >= 9)
            queued.append(run.controller.recorder.view.extra("reward", QUEUED))
            at.append(time.time())
            run.runner.scale("reward", 2)
            await run.until(lambda: chain not in run.runner.alive())

        await run.until((run.run_dir / "ledger.jsonl").exists)
        await apart("generate-0")
        run.runner.scale("reward", 1)  # the new chain takes over what waits at the hub of reward
        await apart("generate-2")
        await run.steps(1)

    flags = [*SMALL, *made_model(), *SIMULATED, "--num-rollout", "4000", "--async-buffer-size", "5"]
    flags += ["--n-samples-per-prompt", "2", "--rm-type", "sleep:0.3", "--max-staleness", "9"]
    place = tmp_path / "run"
    run = scripted(monkeypatch, place, script, lambda place: run_here(place, *flags).code)
    for chain, since_s, waiting in zip(("reward-0", "reward-3"), at, queued, strict=True):
        assert graded(place, chain, since_s) < waiting / 2, "it ends with what it works on"
    assert run.controller.recorder.restarts == {}
    assert run.controller.recorder.dead_letters == []
    assert audit(place / "ledger.jsonl").outcomes.keys() <= {"trained", "stale", "discarded"}


# Seconds and tokens of a job that is slow with one engine and one grader. An engine has 8 slots, a batch 8 groups of 4.
STEP_S, BATCHES, COUNTED = 1.2, 57, 12
GROUPS, MEMBERS, SLOTS, A_S, C_S, REWARD_S, CAP, AHEAD = 8, 4, 8, 0.01, 0.00025, 0.1, 256, 2


def planned_rate() -> float:
    """Rollouts per second that the simulation attains with six engines and graders enough."""
    full_s, growth = A_S + C_S * SLOTS, C_S * SLOTS / (A_S + C_S * SLOTS)
    lengths = lognormal_lengths(64.0, 0.5, CAP)
    batch_s = GROUPS * MEMBERS * sum(lengths) / len(lengths) / (6 * SLOTS) * full_s
    work = Workload(
        lengths=lengths, slots=6 * SLOTS, groups=GROUPS, members=MEMBERS, train_ratio=STEP_S / batch_s, growth=growth,
        wait=REWARD_S / full_s, streams=True,
    )  # fmt: skip
    return GROUPS * MEMBERS * attainable(work, AHEAD).goodput / batch_s


@pytest.mark.full
def test_a_run_that_scales_itself_becomes_as_fast_as_the_planners_split(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    simulated = {
        "a_ms": 1e3 * A_S, "c_ms": 1e3 * C_S, "prefill_ms_per_token": 0.01,
        "length_mean": 64, "length_sigma": 0.5, "length_cap": CAP, "update_s": 0.05,
        "vocab_size": 32,
    }  # fmt: skip
    flags = [
        "--mode", "async", "--async-buffer-size", str(AHEAD), *made_model(), "--prompt-data", "arithmetic",
        "--label-key", "label", "--engine", "simulated", "--engine-slots", str(SLOTS),
        "--scale", "engine=1", "reward=1", "--autoscale", "engine=1..6", "reward=1..8", "--autoscale-window-s", "5",
        "--train-backend", "simulated", "--simulated-step-s", str(STEP_S), "--rm-type", f"sleep:{REWARD_S}",
        "--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS),
        "--num-rollout", str(BATCHES), "--rollout-max-response-len", str(CAP),
        "--rollout-max-context-len", str(4 * CAP), "--seed", "1", "--rollout-seed", "1", "--samples-interval", "0",
        "--no-live", "--no-trace", "--no-use-tensorboard", "--no-use-plot", "--log-interval", "100",
        *(f"engine.simulated.{key}={value:g}" for key, value in simulated.items()),
    ]  # fmt: skip
    ended = succeed(run_dir, *flags)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "ledger/trained" in row]
    first, last = rows[-COUNTED - 1], rows[-1]
    groups = last["ledger/trained"] - first["ledger/trained"]
    rate = groups * MEMBERS / (last["wall_s"] - first["wall_s"])
    assert ended.summary["changes"], "one of each is too few"
    assert rate >= 0.8 * planned_rate()


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
        await begun(run)
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
