"""Refusals and warnings: each rule fires on its case, in words that name the cure, and on no other."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.guards import check, warn
from models.algorithms.modes import Correction, resolve_correction


@pytest.mark.parametrize(
    ("changes", "staleness", "expected"),
    [
        ({}, 0, Correction("onpolicy", False)),
        ({}, 2, Correction("decoupled", True)),
        ({"use_tis": False}, 2, Correction("onpolicy", False)),
        ({"use_tis": True, "tis_clip": 5.0, "tis_clip_low": 0.5}, 0, Correction("decoupled", True, 0.5, 5.0)),
        ({"use_rollout_logprobs": True}, 2, Correction("bypass", False)),
        ({"policy_mode": "bypass"}, 2, Correction("bypass", False)),
        ({"policy_mode": "decoupled"}, 0, Correction("decoupled", True)),
        ({"policy_mode": "decoupled", "use_tis": False}, 0, Correction("decoupled", False)),
        ({"policy_mode": "onpolicy"}, 2, Correction("onpolicy", False)),
    ],
)
def test_resolution_of_the_mode(changes: dict[str, Any], staleness: int, expected: Correction) -> None:
    assert resolve_correction(AlgorithmConfig(**changes), max_staleness=staleness) == expected


@pytest.mark.parametrize(
    ("changes", "staleness", "options"),
    [
        ({}, 0, {}),
        ({}, 3, {"n_samples_per_prompt": 8, "update_weights_interval": 2}),
        ({"use_rollout_logprobs": True}, 3, {}),
        ({"policy_mode": "bypass"}, 3, {}),
        ({"policy_mode": "onpolicy"}, 0, {"rollout_top_p": 0.9}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, 0, {}),
        ({"policy_mode": "onpolicy"}, 3, {"loss_type": "sft_loss", "n_samples_per_prompt": 1}),
    ],
)
def test_sound_configurations_pass(changes: dict[str, Any], staleness: int, options: dict[str, Any]) -> None:
    assert check(AlgorithmConfig(**changes), staleness, **options) == []


@pytest.mark.parametrize(
    ("changes", "staleness", "options", "words"),
    [
        ({"policy_mode": "onpolicy"}, 1, {}, r"max_staleness=1 .*refused; add --use-tis or --use-rollout-logprobs"),
        ({"use_tis": False}, 2, {}, "policy_mode=onpolicy without TIS"),
        ({"use_tis": False}, 0, {"update_weights_interval": 2}, "update_weights_interval=2 admit samples of older"),
        ({"policy_mode": "decoupled", "use_tis": False}, 1, {}, "policy_mode=decoupled without TIS"),
        ({"use_rollout_logprobs": True, "use_tis": True}, 1, {}, "use_rollout_logprobs with policy_mode=decoupled"),
        ({"policy_mode": "bypass", "use_tis": True}, 1, {}, "use_tis with policy_mode=bypass"),
        ({"policy_mode": "onpolicy", "use_tis": True}, 0, {}, "use_tis with policy_mode=onpolicy"),
        ({"use_kl_loss": True}, 0, {}, "use_kl_loss with kl_loss_coef=0"),
        ({"kl_loss_coef": 0.1}, 0, {}, r"kl_loss_coef=0\.1 without use_kl_loss"),
        ({"tis_clip_low": 3.0}, 1, {}, r"tis_clip_low=3\.0 is above tis_clip=2\.0"),
        ({"eps_clip": 1.5}, 0, {}, r"eps_clip=1\.5.*--eps-clip below 1"),
        ({}, 0, {"n_samples_per_prompt": 1}, r"n_samples_per_prompt=1 .*to 2 or more"),
        ({}, 1, {"rollout_top_p": 0.9}, r"rollout_top_p=0\.9"),
        ({}, 1, {"rollout_top_k": 50}, "rollout_top_k=50"),
        ({"policy_mode": "bypass"}, 1, {"rollout_top_k": 50}, "--rollout-top-p 1"),
    ],
)
def test_faults(changes: dict[str, Any], staleness: int, options: dict[str, Any], words: str) -> None:
    faults = check(AlgorithmConfig(**changes), staleness, **options)
    assert len(faults) == 1
    import re

    assert re.search(words, faults[0])


def test_warnings() -> None:
    assert warn(AlgorithmConfig()) == []
    assert warn(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)) == []
    (k1,) = warn(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1"))
    assert "expected gradient on-policy is zero" in k1
    (high,) = warn(AlgorithmConfig(eps_clip=0.3, eps_clip_high=0.2))
    assert "--eps-clip-high above --eps-clip" in high
    (std,) = warn(AlgorithmConfig(advantage_estimator="rloo", disable_grpo_std_normalization=True))
    assert "has no effect" in std
    assert warn(AlgorithmConfig(eps_clip=0.3, eps_clip_high=0.2), loss_type="sft_loss") == []
