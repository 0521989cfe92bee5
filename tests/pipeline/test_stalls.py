"""Stalls are reported while they last, on the terminal and in summary.json, and end the run; no stream causes one.

The parts that hang are real: a stage, a tool and a reward service that give no answer, engines that take no weights or
answer no request. Streams hold everything that the gate admits, in messages and in bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from launching import NO_DATA, SIMULATED, SIMULATED_TRAINER, SMALL, Finished, here, made_model, succeed_here

from configs.graph import streams
from configs.schema import Config
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from models.import_path import import_path
from models.tiny import TinyRecipe, make_tiny_checkpoint
from pipeline.control.client import table
from pipeline.control.monitor import Waits
from pipeline.facts.run_log import loop_watched, named, run_log
from pipeline.facts.stats import StageStats
from pipeline.graph import STAGES, Graph, build, message_bytes, stream_spec
from pipeline.hosts.worker import ReplicaSpec, run_replica
from pipeline.record.health import MOST_KEPT, Stall, StallWatch
from pipeline.record.journal import Journal, RolledBack
from pipeline.supervise.lifecycle import DeadLetters
from stages.base import MapStage
from stages.group.stage import GroupStage
from stages.messages import RolloutSlice, Settled, WeightsAnnouncement
from stages.staleness_gate import StalenessGate
from stages.topic_values import EngineAddress, EngineEntry
from tests.hostile_engine import SpoiltEngine, never, serving
from tests.pipeline.control.test_commands import STATUS
from tests.stages.stage_rig import join, make_config, make_context, make_sample, make_slice, open_rig, running, take
from tests.transport.memory_link import MemoryNetwork, MemoryNode
from transport import DeadLetter, Held, StreamSpec

QUICK = ["--stall-notice-s", "0.4"]


def told(done: Finished) -> list[str]:
    return [line for line in done.out.splitlines() if line.startswith("nothing was trained for ")]


def failed(done: Finished, *words: str, code: int = 7) -> None:
    """It ended with an error that has these words, since nothing moved unless another exit code says why."""
    assert done.code == code
    for word in words:
        assert word in done.err, done.err


def stalls(done: Finished) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = done.summary["stalls"]
    return found


# ------------------------------------------------------------------ the clock


def test_a_stall_is_reported_again_and_again_and_kept_with_what_was_reported_last() -> None:
    watch = StallWatch(60, 1000, started_s=100.0)

    def look(now_s: float, done: int, moved: int = 0) -> str | None:
        return watch.look(now_s, done, moved, lambda quiet_s: f"b waits for a ({quiet_s:g})")

    assert look(100, 0) is None
    assert (look(159, 0), watch.waits) == (None, "")
    assert look(161, 0) == "nothing was trained for 61 s: b waits for a (61)"
    assert "waits      b waits for a (61)" in table(msgspec.structs.replace(STATUS, waits=watch.waits))
    assert look(162, 0) is None
    assert look(221, 0) == "nothing was trained for 121 s: b waits for a (121)"
    assert look(400, 0) == "nothing was trained for 300 s: b waits for a (300)", "once, however late"
    assert look(401, 0) is None
    assert look(410, 1) == "there is progress again, after 310 s"
    assert watch.waits == ""
    assert look(460, 2) is None, "a wait that was not told has no end to tell"
    assert look(521, 2) == "nothing was trained for 61 s: b waits for a (61)"
    assert watch.stalls(530) == (Stall(0.0, 310.0, "b waits for a (300)"), Stall(360.0, 70.0, "b waits for a (61)"))


def test_the_limit_counts_from_the_last_movement_of_anything() -> None:
    watch = StallWatch(60, 100, started_s=0.0)
    for now_s in range(0, 500, 50):
        watch.look(now_s, 0, now_s, lambda quiet_s: "waits")
    assert watch.over is None, "something moved between the stages"
    watch.look(551, 0, 450, lambda quiet_s: "b waits for a")
    assert watch.over == "nothing has moved for --stall-limit-s 100: b waits for a"


def test_of_many_stalls_the_longest_are_kept() -> None:
    watch = StallWatch(1, 1000, started_s=0.0)
    now_s = 0.0
    for number in range(MOST_KEPT + 20):
        watch.look(now_s, number, 0, lambda quiet_s: "")
        now_s += 2 + (number == 3)
        watch.look(now_s, number, 0, lambda quiet_s: "")
    kept = watch.stalls(now_s)
    assert len(kept) == MOST_KEPT
    assert max(stall.seconds for stall in kept) == 3


# ------------------------------------------------------------------ each thing that can be waited for has its words


@dataclass
class Scene:
    """A run that stands still, by what the controller knows of it."""

    trainer_up: bool = True
    busy: float = 0.0
    held: dict[str, tuple[str, str]] = field(default_factory=dict)  # stream -> (key, holder) of a message
    chained: list[str] = field(default_factory=list)  # stages behind another in its process that have group 7
    unattended: str = ""  # stream
    address: bool = True
    entry: dict[str, Any] | None = field(default_factory=lambda: {"state": "serving", "version": 3})
    newest: int = 3
    pending_s: float = 0.0
    lacking: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    tools: tuple[str, ...] = ()
    quiet_s: float = 60.0

    async def sentence(self) -> str:
        config = make_config(parallel={"actor_num_gpus_per_node": self.ranks}, tools={"tools": self.tools})
        graph = build(config)
        place = SimpleNamespace(graph=graph, config=config, engines=[SimpleNamespace(name="engine-0")])
        ledger, gate = SimpleNamespace(open=1), SimpleNamespace(batch=2)
        stage = SimpleNamespace(
            trainer_up=self.trainer_up, steps=4, gate=gate, ledger=ledger, capacity=1, version=3, evals_pending=False
        )
        row = SimpleNamespace(stage="train", busy=self.busy)
        snapshot = SimpleNamespace(stages=[row])
        reports = [StageStats(stage, f"{stage}-0", 0.0, held={"7": 66.0}) for stage in self.chained]
        pending = {"engine-0": self.pending_s}
        view = SimpleNamespace(snapshot=lambda _: snapshot, pending_s=lambda: pending, newest=lambda: reports)
        async with MemoryNode("run", "test", MemoryNetwork()) as node:
            topic = await node.topic_server("topic")
            if self.address:
                topic.publish("engine/engine-0", msgspec.msgpack.encode(EngineAddress("engine-0", "", 0)))
            if self.entry is not None:
                entry = EngineEntry("engine-0", "", 0, run_generation=0, **self.entry)
                topic.publish("directory/engine-0", msgspec.msgpack.encode(entry))
            topic.publish("weights", msgspec.msgpack.encode(WeightsAnnouncement(0, self.newest, "", "", 0)))
            parts: Any = SimpleNamespace(
                placement=place, stage=stage, hubs=self.hubs(graph), topic=topic,
                launcher=SimpleNamespace(waiting=self.lacking), recorder=SimpleNamespace(view=view),
            )  # fmt: skip
            return Waits(parts).sentence(1000.0, self.quiet_s)

    def hubs(self, graph: Graph) -> dict[str, Any]:
        hubs: dict[str, Any] = {}
        for stream in graph.streams:
            items = [Held(key, holder, 70.0) for key, holder in [self.held.get(stream.name, ("", ""))] if key]
            stats = SimpleNamespace(queued=int(stream.name == self.unattended), consumers=0)
            hubs[stream.name] = SimpleNamespace(held=partial(list, items), stats=partial(lambda found: found, stats))
        return hubs


NODE = "no node of the cluster has 1 GPU free"


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (Scene(trainer_up=False), "train is starting, or loads its model"),
        (Scene(busy=0.9), "train computes batch 5"),
        (Scene(busy=0.9, ranks=2), "batch 5 (a silent rank ends by --distributed-timeout-minutes 10)"),
        (Scene(held={"group": ("7/0/1", "")}), "train waits for groups, it has 0 of 2; 1 groups are under way"),
        (Scene(held={"generate": ("7/0/1", "generate-0")}), "generate-0 has had group 7 for 70 s (--request-timeout"),
        (Scene(held={"reward": ("7/0/1", "reward-0")}), "reward-0 has had group 7 for 70 s (--reward-deadline-s"),
        (Scene(held={"agents": ("7/0/1", "agents-0")}, tools=("calculator",)), "7 for 70 s (--tool-deadline-s 10)"),
        (Scene(held={"generate": ("7", "generate-0")}, chained=["reward"]), "reward-0 has had group 7 for 66 s (--rew"),
        (Scene(held={"generate": ("7", "generate-0")}, chained=["group", "reward"]), "are under way (1 in group)"),
        (Scene(held={"reward": ("7/0/1", "reward-0")}, quiet_s=900), "reward-0 has had group 7 for 70 s"),
        (Scene(unattended="reward"), "1 messages wait for reward, of which no replica answers"),
        (Scene(address=False), "engine-0 is not up"),
        (Scene(address=False, lacking={"engine-0": NODE}), f"engine-0 is not up: {NODE}"),
        (Scene(lacking={"reward-1": NODE}), f"reward-1 is not up: {NODE}"),
        (Scene(entry=None), "engine-0 has no weights yet"),
        (Scene(entry={"state": "away", "version": 3, "detail": "no answer"}), "engine-0 is left out: no answer"),
        (Scene(newest=4), "engine-0 has version 3 and lacks version 4"),
        (Scene(pending_s=70.0), "engine-0 has not answered a request for 70 s"),
    ],
)  # fmt: skip
async def test_what_a_run_waits_for_has_a_name(scene: Scene, words: str) -> None:
    assert words in await scene.sentence()


def test_what_stands_still_outside_the_event_loop_has_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start, and a disk that does not answer: nothing else of the process runs."""
    with run_log(tmp_path), named("checkpoint 7 is written; a kill ends it", notice_s=0.02):
        while "waiting for" not in (shown := capsys.readouterr().err):
            time.sleep(0.01)
    assert " s: checkpoint 7 is written; a kill ends it\n" in shown
    assert "controller: waiting for 0 s: checkpoint 7 is written" in (tmp_path / "run.log").read_text()
    with named("quick", notice_s=60):
        capsys.readouterr()
    assert capsys.readouterr().err == ""


async def test_an_event_loop_that_stands_still_has_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here in the journal, whose disk does not answer. Other tasks, the control endpoint's too, stand still with it."""
    journal = Journal(tmp_path / "ledger.jsonl")
    disk, end = os.pipe()
    os.dup2(end, journal._file.fileno())

    def end_when_told() -> None:
        deadline = time.monotonic() + 60
        while "journal.py" not in (tmp_path / "run.log").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(disk)

    with run_log(tmp_path), loop_watched(asyncio.get_running_loop(), 0.1):
        await asyncio.sleep(0.5)
        assert capsys.readouterr().err == "", "it moves"
        (tmp_path / "run.log").touch()
        threading.Thread(target=end_when_told).start()
        with pytest.raises(BrokenPipeError):
            journal.write(*[RolledBack(step, 0, 0) for step in range(10_000)])  # more than a pipe holds
    shown = capsys.readouterr().err
    assert re.search(r"waiting for 0 s: \w+ \(pipeline/record/journal.py:\d+\) does not return, and", shown), shown
    assert shown.splitlines()[0] in (tmp_path / "run.log").read_text()


# ------------------------------------------------------------------ things that hang

STAGE = """
import asyncio, os, signal
from stages.base import LoopStage

class Stuck(LoopStage):
    interrupts = {interrupts}

    @classmethod
    def wants(cls, config, options, message):
        return True

    async def process(self, message):
        if Stuck.interrupts:  # as Ctrl-C does, once there is something to wait for
            Stuck.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)
"""


def stuck(directory: Path, place: str, *flags: str, interrupts: bool = False) -> Finished:
    """A run with a stage that gives nothing back."""
    (directory / "stuck.py").write_text(STAGE.format(interrupts=interrupts))
    (directory / "stuck.toml").write_text(f'[[stage]]\nname = "stuck"\npath = "stuck:Stuck"\n{place}\n')
    config = ["--config", str(directory / "stuck.toml")]
    return here(directory / "run", *SMALL, *made_model(), *SIMULATED, *config, *flags, cwd=directory)


@pytest.mark.slow  # the limit leaves a busy machine the time to start the trainer
@pytest.mark.parametrize("place", ['after = "reward"', pytest.param('loop = "generate"', marks=pytest.mark.full)])
def test_a_stage_that_hangs_is_named_and_the_run_ends_by_the_limit(tmp_path: Path, place: str) -> None:
    done = stuck(tmp_path, place, *QUICK, "--stall-limit-s", "8", "--drain-s", "0.3")
    assert done.code == 7
    [reason] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "nothing has moved for --stall-limit-s 8: train waits for groups, it has 0 of 4" in reason
    assert "stuck-0 has had group " in reason
    assert f"continue with --resume {tmp_path / 'run'}" in reason
    assert any("groups are under way" in line and "in stuck)" in line for line in told(done)), done.out
    assert "stuck-0 has had group" in stalls(done)[-1]["waits"]
    assert stalls(done)[-1]["seconds"] > 8


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    """A stage that gives nothing back holds a run up for as long as was allowed, and no longer."""
    done = stuck(tmp_path, 'after = "reward"', "--drain-s", "0.5", interrupts=True)
    failed(done, "in-flight work was not finished within --drain-s 0.5: ", code=8)


# ------------------------------------------------------------------ services and engines


def engine(**spoil: Any) -> SpoiltEngine:
    simulated = SimulatedEngineConfig(vocab_size=32, length_mean=6.0, update_s=0.01)
    config = EngineConfig(engine="simulated", simulated=simulated)
    return SpoiltEngine(config, made_model()[1], {f"/{path}": handler for path, handler in spoil.items()})


def external(*engines: SpoiltEngine) -> list[str]:
    addresses = [one.url for one in engines]
    return ["--engine", "sglang", "--router", "none", "--rollout-external-engine-addrs", *addresses]


@pytest.mark.slow
def test_a_reward_service_that_hangs_is_reported_with_the_settings_that_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, requested = threading.Event(), StallWatch.look

    async def grade(request: web.Request, body: bytes) -> web.StreamResponse:
        while not answers.is_set():  # noqa: ASYNC110  (it is set by another thread)
            await asyncio.sleep(0.01)
        return web.Response(text="0.5")

    def look(watch: StallWatch, *arguments: Any) -> str | None:
        said = requested(watch, *arguments)
        if said is not None and "reward-0 has had group" in said:
            answers.set()
        return said

    monkeypatch.setattr(StallWatch, "look", look)
    with serving(engine(grade=grade)) as service:
        flags = [*QUICK, "--rm-type", "remote", "--rm-url", f"{service.url}/grade"]
        done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags)
    lines = [line for line in told(done) if "reward-0 has had group" in line]
    assert "(--reward-deadline-s 10, outside --rm-timeout-s 120, --rm-retries 10)" in lines[0]
    assert "in reward)" in lines[0]
    assert any(line.startswith("there is progress again, after ") for line in done.out.splitlines())
    assert any("reward-0 has had group" in stall["waits"] for stall in stalls(done))
    assert "stalls" in done.out.split("completed: ")[1]


@pytest.mark.slow
def test_an_engine_that_answers_no_request_is_named(tmp_path: Path) -> None:
    with serving(engine(generate=never)) as deaf:
        flags = [*QUICK, "--stall-limit-s", "3", "--drain-s", "0.3", *external(deaf)]
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED_TRAINER, *flags)
    settings = "(--request-timeout-secs 600, --max-retries 3)"
    failed(done, "generate-0 has had group ", settings, "engine-0 has not answered a request for ")


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [pytest.param(True, marks=pytest.mark.full), False])
def test_weights_that_an_engine_does_not_take_are_reported_while_it_is_tried(tmp_path: Path, refuses: bool) -> None:
    """The first version is taken. Then it refuses, again and again, or does not answer the update."""

    async def update(request: web.Request, body: bytes) -> web.StreamResponse | None:
        if b'"0.0"' in body:
            return None
        if not refuses:
            return await never(request, body)
        return web.json_response({"success": False, "message": "no room"}, status=400)

    with serving(engine(update_weights_from_disk=update)) as stubborn:
        flags = [*QUICK, "--stall-limit-s", "4", "--drain-s", "0.3", "--update-weight-max-failures", "100"]
        done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED_TRAINER, *flags, *external(stubborn))
    failed(done, "for no prompt may enter: the engines carry version 0", "failed: engine" if refuses else "")
    assert f"engine-0 has version 0 and {'lacks' if refuses else 'takes'} version " in done.err


@given(
    batch=st.integers(1, 4096), members=st.integers(1, 64), staleness=st.integers(0, 8), context=st.integers(2, 1 << 20)
)
def test_a_hub_holds_all_that_the_gate_lets_out(batch: int, members: int, staleness: int, context: int) -> None:
    sizes = {"rollout_batch_size": batch, "n_samples_per_prompt": members, "rollout_max_context_len": context}
    config = make_config(rollout=sizes)
    gate = StalenessGate(batch, staleness)
    stream = next(one for one in streams(config) if one.name == "group")
    spec = stream_spec(config, gate, stream, "inproc://x")
    rollouts = gate.most_open * members
    assert spec.capacity_items >= 2 * rollouts
    assert spec.capacity_bytes >= rollouts * context * 13, "ids, mask, log-probs and a teacher's of every token"
    assert spec.max_message_bytes >= members * context * 13, "a group may travel whole"
    assert message_bytes(8, None) == 64 << 20, "without a context"


# Whole runs of seconds in this process: one that trains, dead letters, a set-up that fails.


GROUPS = 4 * 4  # --num-rollout x --rollout-batch-size


def test_simulated_engine_and_trainer(tmp_path: Path) -> None:
    done = succeed_here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, "--update-weights-interval", "2")
    assert done.summary["groups"]["trained"] == done.audit.outcomes["trained"] == GROUPS
    assert done.summary["weight_versions"]["published"] == 3, "versions 0, 2 and 4 of four steps"
    assert done.summary["weight_versions"]["last"] == 4
    assert 0 < done.summary["efficiency_vs_bound"] <= 1
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    turns = [e["args"]["detail"] for e in events if e["name"] == "generate" and e["ph"] == "b"]
    assert turns
    assert all(re.fullmatch(r"turn 1, \d+ tokens, version \d( to \d)?", turn) for turn in turns), turns
    trained = [e["args"]["group_id"] for e in events if e["name"] == "trained" and e["ph"] == "b"]
    assert sorted(trained) == sorted(set(trained))
    assert len(trained) == GROUPS
    train = next(e["pid"] for e in events if e["name"] == "trained")
    ends = [e for e in events if e.get("flow_in") and e["pid"] == train]
    assert len(ends) >= GROUPS, "arrows end where a group is trained"
    assert f"run in {tmp_path / 'run'}: starting its processes, which log to " in done.err
    log = (tmp_path / "run" / "run.log").read_text().splitlines()
    stamped = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} controller: (.*)", line) for line in log]
    kept = {match[1] if match else line for match, line in zip(stamped, log, strict=True)}
    shown = {*done.out.splitlines(), *done.err.splitlines()} - kept
    assert all(line.startswith(("staleness: ", "warning: ")) for line in shown), "only what comes before the directory"
    assert any("starts: pid " in line for line in kept)


@pytest.mark.slow
def test_prompts_that_nearly_fill_the_model(tmp_path: Path) -> None:
    """The response gets what the context leaves, and a prompt that leaves nothing is skipped: no rollout fails."""
    model = make_tiny_checkpoint(tmp_path / "model", TinyRecipe(tokenizer="arithmetic", max_position_embeddings=32))
    rows = [{"input": "1" * length, "label": "2"} for length in (31, 30, 8, 32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *SIMULATED, "--hf-checkpoint", str(model), "--rollout-max-response-len", "28",
        "--prompt-data", str(tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert "skipped 1 rows (too long: 1)" in done.err
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["groups"]["trained"] == GROUPS


def member(group: int, index: int) -> RolloutSlice:
    return make_slice(group, make_sample(index, reward=float(index)), n_samples=3)


@pytest.mark.parametrize("sockets", [False, True])
async def test_a_dead_letter_settles_its_group_and_releases_the_other_members(sockets: bool) -> None:
    closed: list[Settled] = []
    noted: list[str] = []

    def close_groups(reports: Sequence[Settled]) -> None:
        assert rig.hubs["group"].stats().settled == 0, "settled before anything is dropped"
        closed.extend(reports)

    async with open_rig(sockets=sockets) as rig:
        recorder: Any = SimpleNamespace(dead_letter=lambda *letter: noted.append(" ".join(letter)))
        reward = await rig.node.hub(
            StreamSpec("reward", rig.prefix + "reward"), DeadLetters(rig.topic, recorder, close_groups)
        )
        ports = await join(rig)
        feed, out = await rig.outlet("group"), await rig.inlet("train")
        grader = await rig.node.inlet(reward.address, "reward", RolloutSlice, replica="reward-0")
        generate = await rig.node.outlet(reward.address, "reward", RolloutSlice)
        async with running(GroupStage(make_context()), ports):
            hub = rig.hubs["group"]
            for slice_ in (member(0, 0), member(1, 0), member(0, 1)):
                await feed.send(slice_, slice_.key)
            while hub.stats().leased < 3:  # noqa: ASYNC110 - what counters say has no event
                await asyncio.sleep(0.001)

            await generate.send(member(0, 2), member(0, 2).key)
            poisoned = await grader.receive()
            poisoned.poison("its text ends the grader")
            while hub.stats().settled < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert [(report.group_id, report.outcome, report.detail) for report in closed] == [
                (0, "failed", "reward: its text ends the grader")
            ]
            assert noted == ["reward 0/2/1 its text ends the grader"]
            assert hub.stats().leased == 1, "the other group goes on"

            late = member(0, 2)  # a duplicate of it may have come through
            await feed.send(late, late.key)
            for index in (1, 2):
                await feed.send(member(1, index), member(1, index).key)
            whole = await take(out)
            assert (whole.group.group_id, len(whole.samples)) == (1, 3)
            await hub.wait_empty()
            assert rig.hubs["train"].stats().accepted == 1
            assert rig.hubs["settle"].stats().accepted == 0, "the controller alone settled it"


async def test_a_group_stage_that_starts_later_knows_of_it() -> None:
    async with open_rig() as rig:
        recorder: Any = SimpleNamespace(dead_letter=lambda *letter: None)
        dead_letters = DeadLetters(rig.topic, recorder, lambda reports: None)
        dead_letters(SimpleNamespace(stream="generate", key="0", reason="no"))  # type: ignore[arg-type]
        async with running(GroupStage(make_context()), await join(rig)):
            feed = await rig.outlet("group")
            await feed.send(member(0, 1), member(0, 1).key)
            await rig.hubs["group"].wait_empty()


def test_what_a_dead_letter_says_commands_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    recorder: Any = SimpleNamespace(dead_letter=lambda *letter: None)
    topic: Any = SimpleNamespace(publish=lambda *entry: None)
    letters = DeadLetters(topic, recorder, lambda reports: None)
    letters(DeadLetter("reward", "0/1\x1b[2J", b"", b"", "ValueError: \x1b]0;x\x07 \x9b1m"))
    assert "ValueError: " in caplog.text
    assert not set(caplog.text) & {"\x1b", "\x07", "\x9b"}


@pytest.mark.parametrize("path", STAGES.values())
async def test_a_stage_that_was_never_set_up_can_be_closed(path: str, tmp_path: Path) -> None:
    await import_path(path)(make_context(run_dir=tmp_path)).close()


class HalfMade(MapStage):
    """A custom stage whose `close` takes for granted what `setup` never made."""

    async def setup(self) -> None:
        raise ValueError("the user's own mistake")

    async def close(self) -> None:
        self.client.close()  # type: ignore[attr-defined]

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return message


async def test_an_error_of_the_clean_up_does_not_replace_that_of_the_setup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{HalfMade.__module__}:HalfMade"
    spec = ReplicaSpec("half", "half-0", path, 0, 1, 1, run_dir=str(tmp_path), inlets={}, outlets={})
    nowhere, node = cast(Any, None), cast(Any, SimpleNamespace(run_id="run"))  # a replica connects after its setup
    with pytest.raises(ValueError, match="the user's own mistake"):
        await run_replica(spec, node, nowhere, Config())
    assert "closing after an error failed as well: AttributeError" in caplog.text
