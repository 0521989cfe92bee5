"""`math` on pairs of answers and labels: what is right scores 1, what a learner would find and exploit scores 0."""

from __future__ import annotations

import pytest

from stages.graders.math.equality import same_answer
from stages.graders.math.mathematics import SYMBOLIC_S, prepare
from stages.workers.serve import CpuLimitError, cpu_limit
from tests.stages.graders.cases_answers import WRONG, pairs
from tests.stages.graders.grading_rig import grade

PAIRS = pairs()
RIGHT = [pair[:2] for pair in PAIRS if pair[2] == 1 and "=" not in str(pair)]


def test_the_table_is_long_and_says_nothing_twice() -> None:
    assert len(PAIRS) >= 400
    assert len({pair[:2] for pair in PAIRS}) == len(PAIRS)
    assert min(sum(score == wanted for *_, score in PAIRS) for wanted in (0, 1)) >= 150


@pytest.mark.parametrize(("answer", "label", "score"), PAIRS)
def test_math(answer: str, label: str, score: int) -> None:
    found = grade("math", rf"so \boxed{{{answer}}}.", label)
    assert (found.score, found.error, found.status) == (score, None, "ok")


@pytest.mark.parametrize("group", ["letters and words", "negations and what is hidden", "thousands"])
def test_math_verify_takes_no_wrong_answer_either(group: str) -> None:
    for line in WRONG[group].strip().splitlines():
        answer, _, label = line.partition(" || ")
        assert grade("math_verify", rf"\boxed{{{answer}}}", label).score == 0.0, line


@pytest.mark.parametrize(("answer", "label"), RIGHT[::5])
def test_equality_has_no_sides(answer: str, label: str) -> None:
    assert same_answer(label, answer) is True


def deaf() -> None:
    """What a library catches does not hold the limit up."""
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_the_limit_of_processor_time_ends_what_takes_too_long_and_nothing_else() -> None:
    with pytest.raises(CpuLimitError, match=r"0\.05 s of processor time"), cpu_limit(0.05):
        deaf()
    with cpu_limit(SYMBOLIC_S):
        sum(range(1000))
    for _ in range(2_000_000):  # no timer is left that would go off now
        pass


def test_a_text_that_uses_up_its_time_is_wrong_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_answer: str, _label: str) -> bool:
        while True:
            pass

    prepare()  # which compares once, without a limit
    with monkeypatch.context() as patched:
        patched.setattr("stages.graders.math.mathematics.same_answer", endless)
        patched.setattr("stages.graders.math.mathematics.SYMBOLIC_S", 0.05)
        found = grade("math", r"\boxed{x+1}", "x+2")
    assert (found.score, found.is_correct, found.error, found.status) == (0.0, False, None, "timeout")
    assert grade("math", r"\boxed{x+1}", "1+x").score == 1.0
