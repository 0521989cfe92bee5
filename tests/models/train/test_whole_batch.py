"""What is decided for a whole batch or step before its first backward pass, and what then must not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.algorithm import AlgorithmConfig
from models.algorithms import tokens as token_module
from models.algorithms.advantages import Episode, batch_advantages
from models.errors import InvalidSequence, TrainConfigInvalid
from models.train import trainer
from models.train.spec import BatchNeeds
from models.train.step import running_batch
from tests.models.train import rig

GROUPS_SEEN: list[list[tuple[int, int]]] = []


def counted(backend: Any) -> list[bool]:
    """Forward passes of the policy from now on: whether each kept a graph."""
    calls: list[bool] = []
    score = backend._models._score
    original = score.chosen_hidden

    def spy(rows: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return original(rows)

    score.chosen_hidden = spy
    return calls


# ---------------------------------------------------------------------- the two ways


def test_both_ways_make_the_same_update(backend, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    batch = rig.make_sequences(7)
    streaming = rig.train_step(backend(max_tokens_per_gpu=48), [batch[:4], batch[4:]], flush=True)
    for recomputed in (False, True):
        monkeypatch.setattr(
            "models.train.trainer.batch_needs",
            lambda *_, recomputed=recomputed, **__: BatchNeeds(whole_batch=True, old_log_probs=recomputed),
        )
        whole = rig.train_step(backend(max_tokens_per_gpu=64), [batch[:4], batch[4:]])
        assert whole[0]["train/loss"] == pytest.approx(streaming[0]["train/loss"], abs=1e-6)
        rig.same(whole[1], streaming[1])


@pytest.mark.parametrize(("fields", "forwards", "graphs"), [
    ({}, 1, 1),  # one pass: the anchor is the pass that is trained
    ({"use_tis": True, "prox": "loglinear"}, 1, 1),  # the anchor lies between mu and theta
    ({"use_rollout_logprobs": True}, 1, 1),
    ({"policy_loss": "m2po"}, 2, 1),
    ({"tis_batch_normalize": True}, 2, 1),
    ({"normalize_advantages": True}, 1, 1),  # whitening looks at advantages only
    ({"use_opd": True}, 2, 1),  # distillation looks at the policy of the batch's start
    ({"use_opd": True, "use_rollout_logprobs": True}, 1, 1),  # or at the sampler
])  # fmt: skip
def test_no_forward_pass_is_made_without_need(backend, fields: dict[str, Any], forwards: int, graphs: int) -> None:  # type: ignore[no-untyped-def]
    made = backend(**fields)
    calls = counted(made)
    rig.train_batch(made, rig.make_sequences(1, rewards=True))
    assert (len(calls), sum(calls)) == (forwards, graphs)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"use_kl_loss": True, "kl_loss_coef": 0.1}], ids=["alone", "beside a reference"]
)
def test_the_first_step_finds_its_old_log_probs_itself(  # type: ignore[no-untyped-def]
    backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], early: bool
) -> None:
    """Also of sequences that came early and were scored; the update is that of a batch which was scored whole."""
    if fields:
        moved = backend(lr=5e-2)
        rig.train_batch(moved, rig.make_sequences(2))
        moved.save(tmp_path / "moved")
        fields = {**fields, "ref_load": str(tmp_path / "moved" / "hf")}
    batch, scored = rig.make_sequences(3, groups=4), []
    original = running_batch.OldLogProbPass._score

    def spy(self: Any, assigned: Any, score: Any, *names: str) -> None:
        scored.extend(names * len(assigned.examples))
        original(self, assigned, score, *names)

    def trained() -> list[rig.Trained]:
        scored.clear()
        made = backend(**fields)
        made.begin_batch(rollouts=len(batch), steps=2)
        made.accumulate(batch[:6])
        if early:
            made.flush()
        return [rig.train_step(made, [batch[6:]] if step == 0 else []) for step in range(2)]

    monkeypatch.setattr(running_batch.OldLogProbPass, "_score", spy)
    found, keys = trained(), sorted({(one.group_id, one.rollout_id) for one in batch})
    examples = [(at, one) for at, one in enumerate(batch) if one.loss_mask.any()]
    due = [at < 6 * early or (one.group_id, one.rollout_id) in keys[len(keys) // 2 :] for at, one in examples]
    assert found[0][0]["train/ppo_kl"] == 0.0
    assert scored.count("old_log_probs") == sum(due) < len(examples)
    assert scored.count("ref_log_probs") == (len(examples) if fields else 0)
    needs = trainer.batch_needs
    monkeypatch.setattr(
        trainer, "batch_needs", lambda *a, **k: dataclasses.replace(needs(*a, **k), score_first_step=True)
    )
    for one, other in zip(found, trained(), strict=True):
        assert one[0]["train/loss"] == pytest.approx(other[0]["train/loss"], abs=1e-6)
        rig.same(one[1], other[1])
    assert scored.count("old_log_probs") == len(examples)


def test_later_steps_look_at_the_weights_of_their_own_start(backend, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The threshold of m2po is of theta as it is when the step begins; the sampler's and the ages stay."""
    made = backend(policy_loss="m2po", m2po_threshold=0.05, lr=1e-2)
    batch = rig.make_sequences(8, groups=2)
    by_ids = {s.tokens.tobytes(): s for s in batch}
    seen = []
    original = running_batch.write_step_statistics

    def spy(examples: Any, *rest: Any) -> Any:
        facts = original(examples, *rest)
        for example in examples:
            sequence = by_ids[example.tokens.tobytes()]
            (now,) = rig.scored(made, [sequence])
            np.testing.assert_allclose(example.current_log_probs, now[sequence.loss_mask > 0], atol=1e-5)
        seen.append(facts.m2po_bound)
        return facts

    monkeypatch.setattr(running_batch, "write_step_statistics", spy)
    rig.train_batch(made, batch, steps=3)
    assert len(set(seen)) == 3
    assert all(np.isfinite(seen))


# ---------------------------------------------------------------------- advantages


@pytest.mark.parametrize("fields", [
    {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.5, "gamma": 0.9},
    {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.5, "normalize_advantages": True},
    {"advantage_estimator": "on_policy_distillation", "opd_kl_coef": 0.7},
    {"advantage_estimator": "grpo", "use_opd": True, "opd_kl_coef": 0.7, "normalize_advantages": True},
    {"advantage_estimator": "grpo", "use_opd": True, "use_rollout_logprobs": True},
], ids=lambda fields: "-".join(map(str, fields.values())))  # fmt: skip
@pytest.mark.parametrize("steps", [1, 2])
def test_advantages_of_tokens_reach_the_loss(backend, tmp_path: Path, fields: dict[str, Any], steps: int) -> None:  # type: ignore[no-untyped-def]
    """The same gradients as with the advantages worked out sequence by sequence and handed over."""
    moved = backend(lr=5e-2)  # a reference that is not the policy
    rig.train_batch(moved, rig.make_sequences(2))
    moved.save(tmp_path / "moved")
    reference = str(tmp_path / "moved" / "hf")
    batch = rig.make_sequences(9, rewards=True)
    made = backend(ref_load=reference, **fields)
    distills = "opd_kl_coef" in fields or "use_opd" in fields
    algorithm = AlgorithmConfig(**{k: v for k, v in fields.items() if k in AlgorithmConfig.__struct_fields__})
    bypass = fields.get("use_rollout_logprobs", False)
    students = [s.rollout_log_probs for s in batch] if bypass else rig.scored(made, batch)
    coefficient = fields.get("opd_kl_coef", 1.0) if distills else None
    episodes = [
        Episode(
            mask=s.loss_mask > 0,
            advantages=s.advantages.astype(float),
            reward=s.reward,
            student=student.astype(float),
            reference=ref.astype(float),
            teacher=None if s.teacher_log_probs is None else s.teacher_log_probs.astype(float),
        )
        for s, student, ref in zip(batch, students, rig.scored(moved, batch), strict=True)
    ]
    found = batch_advantages(algorithm, episodes, opd_kl_coef=coefficient)
    handed = [
        dataclasses.replace(s, advantages=one.advantages.astype(np.float32))
        for s, one in zip(batch, found, strict=True)
    ]
    plain = backend(use_rollout_logprobs=bypass)
    for one in (made, plain):
        one.begin_batch(rollouts=12, steps=steps)
    for step in range(steps):
        metrics, gradient, _ = rig.train_step(made, [batch[:4], batch[4:]] if step == 0 else [])
        _, expected, _ = rig.train_step(plain, [handed] if step == 0 else [])
        rig.same(gradient, expected, atol=2e-5)
    assert ("train/opd_reverse_kl" in metrics) is distills
    assert ("train/reward_kl" in metrics) is ("kl_coef" in fields)


def test_distillation_names_the_sequence_that_has_no_teacher(backend) -> None:  # type: ignore[no-untyped-def]
    batch = rig.make_sequences(5, rewards=True, dark=False)
    bare = dataclasses.replace(batch[2], teacher_log_probs=None)
    with pytest.raises(InvalidSequence, match=f"rollout {bare.rollout_id} of group {bare.group_id}: teacher_log_probs"):
        backend(use_opd=True).accumulate([*batch[:2], bare])
    short = dataclasses.replace(batch[2], teacher_log_probs=np.zeros(99, np.float32))
    with pytest.raises(InvalidSequence, match="teacher_log_probs has 99 entries"):
        backend().accumulate([short])


# ---------------------------------------------------------------------- versions


def test_only_the_newest_version_is_trained(backend) -> None:  # type: ignore[no-untyped-def]
    tokens = [3, 4, 5, 6, 7, 8]
    mixed = rig.sequence(tokens=tokens, mask=[1, 1, 0, 1, 1], rollout_log_probs=[-3.0] * 5)
    mixed = dataclasses.replace(mixed, versions=np.array([-1, 1, 1, 9, 2, 2], dtype=np.int32))
    dark = dataclasses.replace(mixed, loss_mask=np.array([0, 0, 0, 0, 1, 1], dtype=np.uint8))
    metrics, gradient, _ = rig.train_step(backend(mask_offpolicy_in_partial_rollout=True), [[mixed]])
    expected = rig.train_step(backend(), [[dark]])
    assert metrics["train/trained_tokens"] == 2
    assert metrics["train/loss"] == pytest.approx(expected[0]["train/loss"], abs=1e-7)
    rig.same(gradient, expected[1])


# ---------------------------------------------------------------------- rejection


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean", "seq_mean", "constant"])
def test_renormalised_steps_divide_by_what_is_left(backend, aggregation: str) -> None:  # type: ignore[no-untyped-def]
    """As if the rejected tokens had been masked beforehand, but for rollouts and sequences that still count."""
    batch = rig.make_sequences(6, dark=False)
    probe = backend()
    alive = []
    for made, now in zip(batch, rig.scored(probe, batch), strict=True):
        kept = (now - made.rollout_log_probs) ** 2 / 2 <= 0.05
        alive.append(dataclasses.replace(made, loss_mask=(made.loss_mask * kept).astype(np.uint8)))
    assert 0 < sum(int(s.loss_mask.sum()) for s in alive) < sum(int(s.loss_mask.sum()) for s in batch)
    fields = {"rollout_rs": ("token_k2=0.05",), "use_tis": True, "loss_aggregation": aggregation, "clip_grad": 0.0}
    _, gradient, _ = rig.train_step(backend(renormalize_after_rejection=True, **fields), [batch])
    _, expected, _ = rig.train_step(backend(use_tis=True, loss_aggregation=aggregation, clip_grad=0.0), [alive])
    rig.same(gradient, expected)
    _, kept, _ = rig.train_step(backend(**fields), [batch])
    name = next(iter(kept))
    assert torch.allclose(kept[name], expected[name], atol=1e-6) is (aggregation == "constant")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_of_which_nothing_is_left_changes_nothing(backend, steps: int) -> None:  # type: ignore[no-untyped-def]
    """Not even through KL to the reference, weight decay or Adam's momentum; and it is counted."""
    made = backend(rollout_rs=("token_k2=1e-12",), use_kl_loss=True, kl_loss_coef=0.1, weight_decay=0.1)
    with rig.unchanged(made):
        metrics = rig.train_batch(made, rig.make_sequences(6), steps=steps)[-1]
    assert metrics["correction/all_rejected"] == 1.0
    assert metrics["train/empty_steps"] == steps
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-6)
    assert made._models.updater.updates == 0


# ---------------------------------------------------------------------- the reference


def test_the_reference_becomes_the_policy_every_so_many_batches(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    batch = rig.make_sequences(6)
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2, "lr": 1e-2}
    made = backend(**options)

    def kl() -> float:
        return rig.train_batch(made, batch)[0]["train/kl_loss"]

    found = [kl() for _ in range(5)]
    assert [value > 1e-6 for value in found] == [False, True, False, True, False]
    made.save(tmp_path / "state")
    resumed = backend(**options)
    resumed.load(tmp_path / "state")
    assert rig.differing(rig.state_of(made, "reference"), rig.state_of(resumed, "reference")) == []
    expected = kl()
    assert expected > 1e-6
    made = resumed
    assert kl() == expected
    renewed = {name.removeprefix("reference/weights/"): one for name, one in rig.state_of(made, "reference").items()}
    rig.same(renewed, dict(made._models.model.named_parameters()), atol=0.0)  # the sixth batch


def test_a_reference_of_another_shape_cannot_be_renewed(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from models.tiny import TinyRecipe, make_tiny_checkpoint

    other = make_tiny_checkpoint(tmp_path / "other", TinyRecipe(tokenizer="arithmetic", hidden_size=16, num_layers=1))
    with pytest.raises(TrainConfigInvalid, match="cannot become"):
        backend(use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=1, ref_load=str(other))
    backend(use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(other))


# ---------------------------------------------------------------------- losses of one's own


def reinforce(tokens: Any, groups: Any, config: Any) -> torch.Tensor:
    """A loss over groups: plain policy gradient on rewards minus the group's mean."""
    del config
    GROUPS_SEEN.append(list(zip(groups.group.tolist(), groups.rollout.tolist(), strict=True)))
    rewards = groups.reward
    mean = torch.stack([rewards[groups.group == g].mean() for g in range(groups.n_groups)])[groups.group]
    return -(rewards - mean)[tokens.sequence] * tokens.log_probs


@pytest.mark.parametrize("steps", [1, 2])
def test_groups_are_never_split(backend, steps: int) -> None:  # type: ignore[no-untyped-def]
    """Any token budget gives the same gradient, though each micro-batch takes a mean over its groups."""
    batch = rig.make_sequences(3, rewards=True, dark=False)
    options = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}:reinforce"}
    results = []
    for budget in (8, 64, 4096):
        GROUPS_SEEN.clear()
        made = backend(max_tokens_per_gpu=budget, **options)
        metrics = rig.train_batch(made, batch[4:], batch[:4], steps=steps)
        results.append((made, metrics))
        assert sum(len({group for group, _ in one}) for one in GROUPS_SEEN) == 4
        assert sum(len(one) for one in GROUPS_SEEN) == len(batch)
        if budget == 8:
            assert [len(one) for one in GROUPS_SEEN] == [4, 4, 4, 4]
    for made, metrics in results[1:]:
        for have, want in zip(metrics, results[0][1], strict=True):
            assert have["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-4)
        for left, right in zip(made._models.model.parameters(), results[0][0]._models.model.parameters(), strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


def entropies(backend, monkeypatch: pytest.MonkeyPatch, batches: int, *, steps: int = 1):  # type: ignore[no-untyped-def]
    """Of each optimizer step: whether entropies were computed, and whether the metric is there."""
    calls: list[int] = []
    mean = token_module._mean
    monkeypatch.setattr(token_module, "_mean", lambda *args: calls.append(1) or mean(*args))
    found = []
    for number in range(batches):
        backend.begin_batch(rollouts=12, steps=steps)
        backend.accumulate(rig.make_sequences(number))
        for _ in range(steps):
            metrics = backend.step()
            found.append((bool(calls), "train/entropy_loss" in metrics))
            calls.clear()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(("steps", "fields"), [(1, {}), (2, {}), (2, {"use_tis": True, "tis_batch_normalize": True})])
def test_the_entropy_is_computed_in_the_steps_that_report_it(  # type: ignore[no-untyped-def]
    backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, fields: dict[str, Any]
) -> None:
    every, third = backend(**fields), backend(entropy_interval=3, **fields)
    last = [at % steps == steps - 1 for at in range(4 * steps)]
    assert entropies(every, monkeypatch, 4, steps=steps) == [(one, one) for one in last]
    expected = [(one and at // steps % 3 == 0,) * 2 for at, one in enumerate(last)]
    assert entropies(third, monkeypatch, 4, steps=steps) == expected
    rig.same(rig.weights_of(third), rig.weights_of(every))  # it is no part of the loss
    third.save(tmp_path / "state")
    resumed = backend(entropy_interval=3, **fields)
    resumed.load(tmp_path / "state")  # of four batches
    found = entropies(resumed, monkeypatch, 4, steps=steps)[steps - 1 :: steps]
    assert found == [(False, False), (False, False), (True, True), (False, False)]


def surprise(tokens: Any, groups: Any, config: AlgorithmConfig) -> torch.Tensor:
    assert tokens.entropy is not None
    return -tokens.log_probs * tokens.entropy


def test_what_reads_the_entropy_always_has_it(backend, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    bonus = backend(entropy_interval=100, entropy_coef=0.01)
    assert entropies(bonus, monkeypatch, 3) == [(True, True)] * 3
    own = backend(entropy_interval=100, loss_type="custom_loss", custom_loss_function_path=f"{__name__}:surprise")
    assert [computed for computed, _ in entropies(own, monkeypatch, 3)] == [True] * 3
