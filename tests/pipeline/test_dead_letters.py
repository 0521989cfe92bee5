"""A member that nobody can process ends its group: in the ledger, and in the stage that holds the other members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.supervise.announce import DeadLetters
from stages.group.stage import GroupStage
from stages.messages import RolloutSlice, Settled
from tests.stages.group_rig import join
from tests.stages.stage_rig import make_context, make_sample, make_slice, open_rig, running, take
from transport import DeadLetter, StreamSpec


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
