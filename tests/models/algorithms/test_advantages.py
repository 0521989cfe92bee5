"""Group-relative advantages: golden numbers, membership, fan-out and properties."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.algorithm import ESTIMATORS, GROUP_RELATIVE
from models.algorithms import advantages as module
from models.algorithms.advantages import advantages
from models.errors import InconsistentGroup, InsufficientMembers, UnknownAlgorithm

rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=9)


def of(estimator: str, values: list[float], *, normalize_std: bool = True) -> list[float]:
    return advantages(estimator, values, range(len(values)), normalize_std=normalize_std).tolist()


def test_uneven_groups_are_normalised_each_on_its_own() -> None:
    assert of("grpo", [1, 0, 0, 1]) == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert of("grpo", [1, 0, 0]) == pytest.approx([1.154699, -0.577349, -0.577349], abs=1e-6)
    assert of("rloo", [1, 0, 0, 1]) == pytest.approx([0.666667, -0.666667, -0.666667, 0.666667], abs=1e-6)
    assert of("rloo", [1, 0, 0]) == pytest.approx([1, -0.5, -0.5], abs=1e-6)
    for mean_only in (of("dr_grpo", [1, 0, 0]), of("grpo", [1, 0, 0], normalize_std=False)):
        assert mean_only == pytest.approx([0.666667, -0.333333, -0.333333], abs=1e-6)
    # The answer of a normalisation over both groups together.
    assert of("grpo", [1, 0, 0, 1])[0] != pytest.approx(1.069043, abs=1e-2)
    assert of("grpo", [0.5, 0.5, 0.5]) == [0, 0, 0]


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize("reward", [0.5, 0.1, -3.3, 0.0])
def test_equal_rewards_give_exact_zeros(estimator: str, reward: float) -> None:
    assert of(estimator, [reward] * 3) == [0.0, 0.0, 0.0]


def test_a_rollout_that_fanned_out_counts_once() -> None:
    result = advantages("grpo", [1, 1, 1, 0, 0], [7, 7, 7, 3, 9])
    assert result.tolist() == pytest.approx([1.154699] * 3 + [-0.577349] * 2, abs=1e-6)
    assert result[0] != pytest.approx(0.7303, abs=1e-2)  # each sequence counted as a member


def test_every_name_of_the_configuration_is_built() -> None:
    assert sorted(module.ESTIMATORS) == sorted(ESTIMATORS)


@pytest.mark.parametrize("estimator", ["gspo", "cispo"])
def test_losses_of_sequences_and_clipped_weights_share_the_baseline_of_grpo(estimator: str) -> None:
    assert of(estimator, [1, 0, 0]) == of("grpo", [1, 0, 0])
    assert of(estimator, [1, 0, 0], normalize_std=False) == of("dr_grpo", [1, 0, 0])


def test_estimators_that_finish_their_work_token_by_token() -> None:
    assert of("reinforce_plus_plus_baseline", [1, 0]) == [0.5, -0.5]
    assert of("reinforce_plus_plus_baseline", [1, 0, 0]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    for estimator in ("reinforce_plus_plus", "ppo"):
        assert of(estimator, [1, 0, 0.25]) == [1, 0, 0.25]
        assert of(estimator, [0.7]) == [0.7]  # nobody to compare with, and nothing to compare
        assert advantages(estimator, [3, 3, 1], [5, 5, 2]).tolist() == [3, 3, 1]
    assert of("on_policy_distillation", [1, 0, 3]) == [0, 0, 0]
    assert of("on_policy_distillation", [1]) == [0]


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
def test_rewards_as_they_are(estimator: str) -> None:
    assert advantages(estimator, [1, 0, 0.5], [0, 1, 2], normalize=False).tolist() == [1, 0, 0.5]
    assert advantages(estimator, [0.5], [3], normalize=False).tolist() == [0.5]
    assert advantages(estimator, [2, 2, 1], [3, 3, 4], normalize=False).tolist() == [2, 2, 1]
    with pytest.raises(InconsistentGroup):
        advantages(estimator, [2, 1], [3, 3], normalize=False)
    assert advantages("on_policy_distillation", [0.5], [3], normalize=False).tolist() == [0]


def test_an_estimator_of_ones_own_must_answer_for_each_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short_estimator.py").write_text("def one(rewards, *, normalize_std):\n    return rewards[:1]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InconsistentGroup, match=r"returned shape \[1\] for 3 rollouts"):
        of("short_estimator:one", [1, 2, 3])


def test_order_of_rollout_ids_does_not_matter() -> None:
    assert advantages("rloo", [0, 1, 0], [5, 2, 9]).tolist() == pytest.approx([-0.5, 1.0, -0.5])


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize(("values", "ids"), [([], []), ([1.0], [0]), ([1.0, 1.0], [4, 4])])
def test_one_rollout_is_not_a_group(estimator: str, values: list[float], ids: list[int]) -> None:
    with pytest.raises(InsufficientMembers, match="at least 2"):
        advantages(estimator, values, ids)


def test_contradictions_are_refused() -> None:
    with pytest.raises(InconsistentGroup, match=r"rollout 1 carries rewards 1\.0 and 2\.0"):
        advantages("grpo", [1, 2, 0], [1, 1, 2])
    with pytest.raises(InconsistentGroup, match="2 rewards for 3 rollout ids"):
        advantages("grpo", [1, 2], [1, 1, 2])
    with pytest.raises(InconsistentGroup, match="reward nan is not finite"):
        advantages("grpo", [1, float("nan")], [1, 2])


def test_unknown_name_is_refused_with_a_hint() -> None:
    with pytest.raises(UnknownAlgorithm, match=r"choose one of cispo, dr_grpo, grpo, .*did you mean 'grpo'"):
        of("grpoo", [1, 0])


def test_import_path_selects_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_estimator.py").write_text(
        "def best_of(rewards, *, normalize_std):\n    return rewards == max(rewards)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert of("my_estimator:best_of", [1, 3, 2]) == [0.0, 1.0, 0.0]
    with pytest.raises(UnknownAlgorithm, match="has no 'worst_of'"):
        of("my_estimator:worst_of", [1, 3, 2])
    with pytest.raises(UnknownAlgorithm, match=r"importing .* failed"):
        of("no_such_module_here:f", [1, 3, 2])


@given(rewards, st.floats(-5, 5), st.floats(0.1, 10))
def test_shift_and_scale_of_rewards(values: list[float], shift: float, scale: float) -> None:
    for estimator in ("dr_grpo", "rloo"):
        moved = of(estimator, [scale * v + shift for v in values])
        assert moved == pytest.approx([scale * a for a in of(estimator, values)], abs=1e-6)


@given(rewards)
def test_sum_is_zero_and_sign_follows_the_mean(values: list[float]) -> None:
    for estimator in ("grpo", "dr_grpo", "rloo"):
        result = np.array(of(estimator, values))
        assert abs(result.sum()) < 1e-6
        off = np.array(values) - np.mean(values)
        clear = np.abs(off) > 1e-9
        assert (np.sign(result[clear]) == np.sign(off[clear])).all() or np.ptp(values) == 0
        assert np.isfinite(result).all()


@given(rewards, st.randoms())
def test_permutation(values: list[float], random: object) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for estimator in ("grpo", "rloo"):
        straight = of(estimator, values)
        assert of(estimator, [values[i] for i in order]) == pytest.approx([straight[i] for i in order], abs=1e-9)


def test_stages_can_call_it_without_torch() -> None:
    code = (
        "import sys\n"
        "import models.algorithms.advantages\n"
        "import models.algorithms.aggregation\n"
        "models.algorithms.advantages.advantages('grpo', [1, 0], [0, 1])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
