"""The packs reasoning_gym and multi_agent: episodes by hand, scores, and what they refuse."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.environment import Environment, Start, Task
from stages.agents.packs.multi_agent import MultiAgent
from stages.agents.packs.reasoning_gym import ANSWER_CHARS, SCORE_S, ReasoningGym, answer_of, scored
from stages.chat.messages import Message
from tests.stages.agents.play import Episode, needs


@needs("reasoning_gym")
async def test_an_episode_is_one_question_and_one_score() -> None:
    played = Episode(ReasoningGym(datasets={"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}))
    start = await played.start(metadata={"dataset": "chain_sum", "number": 11})
    system, question = start.messages
    assert system.content == "Write your answer between <answer> and </answer>."
    assert question.content.startswith("State the final answer to the following arithmetic problem: ")
    sum_ = eval(question.content.rpartition(": ")[2].rstrip(" ="))  # two digits and a sign
    end = await played.say(f"Let me see. <answer> {sum_} </answer>")
    assert (end.done, end.reward, end.metrics) == (True, 1.0, {"chain_sum": 1.0})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("<answer>1</answer> no, <answer>\n2 </answer>.", "2"),
        ("<answer>half", "half"),
        ("", ""),
        ("<answer></answer>", ""),
    ],
)
def test_answers_are_read(text: str, answer: str) -> None:
    assert answer_of(text) == answer


def test_a_text_of_marks_is_read_quickly() -> None:
    assert len(answer_of("<answer>" * 100_000)) <= ANSWER_CHARS


GARBAGE = ["", "?", "a" * 100_000, "\x00", "\ud800", "[" * 5000, "1e999", "-", "None", "(1,", "0/0", "9" * 10_000]


@needs("reasoning_gym")
async def test_garbage_is_worth_a_number_in_every_dataset_of_a_few() -> None:
    names = ["prime_factorization", "chain_sum", "countdown", "simple_equations", "sudoku", "spell_backward"]
    pack = ReasoningGym(datasets=names)
    for name in names:
        played = Episode(pack)
        await played.start(metadata={"dataset": name, "number": 3})
        for text in GARBAGE:
            end = await played.say(text)
            assert end.reward is not None
            assert 0.0 <= end.reward < 1.0, (name, text[:20])


class Scorer:
    def __init__(self, result: Any) -> None:
        self._result = result

    def score_answer(self, answer: str, entry: object) -> Any:
        if self._result == "endless":
            while True:
                pass
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    ("result", "score"),
    [
        *((0.25, 0.25), (2, 1.0), (-1, 0.0), (float("nan"), 0.0), (None, 0.0), ("x", 0.0), (AssertionError("x"), 0.0)),
        ("endless", 0.0),
    ],
)
def test_a_score_is_a_number_between_0_and_1(result: object, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SCORE_S < 10
    monkeypatch.setattr("stages.agents.packs.reasoning_gym.SCORE_S", 0.05)
    assert scored(Scorer(result), {}, "x") == score


@needs("reasoning_gym")
async def test_partial_scores_can_be_refused() -> None:
    rewards = []
    for partial in (True, False):
        played = Episode(ReasoningGym(datasets=["chain_sum"], partial=partial))
        await played.start(metadata={"number": 3})
        rewards.append((await played.say("no, but 1234567")).reward)
    assert rewards[1] == 0.0
    assert rewards[0] is not None


@needs("reasoning_gym")
async def test_tasks_are_the_same_everywhere_and_the_splits_share_none() -> None:
    datasets = {"chain_sum": {}, "leg_counting": {"max_animals": 4}}
    train, heldout = (list(islice(ReasoningGym.tasks(split, 4, datasets), 100)) for split in ("train", "heldout"))
    assert [task["dataset"] for task in train[:4]].count("leg_counting") == 2
    assert not {task["number"] for task in train} & {task["number"] for task in heldout}
    questions = []
    for _ in range(2):
        starts = [await Episode(ReasoningGym(datasets=datasets)).start(metadata=task) for task in train[:4]]
        questions.append(json.dumps([start.messages[-1].content for start in starts]))
    assert questions[0] == questions[1]


@needs("reasoning_gym")
async def test_tasks_can_be_posed_without_words_and_come_with_their_answers() -> None:
    datasets = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    for task in islice(ReasoningGym.tasks("train", 0, datasets, "{expression} ="), 20):
        environment = ReasoningGym(datasets=datasets, prompt="{expression} =", instructions="", partial=False)
        played = Episode(environment)
        (requested,) = (await played.start(metadata=task)).messages
        assert requested.content == task["input"]
        assert set(task["input"] + task["demonstration"]) <= set(ARITHMETIC_CHARACTERS)
        one, sign, other, _ = task["input"].split()
        value = int(one) + int(other) if sign == "+" else int(one) - int(other)
        assert task["demonstration"] == f"{value}\n"
        assert (await played.say(task["demonstration"])).reward == 1.0


@needs("reasoning_gym")
async def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        ReasoningGym(datasets=["chain_sun"])
    with pytest.raises(ValueError, match="datasets is empty"):
        ReasoningGym(datasets=[])
    with pytest.raises(ValueError, match=r"metadata\.dataset is 'sudoku'"):
        await ReasoningGym(datasets=["chain_sum"]).reset(Episode.task(metadata={"dataset": "sudoku"}))


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
    requested = await played.say(answer)
    assert not requested.done
    assert requested.reward is None
    assert "Is the last answer right?" in requested.messages[0].content
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
