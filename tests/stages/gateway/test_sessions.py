"""Sessions by themselves: what an agent sends, and the sequences that come of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.chat.messages import Message, ToolCall
from stages.gateway.sessions import Conversation, Session, Turn
from stages.messages import Sample, VersionRun
from stages.rollouts import rollout_fault, trained_masks
from stages.sampling.requests import SampleResult
from tests.stages.gateway.gateway_rig import BEGIN, END, ToyChat

USER, SYSTEM = Message("user", "one"), Message("system", "be brief")


def result(text: str, *runs: tuple[int, int], cut: bool = False, seed: int = 0) -> SampleResult:
    """What an engine made: the text and the token that ends a turn; `runs`: (version, tokens)."""
    ids = (*text.encode(), *(() if cut else (END,)))
    log_probs = np.random.default_rng([seed, len(ids)]).uniform(-3, -0.1, len(ids)).astype(np.float32)
    return SampleResult(
        "length" if cut else "stop",
        ids,
        tuple(float(value) for value in log_probs),
        tuple(VersionRun(*run) for run in runs) or (VersionRun(0, len(ids)),),
        text,
    )


def owner(parts: tuple[Sample, ...], place: int, at: int) -> int:
    """The sequence in which that token is trained: those that share it leave it to the first."""
    prefix = parts[place].prefix
    return place if prefix is None or at >= prefix.length else owner(parts, prefix.sequence, at)


@dataclass
class Asked:
    """An agent and the engines in one: each request is answered at once, and what was consumed is kept."""

    session: Session
    chat: ToyChat
    log: list[tuple[list[int], SampleResult]]

    def __call__(self, *messages: Message, text: str = "ok", tools: tuple[dict[str, object], ...] = ()) -> Message:
        return self.answer(self.turn(Conversation(messages, tools)), result(text, seed=len(self.log)))

    def turn(self, conversation: Conversation) -> Turn:
        return self.session.open(self.session.context(conversation), conversation)

    def answer(self, turn: Turn, made: SampleResult) -> Message:
        reply = self.chat.reply(made.token_ids, ()).message
        self.log.append((turn.ids.tolist(), made))
        self.session.land(turn, made, reply)
        return reply

    def check(self) -> tuple[Sample, ...]:
        """Each answer stands in one sequence, behind what the engine was given for it; each of its tokens is trained
        once, there or in the sequence that it shares the token with, and nothing else is trained."""
        parts = self.session.samples()
        assert rollout_fault(parts) is None
        masks, left = trained_masks(parts), [part.loss_mask.copy() for part in parts]
        for ids, made in self.log:
            end = len(ids) + len(made.token_ids)
            [(place, trained)] = [
                (place, trained)
                for place, part in enumerate(parts)
                if part.token_ids[:end].tolist() == [*ids, *made.token_ids]
                and np.array_equal(part.log_probs[len(ids) : end], np.array(made.log_probs, np.float32))
                and (trained := [(owner(parts, place, at), at) for at in range(len(ids), end)])
                and all(masks[of][at] and left[of][at] for of, at in trained)
            ][:1]
            assert parts[place].versions[len(ids) : end].tolist() == [
                run.version for run in made.runs for _ in range(run.n_tokens)
            ]
            for of, at in trained:
                left[of][at] = 0
        assert sum(int(mask.sum()) for mask in masks) == sum(len(made.token_ids) for _, made in self.log)
        return parts


@pytest.fixture
def asked() -> Asked:
    chat = ToyChat()
    return Asked(Session(chat, 3), chat, [])


def test_a_reply_that_comes_back_is_not_tokenised_again(asked: Asked) -> None:
    first = asked(
        SYSTEM, USER, text='<think>hm</think> ok <tool_call>{"name": "add", "arguments": {"a":1}}</tool_call>'
    )
    # As clients do: space is gone, the arguments are text with other spaces.
    sent_back = Message("assistant", "ok", "hm", (ToolCall("add", '{"a": 1}'),))
    assert sent_back != first
    asked(SYSTEM, USER, sent_back, Message("tool", "2"), text="done")
    [sample] = asked.check()
    assert asked.log[1][0][: len(asked.log[0][0])] == asked.log[0][0]
    assert asked.chat.tokenised == [SYSTEM, USER, Message("tool", "2")]
    assert (sample.index, sample.turns, sample.response, sample.prefix) == (3, 2, "done", None)
    assert sample.prompt_length == len(asked.log[0][0])
    closing = sample.token_ids[len(asked.log[0][0]) + len(asked.log[0][1].token_ids) :].tolist()
    assert closing == [BEGIN, *b"tool\n2", END, BEGIN, *b"assistant\n", *b"done", END]


WITHIN_A_CALL = '<think>n</think>now<tool_call>{"name": "add", "arguments": {"a": '


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        ({"content": "no"}, "<think>n</think>no"),
        ({"reasoning_content": ""}, ""),
        ({"tool_calls": (ToolCall("add", {"a": 2}),)}, WITHIN_A_CALL),
    ],
)
def test_a_changed_reply_begins_another_sequence_where_the_tokens_part(
    asked: Asked, change: dict[str, object], shared: str
) -> None:
    reply = asked(USER, text='<think>n</think>now<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    asked(USER, msgspec.structs.replace(reply, **change), Message("user", "two"))
    main, other = asked.check()
    assert main.token_ids.tolist() == [*asked.log[0][0], *asked.log[0][1].token_ids]
    assert other.prefix is not None
    assert other.prefix.length == len(asked.log[0][0]) + len(shared), "the prompt, and what is the same behind it"
    assert other.prompt_length == main.prompt_length
    assert other.turns == 1 + bool(shared)


def test_a_reply_may_come_back_without_its_reasoning_where_that_is_ignored(asked: Asked) -> None:
    asked.session = Session(asked.chat, ignore_reasoning=True)
    reply = asked(USER, text="<think>n</think>now")
    asked(USER, msgspec.structs.replace(reply, reasoning_content=""), Message("user", "two"))
    [sample] = asked.check()
    assert sample.turns == 2


def test_the_sequence_of_the_newest_turn_comes_last_and_is_graded(asked: Asked) -> None:
    def graded() -> str:
        return asked.check()[-1].response

    main = asked(USER, text="main")
    helper = asked(SYSTEM, USER, text="helper")
    assert graded() == "helper"
    again = asked(USER, main, Message("user", "two"), text="main 2")
    assert graded() == "main 2"
    asked.answer(asked.turn(Conversation((SYSTEM, USER, helper, USER))), result("cut", cut=True))
    assert graded() == "cut"
    assert asked.session.cut
    for branch in ("branch", "branch 2"):
        asked(USER, main, Message("user", "three"), text=branch)
        assert graded() == branch
        assert not asked.session.cut
    asked(USER, main, Message("user", "two"), again, USER, text="end")
    parts = asked.check()
    assert [part.response for part in parts] == ["cut", "branch", "branch 2", "end"]
    assert parts[-1].prefix is not None, "others branch off it"


def test_an_answer_is_trained_in_two_sequences_where_an_edited_one_kept_its_beginning(asked: Asked) -> None:
    """The sequence of the newest turn comes last, so the edited one, which shares one token, has it."""
    reply = asked(USER, text="a")
    asked(USER, msgspec.structs.replace(reply, content="ab"), Message("user", "two"), text="of the edited")
    asked(USER, reply, Message("user", "three"), text="newest")
    edited, newest = asked.check()
    at = len(asked.log[0][0])
    assert newest.prefix is not None
    assert newest.prefix.length == at + 1
    assert [mask[at : at + 2].tolist() for mask in trained_masks((edited, newest))] == [[1, 0], [0, 1]]


def test_what_was_not_sampled_as_in_training_is_recorded_and_not_trained(asked: Asked) -> None:
    counted = len(asked.session.context(Conversation((USER,))))
    turn = asked.turn(Conversation((USER,)))
    assert counted == len(turn.ids)
    assert asked.session.samples() == (), "neither was answered"
    asked.session.land(turn, result("cold", (2, 5)), Message("assistant", "cold"), trained=False)
    asked(USER, Message("assistant", "cold"), Message("user", "two"), text="warm")
    [sample] = asked.session.samples()
    assert sample.fault() is None
    assert int(sample.loss_mask.sum()) == len(b"warm") + 1
    assert sample.versions[len(turn.ids) : len(turn.ids) + 5].tolist() == [2] * 5


class _Agent:
    """Does what agents do, as the data says: goes on, forks, edits, forgets, sends twice, asks at the same time."""

    def __init__(self, asked: Asked, data: st.DataObject) -> None:
        self.asked, self.data = asked, data
        self.histories: list[tuple[Message, ...]] = [(USER,)]
        self.waiting: list[tuple[Turn, tuple[Message, ...]]] = []

    def step(self) -> None:
        texts = st.sampled_from(["", "a", "b", "ab", "<think>t</think>a", " a "])
        history = self.data.draw(st.sampled_from(self.histories))
        act = self.data.draw(st.sampled_from(["ask", "ask", "edit", "compact", "helper", "land", "land"]))
        if act == "edit" and len(history) > 2:
            place = self.data.draw(st.integers(0, len(history) - 2))
            edited = msgspec.structs.replace(history[place], content=self.data.draw(texts))
            history = (*history[:place], edited, *history[place + 1 :])
        elif act == "compact":
            history = (SYSTEM, Message("user", self.data.draw(texts)))
        elif act == "helper":
            history = (Message("system", self.data.draw(texts)), USER)
        if act == "land" and self.waiting:
            turn, history = self.waiting.pop(self.data.draw(st.integers(0, len(self.waiting) - 1)))
            made = result(self.data.draw(texts), cut=self.data.draw(st.booleans()), seed=len(self.asked.log))
            if made.token_ids:
                reply = self.asked.answer(turn, made)
                self.histories.append((*history, reply, Message("user", self.data.draw(texts))))
        else:
            self.waiting.append((self.asked.turn(Conversation(history)), history))


@given(st.data(), st.integers(1, 25))
def test_whatever_an_agent_does_is_recorded_exactly_and_once(data: st.DataObject, steps: int) -> None:
    chat = ToyChat()
    agent = _Agent(Asked(Session(chat), chat, []), data)
    for _ in range(steps):
        agent.step()
    if agent.asked.log:
        agent.asked.check()
