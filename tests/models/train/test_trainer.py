"""The trainer: batches, steps, refusals, and the models that a rank builds for its framework."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from configs.resolve import resolve
from configs.schema import CheckpointConfig, Config, RunConfig, TrainConfig
from models.errors import BackendMisuse, CheckpointUnavailable, InvalidSequence, TrainConfigInvalid, UnsupportedModel
from models.train import build
from models.train.build import build_backend, build_member
from models.train.dp_group import DpGroup
from models.train.huggingface import loading
from models.train.huggingface import models as huggingface_models
from models.train.huggingface.loading import check_head, pick_device
from models.train.trainer_group import rank
from tests.models.train import rig
from tests.models.train.families.family_models import SIZES, config_of


def by_rollout(sequences):  # type: ignore[no-untyped-def]
    key = lambda s: (s.group_id, s.rollout_id)  # noqa: E731
    return [list(members) for _, members in itertools.groupby(sorted(sequences, key=key), key=key)]


def reference_gradient(backend, sequences, aggregation, anchors=None):  # type: ignore[no-untyped-def]
    """Section by section as the definition says: one sequence at a time, no packing, one scalar loss."""
    model, temperature = backend._models.model, 0.9
    terms = []
    for members in by_rollout(sequences):
        rollout_tokens = sum(int(m.loss_mask.sum()) for m in members)
        for m in members:
            ids = torch.from_numpy(m.tokens.astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
            every = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            theta = torch.cat([torch.zeros(1), every])
            mask = torch.from_numpy(m.loss_mask.astype(np.float32))
            mu = torch.from_numpy(m.rollout_log_probs)
            old = theta.detach() if anchors is None else torch.from_numpy(anchors[id(m)])
            weight = (old - mu).exp().clamp(0, 2)
            ratio, advantages = (theta - old).exp(), torch.from_numpy(m.advantages)
            loss = weight * torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
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


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean", "seq_mean", "constant"])
def test_gradient_is_that_of_the_definition(backend, aggregation) -> None:  # type: ignore[no-untyped-def]
    made = backend(loss_aggregation=aggregation)
    batch = rig.make_sequences()
    loss, expected = reference_gradient(made, batch, aggregation)
    metrics, gradient, _ = rig.train_step(made, [batch])
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-6)
    rig.same(gradient, expected)


def test_sequences_of_two_temperatures_are_each_scored_at_their_own(backend) -> None:  # type: ignore[no-untyped-def]
    """Also where they share a micro-batch, a row, a prompt; those that say nothing are as configured."""
    batch = [*rig.make_sequences(groups=2, per_group=3), *rig.make_sequences(seed=5, groups=1)]
    drawn = [(0.5, None, 2.0)[at % 3] for at in range(len(batch))]
    mixed = [dataclasses.replace(one, temperature=t) for one, t in zip(batch, drawn, strict=True)]
    alone = {t: backend(temperature=t).logprobs(batch) for t in (0.5, 0.9, 2.0)}
    for budget in (10, 4096):
        found = backend(temperature=0.9, max_tokens_per_gpu=budget).logprobs(mixed)
        for at, (one, t) in enumerate(zip(found, drawn, strict=True)):
            np.testing.assert_allclose(one, alone[t or 0.9][at], atol=1e-5)
    assert backend().logprobs([]) == []
    with pytest.raises(InvalidSequence, match=r"drawn at temperature 0\.0, by which logits cannot be divided"):
        backend().logprobs([dataclasses.replace(batch[0], temperature=0.0)])


@pytest.mark.parametrize("steps", [2, 4])
def test_every_step_of_a_batch_is_anchored_on_its_first_weights(backend, steps) -> None:  # type: ignore[no-untyped-def]
    """The gradient of each step is that of the definition, with anchors of the batch start and its own divisor."""
    batch = rig.make_sequences(groups=4, per_group=4)
    made = backend(lr=3e-2, max_tokens_per_gpu=64)
    anchors = dict(zip([id(s) for s in batch], rig.scored(made, batch), strict=True))
    made.begin_batch(rollouts=16, steps=steps)
    for rollout in by_rollout(batch):
        made.accumulate(rollout)
    ordered = by_rollout(batch)
    for number in range(steps):
        part = [s for members in ordered[number * 16 // steps : (number + 1) * 16 // steps] for s in members]
        loss, expected = reference_gradient(made, part, "rollout_mean", anchors)
        metrics, gradient, _ = rig.train_step(made, [])
        assert metrics["train/rollouts"] == 16 / steps
        assert metrics["train/trained_tokens"] == sum(int(s.loss_mask.sum()) for s in part)
        assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
        assert (abs(metrics["train/ppo_kl"]) < 1e-6) is (number == 0)  # the weights move away from the anchor
        rig.same(gradient, expected, atol=1e-5)
    made.begin_batch(rollouts=1, steps=1)


def test_supervised_loss_falls_and_ignores_advantages(backend) -> None:  # type: ignore[no-untyped-def]
    def losses(steps: int, temperature: float) -> list[float]:
        made = backend(loss_type="sft_loss", lr=1e-2, temperature=temperature)
        return [rig.train_batch(made, batch)[0]["train/loss"] for _ in range(steps)]

    batch = rig.make_sequences(groups=6)
    cold = losses(30, 0.3)
    assert cold[0] == pytest.approx(np.log(32), abs=0.2)
    assert cold[-1] < 0.6 * cold[0]
    assert cold[:4] == losses(4, 1.0)  # temperature 1, whatever the rollouts use


def test_calls_without_meaning_are_refused(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    batch = rig.make_sequences()
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
        made.accumulate(rig.make_sequences(seed=3))
    made.step()
    made.accumulate(batch)  # a new batch may train the same rollouts again


def test_half_precision_trains_fp32_weights(backend, tmp_path) -> None:  # type: ignore[no-untyped-def]
    full, half = backend(lr=1e-2), backend(lr=1e-2, train_dtype="bfloat16")
    exact = rig.train_step(full, [rig.make_sequences()])
    rough = rig.train_step(half, [rig.make_sequences()])
    assert rough[0]["train/loss"] == pytest.approx(exact[0]["train/loss"], abs=0.02)
    assert {tensor.dtype for tensor in rough[1].values()} == {torch.float32}
    assert {tensor.dtype for tensor in rough[2].values()} == {torch.bfloat16}  # exported as the forward pass sees them
    assert {parameter.dtype for parameter in half._models.model.parameters()} == {torch.float32}
    half.save(tmp_path / "state")
    again = backend(train_dtype="bfloat16")
    again.load(tmp_path / "state")
    for left, right in zip(half._models.model.parameters(), again._models.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_common_prompts_leave_room_in_the_budget(backend) -> None:  # type: ignore[no-untyped-def]
    """Eight responses to a prompt of 20 need 20 + 8 * 3 inputs, so they fit one micro-batch of 64."""
    made = backend(max_tokens_per_gpu=64)
    prompt = list(range(1, 21))
    responses = [[*prompt, 1, 2, 3, index + 4] for index in range(8)]
    calls = [[rig.sequence(rollout=at, tokens=tokens, mask=[1] * 4)] for at, tokens in enumerate(responses)]
    [metrics] = rig.train_batch(made, *calls)
    assert metrics["train/micro_batches"] == 1
    assert metrics["train/shared_prompt_frac"] == pytest.approx(1 - 44 / 184)
    assert metrics["train/padding_frac"] == 0


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("backend", "name"), [("fsdp", "FsdpModels"), ("megatron", "MegatronModels")])
def test_background_saves_are_requested_and_waited_for(
    backend: str, name: str, async_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the flag to the models, and from the trainer's `finish_save` to theirs."""
    requested: list[object] = []

    class Models:
        critic, has_reference, reference_apart, pass_micro_batches = None, False, False, 1

        def __init__(self, spec: object, *, async_save: bool) -> None:
            requested.append(async_save)

        def finish_save(self) -> None:
            requested.append("finished")

    place = {"fsdp": "huggingface.sharded_models", "megatron": "megatron.models"}[backend]
    monkeypatch.setitem(sys.modules, f"models.train.{place}", SimpleNamespace(**{name: Models}))
    config = resolve(Config(train=TrainConfig(train_backend=backend)))  # type: ignore[arg-type]
    trainer = build_member(replace(config, checkpoint=CheckpointConfig(async_save=async_save)), 1, DpGroup())
    trainer.setup()
    trainer.finish_save()
    assert requested == [async_save, "finished"]


@pytest.mark.parametrize("member", [False, True])
def test_what_a_loss_of_the_user_draws_begins_with_the_seed_of_the_run(member: bool) -> None:
    def drawn(seed: int) -> float:
        config = resolve(Config(run=RunConfig(seed=seed)))
        _ = build_member(config, 1, DpGroup()) if member else build_backend(config, 1)
        return float(torch.rand(()))

    with torch.random.fork_rng(devices=[]):
        assert drawn(7) == drawn(7) != drawn(8)


ALLOCATOR, CONNECTIONS = "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"
SEGMENTS = {ALLOCATOR: "expandable_segments:True"}
ON_MEGATRON = {"train_backend": "megatron"}


@pytest.mark.parametrize(("train", "before", "after"), [
    ({}, {}, SEGMENTS),
    ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
    (ON_MEGATRON, {ALLOCATOR: ""}, {ALLOCATOR: "", CONNECTIONS: "1"}),
    (ON_MEGATRON | {"train_device": "cuda:1"}, {CONNECTIONS: "8"}, {CONNECTIONS: "8", **SEGMENTS}),
    (ON_MEGATRON | {"train_device": "cpu"}, {}, {}),
])  # fmt: skip
def test_gpus_are_set_up_where_the_user_has_not_done_so(
    train: dict[str, Any], before: dict[str, str], after: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each rank before it finds the others, which is its first use of a GPU; and by the only process."""
    config = Config(train=TrainConfig(**train))

    def stop(*_: Any) -> None:
        raise ZeroDivisionError(dict(os.environ))

    monkeypatch.setattr(rank, "_find_others", stop)
    monkeypatch.setattr(build, "build_member", stop)
    for start in (lambda: rank.run_rank(None, config, lambda _: None), lambda: build.build_backend(config, 1)):
        monkeypatch.setattr(os, "environ", before.copy())
        with pytest.raises(ZeroDivisionError) as seen:
            start()
        assert seen.value.args[0] == os.environ == after


def test_rows_suit_the_device(backend, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Longer rows change no number."""
    plain, batch = rig.train_step(backend(), [rig.make_sequences()]), rig.make_sequences()
    assert [loading.row_multiple(torch.device(name)) for name in ("cpu", "cuda")] == [1, 16]
    monkeypatch.setattr(huggingface_models, "row_multiple", lambda device: 16)
    made, shapes = backend(), list[int]()
    chosen = made._models._score.chosen_hidden
    made._models._score.chosen_hidden = lambda rows: shapes.append(rows.input_ids.shape[1]) or chosen(rows)
    rounded = rig.train_step(made, [batch])
    assert shapes
    assert all(length % 16 == 0 for length in shapes)
    for left, right in zip(plain[1:], rounded[1:], strict=True):
        rig.same(left, right)


def test_the_learning_rate_follows_the_effective_sample_size(backend) -> None:  # type: ignore[no-untyped-def]
    """sqrt of (sum w)^2 / (n sum w^2) over sequences, w = exp(sum of log theta - log mu), theta the batch's start."""
    batch = rig.make_sequences(3, dark=False)
    made = backend(ess_lr_scale=True, lr=0.5)
    scores = rig.scored(made, batch)
    weights = np.array([
        np.exp((score - one.rollout_log_probs)[one.loss_mask > 0].sum(dtype=np.float64))
        for one, score in zip(batch, scores, strict=True) if one.loss_mask.any()
    ])  # fmt: skip
    share = weights.sum() ** 2 / (len(weights) * np.square(weights).sum())
    [metrics] = rig.train_batch(made, batch)
    assert share < 0.9
    assert metrics["train/lr"] == pytest.approx(0.5 * np.sqrt(share), rel=1e-4)
    [plain] = rig.train_batch(backend(lr=0.5), batch)
    assert plain["train/lr"] == 0.5


# What is not finite, empty, inconsistent or missing: no update, a count, or an error that names the cure.


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(backend, poison: float) -> None:  # type: ignore[no-untyped-def]
    made = backend(lr_warmup_iters=3)
    rig.train_batch(made, rig.make_sequences())
    before = rig.weights_of(made)
    batch = rig.make_sequences(seed=1)
    batch[0].advantages[batch[0].loss_mask == 1] = poison
    with rig.unchanged(made):
        [metrics] = rig.train_batch(made, batch)
    assert metrics["train/skipped_steps"] == 1
    assert not np.isfinite(metrics["train/grad_norm"])
    [metrics] = rig.train_batch(made, rig.make_sequences(seed=2))
    assert metrics["train/skipped_steps"] == 1  # counted once, and training goes on
    assert metrics["train/lr"] == pytest.approx(2e-3 / 3)  # the warm-up counts updates
    assert np.isfinite(metrics["train/loss"])
    assert rig.differing(rig.weights_of(made), before)


@pytest.mark.parametrize("fields", [
    *[{"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind} for kind in ("k1", "k3", "low_var_kl")],
    {"use_rollout_logprobs": True},
    {"policy_loss": "m2po"},
    {"use_opsm": True, "staleness": 0},
])  # fmt: skip
def test_a_loss_that_is_no_number_changes_nothing_whatever_its_gradient(  # type: ignore[no-untyped-def]
    backend, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clamp has gradient 0 where its input is NaN: the norm of the gradient alone would let the step pass."""
    made, batch = backend(**fields), rig.make_sequences(dark=False)
    negative = next(one for one in batch if one.loss_mask.any() and one.advantages[one.loss_mask == 1].max() < 0)
    if "use_kl_loss" in fields:
        score = made._models.reference.score

        def one_lost(rows: Any) -> torch.Tensor:
            found = score(rows).clone()
            found[0] = torch.nan
            return found

        monkeypatch.setattr(made._models.reference, "score", one_lost)
    else:
        negative.rollout_log_probs[np.flatnonzero(negative.loss_mask)[0]] = np.nan
    with rig.unchanged(made):
        [metrics] = rig.train_batch(made, batch)
    assert np.isnan([metrics["train/loss"], metrics["train/grad_norm"]]).all()
    assert metrics["train/skipped_steps"] == 1


def test_nan_behind_the_mask_is_harmless(backend) -> None:  # type: ignore[no-untyped-def]
    clean = rig.train_step(backend(), [rig.make_sequences()])
    batch = rig.make_sequences()
    for item in batch:
        item.advantages[item.loss_mask == 0] = np.nan
        item.rollout_log_probs[item.loss_mask == 0] = -np.inf
    dirty = rig.train_step(backend(), [batch])
    assert dirty[0] == clean[0]
    assert rig.differing(dirty[2], clean[2]) == []


def test_steps_without_a_trainable_token_change_nothing(backend) -> None:  # type: ignore[no-untyped-def]
    made, batch = backend(), rig.make_sequences()
    for item in batch:
        item.loss_mask[:] = 0
    with rig.unchanged(made):
        for calls in ([], [[]], [batch]):
            [metrics] = rig.train_batch(made, *calls)
            assert metrics["train/trained_tokens"] == metrics["train/grad_norm"] == 0
    assert metrics["train/empty_steps"] == 3
    assert metrics["train/rollouts"] == 12


@pytest.mark.parametrize(("changes", "words"), [
    ({"loss_mask": np.ones(3, np.uint8)}, "loss_mask has 3 entries for 4 tokens"),
    ({"rollout_log_probs": np.ones(1, np.float32)}, "rollout_log_probs has 1 entries"),
    ({"advantages": np.ones(0, np.float32)}, "advantages has 0 entries"),
    ({"versions": np.ones(5, np.int32)}, "versions has 5 entries"),
    ({"prompt_length": 0}, "keep at least one prompt token"),
    ({"prompt_length": 5}, "4 tokens with prompt_length 5"),
    ({"prompt_length": 3}, "loss_mask is 1 within the first 3 tokens, which are its prompt"),
    ({"tokens": np.array([1, 2, 3, 32], np.int32)}, "vocabulary of 32; engine and trainer"),
    ({"tokens": np.array([1, -1, 3, 4], np.int32)}, "token ids -1 to 4"),
])  # fmt: skip
def test_inconsistent_sequences_are_refused(backend, changes: dict[str, Any], words: str) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    bad = dataclasses.replace(rig.sequence(group=7, rollout=5, tokens=[1, 2, 3, 4], mask=[1, 1]), **changes)
    for method in (made.accumulate, made.logprobs):
        with pytest.raises(InvalidSequence, match=f"rollout 5 of group 7: .*{words}"):
            method([bad])
    assert made.step()["train/sequences"] == 0  # nothing of the refused call was taken in


def test_missing_checkpoints_name_the_option_and_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "no-such-architecture"}')
    for checkpoint, words in (
        (tmp_path / "gone", r"hf_checkpoint='.*gone' does not exist; give an existing directory"),
        (tmp_path / "empty", r"directory without config\.json"),
        (tmp_path / "odd", "cannot be loaded as a causal language model"),
        (Path("tiny"), "has to be made first"),
        (Path("nobody/no-such-model-at-all"), r"could not be fetched from the hub .*download the model first"),
    ):
        with pytest.raises(CheckpointUnavailable, match=words):
            rig.make_backend(checkpoint)


def test_missing_reference_names_its_own_option(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointUnavailable, match="ref_load="):
        backend(use_kl_loss=True, kl_loss_coef=0.1, ref_load=str(tmp_path / "gone"))
    backend(ref_load=str(tmp_path / "gone"))  # not needed, not loaded


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(TrainConfigInvalid, match="is no device"):
        pick_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(TrainConfigInvalid, match="sees no CUDA device"):
            pick_device("cuda:3")


def test_a_head_that_cannot_be_reproduced_is_refused(backend, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    model = backend()._models.model
    check_head(model, torch.device("cpu"))
    forward = type(model).forward

    def scaled(self: Any, **inputs: Any) -> Any:
        output = forward(self, **inputs)
        output.logits = output.logits * 2 + 1
        return output

    monkeypatch.setattr(type(model), "forward", scaled)
    with pytest.raises(UnsupportedModel, match="changes its logits after the output embedding"):
        check_head(model, torch.device("cpu"))


def test_logit_caps_and_scales_are_reproduced(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

    shape = SIZES | {"vocab_size": 32}
    configs = {
        "gemma2": config_of("gemma2", vocab_size=32, final_logit_softcapping=0.5, sliding_window=4),
        "cohere": CohereConfig(**shape, logit_scale=0.2),
        "granite": GraniteConfig(**shape, logits_scaling=4.0),
    }
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        model.save_pretrained(tmp_path / name)
        made = backend(hf_checkpoint=str(tmp_path / name), temperature=1.0)
        batch = rig.make_sequences()
        assert made._models.packing.pack, name
        assert made._models.packing.share_prompts is (name != "gemma2"), name
        model.eval()
        for item, found in zip(batch, made.logprobs(batch), strict=True):
            ids = torch.from_numpy(item.tokens.astype(np.int64))
            with torch.no_grad():
                every = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            np.testing.assert_allclose(found, every[-item.response_length :].numpy(), atol=2e-5, err_msg=name)


def test_recurrent_models_are_not_packed(backend, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    made = backend(hf_checkpoint=str(tmp_path / "mamba"))
    assert not made._models.packing.pack
    batch = rig.make_sequences()
    alone = [made.logprobs([item])[0] for item in batch]
    for left, right in zip(alone, made.logprobs(batch), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
