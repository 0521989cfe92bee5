"""Agents that are started again: what the record answers, and what it does not."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.record.kept_files import forget_responses, uncertain_in
from stages.gateway.answers import OpenSession
from stages.gateway.sessions import Conversation, Session
from stages.messages import Sample
from stages.records import unfinished
from stages.records.unfinished import AnswerJournal
from stages.rollouts import new_sample, oldest_version, rollout_fault
from stages.sampling.requests import SampleResult
from tests.stages.gateway.gateway_rig import BODIES, CALL, CHAT, TOKENS, Rig, ToyChat, opened
from tests.stages.gateway.test_sessions import result
from tests.stages.stage_rig import make_config, make_group

GROUP = make_group(0, 4)
REQUESTS = BODIES | {TOKENS: {"input_ids": [1, 2, 3]}}


def same(found: tuple[Sample, ...], known: tuple[Sample, ...]) -> bool:
    """Whether what is trained is the same, whatever the order of sequences that do not share tokens."""
    trained = ("token_ids", "loss_mask", "log_probs", "versions")
    contents = [
        Counter(str([getattr(part, name).tolist() for name in trained]) for part in one) for one in (found, known)
    ]
    return contents[0] == contents[1]


class Again:
    """Starts of one program at one gateway."""

    def __init__(self, rig: Rig, home: Path) -> None:
        self.rig, self.home = rig, home
        home.mkdir(exist_ok=True)

    def journal(self, *lives: int) -> AnswerJournal:
        return AnswerJournal(self.home, self.rig.world.stage.config, lives)

    @asynccontextmanager
    async def start(self, journal: AnswerJournal, index: int = 2) -> AsyncIterator[OpenSession]:
        """`rig.post` goes to the new session."""
        record = await journal.open(GROUP, index)
        place = OpenSession(GROUP, new_sample((1,), index), Session(ToyChat(), index), record)
        before = self.rig.endpoint
        with self.rig.gateway.session(place) as key:
            self.rig.endpoint = msgspec.structs.replace(before, api_key=key)
            yield place
        self.rig.endpoint = before

    async def ask(self, body: dict[str, Any] = BODIES[CHAT], path: str = CHAT) -> Any:
        """The answer without its time."""
        return timeless(await self.rig.ask(path, body))

    @property
    def asked(self) -> int:
        """Requests that came to engines."""
        return len(self.rig.writer.answered)


@asynccontextmanager
async def again(tmp_path: Path, **options: Any) -> AsyncIterator[Again]:
    """An engine that never answers the same twice."""
    numbers = itertools.count()
    async with opened(tmp_path, lambda prompt: f"<think>hm</think>{next(numbers)}{CALL}", **options) as rig:
        yield Again(rig, tmp_path / "episodes")


def timeless(answer: Any) -> Any:
    """Without the time of the answer."""
    if isinstance(answer, dict):
        return {name: timeless(value) for name, value in answer.items() if not name.startswith("created")}
    return [timeless(value) for value in answer] if isinstance(answer, list | tuple) else answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_the_same_request_gets_the_same_answer_without_an_engine(path: str, stream: bool, tmp_path: Path) -> None:
    body = {**REQUESTS[path], "stream": stream}
    async with again(tmp_path, asynchrony={"max_staleness": 1}) as program:
        async with program.start(program.journal(0)) as place:
            first = [await program.ask(body, path) for _ in range(2)]
            known = place.session.samples()
        assert first[0] != first[1], "each time that it asks it gets another answer"
        assert program.asked == 2
        program.rig.world.weights.publish(1)
        await program.rig.world.weights.landed(1)
        for journal in (program.journal(0), program.journal(0, 7)):
            async with program.start(journal) as place:
                assert [await program.ask(body, path) for _ in range(2)] == first
                assert same(place.session.samples(), known)
                assert journal.restored == 1
                assert program.asked == 2
        async with program.start(journal) as place:
            await program.ask({**body, "stream": not stream}, path)
            assert program.asked == 2, "a stream is the same answer"
            for _ in range(2):
                await program.ask(body, path)
            assert program.asked == 3, "it asks a third time"
            [sample, *_] = place.session.samples()
            assert sample.reused_tokens == len(program.rig.writer.answered[0][1]) or path != "/generate"


CHANGES: tuple[dict[str, Any], ...] = (
    {"max_tokens": 3},
    {"stop": "x"},
    {"temperature": 0.5},
    {"messages": [{"role": "user", "content": "two"}]},
    {"tools": []},
)


async def test_another_request_is_new_and_leaves_the_record_to_those_that_match(tmp_path: Path) -> None:
    async with again(tmp_path) as program:
        journal = program.journal(0)  # of a process that starts the program again itself
        async with program.start(journal):
            first = await program.ask()
        async with program.start(journal):
            for number, change in enumerate(CHANGES):
                await program.ask({**BODIES[CHAT], **change})
                assert program.asked == 2 + number, change
            assert await program.ask() == first
            assert program.asked == 1 + len(CHANGES)
        async with program.start(journal, index=1):
            await program.ask()
            assert program.asked == 2 + len(CHANGES), "another rollout has answers of its own"


async def test_a_request_that_failed_is_not_counted(tmp_path: Path) -> None:
    """Clients send it again, and a program that is started again sends it once."""
    async with again(tmp_path, proxied=True, rollout={"max_retries": 0}) as program:
        async with program.start(program.journal(0)):
            program.rig.world.proxies[0].answer_generate_with(500)
            assert (await program.rig.post(CHAT, BODIES[CHAT]))[0] == 503
            program.rig.world.proxies[0].answer_generate_with(0)
            first = await program.ask()
        async with program.start(program.journal(0)):
            assert await program.ask() == first
        assert program.asked == 1


async def test_an_answer_that_later_batches_may_not_train_is_made_anew(tmp_path: Path) -> None:
    async with again(tmp_path, asynchrony={"max_staleness": 1}) as program:
        for version, asked in ((0, 1), (1, 1), (2, 2), (3, 2)):
            if version:
                program.rig.world.weights.publish(version)
                await program.rig.world.weights.landed(version)
            async with program.start(program.journal(0)) as place:
                await program.ask()
                assert program.asked == asked
                [sample] = place.session.samples()
                assert oldest_version([sample]) == (0 if version < 2 else 2)


def answer(text: str, *versions: int) -> SampleResult:
    """One token of each version behind those of the first."""
    first, *later = versions
    return result(text, (first, len(text) + 1 - len(later)), *((version, 1) for version in later))


def journal(home: Path, *lives: int) -> AnswerJournal:
    return AnswerJournal(home, make_config(), lives)


async def kept(made: AnswerJournal, text: str, *versions: int) -> None:
    """As if a program had asked once."""
    with (await made.open(GROUP, 2)).named(b"request") as name:
        await (await made.open(GROUP, 2)).keep(name, answer(text, *versions))


async def found(made: AnswerJournal, oldest: int = 0) -> str | None:
    record = await made.open(GROUP, 2)
    with record.named(b"request") as name:
        known = record.find(name, oldest)
    return None if known is None else known.text


async def test_only_weights_of_the_run_s_history_count(tmp_path: Path) -> None:
    await kept(journal(tmp_path, 0), "a", 3, 5)
    assert [await found(journal(tmp_path, 0, step)) for step in (4, 5)] == [None, "a"]
    assert await found(journal(tmp_path, 0, 4, 9)) is None, "version 5 was rolled back by the life in between"
    await kept(journal(tmp_path, 0, 4), "b", 4)
    assert await found(journal(tmp_path, 0, 4)) == "b"
    assert await found(journal(tmp_path, 0, 5)) == "a", "the newest weights count"
    assert [await found(journal(tmp_path, 0, 5), oldest) for oldest in (3, 4)] == ["a", None]


async def test_a_record_is_bounded_and_what_follows_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "MOST_BYTES", 16 * 10)
    record = await (made := journal(tmp_path, 0)).open(GROUP, 2)
    for number, text in enumerate(("four", "four", "more")):  # five tokens each
        with record.named(b"%d" % number) as name:
            await record.keep(name, answer(text, 0))
    again_ = await made.open(GROUP, 2)
    known = []
    for number in range(3):
        with again_.named(b"%d" % number) as name:
            known.append(again_.find(name, 0) is not None)
    assert known == [True, True, False]


async def test_what_a_lost_program_did_is_reported_as_uncertain_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await kept(journal(tmp_path, 0), "a", 0)
    assert uncertain_in(tmp_path) == 0
    for _ in range(3):
        assert (await journal(tmp_path, 0).open(GROUP, 2)).answers
    assert uncertain_in(tmp_path) == 1
    assert sum("outside of the gateway" in record.message for record in caplog.records) == 1
    forget_responses(tmp_path, [0])
    assert list((tmp_path / "0").glob("answers-*.log")) == []
    assert uncertain_in(tmp_path) == 1, "it stays"
    assert not (await journal(tmp_path, 0).open(msgspec.structs.replace(GROUP, purpose="eval"), 2)).answers


# A program as a tree of requests: each node asks behind the answer of its parent, some with equal words, some side by
# side. The engine's answer hangs on the request and its name alone, as with a deterministic engine.


class Killed(Exception):
    """The program or one of the processes around it is gone."""


class Tree:
    """Runs against a session, in an order drawn by `rng`, and is killed behind `steps` moments."""

    def __init__(self, parents: list[int], words: list[int]) -> None:
        self.parents, self.words = parents, words

    def before(self, node: int) -> set[int]:
        """Nodes with an equal request: which of two the program asks first is no accident."""
        return {n for n in range(node) if (self.parents[n], self.words[n]) == (self.parents[node], self.words[node])}

    async def run(self, made: AnswerJournal, seed: int, steps: float = np.inf) -> tuple[tuple[Sample, ...], int]:
        """The rollout, and how many answers engines gave."""
        record, session, chat = await made.open(GROUP, 2), Session(ToyChat(), 2), ToyChat()
        rng, said, engines = np.random.default_rng(seed), dict[int, tuple[Any, ...]](), 0
        waiting = {node for node, parent in enumerate(self.parents) if parent < 0}
        under_way: dict[int, tuple[Any, Any, int]] = {}
        while waiting or under_way:
            if (steps := steps - 1) < 0:
                raise Killed
            if waiting and (not under_way or rng.random() < 0.5):
                node = int(rng.choice([node for node in sorted(waiting) if not waiting & self.before(node)]))
                waiting.remove(node)
                asked = (*said.get(self.parents[node], ()), {"role": "user", "content": f"{self.words[node]}"})
                conversation = msgspec.convert({"messages": asked}, Conversation)
                turn = session.open(session.context(conversation), conversation)
                naming = record.named(turn.ids.tobytes())
                under_way[node] = turn, naming, naming.__enter__()
            else:
                node = int(rng.choice(sorted(under_way)))
                turn, naming, name = under_way.pop(node)
                known = record.find(name, 0)
                if known is None:
                    known = result(f"{name}", seed=name)
                    engines += 1
                    await record.keep(name, known)
                    if (steps := steps - 1) < 0:  # behind the record and before the answer
                        raise Killed
                reply = chat.reply(known.token_ids, ()).message
                session.land(turn, known, reply)
                naming.__exit__(None, None, None)
                said[node] = (*msgspec.to_builtins(turn.conversation.messages), msgspec.to_builtins(reply))
                waiting |= {child for child, parent in enumerate(self.parents) if parent == node}
        assert rollout_fault(session.samples()) is None
        return session.samples(), engines


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    n = draw(st.integers(1, 7))
    words = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    return Tree([draw(st.integers(-1, node - 1)) for node in range(n)], words)


@settings(max_examples=60)
@given(trees(), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 1 << 20))
def test_a_killed_program_trains_what_an_undisturbed_one_does(tree: Tree, kills: list[int], seed: int) -> None:
    """Whatever it asks side by side, in whatever order, and whenever it is killed: no answer is made twice."""

    async def play() -> None:
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "fdatasync"):  # a killed process loses nothing that it has written
                patch.setattr(os, name, lambda descriptor: None)
            alone, home = Path(directory, "alone"), Path(directory, "killed")
            alone.mkdir()
            home.mkdir()
            undisturbed, asked = await tree.run(journal(alone, 0), seed)
            assert asked == len(tree.parents)
            lives: tuple[int, ...] = (0,)
            made = journal(home, *lives)
            for number, steps in enumerate(kills):
                try:
                    await tree.run(made, seed + number + 1, steps)
                except Killed:
                    lives = (*lives, 0) if number % 3 == 2 else lives
                    made = journal(home, *lives) if number % 2 else made
            parts, _ = await tree.run(made, seed + 99)
            assert same(parts, undisturbed)
            _, asked = await tree.run(journal(home, *lives), seed + 100)
            assert asked == 0

    asyncio.run(play())
