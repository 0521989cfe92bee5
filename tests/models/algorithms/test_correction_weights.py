"""Importance weights: order of operations, bounds by age, functions of one's own; anchors; off-policy masking."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.rejection_rules import InvalidRule, RejectionRule, parse_rule
from models.algorithms.correction import (
    Correction,
    alpha,
    fails,
    loglinear_old_log_probs,
    rejection_of,
    statistic,
    with_old_log_probs,
    without_drifted,
)
from models.algorithms.losses import policy_loss_of, ppo_clip
from models.algorithms.metrics import effective_size, kept_scale, rejected_rollouts, step_statistics
from models.algorithms.objective import policy_objective
from models.algorithms.slime_hooks import Hooks, Responses
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError
from models.slime_arguments import SlimeArguments
from tests.models.corrections import totals_of, weights_of

STALENESS = torch.tensor([0, 1, 1, 2, 3, 0, 1, 4])
PPO = AlgorithmConfig(policy_loss="ppo")


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


@pytest.mark.parametrize(("ratio", "wanted"), [
    # exp(old - mu) or exp(theta - mu) times -1.2, -0.860708, 0, -1.2, -1.030455; 1.318977, 1.457695, 0.64; half of it
    ("old", [-0.732842, -0.3894, -0.0, -0.444491, -0.490099, 0.488561, 0.983841, 0.304393]),
    ("current", [-0.989233, -0.33516, -0.0, -0.542902, -0.505025, 0.805501, 1.792676, 0.08721]),
])  # fmt: skip
def test_weights_of_a_function_with_slimes_signature(f, close, ratio: Any, wanted: list[float]) -> None:  # type: ignore[no-untyped-def]
    """It sees the masked token of the fixture with mask 0, log-probs 0 and loss 0."""
    seen: dict[str, Any] = {}

    def half(args: Any, **given: Any) -> Any:
        seen.update(given)
        ratios = [new - old for new, old in zip(given["train_log_probs"], given["rollout_log_probs"], strict=True)]
        return args.factor * given["pg_loss"] * torch.cat(ratios).exp(), given["loss_masks"], {}

    responses = Responses(torch.arange(8), [5, 3], [9, 4], torch.ones(8))
    hooks = Hooks(SlimeArguments(factor=0.5), tis=half, responses=responses)
    correction = Correction("decoupled", True, correction_ratio=ratio)
    objective = policy_objective(f.tokens(f.theta.clone().requires_grad_()), PPO, correction, ppo_clip, hooks)
    close(objective.loss, wanted)
    assert objective.loss.requires_grad
    assert [mask.tolist() for mask in seen["loss_masks"]] == [[1, 1, 0, 1, 1], [1, 1, 1]]
    assert (seen["total_lengths"], seen["response_lengths"]) == ([9, 4], [5, 3])
    assert not seen["train_log_probs"][0].requires_grad
    assert objective.kept.tolist() == f.mask.tolist()


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


# Rejection: reading rules, what they remove and from which term, siblings, renormalisation.


def rejecting(*rules: str, **values: object) -> Correction:
    return Correction("decoupled", False, rollout_rs=tuple(rules), **values)  # type: ignore[arg-type]


def test_rules_are_read() -> None:
    assert parse_rule("token_k3=0.05") == RejectionRule("token", "k3", -math.inf, 0.05)
    rule = parse_rule("seq_mean_k1=0.99_1.01")
    assert (rule.level, rule.kind, rule.name, rule.whole_sequence) == ("seq_mean", "k1", "seq_mean_k1", True)
    assert (rule.low, rule.high) == pytest.approx((math.log(0.99), math.log(1.01)))
    assert parse_rule("seq_max_k2=1e-3").high == 0.001
    assert not parse_rule("token_k1=0.5_3").whole_sequence


def test_bounds_of_k1_are_reported_both_ways_round() -> None:
    assert parse_rule("seq_mean_k1=0.5_4").meaning == (
        "seq_mean_k1 keeps sequences with mu / old from 0.5 to 4, that is old / mu from 0.25 to 2"
    )
    assert parse_rule("token_k3=0.05").meaning == "token_k3 keeps tokens up to 0.05"


@pytest.mark.parametrize(("text", "message"), [
    ("seq_max_k1=0.9_1.1", r"'seq_max_k1=0.9_1.1' does not exist.*use seq_max_k2 or seq_max_k3"),
    ("token_k4=1", r"'token_k4=1' is no rejection rule; write for example .* with one of token, seq_sum"),
    ("token_k3", r"'token_k3' is no rejection rule.*token_k3=0.05"),
    ("token_k1=1.01", r"'token_k1=1.01' needs two bounds of the ratio mu / old.*token_k1=0.99_1.01"),
    ("token_k1=1.1_0.9", "the lower one first"),
    ("token_k1=0_1.1", "needs two bounds"),
    ("token_k1=nan_1.1", "needs two bounds"),
    ("seq_sum_k2=0.1_0.2", r"needs one upper bound above 0; write for example seq_sum_k2=0.05"),
    ("seq_sum_k3=-1", "needs one upper bound above 0"),
    ("seq_sum_k3=inf", "needs one upper bound above 0"),
    ("seq_sum_k3=much", "needs one upper bound above 0"),
    ("seq_sum_k3=", "needs one upper bound above 0"),
])  # fmt: skip
def test_wrong_rules_are_refused_with_a_cure(text: str, message: str) -> None:
    with pytest.raises(InvalidRule, match=message):
        parse_rule(text)


def test_a_value_on_a_bound_is_kept(f) -> None:  # type: ignore[no-untyped-def]
    tokens = f.tokens()
    log_weight = f.old - f.mu
    values = statistic(parse_rule("token_k2=1"), log_weight, tokens)
    low, high = float(values.min()), float(values.max())
    assert low < high
    assert not fails(RejectionRule("token", "k2", low, high), log_weight, tokens).any()
    inside = fails(RejectionRule("token", "k2", math.nextafter(low, 9), math.nextafter(high, -9)), log_weight, tokens)
    assert inside.tolist() == ((values == low) | (values == high)).tolist()


def test_only_large_negative_differences_veto(f) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", False, rs_veto=1e-4)
    for shift, kept in ((20.0, True), (-20.0, False)):
        old = f.old.clone()
        old[4] += shift
        result = rejection_of(f.tokens(old_log_probs=old), correction)
        assert result.kept.tolist() == [kept, kept, False, kept, kept, True, True, True]
    old[4] = f.old[4]
    old[2] -= 1000  # masked: it sampled nothing
    assert bool(rejection_of(f.tokens(old_log_probs=old), correction).kept[0])


def test_sequence_statistics_are_not_clamped_token_by_token(f) -> None:  # type: ignore[no-untyped-def]
    """Two differences of +60 and -60 cancel in a sum; clamping each first would hide a third of them."""
    old = f.mu.clone()
    old[0] += 60.0
    old[1] -= 30.0
    tokens = f.tokens(old_log_probs=old)
    lowest, highest = math.exp(-30.1), math.exp(-29.9)
    rule = rejecting(f"seq_sum_k1={lowest}_{highest}")
    assert rejection_of(tokens, rule).kept[:2].all()


def test_what_is_not_a_number_fails_no_test(f) -> None:  # type: ignore[no-untyped-def]
    """So that it reaches the loss, and the step is refused instead of the token dropped."""
    old = f.old.clone()
    old[1] = float("nan")
    for rule in ("token_k1=0.8_1.25", "token_k3=0.01", "seq_mean_k1=0.99_1.01", "seq_max_k2=0.001"):
        result = rejection_of(f.tokens(old_log_probs=old), rejecting(rule, rs_veto=0.99999))
        assert not result.removed[rule.partition("=")[0]][1]
    alone = rejection_of(f.tokens(old_log_probs=old), rejecting("seq_sum_k2=1e-6"))
    assert alone.kept.tolist() == [True, True, False, True, True, False, False, False]


def test_a_sequence_without_tokens_is_never_counted(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    """Its statistics are 0, which these bounds do not allow."""
    dead = f.tokens(mask=f.mask & (f.sequence == 1), n_sequences=3)
    rule = rejecting("seq_mean_k1=1.01_1.05")
    assert rejection_of(dead, rule).failed_sequences.tolist() == [False, False, False]
    objective = policy_objective(dead, clip_higher, rule, ppo_clip)
    assert totals_of(objective, f.mask * 1.0, 3.0)["train/seq_mask_fraction/seq_mean_k1"] == 0.0


def test_rejection_spares_kl_entropy_and_the_counts(f, close) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(
        policy_loss="ppo", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01
    )
    entropy = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)
    tokens = f.tokens(entropy=entropy)
    free = policy_objective(tokens, config, Correction("decoupled", False), ppo_clip)
    held = policy_objective(tokens, config, rejecting("token_k1=0.8_1.25"), ppo_clip)
    kept = torch.tensor([1, 1, 0, 0, 1, 0, 0, 1]).bool()
    assert torch.equal(held.kept, kept)
    assert torch.equal(free.kept, f.mask)
    close(held.loss, (free.loss - torch.where(kept, 0.0, ppo_clip(tokens, config).loss)).tolist())


def test_under_gspo_the_ratio_keeps_all_tokens(f) -> None:  # type: ignore[no-untyped-def]
    """Rejection acts on token losses after the statistic, and the gradient reaches rejected tokens through it."""
    config = AlgorithmConfig(policy_loss="gspo", eps_clip=0.5)
    theta = f.theta.clone().requires_grad_()
    objective = policy_objective(f.tokens(theta), config, rejecting("token_k1=0.8_1.25"), policy_loss_of("gspo"))
    objective.loss.sum().backward()
    ratio = float(((f.theta - f.old)[:5] * f.mask[:5]).sum().div(4).exp())
    assert objective.loss[:5].tolist() == pytest.approx([-ratio, -ratio, 0, 0, -ratio])
    assert theta.grad is not None
    assert theta.grad[:5].tolist() == pytest.approx([-ratio * 3 / 4, -ratio * 3 / 4, 0, -ratio * 3 / 4, -ratio * 3 / 4])


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_the_effective_size_is_the_same_at_any_scale_of_the_weights(scale: float) -> None:
    """Of 0.5 and 0.1: (0.6)^2 / (2 * 0.26)."""
    assert effective_size(2, 0.6 * scale, 0.26 * scale**2) == pytest.approx(0.36 / 0.52)


def test_everything_rejected_is_zero_with_a_graph(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    theta = f.theta.clone().requires_grad_()
    objective = policy_objective(f.tokens(theta), clip_higher, rejecting("seq_sum_k3=1e-9"), ppo_clip)
    assert (objective.loss == 0).all()
    assert not objective.kept.any()
    objective.loss.sum().backward()
    assert theta.grad is not None
    assert (theta.grad == 0).all()
    found = totals_of(objective, *f.weights("token_mean"))
    assert found["correction/all_rejected"] == 1.0
    assert found["train/mask_fraction/seq_sum_k3"] == pytest.approx(1.0)
    assert found["train/seq_mask_fraction/seq_sum_k3"] == 1.0


def test_shares_that_each_rule_removes(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    correction = rejecting("token_k1=0.8_1.25", "seq_mean_k3=0.02", rs_veto=0.75)
    found = totals_of(policy_objective(f.tokens(), clip_higher, correction, ppo_clip), *f.weights("token_mean"))
    expected = {
        "train/mask_fraction/token_k1": 3 / 7,
        "train/mask_fraction/seq_mean_k3": 3 / 7,
        "train/seq_mask_fraction/seq_mean_k3": 0.5,
        "train/veto_fraction": 1.0,
        "train/seq_mask_fraction/veto": 1.0,
        "train/mask_fraction": 1.0,
        "correction/all_rejected": 1.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "train/seq_mask_fraction/token_k1" not in found
    plain = policy_objective(f.tokens(), clip_higher, Correction("decoupled", False), ppo_clip)
    assert not [name for name in totals_of(plain, f.mask * 1.0, 7.0) if "mask_fraction" in name or "rejected" in name]


# Statistics of fixture F over both rows, 7 trainable tokens: sums of k1, k2, k3 are 0.3, 0.1625, 0.160194.
POOLED = {
    "seq_mean_k1=0.95_1.05": (False, (True, False)),  # 0.042857; the first row alone: 0.0625
    "seq_mean_k1=0.97_1.03": (True, (True, False)),
    "seq_sum_k1=0.75_1.3": (True, (False, False)),  # 0.3 above log 1.3; 0.25 and 0.05 apart
    "seq_sum_k2=0.1": (True, (False, False)),
    "seq_mean_k3=0.0229": (False, (False, True)),  # 0.022885; the second row alone: 0.030635
    "seq_max_k3=0.045": (True, (False, True)),
    "token_k1=0.8_1.25": (False, (False, False)),  # no rule on sequences: its failures stay where they are
}


@pytest.mark.parametrize("rule", POOLED)
def test_a_rollout_is_tested_over_the_tokens_of_all_its_rows(f, clip_higher, rule: str) -> None:  # type: ignore[no-untyped-def]
    together, alone = POOLED[rule]
    correction = rejecting(rule, rs_unit="rollout")
    assert rejected_rollouts(f.tokens(), torch.tensor([4, 4]), correction).tolist() == [together] * 2
    assert rejected_rollouts(f.tokens(), torch.tensor([4, 9]), correction).tolist() == list(alone)
    # In a micro-batch the fact of the step decides, not what its own rows would say.
    for fact in ([True, True], [False, False], [False, True]):
        tokens = f.tokens(rejected=torch.tensor(fact))
        lost = torch.tensor(fact)[f.sequence] & f.mask
        kept = policy_objective(tokens, clip_higher, correction, ppo_clip).kept
        if rule.startswith("seq"):
            assert torch.equal(kept, f.mask & ~lost)
        else:
            assert torch.equal(kept, policy_objective(f.tokens(), clip_higher, correction, ppo_clip).kept & ~lost)


def test_the_veto_takes_the_whole_rollout(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    correction = Correction("decoupled", False, rs_veto=0.745, rs_unit="rollout")  # the second row's is 0.7408 as well
    first = f.tokens(old_log_probs=f.mu.clone().index_fill(0, torch.tensor([0]), -4.0))
    assert rejected_rollouts(first, torch.tensor([4, 4]), correction).tolist() == [True, True]
    assert rejected_rollouts(first, torch.tensor([4, 9]), correction).tolist() == [True, False]
    tokens = f.tokens(rejected=torch.tensor([True, True]))
    found = totals_of(policy_objective(tokens, clip_higher, correction, ppo_clip), f.mask * 1.0, 7.0)
    assert (found["train/seq_mask_fraction/rollout"], found["train/mask_fraction/rollout"]) == (1, 1)


def test_renormalisation_restores_the_mean_of_what_is_left(f) -> None:  # type: ignore[no-untyped-def]
    correction = rejecting("token_k1=0.8_1.25", renormalize_after_rejection=True)  # keeps 3 of 4 and 1 of 3
    apart, one = torch.tensor([0, 1]), torch.tensor([5, 5])
    scale = kept_scale(f.tokens(), apart, "rollout_mean", correction)
    assert scale.tolist() == pytest.approx([4 / 3, 3])
    assert kept_scale(f.tokens(), one, "rollout_mean", correction).tolist() == pytest.approx([7 / 4] * 2)
    assert kept_scale(f.tokens(), one, "seq_mean", correction).tolist() == pytest.approx([4 / 3, 3])
    assert kept_scale(f.tokens(), apart, "token_mean", correction).tolist() == pytest.approx([7 / 4] * 2)
    assert kept_scale(f.tokens(), apart, "constant", correction).tolist() == [1, 1]
    assert kept_scale(f.tokens(), apart, "seq_mean_token_sum", correction).tolist() == [1, 1]
    nothing_left = rejecting("seq_mean_k1=0.95_1.05", renormalize_after_rejection=True)
    assert kept_scale(f.tokens(), apart, "rollout_mean", nothing_left).tolist() == [1, 1]
    config = AlgorithmConfig(policy_loss="ppo")
    plain = policy_objective(f.tokens(), config, correction, ppo_clip)
    scaled = policy_objective(f.tokens(kept_scale=scale), config, correction, ppo_clip)
    torch.testing.assert_close(scaled.loss, plain.loss * scale[f.sequence])


def test_bypass_tests_the_current_policy(f) -> None:  # type: ignore[no-untyped-def]
    """There the anchor is mu itself, and log old - log mu says nothing."""
    correction = Correction("bypass", False, rollout_rs=("token_k1=0.8_1.25",))
    inside = (f.mu - f.theta).exp()
    expected = (inside >= 0.8) & (inside <= 1.25) & f.mask
    config = AlgorithmConfig(policy_loss="ppo")
    assert torch.equal(policy_objective(f.tokens(), config, correction, ppo_clip).kept, expected)
