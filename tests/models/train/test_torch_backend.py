"""The backend trains the same whatever way its input was cut, packed or ordered; and it learns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from models.algorithms.modes import Correction
from models.train.errors import BackendMisuse

AGGREGATIONS = ["rollout_mean", "token_mean", "seq_mean", "constant"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def by_rollout(sequences):  # type: ignore[no-untyped-def]
    key = lambda s: (s.group_id, s.rollout_id)  # noqa: E731
    return [list(members) for _, members in itertools.groupby(sorted(sequences, key=key), key=key)]


def reference_gradient(backend, sequences, aggregation):  # type: ignore[no-untyped-def]
    """Section by section as the definition says: one sequence at a time, no packing, one scalar loss."""
    model, temperature = backend._model, 0.9
    terms = []
    for members in by_rollout(sequences):
        rollout_tokens = sum(int(m.loss_mask.sum()) for m in members)
        for m in members:
            ids = torch.from_numpy(m.tokens.astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
            every = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            theta = every[len(ids) - 1 - m.response_length :]
            mask = torch.from_numpy(m.loss_mask.astype(np.float32))
            mu = torch.from_numpy(m.rollout_log_probs)
            weight = (theta.detach() - mu).exp().clamp(0, 2)
            loss = -weight * (theta - theta.detach()).exp() * torch.from_numpy(m.advantages)
            summed = (loss * mask).sum()
            own = max(int(m.loss_mask.sum()), 1)
            divisor = {"rollout_mean": max(rollout_tokens, 1), "seq_mean": own}.get(aggregation, 1)
            terms.append(summed / divisor)
    rollouts, tokens = len(by_rollout(sequences)), sum(int(s.loss_mask.sum()) for s in sequences)
    whole = {"rollout_mean": rollouts, "token_mean": tokens, "seq_mean": len(sequences), "constant": rollouts * 16}
    total = torch.stack(terms).sum() / whole[aggregation]
    parameters = dict(model.named_parameters())
    gradient = torch.autograd.grad(total, list(parameters.values()))
    return float(total.detach()), dict(zip(parameters, gradient, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_that_of_the_definition(backend, sequences, run_step, aggregation) -> None:  # type: ignore[no-untyped-def]
    made = backend(loss_aggregation=aggregation)
    batch = sequences()
    loss, expected = reference_gradient(made, batch, aggregation)
    metrics, gradient, _ = run_step(made, [batch])
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
    same(gradient, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_splits_order_packing_and_padding_change_nothing(backend, sequences, run_step, aggregation) -> None:  # type: ignore[no-untyped-def]
    batch = sequences()
    fields = {"loss_aggregation": aggregation, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    metrics, gradient, weights = run_step(backend(**fields), [batch])
    assert metrics["train/micro_batches"] == 1
    rollouts = by_rollout(batch)
    variants = {
        "small budget": (backend(**fields, max_tokens_per_gpu=24), [batch], False),
        "one sequence at a time": (backend(**fields, max_tokens_per_gpu=1), [batch], False),
        "as they arrive": (backend(**fields, max_tokens_per_gpu=40), rollouts, False),
        "last first": (backend(**fields), rollouts[::-1], False),
        "flushed": (backend(**fields), rollouts[1:] + rollouts[:1], True),
        "small chunks": (backend(**fields, logprob_chunk_tokens=5), [batch], False),
        "eager": (backend(**fields, attn_implementation="eager"), [batch], False),
        "checkpointed": (backend(**fields, gradient_checkpointing=True), [batch], False),
    }
    unpacked = backend(**fields)
    object.__setattr__(unpacked._loaded, "can_pack", False)
    variants["unpacked"] = (unpacked, [batch], False)
    for name, (made, calls, flush) in variants.items():
        found, other_gradient, other_weights = run_step(made, calls, flush=flush)
        same(other_gradient, gradient)
        same(other_weights, weights)
        for key in set(metrics) - {"train/micro_batches", "train/padding_frac"}:
            assert found[key] == pytest.approx(metrics[key], abs=2e-6, rel=1e-4), (name, key)


def test_small_budgets_work_while_sequences_arrive(backend, sequences) -> None:  # type: ignore[no-untyped-def]
    made = backend(max_tokens_per_gpu=16)
    for rollout in by_rollout(sequences()):
        made.accumulate(rollout)
    assert made._totals.micro_batches > 3  # before step()
    assert made.step()["train/micro_batches"] > 5


def test_modes_give_the_same_gradient_without_staleness(backend, sequences, run_step) -> None:  # type: ignore[no-untyped-def]
    results = []
    for correction in (
        Correction(mode="decoupled", use_tis=True),
        Correction(mode="bypass", use_tis=False),
        Correction(mode="onpolicy", use_tis=False),
    ):
        made = backend(correction=correction)
        batch = sequences()
        for item, log_probs in zip(batch, made.logprobs(batch), strict=True):
            item.rollout_log_probs[:] = log_probs
        metrics, gradient, _ = run_step(made, [batch])
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-5
        results.append(gradient)
    same(results[0], results[1])
    same(results[0], results[2])


def test_log_probs_follow_temperature_and_length(backend, sequences) -> None:  # type: ignore[no-untyped-def]
    batch = [*sequences(), *sequences(seed=5, groups=1)]
    cold, warm = backend(temperature=0.5), backend(temperature=1.0)
    small = backend(temperature=0.5, max_tokens_per_gpu=10)
    for item, a, b, c in zip(
        batch, cold.logprobs(batch), warm.logprobs(batch), small.logprobs(batch), strict=True
    ):
        assert len(a) == item.response_length
        assert (a < 0).all()
        assert not np.allclose(a, b)
        np.testing.assert_allclose(a, c, atol=1e-5)
    assert cold.logprobs([]) == []


@pytest.mark.parametrize("steps", [2, 4])
def test_several_steps_per_batch_anchor_on_its_first_weights(backend, sequences, one, steps) -> None:  # type: ignore[no-untyped-def]
    """The anchor is scored before any step, and each step's denominator is its own."""
    batch = sequences(groups=4, per_group=4, fan_out=True)
    made = backend(lr=1e-2, max_tokens_per_gpu=64)
    before = dict(zip([id(s) for s in batch], made.logprobs(batch), strict=True))
    made.begin_batch(rollouts=16, steps=steps)
    for rollout in by_rollout(batch):
        made.accumulate(rollout)
    found = [made.step()]
    anchors = {}
    for part in made._parts:
        for rollout in part:
            anchors[rollout.key] = [example.old_log_probs for example in rollout.examples]
    for members in by_rollout(batch):
        expected = [before[id(m)][m.loss_mask == 1] for m in members if m.loss_mask.any()]
        for anchor, values in zip(anchors.get((members[0].group_id, members[0].rollout_id), []), expected, strict=False):
            np.testing.assert_allclose(anchor, values, atol=1e-5)
    found += [made.step() for _ in range(steps - 1)]
    assert [m["train/rollouts"] for m in found] == [16 / steps] * steps
    assert sum(m["train/trained_tokens"] for m in found) == sum(int(s.loss_mask.sum()) for s in batch)
    assert abs(found[0]["train/ppo_kl"]) < 1e-6
    assert abs(found[-1]["train/ppo_kl"]) > 1e-6  # the weights moved away from the anchor
    made.begin_batch(rollouts=1, steps=1)


def test_several_steps_do_not_depend_on_the_order_of_arrival(backend, sequences, weights) -> None:  # type: ignore[no-untyped-def]
    batch = sequences(groups=4, per_group=4)
    results = []
    for calls in (by_rollout(batch), by_rollout(batch)[::-1], [batch]):
        made = backend(max_tokens_per_gpu=64, use_kl_loss=True, kl_loss_coef=0.1)
        made.begin_batch(rollouts=16, steps=4)
        for call in calls:
            made.accumulate(call)
        for _ in range(4):
            made.step()
        results.append(weights(made))
    same(results[0], results[1])
    same(results[0], results[2])


def test_kl_term_is_zero_at_the_reference_and_grows_away_from_it(backend, sequences) -> None:  # type: ignore[no-untyped-def]
    made = backend(use_kl_loss=True, kl_loss_coef=0.1, lr=3e-2)
    found = []
    for seed in range(2):
        made.accumulate(sequences(seed=seed))
        found.append(made.step()["train/kl_loss"])
    assert abs(found[0]) < 1e-6
    assert found[1] > 1e-4


def test_supervised_loss_falls_and_ignores_advantages(backend, sequences) -> None:  # type: ignore[no-untyped-def]
    made = backend(loss_type="sft_loss", lr=1e-2, temperature=0.3)
    batch = sequences(groups=6)
    losses = []
    for _ in range(30):
        made.accumulate(batch)
        losses.append(made.step()["train/loss"])
    assert losses[0] == pytest.approx(np.log(32), abs=0.2)  # temperature 1, whatever the rollouts use
    assert losses[-1] < 0.6 * losses[0]


def test_rewarded_tokens_become_likelier(backend, one) -> None:  # type: ignore[no-untyped-def]
    made = backend(lr=1e-2, staleness=0)
    good = one(rollout=0, tokens=[1, 2, 3, 4], mask=[1, 1], advantage=1.0)
    bad = one(rollout=1, tokens=[1, 2, 5, 6], mask=[1, 1], advantage=-1.0)
    before = made.logprobs([good, bad])
    for _ in range(5):
        made.accumulate([good, bad])
        made.step()
    after = made.logprobs([good, bad])
    assert (after[0] > before[0]).all()
    assert (after[1] < before[1]).all()


def test_calls_without_meaning_are_refused(backend, sequences) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    batch = sequences()
    made.accumulate(batch[:4])
    with pytest.raises(BackendMisuse, match="handed over twice"):
        made.accumulate(batch[:1])
    with pytest.raises(BackendMisuse, match="finish the batch before with step"):
        made.begin_batch(rollouts=1, steps=1)
    made.step()
    with pytest.raises(BackendMisuse, match="at least 1 step"):
        made.begin_batch(rollouts=1, steps=0)
    made.begin_batch(rollouts=4, steps=2)
    made.accumulate(batch)
    made.step()
    with pytest.raises(BackendMisuse, match="call step\\(\\) 1 more times"):
        made.accumulate(sequences(seed=3))
    made.step()
    made.accumulate(batch)  # a new batch may train the same rollouts again
