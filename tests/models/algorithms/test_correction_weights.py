"""Importance weights: order of operations, bounds by age, functions of one's own; anchors; off-policy masking."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.correction import (
    Correction,
    ImportanceWeights,
    alpha,
    importance_weights,
    log_weight_of,
    loglinear_old_log_probs,
    with_old_log_probs,
    without_drifted,
)
from models.algorithms.losses import policy_loss_of, ppo_clip
from models.algorithms.metrics import step_statistics
from models.algorithms.objective import policy_objective
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError, UnknownAlgorithm

STALENESS = torch.tensor([0, 1, 1, 2, 3, 0, 1, 4])
PPO = AlgorithmConfig(policy_loss="ppo")


def weights_of(tokens: PolicyTokens, correction: Correction) -> ImportanceWeights:
    return importance_weights(tokens, correction, log_weight_of(tokens, correction))


def test_older_tokens_have_the_tighter_bound(f, close) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", True, tis_clip_low=0.0, tis_clip=3.0, tis_clip_decay=0.5)
    far = f.tokens(old_log_probs=f.mu + 5.0, staleness=STALENESS)
    bounds = [1 + 2 * 0.5**age for age in STALENESS.tolist()]
    bounds[2] = 1.0  # masked
    close(weights_of(far, correction).weight, bounds)
    ice = Correction("decoupled", True, tis_clip_low=0.0, tis_clip=3.0, tis_clip_decay=0.5, tis_mode="icepop")
    near = f.tokens(old_log_probs=f.mu + math.log(1.6), staleness=STALENESS)
    close(weights_of(near, ice).weight, [1.6, 1.6, 1, 0, 0, 1.6, 1.6, 0])  # bounds 3, 2, 1.5, 1.25, 1.125
    # Without ages, and without decay, the bound is the same for all.
    assert float(weights_of(f.tokens(old_log_probs=f.mu + 5.0), correction).weight[7]) == 3.0


def test_sums_are_made_before_anything_is_clamped(f) -> None:  # type: ignore[no-untyped-def]
    old = f.mu.clone()
    old[0] += 60.0
    old[1] -= 30.0
    old[3] -= 30.0
    old[4] += math.log(1.5)
    tokens = f.tokens(old_log_probs=old)
    for level, expected in (("sequence", 1.5), ("geometric", 1.5**0.25)):
        weights = weights_of(tokens, Correction("decoupled", True, tis_level=level, tis_clip=9.0))  # type: ignore[arg-type]
        assert weights.weight[:5].tolist() == pytest.approx([expected, expected, 1.0, expected, expected])
        assert not weights.truncated.any()


def test_masked_tokens_are_no_part_of_a_sequence_statistic(f) -> None:  # type: ignore[no-untyped-def]
    old = f.old.clone()
    old[2] = -500.0
    for level in ("sequence", "geometric"):
        correction = Correction("decoupled", True, tis_level=level)  # type: ignore[arg-type]
        moved, straight = weights_of(f.tokens(old_log_probs=old), correction), weights_of(f.tokens(), correction)
        assert torch.equal(moved.weight, straight.weight)


def test_weights_against_the_current_policy(f, close) -> None:  # type: ignore[no-untyped-def]
    current = Correction("decoupled", True, tis_clip=1.2, correction_ratio="current")
    rho = [1.2, 0.778801, 1, 0.904837, 0.980199, 1.2, 1.2, 0.272532]
    close(weights_of(f.tokens(), current).weight, rho)


def test_batch_normalised_weights_have_mean_one(f) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", True, tis_clip=1.2, tis_batch_normalize=True)
    statistics = step_statistics(f.tokens(), PPO, correction)
    loss = policy_objective(f.tokens(statistics=statistics), PPO, correction, ppo_clip).loss
    plain = ppo_clip(f.tokens(), PPO).loss
    factor = (loss / plain)[f.mask]
    assert float(factor.mean()) == pytest.approx(1.0)


def test_weights_of_ones_own(f, close, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "my_weights.py").write_text(
        "import torch\n"
        "def root(log_weight, tokens):\n    return (0.5 * log_weight + 0 * tokens.log_probs).exp()\n"
        "def few(log_weight, tokens):\n    return log_weight[:2]\n"
        "def number(log_weight, tokens):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tokens = f.tokens(f.theta.clone().requires_grad_())
    weights = weights_of(tokens, Correction("decoupled", True, custom_tis_function_path="my_weights:root"))
    expected = (0.5 * (f.old - f.mu)).exp()
    expected[2] = 1.0
    close(weights.weight, expected.tolist())
    assert not weights.weight.requires_grad
    with pytest.raises(AlgorithmError, match=r"'my_weights:few' returned \[2\]: return one weight for each of the 8"):
        weights_of(tokens, Correction("decoupled", True, custom_tis_function_path="my_weights:few"))
    with pytest.raises(AlgorithmError, match="returned float"):
        weights_of(tokens, Correction("decoupled", True, custom_tis_function_path="my_weights:number"))
    with pytest.raises(UnknownAlgorithm, match="has no 'fewer'"):
        weights_of(tokens, Correction("decoupled", True, custom_tis_function_path="my_weights:fewer"))


def test_alpha_of_both_conventions() -> None:
    ages = torch.tensor([-2, 0, 1, 2, 3])
    assert alpha(ages, "next_version").tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3, 3 / 4])
    assert alpha(ages, "areal").tolist() == pytest.approx([0, 0, 0, 1 / 2, 2 / 3])


def test_fresh_tokens_are_anchored_on_the_sampler(f) -> None:  # type: ignore[no-untyped-def]
    sampler = torch.where(f.mask, f.mu, 0.0)
    assert torch.equal(loglinear_old_log_probs(f.tokens(), "next_version"), sampler)
    fresh = f.tokens(staleness=torch.zeros(8, dtype=torch.int64))
    assert torch.equal(loglinear_old_log_probs(fresh, "areal"), sampler)
    attached = f.tokens(f.theta.clone().requires_grad_(), staleness=STALENESS)
    assert not loglinear_old_log_probs(attached, "next_version").requires_grad


def test_the_anchor_follows_the_mode(f) -> None:  # type: ignore[no-untyped-def]
    assert torch.equal(with_old_log_probs(f.tokens(), Correction("bypass", False)).old_log_probs, f.mu)
    for mode in ("decoupled", "onpolicy"):
        assert torch.equal(with_old_log_probs(f.tokens(), Correction(mode, False)).old_log_probs, f.old)  # type: ignore[arg-type]
    # The log-linear anchor is that of decoupled mode only.
    assert torch.equal(
        with_old_log_probs(f.tokens(), Correction("bypass", False, prox="loglinear")).old_log_probs, f.mu
    )


def test_the_log_linear_anchor_moves_with_the_current_policy(f) -> None:  # type: ignore[no-untyped-def]
    """At every optimizer step, while the age of a token stays that of the batch's start."""
    correction = Correction("decoupled", True, prox="loglinear")
    before = with_old_log_probs(f.tokens(staleness=STALENESS), correction).old_log_probs
    after = with_old_log_probs(f.tokens(f.theta + 0.3, staleness=STALENESS), correction).old_log_probs
    share = alpha(STALENESS, "next_version") * f.mask
    torch.testing.assert_close(after - before, 0.3 * share)


def test_only_drifted_negative_responses_are_masked(f) -> None:  # type: ignore[no-untyped-def]
    # Means of log mu - log theta: -0.0325 and 0.066667; the second response is the negative one.
    def dropped(tokens: PolicyTokens, delta: float) -> list[bool]:
        loss, lost = without_drifted(torch.ones(8, dtype=torch.float64), tokens, delta)
        assert torch.equal(loss, (~lost).double())
        found: list[bool] = lost.tolist()
        return found

    assert dropped(f.tokens(), 0.03) == [False] * 5 + [True] * 3
    assert not any(dropped(f.tokens(), 0.07))
    assert not any(dropped(f.tokens(advantages=f.advantages.abs()), 0.03))
    flipped = f.tokens(advantages=-f.advantages)
    assert dropped(flipped, -0.04) == [True, True, False, True, True, False, False, False]


def test_a_drift_that_is_no_number_is_not_taken_for_a_small_one(f) -> None:  # type: ignore[no-untyped-def]
    """The terms that hang on it are no numbers either, so that the step is refused."""
    correction = Correction("onpolicy", False, use_opsm=True, opsm_delta=0.03)
    for token, lost in ((6, [False] * 5 + [True] * 3), (0, [False] * 8), (2, [False] * 8)):  # 0: A > 0; 2: masked
        tokens = f.tokens(rollout_log_probs=f.mu.index_fill(0, torch.tensor([token]), math.nan))
        assert policy_objective(tokens, PPO, correction, ppo_clip).loss.isnan().tolist() == lost


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "kimi"])
def test_the_weight_multiplies_what_is_clipped_already(f, loss: str) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", True, tis_clip=1.2)
    config = AlgorithmConfig(policy_loss=loss)
    whole = policy_objective(f.tokens(), config, correction, policy_loss_of(loss)).loss
    torch.testing.assert_close(
        whole, policy_loss_of(loss)(f.tokens(), config).loss * weights_of(f.tokens(), correction).weight
    )
