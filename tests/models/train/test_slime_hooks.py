"""Functions with slime's signatures in a trainer: the examples of docs/custom_losses.md, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import AlgorithmError, UnknownAlgorithm
from models.slime_arguments import SlimeArguments
from models.train.spec import train_spec
from stages.slime import all_gather_with_cp, slice_log_prob_with_cp
from tests.configs.config_rig import BASE, settled
from tests.models.train import rig

PAGE = Path(__file__).parents[3] / "docs" / "custom_losses.md"
CALLS: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the page, as files of the names that stand in them."""
    folder = tmp_path / "slime_page"
    folder.mkdir()
    for name, code in re.findall(r"```python\n# my_project/(\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    CALLS.clear()
    yield
    for name in [name for name in sys.modules if name.startswith("slime_page")]:
        del sys.modules[name]


def trained(made: Any, seed: int = 3, **fields: Any) -> rig.Trained:
    return rig.train_step(made, [rig.make_sequences(seed, rewards=True, **fields)])


@pytest.mark.parametrize("budget", [24, 4096])
def test_importance_weights_of_the_page_are_the_built_in_ones(backend, budget: int) -> None:  # type: ignore[no-untyped-def]
    """Truncated, and a response with a wild token is dropped: the same update, whatever shares a micro-batch."""
    batch = rig.make_sequences(3)
    wild = next(one for one in batch if one.loss_mask.sum() > 1)
    wild.rollout_log_probs[np.flatnonzero(wild.loss_mask)[0]] = 20.0
    options = {"use_tis": True, "tis_clip": 1.3, "max_tokens_per_gpu": budget}
    own = backend(
        **options, custom_tis_function_path="slime_page.weights:truncated", arguments=SlimeArguments(tis_clip=1.3)
    )
    found = rig.train_step(own, [batch])
    wanted = rig.train_step(backend(**options, rs_veto=1e-4), [batch])
    rig.same(found[1], wanted[1])
    assert found[0]["train/loss"] == pytest.approx(wanted[0]["train/loss"], abs=1e-6)
    # tis has the mean of raw weights, own_weight of bounded ones: a metric of the function, with the step's reducer.
    assert 0.3 < found[0]["train/own_weight"] < 1.3
    plain = rig.train_step(backend(**options), [batch])
    assert plain[0]["train/loss"] != pytest.approx(found[0]["train/loss"], abs=1e-3), "the wild response counts"


def look(args: Any, **given: Any) -> Any:
    CALLS.append(given)
    return given["pg_loss"], given["loss_masks"], {}


def test_a_function_sees_whole_responses_with_their_masks(backend) -> None:  # type: ignore[no-untyped-def]
    batch = rig.make_sequences(3, dark=False)
    made = backend(use_tis=True, custom_tis_function_path=f"{__name__}:look", max_tokens_per_gpu=64)
    log_probs = rig.scored(made, batch)
    rig.train_batch(made, batch)
    assert len(CALLS) > 1
    rows = {}
    for call in CALLS:
        assert len(call["pg_loss"]) == sum(call["response_lengths"])
        names = ("total_lengths", "response_lengths", "loss_masks", "rollout_log_probs", "train_log_probs")
        for total, length, mask, rollout, train in zip(*(call[name] for name in names), strict=True):
            assert len(mask) == len(rollout) == len(train) == length
            rows[total, tuple(mask.tolist()), tuple(rollout.tolist())] = train
    wanted = [one for one in batch if one.loss_mask.any()]
    assert len(rows) == len(wanted)
    for one, score in zip(batch, log_probs, strict=True):
        if one.loss_mask.any():
            mask, rollout = (column[one.prompt_length :] for column in (one.loss_mask, one.rollout_log_probs))
            train = rows[len(one.tokens), tuple(mask.tolist()), tuple((rollout * mask).tolist())]
            np.testing.assert_allclose(train.numpy(), score[one.prompt_length :] * mask, atol=1e-5)


def test_what_masks_take_away_leaves_the_divisor_alone(backend) -> None:  # type: ignore[no-untyped-def]
    """The first token of each response is dropped: the loss loses its term, and no other token weighs more."""
    batch = rig.make_sequences(3, dark=False, masked=0.0)
    made = backend(use_tis=True, custom_tis_function_path=f"{__name__}:without_first")
    [found] = rig.train_batch(made, batch)
    rest = [dataclasses.replace(one, advantages=one.advantages.copy()) for one in batch]
    for one in rest:
        one.advantages[one.prompt_length] = 0.0
    [wanted] = rig.train_batch(backend(use_tis=True, custom_tis_function_path=f"{__name__}:look"), rest)
    assert found["train/pg_loss"] == pytest.approx(wanted["train/pg_loss"], abs=1e-6)
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)


def without_first(args: Any, **given: Any) -> Any:
    masks = [torch.cat([mask[:1] * 0, mask[1:]]) for mask in given["loss_masks"]]
    return given["pg_loss"], masks, {}


def nothing(args: Any, **given: Any) -> Any:
    return given["pg_loss"], [mask * 0 for mask in given["loss_masks"]], {}


def test_no_update_is_made_if_nothing_is_left(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend(use_tis=True, custom_tis_function_path=f"{__name__}:nothing")
    with rig.unchanged(made):
        [metrics] = rig.train_batch(made, rig.make_sequences(3))
    assert metrics["train/empty_steps"] == 1


@pytest.mark.parametrize("budget", [24, 4096])
def test_the_reducer_of_the_page_is_the_constant_divisor(backend, budget: int) -> None:  # type: ignore[no-untyped-def]
    options = {"max_tokens_per_gpu": budget, "use_kl_loss": True, "kl_loss_coef": 0.1}
    reducer = "slime_page.reducers:dr_grpo"
    [found] = rig.train_batch(backend(**options, custom_pg_loss_reducer_function_path=reducer), rig.make_sequences(3))
    [wanted] = rig.train_batch(backend(**options, loss_aggregation="constant"), rig.make_sequences(3))
    [plain] = rig.train_batch(backend(**options), rig.make_sequences(3))
    assert found["train/pg_loss"] == pytest.approx(wanted["train/pg_loss"], abs=1e-6)
    assert found["train/pg_loss"] != pytest.approx(plain["train/pg_loss"], abs=1e-3)
    assert found["train/kl_loss"] == pytest.approx(plain["train/kl_loss"], abs=1e-6), "it keeps its own aggregation"
    made = [backend(**{k: v for k, v in options.items() if "kl" not in k}, **one) for one in (
        {"custom_pg_loss_reducer_function_path": reducer}, {"loss_aggregation": "constant"})]  # fmt: skip
    rig.same(*(trained(one)[1] for one in made))


def per_token(
    total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool = False
) -> Any:
    CALLS.append({"per_token": calculate_per_token_loss, "masks": [mask.tolist() for mask in loss_masks]})
    return lambda pg_loss: (pg_loss * torch.cat(list(loss_masks))).sum()


def test_a_reducer_is_told_of_the_divisor_and_of_what_is_left(backend) -> None:  # type: ignore[no-untyped-def]
    options = {"custom_pg_loss_reducer_function_path": f"{__name__}:per_token", "loss_aggregation": "token_mean"}
    batch = rig.make_sequences(3, masked=0.0)
    [found] = rig.train_batch(backend(**options), batch)
    [wanted] = rig.train_batch(backend(loss_aggregation="token_mean"), batch)
    assert found["train/loss"] == pytest.approx(wanted["train/loss"], abs=1e-6)
    assert all(call["per_token"] for call in CALLS)
    assert all(set(mask) == {1.0} for call in CALLS for mask in call["masks"])
    CALLS.clear()
    masked = {"use_tis": True, "custom_tis_function_path": f"{__name__}:without_first"}
    rig.train_batch(backend(**{**options, "loss_aggregation": "rollout_mean"}, **masked), batch)
    assert not any(call["per_token"] for call in CALLS)
    assert all(mask[0] == 0.0 and set(mask[1:]) <= {1.0} for call in CALLS for mask in call["masks"])


@pytest.mark.parametrize(("steps", "fields"), [
    (1, {}), (2, {}), (1, {"use_rollout_logprobs": True}), (1, {"normalize_advantages": True}),
])  # fmt: skip
def test_advantages_of_the_page_reach_the_loss(backend, steps: int, fields: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """The same update as with advantages that grow over the response and are handed over."""
    batch = rig.make_sequences(3, rewards=True)
    own = backend(**fields, custom_advantage_function_path="slime_page.credit:later_tokens_more")
    handed = [
        dataclasses.replace(
            one,
            advantages=np.concatenate([
                np.zeros(one.prompt_length, np.float32),
                one.advantages[one.loss_mask > 0].mean() * np.linspace(0, 1, one.response_length, dtype=np.float32),
            ]) if one.loss_mask.any() else one.advantages,
        )
        for one in batch
    ]  # fmt: skip
    given = backend(**fields)
    found, wanted = rig.train_batch(own, batch, steps=steps), rig.train_batch(given, handed, steps=steps)
    rig.same_metrics(found, wanted, rel=1e-4, abs=1e-5)
    rig.same(rig.weights_of(own), rig.weights_of(given), atol=1e-5)


def keep(args: Any, rollout_data: dict[str, Any]) -> None:
    CALLS.append(dict(rollout_data))
    rollout_data["advantages"] = [torch.zeros(length) for length in rollout_data["response_lengths"]]
    rollout_data["returns"] = [torch.full((length,), 2.0) for length in rollout_data["response_lengths"]]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_function_sees_the_batch_as_slime_has_it(backend, alone: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """`alone`: batches in which only the critic is trained."""
    batch = [dataclasses.replace(one, turn_total=0.5) for one in rig.make_sequences(3, rewards=True, dark=False)]
    moved = backend(lr=5e-2)  # a reference that is not the policy
    rig.train_batch(moved, rig.make_sequences(2))
    moved.save(tmp_path / "moved")
    fields = {**rig.PPO, "kl_coef": 0.1, "use_opd": True, "lr": 0.0, "num_critic_only_steps": alone}
    reference = str(tmp_path / "moved" / "hf")
    made = backend(**fields, ref_load=reference, custom_advantage_function_path=f"{__name__}:keep")
    scores, anchors = rig.scored(made, batch), rig.scored(moved, batch)
    assert np.abs(np.concatenate(scores) - np.concatenate(anchors)).max() > 0.01
    [metrics] = rig.train_batch(made, batch)
    (data,) = CALLS
    trained = [row for row in zip(batch, scores, anchors, strict=True) if row[0].loss_mask.any()]
    assert len(data["tokens"]) == len(trained)
    by_tokens = {tuple(ids.tolist()): place for place, ids in enumerate(data["tokens"])}
    for one, score, anchor in trained:
        at, behind = by_tokens[tuple(one.tokens.tolist())], slice(one.prompt_length, None)
        mask = one.loss_mask[behind]
        assert data["loss_masks"][at].tolist() == mask.tolist()
        assert (data["total_lengths"][at], data["response_lengths"][at]) == (len(one.tokens), len(mask))
        assert (data["raw_reward"][at], data["truncated"][at]) == (one.reward + 0.5, int(one.truncated))
        assert data["rewards"][at] == pytest.approx(one.advantages[one.loss_mask > 0].mean(), abs=1e-6)
        assert data["sample_indices"][at] == one.rollout_id
        assert one.teacher_log_probs is not None
        for name, column in (
            ("rollout_log_probs", one.rollout_log_probs), ("teacher_log_probs", one.teacher_log_probs),
            ("log_probs", score), ("ref_log_probs", anchor), ("kl", score - anchor),
        ):  # fmt: skip
            np.testing.assert_allclose(data[name][at].numpy(), column[behind] * mask, atol=1e-5, err_msg=name)
        assert len(data["values"][at]) == len(mask)
    assert metrics["train/return_mean"] == 2.0  # what the critic learns is the function's


def without_first_token(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    CALLS.append({**rollout_data, "rollout_id": rollout_id})
    rollout_data["loss_masks"] = [torch.cat([mask[:1] * 0, mask[1:]]) for mask in rollout_data["loss_masks"]]
    rollout_data["advantages"] = [2 * advantages for advantages in rollout_data["advantages"]]


@pytest.mark.parametrize("fields", [{}, {"normalize_advantages": True}])
def test_post_processing_changes_advantages_and_masks(backend, fields: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """As if advantages had come so: twice as large, and 0 for the first token of each response."""
    batch = rig.make_sequences(3, dark=False, masked=0.0)
    made = backend(rollout_data_postprocess_path=f"{__name__}:without_first_token", **fields)
    [found] = rig.train_batch(made, batch)
    (data,) = CALLS
    assert data["rollout_id"] == 0
    before = {tuple(ids.tolist()): values for ids, values in zip(data["tokens"], data["advantages"], strict=True)}
    rest = [dataclasses.replace(one, advantages=one.advantages.copy()) for one in batch]
    for one in rest:
        one.advantages[one.prompt_length :] = 2 * before[tuple(one.tokens.tolist())].numpy()
        one.advantages[one.prompt_length] = 0.0
    [wanted] = rig.train_batch(backend(), rest)
    assert found["train/pg_loss"] == pytest.approx(wanted["train/pg_loss"], abs=1e-6)
    assert found["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4)
    rig.train_batch(made, batch)
    assert CALLS[1]["rollout_id"] == 1


def test_log_probs_are_there_where_only_the_critic_is_trained(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend(**rig.PPO, num_critic_only_steps=1, custom_advantage_function_path=f"{__name__}:keep")
    batch = rig.make_sequences(3, rewards=True, dark=False, masked=0.0)
    found = dict(zip((tuple(one.tokens.tolist()) for one in batch), rig.scored(made, batch), strict=True))
    rig.train_batch(made, batch)
    (data,) = CALLS
    assert "ref_log_probs" not in data
    for ids, log_probs, length in zip(data["tokens"], data["log_probs"], data["response_lengths"], strict=True):
        np.testing.assert_allclose(log_probs.numpy(), found[tuple(ids.tolist())][-length:], atol=1e-5)


def alternating(args: Any, rollout_data: dict[str, Any]) -> None:
    """By places in the response, and by what the policy thinks of its tokens."""
    rollout_data["advantages"] = [
        torch.cos(torch.arange(float(len(log_probs)))) + log_probs for log_probs in rollout_data["log_probs"]
    ]


def short(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.zeros(1) for _ in rollout_data["rewards"]]


def lazy(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.zeros(length) for length in rollout_data["response_lengths"]]


def vector(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any:
    return lambda pg_loss: pg_loss


def one_mask(args: Any, **given: Any) -> Any:
    return given["pg_loss"], given["loss_masks"][:1], {}


def mean_metric(args: Any, **given: Any) -> Any:
    return given["pg_loss"], given["loss_masks"], {"drift": given["pg_loss"].mean()}


TIS, ADVANTAGE, REDUCER = (
    "custom_tis_function_path", "custom_advantage_function_path", "custom_pg_loss_reducer_function_path",
)  # fmt: skip


@pytest.mark.parametrize(("option", "function", "words"), [
    (TIS, one_mask, r"--custom-tis-function-path, the masks: shape \[\d+\]; return a number for each of \d+ response"),
    (TIS, mean_metric, r"--custom-tis-function-path, drift: shape \[\]; return a number for each"),
    (REDUCER, vector, r"custom_pg_loss_reducer_function_path gave \[\d+\]: return a scalar"),
    (ADVANTAGE, short, r'rollout_data\["advantages"\] has shapes \[\[1\], .*; set one tensor for each of the 16'),
])  # fmt: skip
def test_an_answer_of_another_shape_is_refused(  # type: ignore[no-untyped-def]
    backend, option: str, function: Callable[..., Any], words: str
) -> None:
    made = backend(use_tis=True, max_tokens_per_gpu=4096, **{option: f"{__name__}:{function.__name__}"})
    with pytest.raises(AlgorithmError, match=words):
        rig.train_batch(made, rig.make_sequences(3, dark=False))


def test_a_critic_needs_returns(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend(**rig.PPO, custom_advantage_function_path=f"{__name__}:lazy")
    with pytest.raises(AlgorithmError, match=r'rollout_data."returns". has shapes ..; set one tensor for each'):
        rig.train_batch(made, rig.make_sequences(3, rewards=True))


def test_what_no_function_of_slimes_can_do_is_refused(backend) -> None:  # type: ignore[no-untyped-def]
    made = backend(use_tis=True, tis_batch_normalize=True, custom_tis_function_path=f"{__name__}:look")
    with pytest.raises(
        AlgorithmError, match=r"has slime's signature and normalises its own weights; leave --tis-batch"
    ):
        rig.train_batch(made, rig.make_sequences(3))
    with pytest.raises(
        UnknownAlgorithm, match=r"slime's signature .args, batch, logits, .*take .tokens, groups, config"
    ):
        backend(loss_type="custom_loss", custom_loss_function_path=f"{__name__}:keep")
    with pytest.raises(UnknownAlgorithm, match="has no 'absent'"):
        backend(custom_pg_loss_reducer_function_path=f"{__name__}:absent")


def test_args_have_the_settings_of_the_run() -> None:
    config, _ = settled(f"{BASE} --mode sync --lr 3e-4 --calculate-per-token-loss --custom-args '{{\"bound\": 3}}'")
    args = train_spec(config, 3).arguments
    assert (args.lr, args.calculate_per_token_loss, args.bound) == (3e-4, True, 3)


def test_helpers_of_context_parallelism_have_nothing_to_do() -> None:
    """The loss sees whole responses in every process."""
    values = torch.arange(3.0)
    assert all_gather_with_cp(values, 5, 3) is slice_log_prob_with_cp(values, 5, 3) is values
