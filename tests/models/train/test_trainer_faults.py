"""What is not finite, empty, inconsistent or missing: no update, a count, or an error that names the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.train import TrainConfig
from models.errors import CheckpointUnavailable, InvalidSequence, TrainConfigInvalid, UnsupportedModel
from models.train.huggingface.loading import check_head, pick_device
from models.train.spec import TrainSpec
from models.train.trainer import Trainer


def unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(backend, sequences, weights, poison: float) -> None:  # type: ignore[no-untyped-def]
    made = backend(lr_warmup_iters=3)
    made.accumulate(sequences())
    made.step()
    before, moments = weights(made), {k: v.clone() for k, v in made._models.updater.state_tensors().items()}
    batch = sequences(seed=1)
    batch[0].advantages[batch[0].loss_mask == 1] = poison
    made.accumulate(batch)
    metrics = made.step()
    assert metrics["train/skipped_steps"] == 1
    assert not np.isfinite(metrics["train/grad_norm"])
    assert unchanged(before, weights(made))
    assert unchanged(moments, made._models.updater.state_tensors())
    made.accumulate(sequences(seed=2))
    metrics = made.step()
    assert metrics["train/skipped_steps"] == 1  # counted once, and training goes on
    assert metrics["train/lr"] == pytest.approx(2e-3 / 3)  # the warm-up counts updates
    assert np.isfinite(metrics["train/loss"])
    assert not unchanged(before, weights(made))


@pytest.mark.parametrize(
    "fields",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
        {"use_rollout_logprobs": True},
        {"policy_loss": "m2po"},
        {"use_opsm": True, "staleness": 0},
    ],
    ids=["k1", "k3", "low_var_kl", "bypass", "m2po", "opsm"],
)
def test_a_loss_that_is_no_number_changes_nothing_whatever_its_gradient(  # type: ignore[no-untyped-def]
    backend, sequences, weights, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clamp has gradient 0 where its input is NaN: the norm of the gradient alone would let the step pass."""
    made = backend(**fields)
    before = weights(made)
    batch = sequences(dark=False)
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
    made.begin_batch(rollouts=12, steps=1)
    made.accumulate(batch)
    metrics = made.step()
    assert np.isnan(metrics["train/loss"])
    assert metrics["train/skipped_steps"] == 1
    assert np.isnan(metrics["train/grad_norm"])
    assert unchanged(before, weights(made))


def test_a_critic_whose_loss_is_no_number_stays_as_it_is(backend, sequences, weights) -> None:  # type: ignore[no-untyped-def]
    """An old value that is no number, behind a maximum: the gradient is that of the other term."""
    made = backend(advantage_estimator="ppo", normalize_advantages=True, critic_lr=1e-3)
    critic, policy = made._models.critic, weights(made)
    before = {name: one.clone() for name, one in critic.model.state_dict().items()}
    backward = critic.backward

    def one_lost(batches: Any) -> None:
        batches[0].members[0].values = np.full_like(batches[0].members[0].values, np.nan)
        backward(batches)

    critic.backward = one_lost
    made.begin_batch(rollouts=12, steps=1)
    made.accumulate(sequences(rewards=True))
    metrics = made.step()
    assert np.isnan(metrics["train/value_loss"])
    assert np.isnan(metrics["train/critic_grad_norm"])
    assert metrics["train/skipped_steps"] == 1
    assert unchanged(before, critic.model.state_dict())
    assert not unchanged(policy, weights(made))


def test_nan_behind_the_mask_is_harmless(backend, sequences, run_step) -> None:  # type: ignore[no-untyped-def]
    clean = run_step(backend(), [sequences()])
    batch = sequences()
    for item in batch:
        item.advantages[item.loss_mask == 0] = np.nan
        item.rollout_log_probs[item.loss_mask == 0] = -np.inf
    dirty = run_step(backend(), [batch])
    assert dirty[0] == clean[0]
    assert unchanged(clean[2], dirty[2])


def test_steps_without_a_trainable_token_change_nothing(backend, sequences, weights) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    before = weights(made)
    batch = sequences()
    for item in batch:
        item.loss_mask[:] = 0
    for calls in ([], [[]], [batch]):
        for call in calls:
            made.accumulate(call)
        metrics = made.step()
        assert metrics["train/trained_tokens"] == 0
        assert metrics["train/grad_norm"] == 0
    assert metrics["train/empty_steps"] == 3
    assert metrics["train/rollouts"] == 12
    assert unchanged(before, weights(made))


def test_fully_masked_rollouts_count_in_the_denominator(backend, one) -> None:  # type: ignore[no-untyped-def]
    live = one(rollout=0, tokens=[1, 2, 3], mask=[1])
    dark = one(rollout=1, tokens=[1, 2, 4], mask=[0])
    empty = one(rollout=2, tokens=[1, 2], mask=[])
    alone, together = backend(), backend()
    alone.accumulate([live])
    together.accumulate([live, dark, empty])
    a, b = alone.step(), together.step()
    assert b["train/loss"] == pytest.approx(a["train/loss"] / 3)
    assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"] / 3, rel=1e-4)
    assert b["train/rollouts"] == 3


def test_a_batch_with_more_steps_than_rollouts(backend, one) -> None:  # type: ignore[no-untyped-def]
    made = backend()
    made.begin_batch(rollouts=2, steps=3)
    made.accumulate([one(rollout=0, tokens=[1, 2, 3], mask=[1]), one(rollout=1, tokens=[1, 2, 3], mask=[1])])
    assert [made.step()["train/rollouts"] for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_mask": np.ones(3, np.uint8)}, "loss_mask has 3 entries for 4 tokens"),
        ({"rollout_log_probs": np.ones(1, np.float32)}, "rollout_log_probs has 1 entries"),
        ({"advantages": np.ones(0, np.float32)}, "advantages has 0 entries"),
        ({"versions": np.ones(5, np.int32)}, "versions has 5 entries"),
        ({"prompt_length": 0}, "keep at least one prompt token"),
        ({"prompt_length": 5}, "4 tokens with prompt_length 5"),
        ({"prompt_length": 3}, "loss_mask is 1 within the first 3 tokens, which are its prompt"),
        ({"tokens": np.array([1, 2, 3, 32], np.int32)}, "vocabulary of 32; engine and trainer"),
        ({"tokens": np.array([1, -1, 3, 4], np.int32)}, "token ids -1 to 4"),
    ],
)
def test_inconsistent_sequences_are_refused(backend, one, changes: dict[str, Any], words: str) -> None:  # type: ignore[no-untyped-def]
    import dataclasses

    made = backend()
    bad = dataclasses.replace(one(group=7, rollout=5, tokens=[1, 2, 3, 4], mask=[1, 1]), **changes)
    for method in (made.accumulate, made.logprobs):
        with pytest.raises(InvalidSequence, match=f"rollout 5 of group 7: .*{words}"):
            method([bad])
    assert made.step()["train/sequences"] == 0  # nothing of the refused call was taken in


def start(checkpoint: object, **fields: Any) -> None:
    train = TrainConfig(hf_checkpoint=str(checkpoint), train_device="cpu", **fields)
    Trainer(TrainSpec(train, AlgorithmConfig(), max_response_len=8, seed=0)).setup()


def test_missing_checkpoints_name_the_option_and_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointUnavailable, match=r"hf_checkpoint='.*gone' does not exist; give an existing directory"
    ):
        start(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointUnavailable, match=r"directory without config\.json"):
        start(tmp_path / "empty")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(CheckpointUnavailable, match="cannot be loaded as a causal language model"):
        start(tmp_path / "odd")
    with pytest.raises(CheckpointUnavailable, match="has to be made first"):
        start("tiny")
    with pytest.raises(CheckpointUnavailable, match=r"could not be fetched from the hub .*download the model first"):
        start("nobody/no-such-model-at-all")


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


def test_logit_caps_and_scales_are_reproduced(backend, tmp_path: Path, sequences) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
    }
    configs = {
        "gemma2": Gemma2Config(**shape, head_dim=8, final_logit_softcapping=0.5, sliding_window=4),
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
        batch = sequences()
        assert made._models.packing.pack, name
        assert made._models.packing.share_prompts is (name != "gemma2"), name
        model.eval()
        for item, found in zip(batch, made.logprobs(batch), strict=True):
            ids = torch.from_numpy(item.tokens.astype(np.int64))
            with torch.no_grad():
                every = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            np.testing.assert_allclose(found, every[-item.response_length :].numpy(), atol=2e-5, err_msg=name)


def test_recurrent_models_are_not_packed(backend, tmp_path: Path, sequences) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    made = backend(hf_checkpoint=str(tmp_path / "mamba"))
    assert not made._models.packing.pack
    batch = sequences()
    alone = [made.logprobs([item])[0] for item in batch]
    for left, right in zip(alone, made.logprobs(batch), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
