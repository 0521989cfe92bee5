"""Solver and verifier: who is paid for what."""

from __future__ import annotations

from itertools import islice

import pytest
from episodes import Episode

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.environment import Environment, Start, Task
from stages.agents.packs.multi_agent import MultiAgent
from stages.chat.messages import Message


async def begun(label: str = "85", **options: object) -> Episode:
    environment = MultiAgent(**options)  # type: ignore[arg-type]
    assert isinstance(environment, Environment)
    start = await environment.reset(Task((Message("user", "37+48="),), label=label))
    assert start == Start((Message("user", "37+48="),))
    return Episode(environment)


@pytest.mark.parametrize(
    ("answer", "verdict", "reward", "correct", "true_verdicts"),
    [
        ("It is 85", "yes", 1.5, 1.0, 1.0),
        ("It is 85", "Hm. yes... but no", 1.0, 1.0, 0.0),
        ("It is 84", "No.", 0.5, 0.0, 1.0),
        ("It is 84", "YES", 0.0, 0.0, 0.0),
        ("It is 84", "I do not know", 0.0, 0.0, 0.0),
        ("It is 85", "nothing, yesterday", 1.0, 1.0, 0.0),
        ("", "", 0.0, 0.0, 0.0),
    ],
)
async def test_a_round_by_hand(answer: str, verdict: str, reward: float, correct: float, true_verdicts: float) -> None:
    played = await begun()
    asked = await played.say(answer)
    assert not asked.done
    assert asked.reward is None
    assert "Is the last answer right?" in asked.messages[0].content
    end = await played.say(verdict)
    assert (end.done, end.reward) == (True, reward)
    assert end.metrics == {"correct": correct, "answers": 1.0, "true_verdicts": true_verdicts}


async def test_a_doubted_answer_is_given_again() -> None:
    played = await begun(rounds=2, verdict_share=0.25)
    await played.say("84")
    doubted = await played.say("no")
    assert (doubted.done, doubted.reward) == (False, 0.25)
    assert "give another" in doubted.messages[0].content
    await played.say("85")
    end = await played.say("no")  # wrongly, and there is no third round
    assert (end.done, end.reward) == (True, 1.0)
    assert end.metrics == {"correct": 1.0, "answers": 2.0, "true_verdicts": 0.5}


async def test_an_episode_that_is_cut_off_is_worth_its_answer() -> None:
    played = await begun()
    end = await played.say("85", truncated=True)
    assert (end.done, end.reward) == (True, 1.0)
    played = await begun()
    await played.say("85")
    end = await played.say("yes" * 100_000, truncated=True)
    assert (end.done, end.reward) == (True, 1.0)


async def test_lying_never_pays() -> None:
    with pytest.raises(ValueError, match="must be worth less than 1"):
        MultiAgent(rounds=2, verdict_share=0.5)
    with pytest.raises(ValueError, match="grader is 'code'"):
        MultiAgent(grader="code")
    with pytest.raises(ValueError, match="no label"):
        await MultiAgent().reset(Task())


async def test_demonstrations_are_episodes() -> None:
    tasks = list(islice(MultiAgent.tasks("train", 0), 400))
    assert {c for task in tasks for c in task["input"] + task["demonstration"]} <= set(ARITHMETIC_CHARACTERS)
    right = 0
    for task in tasks:
        text, (start, end) = task["demonstration"], task["tool_spans"][0]
        answer, _, verdict = text.partition("\n:")
        right += verdict == "+\n"
        assert (verdict == "+\n") == (answer == task["label"])
        assert text[end:] == verdict  # learnt in either case
        assert text[:start] == (f"{answer}\n" if verdict == "+\n" else "")  # the answer only if it is right
        environment = MultiAgent(ask=":", right="+", wrong="-")
        await environment.reset(Task((Message("user", task["input"]),), label=task["label"]))
        played = Episode(environment)
        assert (await played.say(answer)).messages == (Message("user", ":"),)
        assert (await played.say(verdict)).metrics["true_verdicts"] == 1.0
    assert 150 < right < 250
    heldout = {task["input"] for task in islice(MultiAgent.tasks("heldout", 0), 400)}
    assert not heldout & {task["input"] for task in tasks}


def test_sums_can_be_smaller_and_the_splits_share_none() -> None:
    train, heldout = (
        {task["input"] for task in islice(MultiAgent.tasks(split, 1, below=10), 3000)} for split in ("train", "heldout")
    )
    assert train | heldout == {f"{one}+{other}=" for one in range(10) for other in range(10)}
    assert (len(train), len(heldout)) == (90, 10)
