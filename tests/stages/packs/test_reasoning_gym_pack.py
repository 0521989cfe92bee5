"""reasoning-gym as an environment: the right answers score, and no answer makes a scorer raise."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from episodes import Episode

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install reasoning-gym")

from models.tiny import ARITHMETIC_CHARACTERS
from stages.agents.packs.reasoning_gym import ANSWER_CHARS, SCORE_S, ReasoningGym, answer_of, scored


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
    [(0.25, 0.25), (2, 1.0), (-1, 0.0), (float("nan"), 0.0), (None, 0.0), ("x", 0.0), (AssertionError("x"), 0.0)],
)
def test_a_score_is_a_number_between_0_and_1(result: object, score: float) -> None:
    assert scored(Scorer(result), {}, "x") == score


@pytest.mark.slow
def test_a_scorer_without_an_end_is_ended() -> None:
    assert SCORE_S < 10
    assert scored(Scorer("endless"), {}, "x") == 0.0


async def test_partial_scores_can_be_refused() -> None:
    rewards = []
    for partial in (True, False):
        played = Episode(ReasoningGym(datasets=["chain_sum"], partial=partial))
        await played.start(metadata={"number": 3})
        rewards.append((await played.say("no, but 1234567")).reward)
    assert rewards[1] == 0.0
    assert rewards[0] is not None


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


async def test_tasks_can_be_asked_without_words_and_come_with_their_answers() -> None:
    datasets = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    for task in islice(ReasoningGym.tasks("train", 0, datasets, "{expression} ="), 20):
        environment = ReasoningGym(datasets=datasets, prompt="{expression} =", instructions="", partial=False)
        played = Episode(environment)
        (asked,) = (await played.start(metadata=task)).messages
        assert asked.content == task["input"]
        assert set(task["input"] + task["demonstration"]) <= set(ARITHMETIC_CHARACTERS)
        one, sign, other, _ = task["input"].split()
        value = int(one) + int(other) if sign == "+" else int(one) - int(other)
        assert task["demonstration"] == f"{value}\n"
        assert (await played.say(task["demonstration"])).reward == 1.0


async def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'chain_sum'"):
        ReasoningGym(datasets=["chain_sun"])
    with pytest.raises(ValueError, match="datasets is empty"):
        ReasoningGym(datasets=[])
    with pytest.raises(ValueError, match=r"metadata\.dataset is 'sudoku'"):
        await ReasoningGym(datasets=["chain_sum"]).reset(Episode.task(metadata={"dataset": "sudoku"}))
