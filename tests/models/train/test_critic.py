"""The critic: its loss, its values, what the policy makes of them, and its place in a checkpoint."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from models.algorithms.returns import gae
from models.train.step.critic import value_loss
from tests.models.train.rig import differing, make_sequences, state_of, train_batch, unchanged, weights_of, with_rewards

PPO = {"advantage_estimator": "ppo", "critic_lr": 3e-3, "gamma": 0.9, "lambd": 0.8}


def values_of(backend, sequence, *, after: bool = False):  # type: ignore[no-untyped-def]
    """Values before each token, 0 before the first (and behind the last one), one sequence at a time."""
    critic = backend._models.critic
    ids = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    with torch.no_grad():
        hidden = critic.model.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        values = critic.model.value_head(hidden).squeeze(-1)
    values = np.append(np.float32(0.0), values.numpy())
    return values if after else values[:-1]


def test_value_loss_golden() -> None:
    values = torch.tensor([0.9, 0.35, 0.3], requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor([0.5, 0.4, 0.3]), torch.tensor([1.0, 0.2, 0.0]), clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([0.09, 0.0225, 0.09]))
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 0.3, 0.6]))
    assert clipped.tolist() == [True, False, False]


def trained_examples(backend, sequences):  # type: ignore[no-untyped-def]
    """The examples of a batch of one step, as the step leaves them."""
    backend.accumulate(sequences)
    batch = backend._batch
    backend.step()
    return [example for rollout in batch._rollouts for example in rollout.examples]


def test_values_are_read_before_each_token_and_behind_a_truncated_end(backend) -> None:  # type: ignore[no-untyped-def]
    batch = with_rewards(make_sequences(1))
    made, plain = backend(**PPO, bootstrap_truncated=True), backend(**PPO)
    expected = {id(s): values_of(made, s, after=True) for s in batch}  # before the step
    trained, others = trained_examples(made, batch), trained_examples(plain, batch)
    alive = [s for s in batch if s.loss_mask.any()]
    alive.sort(key=lambda s: (s.group_id, s.rollout_id))
    assert len(trained) == len(alive)
    for sequence, example, other in zip(alive, trained, others, strict=True):
        values = expected[id(sequence)]
        np.testing.assert_allclose(example.values, values[:-1][sequence.loss_mask > 0], atol=1e-5)
        assert example.bootstrap == pytest.approx(values[-1] if sequence.truncated else 0.0, abs=1e-5)
        assert other.bootstrap == 0.0
        rewards = np.zeros(len(example.chosen))
        rewards[-1] = sequence.reward
        mask = np.ones(len(rewards), dtype=bool)
        _, returns = gae(rewards, example.values.astype(float), mask, gamma=0.9, lambd=0.8, bootstrap=example.bootstrap)
        np.testing.assert_allclose(example.returns, returns, atol=1e-5)
    assert any(s.truncated for s in alive)
    assert not all(s.truncated for s in alive)


@pytest.mark.parametrize("steps", [1, 2])
def test_at_first_only_the_critic_is_trained(backend, steps: int) -> None:  # type: ignore[no-untyped-def]
    batch = with_rewards(make_sequences(4))
    made = backend(**PPO, num_critic_only_steps=2, lr_warmup_iters=3)
    before = weights_of(made)
    for number in range(3):
        head = made._models.critic.model.value_head.weight.detach().clone()
        metrics = train_batch(made, batch, steps=steps)[-1]
        assert not torch.equal(head, made._models.critic.model.value_head.weight)
        assert (differing(weights_of(made), before) == []) is (number < 2)
        assert ("train/critic_only" in metrics) is (number < 2)
        assert metrics["train/empty_steps"] == metrics["train/skipped_steps"] == 0.0
    assert made._models.updater.updates == steps  # the policy's warm-up begins with its first update


def test_warm_up_of_the_critic_is_its_own(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend(**PPO, critic_lr_warmup_iters=4)
    [metrics] = train_batch(made, with_rewards(make_sequences(4)))
    assert metrics["train/critic_lr"] == pytest.approx(3e-3 / 4)


def test_a_discarded_batch_leaves_no_gradient_behind(backend, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Its gradients are there when a step breaks off; the batch that comes next is as good as a first one."""
    made, fresh, batch = backend(**PPO), backend(**PPO), with_rewards(make_sequences(1))
    critic = made._models.critic

    def breaks_off(batches):  # type: ignore[no-untyped-def]
        type(critic).backward(critic, batches)
        raise RuntimeError("out of memory")

    made.accumulate(with_rewards(make_sequences(0)))
    monkeypatch.setattr(critic, "backward", breaks_off)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.step()
    monkeypatch.undo()
    made.discard()
    assert train_batch(made, batch) == train_batch(fresh, batch)
    assert differing(state_of(made, "critic"), state_of(fresh, "critic")) == []


def test_a_value_that_is_not_finite_reaches_neither_optimizer(backend) -> None:  # type: ignore[no-untyped-def]
    batch = with_rewards(make_sequences(0))
    made = backend(**PPO)
    train_batch(made, batch)
    with unchanged(made):
        [metrics] = train_batch(made, [dataclasses.replace(s, reward=float("inf")) for s in batch])
    assert metrics["train/skipped_steps"] == 2.0  # the policy's and the critic's
