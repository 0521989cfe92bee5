"""Calls that change the world: made once, whenever their process is killed and whatever becomes of a file's bytes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.agents.environment import InfrastructureError, Task, Turn
from stages.agents.tool_episode import ToolEpisode
from stages.chat.messages import Message, ToolCall
from stages.records import once as module
from stages.records.once import CallRaised, NoEffect, Once, Uncertain, call_id, groups_in
from stages.tools.tool import Arguments, NoAnswer, ToolCallError, function_schema

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


def life(home: Path, *, about: str = "", episode: str = EPISODE, turn: tuple[int, str] = (0, "pay")) -> Once:
    """The episode in a new process, at a turn."""
    made = Once(home, episode, about)
    made.begin_turn(*turn)
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


@pytest.mark.parametrize(
    "other",
    [
        {"turn": (1, "pay")},
        {"turn": (0, "pay!")},
        {"about": "another task"},
        {"episode": "held@4:3/1"},
        {"episode": "held@4:33/0"},
    ],
)
async def test_another_turn_task_or_episode_makes_a_call_of_its_own(tmp_path: Path, other: dict[str, Any]) -> None:
    world = World()
    await life(tmp_path)(world.pay, "rent")
    assert (await life(tmp_path, **other)(world.pay, "rent"))["number"] == 2
    assert (await life(tmp_path)(world.pay, "food"))["number"] == 3, "other arguments too"


async def test_what_a_call_raises_is_what_it_raised(tmp_path: Path) -> None:
    world = World()
    for _ in range(2):
        with pytest.raises(CallRaised, match="ValueError: the receipt is torn"):
            await life(tmp_path)(world.pay, "rent", "after")
        with pytest.raises(CallRaised, match="not JSON serializable"):
            await life(tmp_path)(world.object)
    assert world.paid == ["rent", "object"]


async def test_a_call_without_effect_may_be_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NoEffect):
            await life(tmp_path)(World().pay, "rent", "before")
    assert [list(home.iterdir()) for home in groups_in(tmp_path).values()] == [[]]


async def test_nobody_knows_of_a_call_that_was_cut_off_or_does_not_know_itself(tmp_path: Path) -> None:
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
        async with asyncio.timeout(30):
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


async def test_killed_at_any_step_a_call_took_effect_once_or_nobody_knows(
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
            for owner, name in ((os, "open"), (os, "fsync"), (os, "replace"), (os, "mkdir"), (module, "sync")):
                patch.setattr(owner, name, step(getattr(owner, name)))
            patch.setattr(Path, "open", step(Path.open))
            try:
                await life(home)(world.pay, "rent")
            except Killed:
                killed = True
            else:
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


@settings(max_examples=30, deadline=None)
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

    with tempfile.TemporaryDirectory() as place:
        asyncio.run(played(Path(place)))


class Bank(ToolEpisode):
    """Its tool changes the world, and answers in all the ways that a tool can."""

    def __init__(self, paid: list[object]) -> None:
        super().__init__()
        self._paid = paid

    async def open_tools(self, task: Task) -> list[Any]:
        return [self]

    name, effects = "pay", True
    schema = function_schema("pay", "Pay.", {"to": {"type": "string"}}, ["to"])

    async def call(self, arguments: Arguments) -> str:
        to = arguments["to"] if isinstance(arguments, dict) else arguments
        if to == "busy":
            raise NoEffect("the bank is closed")
        self._paid.append(to)
        if to == "nobody":
            raise ToolCallError("nobody is no customer")
        if to == "slow":
            raise NoAnswer("no answer within 5 s")
        if to == "gone":
            raise InfrastructureError("the line broke")
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
