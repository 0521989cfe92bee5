"""From grades to a reward: components, `--reward-key`, overlong shaping and masking, with golden numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.data import RewardConfig
from stages.graders.grade import Grade, UnknownGraderError, as_grade, failed
from stages.graders.registry import outside
from stages.reward.components import (
    PART,
    Component,
    Overlong,
    Row,
    Selection,
    combined,
    parse_components,
    picked,
    shaped,
)
from tests.stages.stage_rig import make_sample

REFERENCE = ("acc=math@0.8", "fmt=format:<a>.*</a>@0.1", "len=length:100@0.1")


def test_the_weighted_sum_of_the_reference() -> None:
    parts = parse_components(REFERENCE)
    grades = [Grade(1.0, True, extracted="7"), Grade(0.5), Grade(1.0)]
    found = combined(parts, grades)
    assert found.score == pytest.approx(0.95)
    assert found.parts == {"acc": 1.0, "fmt": 0.5, "len": 1.0}
    assert (found.is_correct, found.extracted, found.status) == (True, "7", "ok")


def test_the_grader_stands_between_the_first_equals_sign_and_the_last_at() -> None:
    (found,) = parse_components(["fmt=format:(a=b)@c@0.5"])
    assert found == Component("fmt", "format:(a=b)@c", 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("acc", "has no grader and weight; write name=GRADER@WEIGHT"),
        ("acc=math", "has no grader and weight"),
        ("acc=@1", "has no grader and weight"),
        ("=math@1", "'' is no name of a metric"),
        ("a b=math@1", "'a b' is no name of a metric"),
        ("acc=math@x", "'x' is no finite weight"),
        ("acc=math@nan", "'nan' is no finite weight"),
        ("acc=math@", "'' is no finite weight"),
    ],
)
def test_components_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UnknownGraderError, match=words.replace("(", r"\(")):
        parse_components([text])


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(UnknownGraderError, match="names 'acc' twice"):
        parse_components(["acc=exact@1", "acc=math@1"])


def test_one_failed_component_fails_the_sample() -> None:
    parts = parse_components(["a=exact@1", "b=judge@1"])
    found = combined(parts, [Grade(1.0), failed("no answer", "timeout")])
    assert (found.error, found.status, found.score) == ("component 'b': no answer", "timeout", 0.0)


def test_the_first_component_that_knows_says_whether_it_is_right() -> None:
    parts = parse_components(["fmt=format:x@1", "acc=exact@1", "also=exact@1"])
    grades = [Grade(1.0), Grade(0.0, False), Grade(1.0, True)]
    assert combined(parts, grades).is_correct is False


def test_parts_of_a_component_keep_its_name() -> None:
    found = combined(parse_components(["code=code@2"]), [Grade(0.5, parts={"pass_frac": 0.25})])
    assert (found.score, found.parts) == (1.0, {"code": 0.5, "code/pass_frac": 0.25})


finite = st.floats(-100, 100)


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(finite, finite), min_size=1))
def test_the_sum_is_linear(values: dict[str, tuple[float, float]]) -> None:
    parts = [Component(name, "exact", weight) for name, (weight, _) in values.items()]
    found = combined(parts, [Grade(score) for _, score in values.values()])
    assert found.score == pytest.approx(sum(weight * score for weight, score in values.values()))
    assert found.parts == {name: score for name, (_, score) in values.items()}


def test_overflow_is_no_reward() -> None:
    parts = [Component("a", "exact", 1e308), Component("b", "exact", 1e308)]
    assert "the weighted sum of the components is inf" in (combined(parts, [Grade(1.0), Grade(1.0)]).error or "")


def test_reward_key_picks_a_part() -> None:
    grade = Grade(-1.0, False, {"acc": 0.0})
    assert picked(grade, None, "dapo") is grade
    assert picked(grade, "score", "dapo") is grade
    assert picked(grade, "acc", "dapo") == Grade(0.0, False, {"score": -1.0, "acc": 0.0})
    assert picked(grade, "accuracy", "dapo").error == (
        "--reward-key is 'accuracy', but dapo returned only: score, acc; set it to one of these"
    )
    bad = failed("gone")
    assert picked(bad, "acc", "dapo") is bad


def test_a_dict_without_a_score_needs_the_key() -> None:
    assert picked(as_grade({"acc": 0.5, "fmt": 1}, "acc"), "acc", "mine").score == 0.5
    assert "needs a number under 'score'; its keys: acc, fmt" in (as_grade({"acc": 0.5, "fmt": 1}).error or "")
    assert "needs a number under 'f1'; its keys: acc" in (as_grade({"acc": 0.5}, "f1").error or "")


ORDER = [
    (Row("exact", "own:grade"), "mine:grade", "own:grade"),
    (Row("exact", None), "mine:grade", "mine:grade"),
    (Row("exact", None), None, "exact"),
    (Row(), None, "gsm8k"),
]


@pytest.mark.parametrize(("row", "flag", "chosen"), ORDER)
def test_order_of_selection(row: Row, flag: str | None, chosen: str) -> None:
    selection = Selection(RewardConfig(rm_type="gsm8k", custom_rm_path=flag))
    assert [part.grader for part in selection.graders(row)] == [chosen]


@pytest.mark.parametrize(
    ("given_", "full"), [("math", "math:compat"), ("boxed_math", "boxed_math:compat"), ("math:verify", "math:verify")]
)
def test_math_takes_its_dialect_from_the_flag(given_: str, full: str) -> None:
    selection = Selection(RewardConfig(rm_type=given_, math_equivalence="compat"))
    assert selection.configured() == (full,)
    assert [part.grader for part in selection.graders(Row())] == [full]


def test_code_ends_before_its_process_is_killed() -> None:
    assert Selection(RewardConfig(rm_type="code", reward_deadline_s=10)).configured() == ("code:8",)
    assert Selection(RewardConfig(rm_type="code:3")).configured() == ("code:3",)


def test_a_row_chooses_for_the_components_that_say_auto() -> None:
    selection = Selection(RewardConfig(reward_component=("acc=auto@0.9", "fmt=format:x@0.1"), rm_type="gsm8k"))
    assert [part.grader for part in selection.graders(Row())] == ["auto", "format:x"]
    assert [part.grader for part in selection.graders(Row("math"))] == ["math:either", "format:x"]
    assert selection.configured() == ("auto", "format:x")


def test_which_graders_the_stage_asks_itself() -> None:
    assert outside("remote") == ("remote", None)
    assert outside("remote:http://host:1/rm") == ("remote", "http://host:1/rm")
    assert outside("judge:strict") == ("judge", "strict")
    assert outside("remotely") is outside("exact") is outside("mine:judge") is None


GOLDEN = Overlong(limit=100, buffer=20, factor=1.0)


@pytest.mark.parametrize(("length", "penalty"), [(50, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)])
def test_overlong_golden_numbers(length: int, penalty: float) -> None:
    assert GOLDEN.penalty(length) == pytest.approx(penalty, abs=1e-12)
    assert Overlong(100, 20, 0.5).penalty(length) == pytest.approx(0.5 * penalty, abs=1e-12)


def test_beyond_the_limit_the_penalty_stays() -> None:
    """Several turns together may be longer than the limit of one."""
    assert GOLDEN.penalty(101) == GOLDEN.penalty(1000) == -1.0


@given(
    st.integers(1, 4000), st.integers(1, 2000), st.floats(0, 4), st.lists(st.integers(0, 9000), min_size=2, max_size=9)
)
def test_the_penalty_only_grows_with_the_length(limit: int, buffer: int, factor: float, lengths: list[int]) -> None:
    overlong = Overlong(limit, buffer, factor)
    penalties = [overlong.penalty(length) for length in sorted(lengths)]
    assert penalties == sorted(penalties, reverse=True)
    assert all(-factor <= penalty <= 0 for penalty in penalties)
    assert overlong.penalty(limit - buffer) == 0


def test_the_raw_reward_is_kept_where_shaping_changed_it() -> None:
    sample = shaped(make_sample(reward=1.0), GOLDEN, 90, mask_truncated=False)
    assert (sample.reward, sample.raw_reward, sample.reward_parts) == (0.5, 1.0, {PART: -0.5})
    short = shaped(make_sample(reward=1.0), GOLDEN, 10, mask_truncated=False)
    assert (short.reward, short.raw_reward, short.reward_parts) == (1.0, None, {PART: 0.0})


def test_a_sample_is_shaped_once() -> None:
    once = shaped(make_sample(reward=1.0), GOLDEN, 90, mask_truncated=True)
    assert shaped(once, GOLDEN, 90, mask_truncated=True) is once


def test_off_and_ungraded_samples_stay_as_they_are() -> None:
    sample = make_sample(reward=1.0)
    assert shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=True) is sample
    ungraded = make_sample()
    assert shaped(ungraded, GOLDEN, 100, mask_truncated=True) is ungraded


def test_truncated_samples_are_masked_but_keep_their_reward() -> None:
    sample = make_sample(reward=0.25, status="truncated")
    masked = shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=True)
    assert (masked.remove_sample, masked.reward) == (True, 0.25)
    assert not shaped(sample, Overlong(100, 0, 1.0), 100, mask_truncated=False).remove_sample
