"""Calls that are made once, and recorded turns: kills, damaged files, and resumed runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint import Manifest
from pipeline.record.kept_files import forget_ended, read_lives, uncertain_in, write_lives
from stages.agents.environment import InfrastructureError, Task, Turn
from stages.agents.episodes import Episode
from stages.agents.tool_episode import ToolEpisode
from stages.base import LoopStage
from stages.chat.messages import Message, ToolCall
from stages.messages import PromptGroup, Sample, VersionRun
from stages.prompts.ledger import LedgerSnapshot, OpenGroup
from stages.records import once as module
from stages.records.growing_records import GrowingRecords
from stages.records.once import CallRaised, GroupEnded, NoEffect, Once, Uncertain, call_id, groups_in
from stages.records.unfinished import TURN_KIND, TurnJournal
from stages.rollouts import join_runs, new_sample
from stages.tools.tool import Arguments, NoAnswer, ToolCallError, function_schema
from tests.stages.agents.play import WORLD, fresh, playing, world, write
from tests.stages.stage_rig import make_config

EPISODE = "held@4:3/0"


class World:
    """What calls change."""

    def __init__(self) -> None:
        self.paid: list[str] = []
        self.call_ids: list[str] = []
        self.waits = asyncio.Event()

    async def pay(self, name: str, fails: str = "") -> dict[str, object]:
        if fails == "before":
            raise NoEffect("the bank did not answer the telephone")
        self.paid.append(name)
        if fails == "after":
            raise ValueError("the receipt is torn")
        if fails == "perhaps":
            raise Uncertain("the line broke")
        return {"paid": name, "number": len(self.paid)}

    async def wait(self, name: str) -> None:
        self.paid.append(name)
        self.call_ids.append(call_id())
        self.waits.set()
        await asyncio.Event().wait()

    async def object(self) -> object:
        self.paid.append("object")
        return object()


def life(home: Path) -> Once:
    """The episode in a new process, at its first turn."""
    made = Once(home, EPISODE, "")
    made.begin_turn(0, "pay")
    return made


async def test_a_call_is_made_once_and_gives_what_it_gave(tmp_path: Path) -> None:
    world = World()
    first = life(tmp_path)
    said = [await first(world.pay, "rent"), await first(world.pay, "rent"), await first(world.pay, "tax")]
    assert [one["number"] for one in said] == [1, 2, 3], "places of a turn are calls of their own"
    again = life(tmp_path)
    assert [await again(world.pay, name) for name in ("rent", "rent", "tax")] == said
    assert world.paid == ["rent", "rent", "tax"]
    assert list(groups_in(tmp_path)) == ["held@4:3"]


async def test_what_a_call_raises_is_what_it_raised(tmp_path: Path) -> None:
    world = World()
    for _ in range(2):
        with pytest.raises(NoEffect):
            await life(tmp_path)(world.pay, "rent", "before")
    assert [list(home.iterdir()) for home in groups_in(tmp_path).values()] == [[]], "it may be made again"
    for _ in range(2):
        with pytest.raises(CallRaised, match="ValueError: the receipt is torn"):
            await life(tmp_path)(world.pay, "rent", "after")
        with pytest.raises(CallRaised, match="not JSON serializable"):
            await life(tmp_path)(world.object)
    assert world.paid == ["rent", "object"]


async def test_a_call_that_was_cut_off_is_uncertain(tmp_path: Path) -> None:
    world, made = World(), life(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        cut = tasks.create_task(made(world.wait, "rent"))
        await world.waits.wait()
        cut.cancel()
    with pytest.raises(Uncertain, match="the line broke"):
        await made(world.pay, "tax", "perhaps")
    assert made.uncertain == 1
    again = life(tmp_path)
    with pytest.raises(Uncertain, match="whether this call took effect is not known") as raised:
        async with asyncio.timeout(120):
            await again(world.wait, "rent")
    assert [raised.value.call_id] == world.call_ids, "to ask the other side with"
    with pytest.raises(LookupError):
        call_id()
    with pytest.raises(Uncertain, match="the line broke"):
        await again(world.pay, "tax", "perhaps")
    assert again.uncertain == 2
    assert world.paid == ["rent", "tax"]


class Killed(BaseException):
    """The process is gone: nothing behind this line of it happens."""


async def test_killed_at_any_step_a_call_took_effect_once_or_is_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step that touches the disk, one after the other, is the last one of a first life."""
    outcomes = []
    for last in range(40):
        world, home, left = World(), tmp_path / str(last), last

        def step(real: Any) -> Any:
            def counted(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real(*arguments, **named)

            return counted

        with monkeypatch.context() as patch:
            steps = [(os, name) for name in ("open", "fsync", "replace", "mkdir")]
            for owner, name in (*steps, (module, "sync"), (Path, "open")):
                patch.setattr(owner, name, step(getattr(owner, name)))
            killed = True
            with contextlib.suppress(Killed):
                await life(home)(world.pay, "rent")
                killed = False
        before = list(world.paid)
        try:
            assert (await life(home)(world.pay, "rent"))["paid"] == "rent"
            outcomes.append("made" if not before else "known")
            assert world.paid == ["rent"]
        except Uncertain:
            outcomes.append("uncertain")
            assert world.paid == before
        if not killed:
            break
    assert not killed
    assert set(outcomes) == {"made", "uncertain", "known"}
    assert outcomes == sorted(outcomes, key=["made", "uncertain", "known"].index), "in this order, as time goes on"


@given(st.data())
def test_a_damaged_file_is_never_a_result_nor_a_reason_to_call_again(data: st.DataObject) -> None:
    async def played(home: Path) -> None:
        world = World()
        said = await life(home)(world.pay, "rent")
        [file] = groups_in(home)["held@4:3"].iterdir()
        whole = file.read_bytes()
        if data.draw(st.booleans(), label="torn"):
            file.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        else:
            place = data.draw(st.integers(0, len(whole) - 1))
            file.write_bytes(whole[:place] + bytes([data.draw(st.integers(0, 255))]) + whole[place + 1 :])
        try:
            assert await life(home)(world.pay, "rent") == said
            assert file.read_bytes() == whole
        except Uncertain:
            assert file.read_bytes() != whole
        assert world.paid == ["rent"]

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # no power is lost here
        asyncio.run(played(Path(place)))


@pytest.mark.parametrize("link", ["/dev/zero", "/proc/self/mem", "/"])
async def test_an_unreadable_record_is_no_reason_to_call_again(tmp_path: Path, link: str) -> None:
    world = World()
    await life(tmp_path)(world.pay, "rent")
    [file] = groups_in(tmp_path)["held@4:3"].iterdir()
    file.unlink()
    file.symlink_to(link)
    with pytest.raises(Uncertain, match="its record cannot be read"):
        await life(tmp_path)(world.pay, "rent")
    assert world.paid == ["rent"]
    assert uncertain_in(tmp_path) == 1


class Bank(ToolEpisode):
    """Its tool changes the world, and answers in all the ways that a tool can."""

    name, effects = "pay", True
    schema = function_schema("pay", "Pay.", {"to": {"type": "string"}}, ["to"])
    faults: Mapping[object, Exception] = {
        "busy": NoEffect("the bank is closed"),
        "nobody": ToolCallError("nobody is no customer"),
        "slow": NoAnswer("no answer within 5 s"),
        "gone": InfrastructureError("the line broke"),
    }

    def __init__(self, paid: list[object]) -> None:
        super().__init__()
        self._paid = paid

    async def open_tools(self, task: Task) -> list[Any]:
        return [self]

    async def call(self, arguments: Arguments) -> str:
        to = arguments["to"] if isinstance(arguments, dict) else arguments
        if to != "busy":
            self._paid.append(to)
        if to in self.faults:
            raise self.faults[to]
        return f"payment {len(self._paid)}"


async def test_a_tool_that_changes_the_world_is_called_once_for_each_of_its_calls(tmp_path: Path) -> None:
    paid: list[object] = []
    names = ("rent", "rent", "nobody", "gone", "slow")
    turn = Turn(0, Message("assistant", "", tool_calls=tuple(ToolCall("pay", {"to": to}) for to in names)), "text")

    async def played(turn: Turn) -> list[str]:
        bank = Bank(paid)
        bank.once = life(tmp_path)
        await bank.reset(Task())
        return [message.content for message in (await bank.step(turn)).messages]

    said = await played(turn)
    assert said[:3] == ["payment 1", "payment 2", "error: nobody is no customer"]
    assert said[3] == "error: whether this call took effect is not known: the line broke"
    assert said[4] == "error: whether this call took effect is not known: no answer within 5 s"
    assert await played(turn) == said
    assert paid == list(names)
    with pytest.raises(InfrastructureError, match="closed"):
        await played(Turn(1, Message("assistant", "", tool_calls=(ToolCall("pay", {"to": "busy"}),)), "text"))


COUNTER = WORLD.replace("World", "Counter")
SAVES = {"save_interval": 1}


def journal(home: Path, *lives: int, **sections: object) -> TurnJournal:
    return TurnJournal(home, make_config(checkpoint=SAVES, **sections), lives)


def turns(*versions: int, index: int = 0, ids: int = 3, salt: int = 0) -> list[Sample]:
    """A rollout behind each of its turns, made with these versions."""
    sample, runs, found = new_sample([1, 2], index), (VersionRun(-1, 2),), []
    for number, version in enumerate(versions):
        runs = join_runs(runs, (VersionRun(version, ids),))
        sample = write(sample, [number + salt * (number > 0)] * ids, f"é{number} ", "completed")
        found.append(msgspec.structs.replace(sample, version_runs=runs, loop_state=b"%d" % number))
    return found


def same(found: Sample | None, kept: Sample) -> bool:
    """To the bit."""
    one, other = (msgspec.msgpack.encode(sample, enc_hook=np.ndarray.tolist) for sample in (found, kept))
    return one == other


GROUP = fresh().group


async def restored(
    home: Path, *lives: int, index: int = 0, group: PromptGroup = GROUP, **sections: object
) -> Sample | None:
    begun = new_sample((), index)
    found = await journal(home, *lives, **sections).restore(group, begun)
    return None if found is begun else found


async def test_the_newest_turn_of_the_run_s_history_is_restored_to_the_bit(tmp_path: Path) -> None:
    first, other = turns(3, 4, 6), turns(3, index=1)
    written = journal(tmp_path, 0)
    for sample in (*first, *other):
        await written.keep(GROUP, sample)
    for step, turn in ((7, 2), (6, 2), (5, 1), (4, 1), (3, 0)):
        assert same(await restored(tmp_path, 0, step), first[turn]), step
    assert await restored(tmp_path, 0, 2) is None, "its first turn was made by weights that never were"
    assert same(await restored(tmp_path, 0, 3, index=1), other[0])
    assert await restored(tmp_path, 0, 7, index=2) is None
    assert await restored(tmp_path, 0) is None, "of this life: what is begun anew is begun anew"
    assert same(await restored(tmp_path, 0, 4, 9), first[1]), "version 6 was rolled back by the life in between"


async def test_what_another_prompt_or_setting_made_is_not_restored(tmp_path: Path) -> None:
    await journal(tmp_path, 0).keep(GROUP, turns(0)[0])
    assert await restored(tmp_path, 0, 1) is not None
    assert await restored(tmp_path, 0, 1, rollout={"num_rollout": 99}) is not None
    assert await restored(tmp_path, 0, 1, rollout={"rollout_temperature": 0.5}) is None
    cold = msgspec.structs.replace(GROUP, temperature=0.5)
    assert await restored(tmp_path, 0, 1, group=cold) is None, "its turns are drawn as it was admitted"
    again = msgspec.structs.replace(GROUP, temperature=1.0)
    assert await restored(tmp_path, 0, 1, group=again, rollout={"rollout_temperature": 0.5}) is not None
    assert await restored(tmp_path, 0, 1, group=msgspec.structs.replace(GROUP, seed=GROUP.seed + 1)) is None
    assert await restored(tmp_path, 0, 1, group=msgspec.structs.replace(GROUP, prompt="another")) is None


async def test_records_hold_what_is_new_and_turns_that_were_made_twice_do_not_mix(tmp_path: Path) -> None:
    first, second = turns(0, 0, 0, ids=400), turns(0, 0, 0, ids=400, salt=5)
    written = journal(tmp_path, 0)
    for sample in (first[0], first[1], second[1], first[2], second[2]):
        await written.keep(GROUP, sample)
    [(_, records)] = GrowingRecords(tmp_path, TURN_KIND, make_config(), (0, 0)).pieces(GROUP, this_life=False)
    assert [kept.tokens for kept in records] == [0, 402, 0, 0, 0], "whole where another turn came between"
    assert same(await restored(tmp_path, 0, 0), first[2])


def timeless(sample: Sample) -> Sample:
    """Without the seconds that the episode has lasted."""
    episode = LoopStage.read_state(sample, Episode)
    assert episode is not None
    return LoopStage.write_state(sample, msgspec.structs.replace(episode, spent_s=0.0))


async def test_a_resumed_episode_goes_on_and_makes_no_call_again(tiny: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    about = {"turns": 3, "counter": str(counter)}
    async with playing(tiny, world(COUNTER), run_dir=tmp_path, lives=(0,), checkpoint=SAVES) as play:
        slice_ = await play.begin(**about)
        slice_ = await play.turn(await play.turn(slice_, "1\n"), "2\n")
    lines = counter.read_text().splitlines()
    assert len(lines) == 2
    async with playing(tiny, world(COUNTER), run_dir=tmp_path, lives=(0, 0), checkpoint=SAVES) as play:
        resumed = await play.begin(**about)
        [sample] = resumed.samples
        assert same(timeless(sample), timeless(slice_.samples[0])), "the second turn with its answer, as it was"
        assert play.stages[0].activity.extra["restored"] == 1.0
        assert counter.read_text().splitlines() == lines
        [sample] = (await play.turn(resumed, "3\n")).samples
        assert sample.done
        assert sample.response == "1\n[1]2\n[2]3\n"
    assert counter.read_text().splitlines() == [*lines, "0/0 2 '3'"]


def checkpoint(step: int, next_group: int, *opened: int) -> Manifest:
    ledger = LedgerSnapshot(next_group, 0, {}, tuple(OpenGroup(group, 0) for group in opened))
    return Manifest(step=step, version=step, run_generation=0, ledger=msgspec.json.encode(ledger).decode())


async def test_what_ended_in_every_checkpoint_is_removed_but_for_uncertain_calls(tmp_path: Path) -> None:
    home = tmp_path / "episodes"
    assert read_lives(home) == ()
    write_lives(home, (0, 7))
    assert read_lives(home) == (0, 7)

    async def call(outcome: str) -> str:
        if outcome == "cut":
            raise Killed
        return outcome

    groups = ("3", "4", "5", "9", "held@2:1", "held@3:1")
    for group in groups:
        if group.isdigit():
            await journal(home, 0).keep(msgspec.structs.replace(GROUP, group_id=int(group)), turns(0)[0])
        await Once(home, f"{group}/0")(call, "done")
    with pytest.raises(Killed):
        await Once(home, "4/1")(call, "cut")
    forget_ended(home, [checkpoint(3, 8, 5), checkpoint(5, 12, 3)])
    assert sorted(groups_in(home)) == ["3", "4", "5", "9", "held@3:1"]
    assert uncertain_in(home) == 1
    assert len(list(groups_in(home)["4"].iterdir())) == 1
    with pytest.raises(GroupEnded, match="group 4 has ended"):
        await Once(home, "4/0")(call, "done")
    assert await Once(home, "5/0")(call, "again") == "again"
