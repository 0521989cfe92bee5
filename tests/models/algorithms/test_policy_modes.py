"""The correction that a loss is given: decided, and refused where it is not."""

from __future__ import annotations

import msgspec
import pytest

from configs.schema.algorithm import CorrectionConfig, InvalidRule
from models.algorithms.correction import correction_of
from models.errors import AlgorithmError
from tests.models.corrections import corrected


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
