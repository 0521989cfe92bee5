"""Order of arrival, micro-batches, packing, padding: nothing of it reaches the update, whatever is switched on."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_trainer import CASES, sequences_of
from small_trainer import Trained, make_backend, make_sequences, train_step

from models.train.interface import TrainSequence
from models.train.trainer import Trainer

# What depends on how micro-batches were formed; and a threshold at 0 of a margin that is 0 but for rounding.
LAYOUT = {"train/micro_batches", "train/padding_frac", "train/shared_prompt_frac", "custom/accuracy"}
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {"max_tokens": 32},
    "unpacked": {"pack": False},
    "unshared": {"share_prompts": False, "max_tokens": 64},
    "one row": {"share_prompts": False, "single_row": True, "max_tokens": 40},
}


def calls_of(sequences: list[TrainSequence], *, backwards: bool) -> list[list[TrainSequence]]:
    """One call with all sequences, or one for each rollout from the last to the first."""
    if not backwards:
        return [sequences]
    key = lambda sequence: sequence.rollout_id  # noqa: E731
    rollouts = itertools.groupby(sorted(sequences, key=key, reverse=True), key=key)
    return [list(members)[::-1] for _, members in rollouts]


def update(backend: Trainer, sequences: list[TrainSequence], steps: int, *, backwards: bool) -> list[Trained]:
    backend.begin_batch(rollouts=12, steps=steps, version=2)
    calls = calls_of(sequences, backwards=backwards)
    return [train_step(backend, calls if step == 0 else [], flush=backwards) for step in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_how_a_batch_is_computed_changes_nothing(tiny, name: str) -> None:  # type: ignore[no-untyped-def]
    steps, how, fields = CASES[name]
    sequences = sequences_of(how)
    expected = update(make_backend(tiny, **fields), sequences, steps, backwards=False)
    for variant, changes in VARIANTS.items():
        made = make_backend(tiny, **fields)
        models = made._models
        models.packing = dataclasses.replace(models.packing, **changes)
        found = update(made, sequences, steps, backwards=True)
        for step, (have, want) in enumerate(zip(found, expected, strict=True)):
            assert have[0].keys() == want[0].keys(), variant
            for key in want[0].keys() - LAYOUT:
                assert have[0][key] == pytest.approx(want[0][key], rel=1e-4, abs=2e-6), (variant, step, key)
            for left, right in zip(have[1:], want[1:], strict=True):  # gradient, weights
                assert left.keys() == right.keys()
                for key, value in right.items():
                    torch.testing.assert_close(left[key], value, atol=3e-6, rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    case=st.sampled_from(sorted(CASES)),
    wild=st.booleans(),
    steps=st.integers(1, 3),
)
def test_whatever_comes_the_weights_stay_finite(tiny, seed: int, case: str, wild: bool, steps: int) -> None:  # type: ignore[no-untyped-def]
    """Lengths from 0, masked sequences, NaN behind the mask, samplers that were sure of what the policy rules out."""
    rng = np.random.default_rng(seed)
    sequences = []
    for one in make_sequences(seed % 50, groups=int(rng.integers(0, 4)), per_group=2, rewards=True):
        keep = one.prompt_length + int(rng.integers(0, one.response_length + 1))
        mask = (one.loss_mask[:keep] * (rng.random() < 0.8)).astype(np.uint8)
        sampler = one.rollout_log_probs[:keep] + (rng.choice([-1000.0, 0.0, 1000.0]) if wild else 0.0)
        sequences.append(
            dataclasses.replace(
                one,
                tokens=one.tokens[:keep],
                loss_mask=mask,
                rollout_log_probs=np.where(mask, sampler, np.nan).astype(np.float32),
                advantages=np.where(mask, one.advantages[:keep], np.nan).astype(np.float32),
                teacher_log_probs=np.where(mask, one.teacher_log_probs[:keep], np.nan).astype(np.float32),
                versions=one.versions[:keep],
            )
        )
    _, _, fields = CASES[case]
    made = make_backend(tiny, **fields)
    made.begin_batch(rollouts=len(sequences), steps=steps, version=3)
    made.accumulate(sequences)
    for _ in range(steps):
        metrics = made.step()
        assert metrics["train/skipped_steps"] == 0.0
        assert np.isfinite([metrics["train/grad_norm"], metrics["train/lr"]]).all()
    assert all(torch.isfinite(parameter).all() for parameter in made._models.model.parameters())
