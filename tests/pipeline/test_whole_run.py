"""Whole runs of seconds in this process: one that trains, dead letters, a set-up that fails.

Every part is the production one, apart from engine and trainer in the first: those take time instead of computing.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from launching import NO_DATA, SIMULATED, SMALL, here, made_model, succeed_here
from safetensors.torch import load_file

from configs.schema import Config
from models.import_path import import_path
from models.tiny import make_tiny_checkpoint
from pipeline.graph import STAGES
from pipeline.hosts.worker import ReplicaSpec, run_replica
from pipeline.supervise.announce import DeadLetters
from stages.base import MapStage
from stages.group.stage import GroupStage
from stages.messages import RolloutSlice, Settled
from tests.stages.group_rig import join
from tests.stages.stage_rig import make_context, make_sample, make_slice, open_rig, running, take
from transport import DeadLetter, StreamSpec

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


def test_embedded_engine_and_torch(tmp_path: Path) -> None:
    """What is left behind is a model that moved, by gradients of what the engine made while its weights moved."""
    done = succeed_here(
        tmp_path / "run", *SMALL, *made_model(), "--save-interval", "4", "--lr", "1e-2", "--max-staleness", "1"
    )
    assert done.summary["groups"]["trained"] == done.audit.outcomes["trained"] == GROUPS
    assert done.summary["weight_versions"]["last"] > 0
    before = load_file(Path(made_model()[1]) / "model.safetensors")
    [after] = (tmp_path / "run" / "checkpoints").glob("*/hf/model.safetensors")
    moved = load_file(after)
    assert before.keys() == moved.keys()
    assert any(not torch.equal(before[name], moved[name].to(before[name].dtype)) for name in before)


@pytest.mark.slow
def test_prompts_that_nearly_fill_the_model(tmp_path: Path) -> None:
    """The response gets what the context leaves, and a prompt that leaves nothing is skipped: no rollout fails."""
    model = make_tiny_checkpoint(tmp_path / "model", tokenizer="arithmetic", max_position_embeddings=32)
    rows = [{"input": "1" * length, "label": "2"} for length in (31, 30, 8, 32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *SIMULATED, "--hf-checkpoint", str(model), "--rollout-max-response-len", "28",
        "--prompt-data", str(tmp_path / "rows.jsonl"),
    )  # fmt: skip
    assert "skipped 1 rows (too long: 1)" in done.err
    assert done.summary["groups"]["failed"] == 0
    assert done.summary["groups"]["trained"] == GROUPS


STUCK = """
import asyncio, os, signal
from stages.base import MapStage


class Stuck(MapStage):
    interrupted = False

    async def process(self, message):
        if not Stuck.interrupted:  # as Ctrl-C does, once there is something to wait for
            Stuck.interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)
"""
STUCK_RECIPE = '[[stage]]\nname = "stuck"\npath = "stuck:Stuck"\nafter = "reward"\n'


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    """A stage that gives nothing back holds a run up for as long as was allowed, and no longer."""
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "stuck.toml").write_text(STUCK_RECIPE)
    flags = ["--config", str(tmp_path / "stuck.toml"), "--drain-s", "0.5"]
    done = here(tmp_path / "run", *SMALL, *made_model(), *SIMULATED, *flags, cwd=tmp_path)
    assert done.code == 1
    assert "in-flight work was not finished within --drain-s 0.5: " in done.err


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
            assert poisoned is not None
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
    nowhere = cast(Any, None)  # a replica connects after its setup
    with pytest.raises(ValueError, match="the user's own mistake"):
        await run_replica(spec, nowhere, nowhere, Config())
    assert "closing after an error failed as well: AttributeError" in caplog.text
