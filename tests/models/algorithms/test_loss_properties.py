"""Properties of every loss under every correction: masks, permutation, splits, bounds, extremes, empty input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema.algorithm import POLICY_LOSSES, SAMPLER_LOSSES, AlgorithmConfig
from models.algorithms.correction import Correction
from models.algorithms.losses import policy_loss_of
from models.algorithms.metrics import MetricTotals, kept_scale, rejected_rollouts, step_statistics
from models.algorithms.objective import Objective, policy_objective
from models.algorithms.tokens import PolicyTokens
from tests.models.corrections import totals_of, weights_of

CLIPPED = AlgorithmConfig(policy_loss="ppo", eps_clip_high=0.28, eps_clip_c=3.0, use_kl_loss=True, kl_loss_coef=0.05)
CONFIGS = {
    name: AlgorithmConfig(policy_loss=name, use_kl_loss=True, kl_loss_coef=0.05, use_unbiased_kl=name == "aipo")
    for name in POLICY_LOSSES
} | {"ppo": CLIPPED}
TIS = Correction("decoupled", True, tis_clip_low=0.1, tis_clip=1.5)
ON_POLICY = Correction("onpolicy", False)
BYPASS = Correction("bypass", False)
RULES = ("seq_mean_k1=0.5_2", "token_k3=1.5", "seq_max_k2=4")
CORRECTIONS = [
    TIS, ON_POLICY, BYPASS,
    Correction("decoupled", True, tis_level="sequence", tis_batch_normalize=True),
    Correction("decoupled", True, tis_clip_low=0.3, tis_clip=3.0, tis_mode="icepop", tis_clip_decay=0.7,
               tis_batch_normalize=True),
    Correction("decoupled", True, tis_mode="seq_mask", tis_seq_low=0.5, tis_seq_high=2.0),
    Correction("decoupled", True, correction_ratio="current", rollout_rs=RULES, rs_veto=1e-2),
    Correction("decoupled", False, rollout_rs=RULES, renormalize_after_rejection=True, rs_unit="rollout",
               use_opsm=True, opsm_delta=0.1),
    Correction("decoupled", True, prox="loglinear", prox_alpha="areal", rollout_rs=RULES),
    Correction("bypass", False, rollout_rs=RULES, use_opsm=True),
]  # fmt: skip
COLUMNS = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "mask", "ref_log_probs", "staleness")


def corrections_of(loss: str) -> list[Correction]:
    """What may be combined with a loss."""
    return [BYPASS, CORRECTIONS[-1]] if loss in SAMPLER_LOSSES else CORRECTIONS


@st.composite
def token_sets(draw: st.DrawFn, *, min_size: int = 0) -> PolicyTokens:
    """Up to 3 sequences of up to 4 tokens; sometimes empty, sometimes without a trainable token."""
    lengths = draw(st.lists(st.integers(min_size, 4), min_size=1, max_size=3))
    n = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    spread = draw(st.sampled_from([0.1, 1.0, 8.0]))  # of log-probs: nearly equal policies up to very different ones

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, dtype=torch.float64, generator=generator)

    return PolicyTokens(
        log_probs=uniform(-spread, 0),
        old_log_probs=uniform(-spread, 0),
        rollout_log_probs=uniform(-spread, 0),
        advantages=uniform(-3, 3),
        mask=uniform(0, 1) < draw(st.sampled_from([0.0, 0.7, 1.0])),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        n_sequences=len(lengths),
        ref_log_probs=uniform(-spread, 0),
        staleness=uniform(0, 7).long(),
    )


@st.composite
def cases(draw: st.DrawFn, *, min_size: int = 0) -> tuple[PolicyTokens, AlgorithmConfig, Correction]:
    """Tokens, a loss, and a correction that may be combined with it."""
    loss = draw(st.sampled_from(POLICY_LOSSES))
    return draw(token_sets(min_size=min_size)), CONFIGS[loss], draw(st.sampled_from(corrections_of(loss)))


def changed(tokens: PolicyTokens, **changes: object) -> PolicyTokens:
    return dataclasses.replace(tokens, **changes)  # type: ignore[arg-type]


def with_statistics(tokens: PolicyTokens, config: AlgorithmConfig, correction: Correction) -> PolicyTokens:
    """As if `tokens` were the whole step, in which all sequences belong to one rollout."""
    one = torch.zeros(tokens.n_sequences, dtype=torch.int64)
    tokens = changed(tokens, statistics=step_statistics(tokens, config, correction))
    tokens = changed(tokens, rejected=rejected_rollouts(tokens, one, correction))
    return changed(tokens, kept_scale=kept_scale(tokens, one, "rollout_mean", correction))


def objective_of(tokens: PolicyTokens, correction: Correction = TIS, config: AlgorithmConfig = CLIPPED) -> Objective:
    return policy_objective(tokens, config, correction, policy_loss_of(config.policy_loss))


def loss_of(tokens: PolicyTokens, correction: Correction = TIS, config: AlgorithmConfig = CLIPPED) -> Tensor:
    return objective_of(tokens, correction, config).loss


def gradient_of(tokens: PolicyTokens, correction: Correction = TIS, config: AlgorithmConfig = CLIPPED) -> Tensor:
    theta = tokens.log_probs.clone().requires_grad_()
    loss_of(changed(tokens, log_probs=theta), correction, config).sum().backward()
    assert theta.grad is not None
    return theta.grad


def test_no_gradient_flows_through_weight_and_anchor(f) -> None:  # type: ignore[no-untyped-def]
    """One step per batch: the anchor is theta itself, detached; the weight changes with theta, without gradient."""
    fresh = f.tokens(old_log_probs=f.theta)
    weight = (f.theta - f.mu).exp().clamp(0.1, 1.5) * f.mask
    torch.testing.assert_close(gradient_of(fresh, config=AlgorithmConfig(policy_loss="ppo")), -weight * f.advantages)
    attached = changed(fresh, old_log_probs=f.theta.clone().requires_grad_())
    assert not weights_of(attached, TIS).weight.requires_grad


Case = tuple[PolicyTokens, AlgorithmConfig, Correction]


@settings(max_examples=60)
@given(cases(), st.sampled_from([float("nan"), float("inf"), -1000.0]))
def test_masked_tokens_are_invisible(case: Case, poison: float) -> None:
    tokens, config, correction = case
    bad = torch.full_like(tokens.log_probs, poison)
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "ref_log_probs")
    poisoned = changed(tokens, **{name: torch.where(tokens.mask, getattr(tokens, name), bad) for name in names})
    clean, dirty = with_statistics(tokens, config, correction), with_statistics(poisoned, config, correction)
    assert dirty.statistics == clean.statistics
    found = loss_of(dirty, correction, config)
    assert torch.equal(found, loss_of(clean, correction, config))
    assert (found[~tokens.mask] == 0).all()
    gradient = gradient_of(dirty, correction, config)
    assert torch.equal(gradient, gradient_of(clean, correction, config))
    assert (gradient[~tokens.mask] == 0).all()


@settings(max_examples=60)
@given(cases(min_size=1), st.randoms(use_true_random=False))
def test_order_of_tokens_and_sequences_does_not_matter(case: Case, random: object) -> None:
    tokens, config, correction = case
    order, names = list(range(len(tokens.mask))), list(range(tokens.n_sequences))
    random.shuffle(order)  # type: ignore[attr-defined]
    random.shuffle(names)  # type: ignore[attr-defined]
    index = torch.tensor(order)
    moved = {name: getattr(tokens, name)[index] for name in COLUMNS}
    shuffled = changed(tokens, sequence=torch.tensor(names)[tokens.sequence][index], **moved)
    straight, other = with_statistics(tokens, config, correction), with_statistics(shuffled, config, correction)
    assert other.statistics.m2po_bound == straight.statistics.m2po_bound
    torch.testing.assert_close(loss_of(other, correction, config), loss_of(straight, correction, config)[index])


@settings(max_examples=60)
@given(cases())
def test_any_split_into_micro_batches_gives_the_same(case: Case) -> None:
    """Facts of the whole step in each part: losses, gradients, kept tokens and metrics are those of the whole."""
    tokens, config, correction = case
    weights = torch.linspace(0.3, 1.0, len(tokens.mask), dtype=torch.float64) * tokens.mask
    whole = with_statistics(tokens, config, correction)
    assert whole.rejected is not None
    assert whole.kept_scale is not None
    totals, pieces, gradients, kept = MetricTotals(), [], [], []
    for which in range(tokens.n_sequences):
        part = tokens.sequence == which
        piece = changed(
            whole,
            sequence=torch.zeros(int(part.sum()), dtype=torch.int64),
            n_sequences=1,
            rejected=whole.rejected[which : which + 1],
            kept_scale=whole.kept_scale[which : which + 1],
            **{name: getattr(whole, name)[part] for name in COLUMNS},
        )
        objective = objective_of(piece, correction, config)
        totals.add(objective.metrics, weights[part])
        pieces.append(objective.loss)
        kept.append(objective.kept)
        gradients.append(gradient_of(piece, correction, config))
    objective = objective_of(whole, correction, config)
    torch.testing.assert_close(torch.cat(pieces), objective.loss)
    torch.testing.assert_close(torch.cat(gradients), gradient_of(whole, correction, config))
    assert torch.equal(torch.cat(kept), objective.kept)
    assert totals.result(3.0) == pytest.approx(totals_of(objective, weights, 3.0), abs=1e-9, rel=1e-9)


@settings(max_examples=60)
@given(
    cases(),
    st.sampled_from(["log_probs", "old_log_probs", "rollout_log_probs"]),
    st.sampled_from([-1000.0, -30.0, 30.0, 1000.0]),
)
def test_huge_log_ratios_stay_finite(case: Case, column: str, shift: float) -> None:
    tokens, config, correction = case
    far = with_statistics(changed(tokens, **{column: getattr(tokens, column) + shift}), config, correction)
    assert torch.isfinite(loss_of(far, correction, config)).all()
    assert torch.isfinite(gradient_of(far, correction, config)).all()
    metrics = totals_of(objective_of(far, correction, config), tokens.mask.double(), 1.0)
    assert all(abs(value) < float("inf") for value in metrics.values())


@settings(max_examples=40)
@given(cases())
def test_fully_masked_and_empty_input(case: Case) -> None:
    tokens, config, correction = case
    dark = with_statistics(changed(tokens, mask=torch.zeros_like(tokens.mask)), config, correction)
    objective = objective_of(dark, correction, config)
    assert (objective.loss == 0).all()
    assert not objective.kept.any()
    assert (gradient_of(dark, correction, config) == 0).all()
    metrics = totals_of(objective, torch.zeros(len(tokens.mask), dtype=torch.float64), 1.0)
    assert all(value in (0.0, 1.0) for value in metrics.values())


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("column", ["log_probs", "rollout_log_probs", "old_log_probs", "advantages"])
def test_nan_at_a_trained_token_is_never_hidden(f, loss: str, column: str) -> None:  # type: ignore[no-untyped-def]
    """No comparison, bound or rule turns it into an ordinary number: the trainer must see and refuse the step."""
    for index in (1, 6):  # A > 0, A < 0
        if index == 1 and loss.startswith("topr") and column == "rollout_log_probs":
            continue  # not read where A > 0
        values = getattr(f.tokens(), column).clone()
        values[index] = float("nan")
        tokens = f.tokens(staleness=torch.tensor([1, 1, 1, 0, 0, 2, 2, 2]), **{column: values})
        for correction in corrections_of(loss):
            read = {"log_probs", "advantages"}
            read |= {"rollout_log_probs"} if correction.policy_mode != "onpolicy" else {"old_log_probs"}
            read |= {"old_log_probs"} if correction.policy_mode == "decoupled" and not correction.loglinear else set()
            if column in read:
                whole = with_statistics(tokens, CONFIGS[loss], correction)
                loss_here = loss_of(whole, correction, CONFIGS[loss])[index]
                gradient = gradient_of(whole, correction, CONFIGS[loss])
                assert not (torch.isfinite(loss_here) and torch.isfinite(gradient).all()), correction


@settings(max_examples=40)
@given(cases())
def test_inputs_are_not_changed_in_place(case: Case) -> None:
    tokens, config, correction = case
    before = {name: value.clone() for name, value in tokens.__dict__.items() if isinstance(value, Tensor)}
    gradient_of(with_statistics(tokens, config, correction), correction, config)
    for name, value in before.items():
        assert torch.equal(getattr(tokens, name), value)
