"""Group-relative advantages: golden numbers, membership, fan-out and properties."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema.algorithm import ESTIMATORS, GROUP_RELATIVE, AlgorithmConfig
from models.algorithms.advantages import Episode, advantages, batch_advantages
from models.algorithms.returns import discounted_sums, gae, reward_to_go, token_rewards, whiten
from models.errors import AlgorithmError, InconsistentGroup, InsufficientMembers, UnknownAlgorithm


def of(estimator: str, values: list[float], *, normalize_std: bool = True) -> list[float]:
    return advantages(estimator, values, range(len(values)), normalize_std=normalize_std).tolist()


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize("reward", [0.5, 0.1, -3.3, 0.0])
def test_equal_rewards_give_exact_zeros(estimator: str, reward: float) -> None:
    assert of(estimator, [reward] * 3) == [0.0, 0.0, 0.0]


def test_a_rollout_that_fanned_out_counts_once() -> None:
    result = advantages("grpo", [1, 1, 1, 0, 0], [7, 7, 7, 3, 9])
    assert result.tolist() == pytest.approx([1.154699] * 3 + [-0.577349] * 2, abs=1e-6)
    assert result[0] != pytest.approx(0.7303, abs=1e-2)  # each sequence counted as a member


# Of rewards 1, 0 and 1/4, whose mean is 5/12 and whose deviation is 0.520416.
DIFFERENCES = [7 / 12, -5 / 12, -1 / 6]
SCALED = [1.120895, -0.800639, -0.320256]
OF_THREE = {
    "grpo": SCALED,
    "gspo": SCALED,
    "cispo": SCALED,
    "dr_grpo": DIFFERENCES,
    "reinforce_plus_plus_baseline": DIFFERENCES,
    "rloo": [7 / 8, -5 / 8, -1 / 4],  # less the mean of the other two
    "reinforce_plus_plus": [1, 0, 1 / 4],
    "ppo": [1, 0, 1 / 4],
    "on_policy_distillation": [0, 0, 0],
    "maxrl": [7 / 5, -1, -2 / 5],  # the differences over 5/12
    "gdpo": SCALED,  # of one component
}


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_values_of_a_group_golden(estimator: str) -> None:
    """Every name of the configuration is built."""
    expected = OF_THREE[estimator]
    assert of(estimator, [1, 0, 0.25]) == pytest.approx(expected, abs=1e-6)
    plain = DIFFERENCES if expected is SCALED else expected
    assert of(estimator, [1, 0, 0.25], normalize_std=False) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("estimator", "value"), [("reinforce_plus_plus", 0.7), ("ppo", 0.7), ("on_policy_distillation", 0)]
)
def test_estimators_that_finish_their_work_token_by_token_compare_nobody(estimator: str, value: float) -> None:
    assert of(estimator, [0.7]) == [value]


@pytest.mark.parametrize("estimator", sorted(GROUP_RELATIVE))
def test_rewards_as_they_are(estimator: str) -> None:
    assert advantages(estimator, [1, 0, 0.5], [0, 1, 2], normalize=False).tolist() == [1, 0, 0.5]
    assert advantages(estimator, [0.5], [3], normalize=False).tolist() == [0.5]
    assert advantages(estimator, [2, 2, 1], [3, 3, 4], normalize=False).tolist() == [2, 2, 1]
    with pytest.raises(InconsistentGroup):
        advantages(estimator, [2, 1], [3, 3], normalize=False)
    assert advantages("on_policy_distillation", [0.5], [3], normalize=False).tolist() == [0]


def test_maximum_likelihood_divides_by_the_chance_of_success() -> None:
    """One right answer of four weighs as much as all answers of four do together: (1 - 1/4) / (1/4) = 3."""
    assert of("maxrl", [0, 0, 1, 0]) == [-1.0, -1.0, 3.0, -1.0]
    assert of("maxrl", [0, 0, 0]) == [0.0, 0.0, 0.0]
    with pytest.raises(
        InconsistentGroup, match=r"divides by the mean reward of a group, here -0\.5: give rewards from 0"
    ):
        of("maxrl", [-1, 0])


def test_an_estimator_of_ones_own_must_answer_for_each_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_estimator.py").write_text(
        "def best_of(rewards, *, normalize_std):\n    return rewards == max(rewards)\n"
        "def one(rewards, *, normalize_std):\n    return rewards[:1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert of("my_estimator:best_of", [1, 3, 2]) == [0.0, 1.0, 0.0]
    with pytest.raises(InconsistentGroup, match=r"returned shape \[1\] for 3 rollouts"):
        of("my_estimator:one", [1, 2, 3])


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
    with pytest.raises(UnknownAlgorithm, match=r"choose one of cispo, dr_grpo, gdpo, grpo, .*did you mean 'grpo'"):
        of("grpoo", [1, 0])
    with pytest.raises(UnknownAlgorithm, match=r"importing .* failed"):
        of("no_such_module_here:f", [1, 3, 2])


# Advantages of single tokens: golden numbers, and what must hold for any batch.


def test_vapo_golden() -> None:
    """Four trained tokens, values 0.1, 0.2, 0.4, 0.3, reward 1 at the end, gamma 1, so that the deltas are
    0.1, 0.2, -0.1, 0.7. With alpha 0.5 lambda is 1 - 1 / (0.5 x 4) = 0.5: A = 0.7, 0.25, 0.325, 0.2625 from behind.
    Returns with lambda 1 are the reward, with lambda 0.5 they are A + V.
    """
    values = np.array([0.1, 0.2, 9.0, 0.4, 0.3])
    episode = Episode(mask=M1, advantages=np.zeros(5), reward=1.0, values=values)

    def made(**fields: Any) -> tuple[list[float], list[float]]:
        config = AlgorithmConfig(advantage_estimator="ppo", **fields)
        (found,) = batch_advantages(config, [episode])
        assert found.returns is not None
        return found.advantages.tolist(), found.returns.tolist()

    adaptive = [0.2625, 0.325, 0, 0.25, 0.7]
    advantages_, returns = made(lambd=0.9, lambd_alpha=0.5, critic_lambd=1.0)
    assert advantages_ == pytest.approx(adaptive)
    assert returns == pytest.approx([1, 1, 0, 1, 1])
    assert made(lambd=0.5)[1] == pytest.approx([0.3625, 0.525, 0, 0.65, 1])
    assert made(lambd=0.5, lambd_alpha=0.5) == made(lambd=0.5)
    # Short responses have no lambda below 0: each delta stands alone.
    assert made(lambd_alpha=0.05)[0] == pytest.approx([0.1, 0.2, 0, -0.1, 0.7])
    assert made(lambd_alpha=0.05)[1] == pytest.approx([1, 1, 0, 1, 1])  # --lambd, which is 1


Array = npt.NDArray[np.float64]

M1 = np.array([1, 1, 0, 1, 1], dtype=bool)
M2 = np.ones(3, dtype=bool)
OLD = np.array([-1.00, -0.60, -3.00, -2.30, -0.15]), np.array([-0.70, -1.20, -0.95])
REF = np.array([-1.10, -0.55, -2.80, -2.50, -0.20]), np.array([-0.60, -1.40, -1.00])


def two(rewards: tuple[float, float], advantages: tuple[float, float]) -> list[Episode]:
    """The two sequences of the fixture."""
    return [
        Episode(mask=mask, advantages=advantage * mask, reward=reward, student=old, reference=ref)
        for mask, advantage, reward, old, ref in zip((M1, M2), advantages, rewards, OLD, REF, strict=True)
    ]


def test_gae_golden() -> None:
    values = np.array([0.1, 0.2, 0.9, 0.3, 0.4])
    advantages, returns = gae(np.array([-0.01, -0.02, 0, -0.03, 0.96]), values, M1, gamma=0.95, lambd=0.9)
    np.testing.assert_allclose(advantages, [0.522141, 0.517124, 0, 0.528800, 0.560000], atol=1e-6)
    np.testing.assert_allclose(returns, [0.622141, 0.717124, 0, 0.828800, 0.960000], atol=1e-6)


REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}
BASELINE = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1}
WHITENED = {"normalize_advantages": True}


@pytest.mark.parametrize(("fields", "first", "second"), [
    (REINFORCE, [0.970, 0.980, 0, 0.975, 0.995], [-0.015, -0.025, -0.005]),
    (REINFORCE | WHITENED, [0.782855, 0.801654, 0, 0.792254, 0.829853], [-1.068872, -1.087671, -1.050073]),
    (BASELINE, [0.490, 0.505, 0, 0.480, 0.495], [-0.490, -0.520, -0.505]),
    (BASELINE | WHITENED, [0.796914, 0.825040, 0, 0.778163, 0.806289], [-1.040676, -1.096929, -1.068802]),
])  # fmt: skip
def test_kl_in_the_reward_golden(fields: dict[str, Any], first: list[float], second: list[float]) -> None:
    found = batch_advantages(AlgorithmConfig(**fields), two((1.0, 0.0), (0.5, -0.5)))
    np.testing.assert_allclose(found[0].advantages, first, atol=1e-6)
    np.testing.assert_allclose(found[1].advantages, second, atol=1e-6)
    assert found[0].reward_kl is not None
    np.testing.assert_allclose(found[0].reward_kl, [0.1, -0.05, 0, 0.2, 0.05], atol=1e-12)


@pytest.mark.parametrize(("estimator", "first", "second"), [
    ("grpo", [1.1, 1.1, 0, 1.4, 0.975], [-0.7, -0.7, -0.625]),
    ("on_policy_distillation", [0.1, 0.1, 0, 0.4, -0.025], [0.1, 0.1, 0.175]),
])  # fmt: skip
def test_distillation_golden(estimator: str, first: list[float], second: list[float]) -> None:
    teachers = np.array([-0.8, -0.4, np.nan, -1.5, -0.2]), np.array([-0.5, -1.0, -0.6])
    episodes = [
        dataclasses.replace(episode, teacher=teacher)
        for episode, teacher in zip(two((0.0, 0.0), (1.0, -0.8)), teachers, strict=True)
    ]
    found = batch_advantages(AlgorithmConfig(advantage_estimator=estimator), episodes, opd_kl_coef=0.5)
    np.testing.assert_allclose(found[0].advantages, first, atol=1e-6)
    np.testing.assert_allclose(found[1].advantages, second, atol=1e-6)


def test_the_reward_stands_at_the_last_trainable_token() -> None:
    np.testing.assert_array_equal(token_rewards(2.0, np.array([1, 1, 0, 0], dtype=bool)), [0, 2, 0, 0])
    np.testing.assert_array_equal(token_rewards(2.0, np.zeros(3, dtype=bool)), np.zeros(3))


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo"])
def test_sequences_without_a_trainable_token_give_zeros(estimator: str) -> None:
    dark = Episode(
        mask=np.zeros(2, dtype=bool), advantages=np.ones(2), reward=1.0, values=np.ones(2), student=np.ones(2)
    )
    empty = Episode(mask=np.zeros(0, dtype=bool), advantages=np.zeros(0), values=np.zeros(0), reward=1.0)
    config = AlgorithmConfig(advantage_estimator=estimator, normalize_advantages=True)
    found = batch_advantages(config, [dark, empty])
    assert [one.advantages.tolist() for one in found] == [[0.0, 0.0], []]


def test_missing_inputs_are_named() -> None:
    bare = [Episode(mask=M2, advantages=np.ones(3))]
    with pytest.raises(AlgorithmError, match="advantage_estimator=ppo needs values of the critic"):
        batch_advantages(AlgorithmConfig(advantage_estimator="ppo"), bare)
    with pytest.raises(AlgorithmError, match="kl_coef needs log-probs of the policy"):
        batch_advantages(AlgorithmConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.1), bare)
    with pytest.raises(AlgorithmError, match="opd_kl_coef needs log-probs"):
        batch_advantages(AlgorithmConfig(), bare, opd_kl_coef=0.1)
    batch_advantages(AlgorithmConfig(kl_coef=0.1), bare)  # group estimators have no KL in the reward


lengths = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def batch_of(sizes: list[int], seed: int) -> tuple[list[Array], list[npt.NDArray[np.bool_]]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(3.0, 2.0, n) for n in sizes], [rng.random(n) < 0.7 for n in sizes]


@given(lengths, st.integers(0, 1000))
def test_whitened_tokens_have_mean_0_and_deviation_1(sizes: list[int], seed: int) -> None:
    parts, masks = batch_of(sizes, seed)
    originals = [part.copy() for part in parts]
    white = whiten(parts, masks)
    kept = np.concatenate([part[mask] for part, mask in zip(white, masks, strict=True)])
    assert all((part[~mask] == 0).all() for part, mask in zip(white, masks, strict=True))
    for part, original in zip(parts, originals, strict=True):
        np.testing.assert_array_equal(part, original)
    if kept.size >= 2 and kept.std() > 0:
        assert kept.mean() == pytest.approx(0.0, abs=1e-9)
        variance = np.concatenate([part[mask] for part, mask in zip(originals, masks, strict=True)]).var(ddof=1)
        # 1 but for the epsilon under the root, which shows where two tokens are nearly equal.
        assert kept.std(ddof=1) == pytest.approx(np.sqrt(variance / (variance + 1e-8)), rel=1e-9)
    elif kept.size == 1:
        assert kept[0] == next(part[mask][0] for part, mask in zip(parts, masks, strict=True) if mask.any())


@given(st.lists(st.floats(-5, 5), max_size=40), st.floats(0, 1))
def test_discounted_sums_are_the_recurrence(terms: list[float], factor: float) -> None:
    expected, running = [], 0.0
    for term in reversed(terms):
        running = term + factor * running
        expected.append(running)
    np.testing.assert_allclose(discounted_sums(np.array(terms), factor), expected[::-1], atol=1e-9)


@given(st.integers(0, 1000), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_masked_tokens_are_transparent(seed: int, gamma: float, lambd: float) -> None:
    """What is put between trainable tokens changes nothing of them."""
    rng = np.random.default_rng(seed)
    mask = rng.random(9) < 0.6
    rewards, values = rng.normal(size=9), rng.normal(size=9)
    everything = np.ones(int(mask.sum()), dtype=bool)
    advantages, returns = gae(
        np.where(mask, rewards, np.nan), np.where(mask, values, np.nan), mask, gamma=gamma, lambd=lambd
    )
    alone = gae(rewards[mask], values[mask], everything, gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(advantages[mask], alone[0])
    np.testing.assert_allclose(returns[mask], alone[1])
    assert (advantages[~mask] == 0).all()
    np.testing.assert_allclose(
        reward_to_go(rewards, mask, gamma=gamma)[mask], reward_to_go(rewards[mask], everything, gamma=gamma)
    )
