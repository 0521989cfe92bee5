"""Tokens that several sequences of a rollout show are trained once: as a flat batch written by hand would have it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branches import Writer, branched_batch, flat, written
from hypothesis import given
from hypothesis import strategies as st
from test_critic import values_of

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms.returns import gae
from models.algorithms.shared_tokens import prefix_fault
from models.errors import InvalidSequence
from models.train.interface import TrainSequence
from models.train.spec import BatchNeeds
from models.train.step.critic import decide_advantages
from models.train.step.examples import Example, Intake, Rollout, rollouts_of
from tests.models.train.rig import scored

VOCABULARY = 32


def trunk_and_branch() -> list[TrainSequence]:
    """prompt p; trunk a b c; branch a b | d e."""
    writer = Writer(np.random.default_rng(0), VOCABULARY)
    writer.begin([7]).tokens += writer.write(3)
    writer.branch(0, 3).tokens += writer.write(2)
    return writer.sequences(0, 0, reward=1.0)


@given(st.data())
def test_each_token_is_trained_once_with_the_mean_of_its_branches(data: st.DataObject) -> None:
    writer = Writer(np.random.default_rng(data.draw(st.integers(0, 99))), VOCABULARY)
    for place in range(data.draw(st.integers(1, 6))):
        if place and data.draw(st.booleans()):
            other = data.draw(st.integers(0, place - 1))
            story = writer.branch(other, data.draw(st.integers(1, len(writer.stories[other].tokens))))
        else:
            story = writer.begin([1, 2])
        for _ in range(data.draw(st.integers(0, 3))):
            trained = data.draw(st.booleans())
            story.tokens += writer.write(data.draw(st.integers(0, 3)), trained=trained)
    sequences = writer.sequences(0, 0)
    removed = data.draw(st.sets(st.integers(0, len(sequences) - 1)))  # mask_truncated, remove_sample
    for place in removed:
        sequences[place] = dataclasses.replace(sequences[place], loss_mask=np.zeros_like(sequences[place].loss_mask))
    (rollout,) = rollouts_of(sequences, Intake("rollout_mean", VOCABULARY))
    trained_by: dict[int, list[tuple[int, float]]] = {}
    by_tokens = {id(s.tokens): place for place, s in enumerate(sequences)}
    for example in rollout.examples:
        place = by_tokens[id(example.tokens)]
        for position, advantage in zip(example.chosen.tolist(), example.advantages.tolist(), strict=True):
            number = writer.stories[place].tokens[position].number
            trained_by.setdefault(number, []).append((place, advantage))
    expected = {}
    for number, shown in writer.by_number().items():
        places = [place for place, _ in shown if place not in removed]
        if places:
            expected[number] = (places[0], np.mean([writer.stories[place].advantage for place in places]))
    assert trained_by.keys() == expected.keys()
    for number, found in trained_by.items():
        assert len(found) == 1
        assert found[0] == (expected[number][0], pytest.approx(expected[number][1], abs=1e-6))
    assert rollout.size.tokens == len(expected)
    assert all(example.coefficient == pytest.approx(1 / len(expected)) for example in rollout.examples)


def test_the_newest_version_is_that_of_the_tokens_that_a_sequence_trains() -> None:
    trunk, branch = trunk_and_branch()
    trunk = dataclasses.replace(trunk, versions=np.array([-1, 1, 1, 2], np.int32))
    branch = dataclasses.replace(branch, versions=np.array([-1, 1, 1, 3, 4], np.int32))
    (rollout,) = rollouts_of([trunk, branch], Intake("token_mean", VOCABULARY, mask_offpolicy=True))
    assert [example.chosen.tolist() for example in rollout.examples] == [[3], [4]]
    assert [one.columns.tolist() for one in rollout.branches] == [[0], [1]]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ((1, 2), "the prefix of sequence 1 names sequence 1; it must name an earlier one"),
        ((0, 5), "the prefix of sequence 1 has 5 tokens, but the sequences have 5 and 4"),
        ((0, 4), "the first 4 tokens of sequence 1 are not those of sequence 0"),
    ],
)
def test_a_wrong_prefix_is_refused(prefix: tuple[int, int], words: str) -> None:
    trunk, branch = trunk_and_branch()
    branch.tokens[3] = 31 - trunk.tokens[3]
    branch = dataclasses.replace(branch, prefix=prefix)
    with pytest.raises(InvalidSequence, match=f"rollout 0 of group 0: {words}"):
        rollouts_of([trunk, branch], Intake("token_mean", VOCABULARY))
    assert prefix_fault([trunk.tokens, branch.tokens], [None, (0, 3)]) is None


# ---------------------------------------------------------------------- golden numbers


def decided(estimator: str, values: list[list[float]] | None = None, **fields: float) -> tuple[Rollout, list[Example]]:
    """The turn that ends with token a earns 0.5, the end 1."""
    trunk, branch = trunk_and_branch()
    sequences = [
        dataclasses.replace(one, token_rewards=np.eye(1, len(one.tokens), 1, dtype=np.float32)[0] * 0.5)
        for one in (trunk, branch)
    ]
    (rollout,) = rollouts_of(sequences, Intake("rollout_mean", VOCABULARY))
    for example, own in zip(rollout.examples, values or (), strict=False):
        example.values = np.array(own, np.float32)
    config = AlgorithmConfig(advantage_estimator=estimator, **fields)  # type: ignore[arg-type]
    decide_advantages([rollout], config, BatchNeeds(values=False), opd_kl_coef=None)
    return rollout, list(rollout.examples)


def test_reinforce_plus_plus_golden() -> None:
    """gamma 1/2. Trunk: c 1, b 0.5, a 0.5 + 0.25. Branch: e 1, d 0.5, b 0.25, a 0.5 + 0.125."""
    _, (trunk, branch) = decided("reinforce_plus_plus", gamma=0.5)
    np.testing.assert_allclose(trunk.advantages, [0.6875, 0.375, 1.0])
    np.testing.assert_allclose(branch.advantages, [0.5, 1.0])


def test_ppo_golden() -> None:
    """gamma 1, lambda 1/2, values a 0.1, b 0.2, c 0.3, d 0.4, e 0.5.

    Trunk: deltas 0.6, 0.1, 0.7 give A = 0.825, 0.45, 0.7; branch: 0.6, 0.2, 0.1, 0.5 give 0.7875, 0.375, 0.35, 0.5.
    """
    _, (trunk, branch) = decided("ppo", [[0.1, 0.2, 0.3], [0.4, 0.5]], gamma=1.0, lambd=0.5)
    np.testing.assert_allclose(trunk.advantages, [0.80625, 0.4125, 0.7], atol=1e-6)
    np.testing.assert_allclose(branch.advantages, [0.35, 0.5], atol=1e-6)
    assert trunk.returns is not None
    assert branch.returns is not None
    np.testing.assert_allclose(trunk.returns, [0.90625, 0.6125, 1.0], atol=1e-6)
    np.testing.assert_allclose(branch.returns, [0.75, 1.0], atol=1e-6)


def test_the_reward_of_a_turn_stands_at_its_last_trained_token() -> None:
    """Tokens a o b: the turn of a ends behind the observation o; a reward before any trained token is nobody's."""
    writer = Writer(np.random.default_rng(0), VOCABULARY)
    writer.begin([7]).tokens += writer.write(1) + writer.write(1, trained=False) + writer.write(1)
    (one,) = writer.sequences(0, 0, reward=1.0)
    rewards = np.array([9.0, 0.0, 0.25, 0.5], np.float32)
    (rollout,) = rollouts_of([dataclasses.replace(one, token_rewards=rewards)], Intake("token_mean", VOCABULARY))
    config = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", gamma=1.0)
    decide_advantages([rollout], config, BatchNeeds(), opd_kl_coef=None)
    np.testing.assert_allclose(rollout.examples[0].advantages, [1.75, 1.5])


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_aggregation": "rollout_mean", "use_tis": True, "entropy_coef": 0.01},
        {"loss_aggregation": "token_mean"},
        {"loss_aggregation": "seq_mean"},
        {"loss_aggregation": "constant"},
        {"use_opd": True, "opd_kl_coef": 0.5, "normalize_advantages": True},
        {"mask_offpolicy_in_partial_rollout": True},
        {"rollout_rs": ("token_k2=0.05",), "use_tis": True, "renormalize_after_rejection": True},
    ],
)
def test_branches_train_as_the_flat_batch_does(backend, run_step, fields: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    branched, by_hand = taught(branched_batch(3, VOCABULARY)), taught(branched_batch(3, VOCABULARY, as_flat=True))
    metrics, gradient, _ = run_step(backend(**fields, clip_grad=0.0), [branched])
    expected, flat_gradient, _ = run_step(backend(**fields, clip_grad=0.0), [by_hand])
    assert metrics["train/trained_tokens"] == expected["train/trained_tokens"]
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    for name, value in flat_gradient.items():
        torch.testing.assert_close(gradient[name], value, atol=1e-6, rtol=1e-6)


def taught(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Every sequence has log-probs of its own from the teacher, also of the tokens that it shares."""
    rng = np.random.default_rng(1)
    return [
        dataclasses.replace(s, teacher_log_probs=rng.normal(-3.0, 0.5, len(s.tokens)).astype(np.float32))
        for s in sequences
    ]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_episodes_of_branches_run_over_what_they_share(backend, run_step, tmp_path: Path, estimator: str) -> None:  # type: ignore[no-untyped-def]
    """KL in the reward, whitening, a critic: as advantages that are worked out branch by branch and handed over."""
    batch = branched_batch(5, VOCABULARY)
    moved = backend(lr=5e-2)
    moved.accumulate(batch)
    moved.step()
    moved.save(tmp_path / "moved")
    made = backend(
        advantage_estimator=estimator,
        gamma=0.9,
        lambd=0.8,
        kl_coef=0.1,
        normalize_advantages=True,
        ref_load=str(tmp_path / "moved" / "hf"),
    )
    students, references = scored(made, batch), scored(moved, batch)
    handed, start = [], 0
    for _, _, writer in written(5, VOCABULARY):
        members = range(start, start + len(writer.stories))
        start = members.stop
        of_branches = []
        for at in members:
            one, mask = batch[at], batch[at].loss_mask > 0
            rewards = -0.1 * (students[at] - references[at]).astype(float) * mask
            rewards[np.flatnonzero(mask)[-1]] += one.reward
            values = values_of(made, one).astype(float) if estimator == "ppo" else np.zeros(len(mask))
            lambd = 0.8 if estimator == "ppo" else 1.0
            advantages = gae(rewards, values, mask, gamma=0.9, lambd=lambd)[0].astype(np.float32)
            of_branches.append(dataclasses.replace(one, advantages=advantages))
        handed += flat(writer, of_branches)
    every = np.concatenate([one.advantages[one.loss_mask > 0] for one in handed])
    for one in handed:
        one.advantages[one.loss_mask > 0] -= every.mean()
        one.advantages[:] /= every.std(ddof=1)
    metrics, gradient, _ = run_step(made, [batch])
    expected, flat_gradient, _ = run_step(backend(), [handed])
    assert metrics["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], abs=1e-6)
    for name, value in flat_gradient.items():
        torch.testing.assert_close(gradient[name], value, atol=1e-5, rtol=1e-4)
