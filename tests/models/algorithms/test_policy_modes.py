"""The resolved correction: every field arrives, and the resolution agrees with that of the configuration."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from configs.resolve import derive
from configs.schema import Config
from configs.schema.algorithm import SAMPLER_LOSSES
from configs.schema.correction import CorrectionConfig
from models.algorithms.errors import InvalidRule
from models.algorithms.modes import Correction, resolve_correction
from models.algorithms.rules import parse_rules


def test_every_field_of_the_configuration_that_the_loss_needs_arrives() -> None:
    config = CorrectionConfig(
        policy_mode="decoupled",
        use_tis=True,
        tis_level="geometric",
        tis_mode="seq_mask",
        tis_clip=3.0,
        tis_clip_low=0.1,
        tis_seq_low=0.8,
        tis_seq_high=1.3,
        tis_clip_decay=0.9,
        tis_batch_normalize=True,
        correction_ratio="current",
        custom_tis_function_path="a.b:c",
        rollout_rs=("token_k3=0.05", "seq_mean_k1=0.9_1.2"),
        rs_veto=1e-4,
        rs_unit="rollout",
        renormalize_after_rejection=True,
        prox="loglinear",
        prox_alpha="areal",
        use_opsm=True,
        opsm_delta=0.2,
    )
    assert resolve_correction(config, max_staleness=2) == Correction(
        mode="decoupled",
        use_tis=True,
        low=0.1,
        high=3.0,
        level="geometric",
        tis_mode="seq_mask",
        seq_low=0.8,
        seq_high=1.3,
        clip_decay=0.9,
        batch_normalize=True,
        ratio="current",
        custom="a.b:c",
        rules=parse_rules(["token_k3=0.05", "seq_mean_k1=0.9_1.2"]),
        veto=1e-4,
        rs_unit="rollout",
        renormalize=True,
        prox="loglinear",
        prox_alpha="areal",
        use_opsm=True,
        opsm_delta=0.2,
    )


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
    found = resolve_correction(config, max_staleness=staleness, policy_loss=loss)
    assert (found.mode, found.use_tis) == (mode, tis)


def test_agreement_with_the_resolution_of_the_configuration() -> None:
    """Whether a caller resolves the correction itself or is handed a resolved configuration: one answer."""
    compared = 0
    for mode, bypass, tis, staleness, loss, rules, allow in itertools.product(
        ("auto", "decoupled", "bypass", "onpolicy"),
        (None, True),
        (None, False, True),
        (0, 3),
        ("ppo", *sorted(SAMPLER_LOSSES)),
        ((), ("token_k3=0.1",)),
        (False, True),
    ):
        correction: dict[str, object] = {"policy_mode": mode, "rollout_rs": rules, "allow_uncorrected": allow}
        correction |= {"use_tis": tis} if tis is not None else {}
        correction |= {"use_rollout_logprobs": True} if bypass else {}
        raw = Config(
            correction=msgspec.convert(correction, CorrectionConfig),
            algorithm=msgspec.structs.replace(Config().algorithm, policy_loss=loss),
            asynchrony=msgspec.structs.replace(Config().asynchrony, max_staleness=staleness),
        )
        written = {f"correction.{name}": "--" for name in correction} | {"asynchrony.max_staleness": "--"}
        resolved, _ = derive(raw, written)
        for config in (raw, resolved):
            found = resolve_correction(config.correction, max_staleness=staleness, policy_loss=loss)
            expected = (resolved.correction.policy_mode, resolved.correction.use_tis)
            assert (found.mode, found.use_tis) == expected, (correction, staleness, loss)
            compared += 1
    assert compared > 1000


def test_a_wrong_rule_is_refused_when_it_is_resolved() -> None:
    with pytest.raises(InvalidRule, match="seq_max_k1"):
        resolve_correction(CorrectionConfig(rollout_rs=("seq_max_k1=0.9_1.1",)), max_staleness=1)
