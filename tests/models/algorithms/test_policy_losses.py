"""Golden values and gradients of the losses, and the detachment of weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import algorithm as schema
from configs.schema.algorithm import SAMPLER_LOSSES, AlgorithmConfig, CorrectionConfig, InvalidRule
from models.algorithms.aggregation import Aggregation, StepSize, coefficients, denominator, metric_mode
from models.algorithms.correction import Correction, ImportanceWeights, correction_of, importance_weights, log_weight_of
from models.algorithms.losses import (
    POLICY_LOSSES,
    k3,
    kl_to_reference,
    kl_values,
    low_var_kl,
    policy_loss_of,
    ppo_clip,
    sft,
)
from models.algorithms.objective import policy_objective, sft_objective
from models.algorithms.tokens import PolicyTokens, StepStatistics
from models.errors import AlgorithmError, UnknownAlgorithm
from tests.models.corrections import corrected


def weights_of(tokens: PolicyTokens, correction: Correction) -> ImportanceWeights:
    return importance_weights(tokens, correction, log_weight_of(tokens, correction))


def test_clip_fractions_by_side(f, clip_higher) -> None:  # type: ignore[no-untyped-def]
    result = ppo_clip(f.tokens(), clip_higher)
    clipped = (result.clipped_high | result.clipped_low).double()
    assert f.aggregate(clipped, "token_mean") == pytest.approx(2 / 7)
    assert f.aggregate(clipped, "rollout_mean") == pytest.approx(0.291667, abs=1e-6)
    assert result.clipped_high.tolist() == [True] + [False] * 7
    assert result.clipped_low.tolist() == [False] * 7 + [True]
    assert result.dual_clipped is None


def test_dual_clip_bounds_negative_tokens_only(f) -> None:  # type: ignore[no-untyped-def]
    result = ppo_clip(f.tokens(), AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=1.5))
    assert result.dual_clipped is not None
    assert result.dual_clipped.tolist() == [False] * 5 + [True, True, False]
    loose = ppo_clip(f.tokens(), AlgorithmConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=100.0))
    assert loose.dual_clipped is not None
    assert not loose.dual_clipped.any()


def test_what_the_other_losses_call_clipped(f) -> None:  # type: ignore[no-untyped-def]
    def sides(name: str, **values: float) -> tuple[list[int], list[int]]:
        tokens = f.tokens(statistics=StepStatistics(m2po_bound=0.1))
        result = policy_loss_of(name)(tokens, AlgorithmConfig(policy_loss=name, **values))
        return result.clipped_high.nonzero().flatten().tolist(), result.clipped_low.nonzero().flatten().tolist()

    assert sides("cispo", eps_clip=0.5, eps_clip_high=0.5) == ([5, 6], [7])
    assert sides("cispo", eps_clip=1.0, eps_clip_high=0.5) == ([5, 6], [])  # no lower bound
    assert sides("dppo") == ([0], [7])
    still = f.tokens(advantages=f.advantages * 0)  # A = 0 belongs to the lower bound
    assert policy_loss_of("dppo")(still, AlgorithmConfig()).clipped_low.tolist() == [False] * 7 + [True]
    assert sides("aipo", aipo_clip=1.5) == ([0, 6], [])
    assert sides("topr") == ([5, 6], [])
    assert sides("topr_sequence") == ([], [])
    assert sides("m2po") == ([0, 6], [7])
    assert sides("kimi") == ([], [])
    assert sides("gspo", eps_clip=0.06, eps_clip_high=0.06) == ([0, 1, 3, 4], [])


@pytest.mark.parametrize("name", sorted(SAMPLER_LOSSES))
def test_sampler_losses_do_not_read_the_anchor(f, name: str) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(policy_loss=name)
    nowhere = torch.full((8,), float("nan"), dtype=torch.float64)
    loss = policy_loss_of(name)(f.tokens(old_log_probs=nowhere), config).loss
    assert torch.equal(loss, policy_loss_of(name)(f.tokens(), config).loss)
    assert torch.isfinite(loss).all()


def test_every_name_of_the_configuration_is_built() -> None:
    assert sorted(POLICY_LOSSES) == sorted(schema.POLICY_LOSSES)
    assert policy_loss_of("ppo") is ppo_clip
    with pytest.raises(UnknownAlgorithm, match=r"policy_loss 'cispoo' is unknown.*did you mean 'cispo'"):
        policy_loss_of("cispoo")


def test_decoupled_weight_multiplies_the_clipped_term_and_is_detached(f, close, clip_higher) -> None:  # type: ignore[no-untyped-def]
    correction = Correction(policy_mode="decoupled", use_tis=True, tis_clip_low=0.0, tis_clip=1.2)
    loss, gradient = f.loss_and_gradient(
        lambda tokens: policy_objective(tokens, clip_higher, correction, ppo_clip).loss
    )
    close(loss, [-1.536, -0.778801, 0, -0.904837, -0.980199, 0.977122, 1.749234, 0.608787])
    assert f.aggregate(loss, "rollout_mean") == pytest.approx(0.030878, abs=1e-5)
    assert f.aggregate(loss, "token_mean") == pytest.approx(-0.123528, abs=1e-5)
    plain = f.loss_and_gradient(lambda tokens: ppo_clip(tokens, clip_higher).loss)[1]
    weight = weights_of(f.tokens(), correction).weight
    close(gradient, (weight * plain).tolist())


def test_bypass_ratio_is_against_the_sampler(f, close, ppo) -> None:  # type: ignore[no-untyped-def]
    # Whatever stands in the place of the anchor.
    loss = policy_objective(f.tokens(), ppo, Correction(policy_mode="bypass", use_tis=False), ppo_clip).loss
    rho = [1.648721, 0.778801, 0, 0.904837, 0.980199, 1.221403, 2.459603, 0.272532]
    expected = [max(-r * a, -min(max(r, 0.8), 1.2) * a) for r, a in zip(rho, f.advantages.tolist(), strict=True)]
    expected[2] = 0
    close(loss, expected)


def test_kl_of_a_wild_token_is_bounded() -> None:
    difference = torch.tensor([-4.0], dtype=torch.float64)
    assert float(k3(difference)) == pytest.approx(49.598150, abs=1e-5)
    assert float(low_var_kl(difference)) == 10.0
    far = torch.tensor([-1000.0, 1000.0], dtype=torch.float64)
    assert torch.isfinite(k3(far)).all()
    assert float(k3(far)[1]) == pytest.approx(999.0)  # the linear term keeps the true value


def test_the_bound_of_low_var_kl_comes_after_the_ratio() -> None:
    difference = torch.tensor([-2.0, -4.0, -4.0], dtype=torch.float64)  # k3 = 4.389056, 49.598150
    ratio = torch.tensor([3.0, 0.1, 0.3], dtype=torch.float64)
    assert kl_values("low_var_kl", difference, ratio).tolist() == pytest.approx([10, 4.959815, 10], abs=1e-6)
    assert kl_values("k3", difference, ratio).tolist() == pytest.approx([13.167168, 4.959815, 14.879445], abs=1e-6)
    assert kl_values("k1", difference).tolist() == [-2, -4, -4]


def test_unknown_kl_is_refused(f) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnknownAlgorithm, match="kl 'k4' is unknown"):
        kl_to_reference("k4", f.theta, f.ref, f.mask)


def test_sft(f, close) -> None:  # type: ignore[no-untyped-def]
    loss, gradient = f.loss_and_gradient(sft)
    assert f.aggregate(loss, "token_mean") == pytest.approx(0.952857, abs=1e-5)
    assert f.aggregate(loss, "rollout_mean") == pytest.approx(0.958750, abs=1e-5)
    close(gradient, [-1, -1, 0, -1, -1, -1, -1, -1])
    close(sft_objective(f.tokens()).loss, loss.tolist())


def test_terms_of_the_objective_add_up(f, close, on_policy) -> None:  # type: ignore[no-untyped-def]
    config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01)
    entropy = torch.linspace(0.1, 0.8, 8, dtype=torch.float64)
    correction = Correction(policy_mode="decoupled", use_tis=True, tis_clip=1.2)
    loss = policy_objective(f.tokens(entropy=entropy), config, correction, ppo_clip).loss
    weight = weights_of(f.tokens(), correction).weight
    kl = kl_to_reference("k2", f.theta, f.ref, f.mask)
    # The weight touches the policy term only.
    close(loss, (weight * ppo_clip(f.tokens(), config).loss + 0.1 * kl - 0.01 * entropy * f.mask).tolist())
    with pytest.raises(AlgorithmError, match="entropy_coef"):
        policy_objective(f.tokens(), config, on_policy, ppo_clip)
    with pytest.raises(AlgorithmError, match="reference policy"):
        policy_objective(f.tokens(entropy=entropy, ref_log_probs=None), config, on_policy, ppo_clip)


def test_a_file_of_its_own_brings_its_policy_loss(tmp_path, monkeypatch, f) -> None:  # type: ignore[no-untyped-def]
    import models.algorithms

    source = (
        "from models.algorithms.losses import PolicyLoss\n"
        "def advantages(rewards, *, normalize_std):\n    return rewards * 2\n"
        "def policy_loss(tokens, config):\n"
        "    none = tokens.mask & False\n"
        "    return PolicyLoss(loss=-tokens.log_probs * tokens.advantages, clipped_high=none, clipped_low=none)\n"
    )
    (tmp_path / "plain_gradient.py").write_text(source)
    monkeypatch.setattr(models.algorithms, "__path__", [*models.algorithms.__path__, str(tmp_path)])
    chosen = policy_loss_of("plain_gradient")
    assert float(chosen(f.tokens(), AlgorithmConfig()).loss[0]) == pytest.approx(0.7)
    from models.algorithms.advantages import advantages

    assert advantages("plain_gradient", [1, 2], [0, 1]).tolist() == [2, 4]


# The correction that a loss is given: decided, and refused where it is not.


@pytest.mark.parametrize(
    ("values", "staleness", "loss", "mode", "tis"),
    [
        ({}, 0, "ppo", "onpolicy", False),
        ({}, 2, "ppo", "decoupled", True),
        ({"use_rollout_logprobs": True}, 2, "ppo", "bypass", False),
        ({"policy_mode": "bypass"}, 2, "ppo", "bypass", False),
        ({"allow_uncorrected": True}, 2, "ppo", "onpolicy", False),
        ({"rollout_rs": ("token_k3=1",), "use_tis": False}, 2, "ppo", "decoupled", False),
        ({"rs_veto": 1e-4}, 0, "ppo", "decoupled", False),
        ({"rs_veto": 1e-4, "use_rollout_logprobs": True}, 2, "ppo", "bypass", False),
        ({}, 2, "aipo", "bypass", False),
        ({}, 0, "m2po", "bypass", False),
        ({"use_tis": True}, 0, "gspo", "decoupled", True),
    ],
)
def test_modes(values: dict[str, object], staleness: int, loss: str, mode: str, tis: bool) -> None:
    config = msgspec.convert(values, CorrectionConfig)
    found = corrected(config, max_staleness=staleness, policy_loss=loss)
    assert (found.policy_mode, found.use_tis) == (mode, tis)


@pytest.mark.parametrize("config", [CorrectionConfig(), CorrectionConfig(use_tis=True), CorrectionConfig(rs_veto=0.1)])
def test_what_is_not_decided_is_refused(config: CorrectionConfig) -> None:
    with pytest.raises(AlgorithmError, match=r"policy_mode=auto .* are not decided; resolve the configuration first"):
        correction_of(config)


def test_a_wrong_rule_is_refused_when_it_is_resolved() -> None:
    with pytest.raises(InvalidRule, match="seq_max_k1"):
        corrected(CorrectionConfig(rollout_rs=("seq_max_k1=0.9_1.1",)))


# Reduction of token losses with the denominators of the whole step.


MODES: list[Aggregation] = ["rollout_mean", "token_mean", "seq_mean", "constant"]
Sequence_ = tuple[int, list[float], list[int]]  # rollout, losses, mask

GOLDEN: list[Sequence_] = [(0, [1, 2], [1, 1]), (0, [3, 4, 5], [1, 0, 1]), (1, [10], [1])]
FULLY_MASKED: Sequence_ = (2, [7, 7], [0, 0])


def reduce(mode: Aggregation, step: Sequence[Sequence_], constant: int = 8) -> float:
    """Numerators sequence by sequence, each as if it were its own micro-batch; one division at the end."""
    own = [sum(mask) for _, _, mask in step]
    of_rollout = [sum(sum(mask) for other, _, mask in step if other == rollout) for rollout, _, _ in step]
    weights = coefficients(mode, own, of_rollout)
    numerator = 0.0
    for (_, losses, mask), weight in zip(step, weights, strict=True):
        numerator += weight * float(np.dot(losses, mask))
    size = StepSize(rollouts=len({rollout for rollout, _, _ in step}), sequences=len(step), tokens=sum(own))
    return numerator / denominator(mode, size, max_response_len=constant)


@pytest.mark.parametrize(
    ("mode", "expected"), [("rollout_mean", 6.375), ("token_mean", 4.2), ("seq_mean", 5.166667), ("constant", 1.3125)]
)
def test_golden(mode: Aggregation, expected: float) -> None:
    assert reduce(mode, GOLDEN) == pytest.approx(expected, abs=1e-5)


def test_fully_masked_rollouts_stay_in_the_denominator() -> None:
    assert reduce("rollout_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(4.25)
    assert reduce("token_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(4.2)
    assert reduce("seq_mean", [*GOLDEN, FULLY_MASKED]) == pytest.approx(5.166667 * 3 / 4, abs=1e-5)


def test_means_of_micro_batches_are_another_number() -> None:
    # What averaging per micro-batch would give for the splits {a,b},{c} and {a},{b,c}.
    token_mean = (reduce("token_mean", GOLDEN[:2]) + reduce("token_mean", GOLDEN[2:])) / 2
    assert token_mean == pytest.approx(6.375)
    assert reduce("token_mean", GOLDEN) != pytest.approx(token_mean)
    rollout_mean = (reduce("rollout_mean", GOLDEN[:1]) + reduce("rollout_mean", GOLDEN[1:])) / 2
    assert rollout_mean == pytest.approx(4.25)
    assert reduce("rollout_mean", GOLDEN) != pytest.approx(rollout_mean)


sequences = st.integers(0, 7).flatmap(
    lambda n: st.tuples(
        st.integers(0, 3),
        st.lists(st.floats(-5, 5), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
    )
)


@given(st.lists(sequences, min_size=1, max_size=8), st.randoms())
def test_order_and_padding_do_not_matter(step: list[Sequence_], random: object) -> None:
    shuffled = [(r, [*losses, 99.0], [*mask, 0]) for r, losses, mask in step]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for mode in MODES:
        value = reduce(mode, step)
        assert np.isfinite(value)
        assert reduce(mode, shuffled) == pytest.approx(value, abs=1e-9)


@given(st.lists(sequences, min_size=1, max_size=8))
def test_a_mean_of_ones_counts_what_is_trained(step: list[Sequence_]) -> None:
    ones = [(r, [1.0] * len(losses), mask) for r, losses, mask in step]
    live = {r for r, _, mask in step if sum(mask)}
    everyone = {r for r, _, _ in step}
    assert reduce("rollout_mean", ones) == pytest.approx(len(live) / len(everyone))
    assert reduce("token_mean", ones) == pytest.approx(1.0 if live else 0.0)


def test_empty_step_and_wrong_name() -> None:
    for mode in MODES:
        assert denominator(mode, StepSize(), max_response_len=8) >= 1
    with pytest.raises(AlgorithmError, match="'mean' is unknown"):
        coefficients("mean", [1], [1])  # type: ignore[arg-type]
    with pytest.raises(AlgorithmError, match="choose rollout_mean"):
        denominator("mean", StepSize(), max_response_len=8)  # type: ignore[arg-type]
    assert metric_mode("constant") == "token_mean"
    assert metric_mode("seq_mean") == "seq_mean"
