"""Every estimator with every policy loss and every correction: trains, or is refused with a reason.

Names and values come from the schema, so that a new one is covered without a change here.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from configs.layers import build
from configs.resolve import derive
from configs.rules.validate import findings
from configs.schema import Config, CorrectionConfig
from configs.schema.algorithm import ESTIMATORS, POLICY_LOSSES, AlgorithmConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.build import build_backend
from models.train.huggingface import loading
from models.train.interface import TrainSequence
from models.train.trainer import Trainer
from tests.models.train.rig import behind, make_sequences

Options = dict[str, Any]
RULES = {"k1": "0.5_2", "k2": "0.5", "k3": "0.5"}
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")


def literal_values(struct: type, name: str) -> tuple[Any, ...]:
    """Values of a field that is a choice of words, none for others."""
    hint = typing.get_type_hints(struct)[name]  # without the description
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def corrections() -> Iterator[Options]:
    """Each choice and each switch of the correction on its own, and those together that touch one another."""
    yield {}
    for field in msgspec.structs.fields(CorrectionConfig):
        values = literal_values(CorrectionConfig, field.name)
        if field.name == "use_tis":
            values = (True, False)
        elif field.default is False:
            values = (True,)
        yield from ({field.name: value} for value in values)
    choices = {name: literal_values(CorrectionConfig, name) for name in ("tis_level", "tis_mode")}
    for level, mode, normalize in itertools.product(*choices.values(), (False, True)):
        yield {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_batch_normalize": normalize}
    for level, kind in itertools.product(LEVELS, RULES):
        yield {"rollout_rs": (f"{level}_{kind}={RULES[kind]}",)}
    rule = {"rollout_rs": ("seq_mean_k1=0.5_2", "token_k3=0.5"), "rs_veto": 1e-4}
    for unit, again in itertools.product(literal_values(CorrectionConfig, "rs_unit"), (False, True)):
        yield {**rule, "rs_unit": unit, "renormalize_after_rejection": again}
    for alpha in literal_values(CorrectionConfig, "prox_alpha"):
        yield {"use_tis": True, "prox": "loglinear", "prox_alpha": alpha}
        yield {**rule, "prox": "loglinear", "prox_alpha": alpha, "tis_batch_normalize": True}
    yield {"rollout_rs": ("token_k2=1e-12",)}  # nothing is left
    yield {"rs_veto": 1e-4}
    yield {"use_tis": True, "tis_clip_decay": 0.5, "correction_ratio": "current", "tis_batch_normalize": True}
    yield {"use_rollout_logprobs": True, "use_opsm": True, "mask_offpolicy_in_partial_rollout": True}
    yield {"use_rollout_logprobs": True, **rule, "renormalize_after_rejection": True}
    yield {"use_tis": True, "staleness_lr_decay": 0.5, "correction_ratio": "current"}


def extras() -> Iterator[tuple[Options, Options]]:
    """Further terms and choices of the algorithm, with other sections by dotted keys."""
    for kind, unbiased in itertools.product(literal_values(AlgorithmConfig, "kl_loss_type"), (False, True)):
        yield {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind, "use_unbiased_kl": unbiased}, {}
    for aggregation in literal_values(AlgorithmConfig, "loss_aggregation"):
        yield {"loss_aggregation": aggregation, "entropy_coef": 0.01}, {}
    for normalize in (False, True):
        yield {"normalize_advantages": normalize, "eps_clip_c": 3.0}, {}
        yield {"normalize_advantages": normalize}, {"distill.use_opd": True, "distill.opd_kl_coef": 0.5}
    yield {"kl_coef": 0.1, "ref_update_interval": 1, "gamma": 0.9}, {}
    yield {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1}, {"asynchrony.max_staleness": 0}
    yield {"gamma": 0.9, "lambd": 0.9, "bootstrap_truncated": True}, {"critic.num_critic_only_steps": 0}
    yield {"disable_grpo_std_normalization": True}, {"asynchrony.max_staleness": 0}
    dpo = {"custom_loss_function_path": "models.algorithms.dpo:dpo", "use_kl_loss": True, "kl_loss_coef": 0.1}
    yield dpo, {"train.loss_type": "custom_loss", "correction.allow_uncorrected": True}
    yield {}, {"train.loss_type": "sft_loss"}


def unique(options: Iterator[Options]) -> list[Options]:
    return list({repr(sorted(one.items())): one for one in options}.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: Options = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
    recipe = TinyRecipe(tokenizer="arithmetic", max_position_embeddings=64, **shape)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("combinations") / "tiny", recipe)


@pytest.fixture(scope="module")
def done() -> set[bytes]:
    """Resolved configurations that have been trained."""
    return set()


# What one loss has trained need not be trained again under another name: tests of one estimator share `done`.
# All but the first are of the full tier: which losses and corrections there are is shown by one estimator.
ON_ONE_WORKER = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"estimator {name}"), *([pytest.mark.full] if at else [])])
    for at, name in enumerate(ESTIMATORS)
]


@pytest.fixture
def quick_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read from disk once; every model is a copy of its own."""
    loaded: dict[str, Any] = {}
    from_disk = loading.load_model

    def load(source: str, key: str, train: Any, device: torch.device, *, seed: int) -> Any:
        if source not in loaded:
            loaded[source] = from_disk(source, key, train, device, seed=seed)
        return copy.deepcopy(loaded[source])

    monkeypatch.setattr(loading, "load_model", load)


def configured(checkpoint: Path, algorithm: Options, correction: Options, **other: Any) -> tuple[Config, list[str]]:
    """The resolved configuration with its faults."""
    values = {
        "rollout.num_rollout": 3,
        "rollout.rollout_batch_size": 3,
        "rollout.n_samples_per_prompt": 4,
        "rollout.rollout_max_response_len": 16,
        "data.prompt_data": ("arithmetic",),
        "train.hf_checkpoint": str(checkpoint),
        "train.train_device": "cpu",
        "train.lr": 1e-3,
        "train.num_steps_per_rollout": None,
        "run.run_dir": "unused",
        **{f"algorithm.{name}": value for name, value in algorithm.items()},
        **{f"correction.{name}": value for name, value in correction.items()},
        **other,
    }
    if algorithm.get("advantage_estimator") == "on_policy_distillation" or values.get("distill.use_opd"):
        values |= {"distill.use_opd": True, "engine.frozen_engine": (f"teacher={checkpoint}",)}
        values |= {"filter.dynamic_sampling_filter": ()}
    if algorithm.get("advantage_estimator") == "gdpo":
        values["reward.reward_component"] = ("right=exact@1", "short=random:0.5@0.5")
    config, faults = derive(build(values, Config()))
    return config, [*faults, *findings(config).faults]


SAMPLED: list[TrainSequence] = []


def sampled(backend: Trainer) -> list[TrainSequence]:
    """Sequences whose log-probs are nearly those of the model, as if a little older weights had sampled them.

    Every backend starts from the same weights, so that they are made once.
    """
    if SAMPLED:
        return SAMPLED
    sequences = make_sequences(5, groups=3, per_group=3, rewards=True)
    rng = np.random.default_rng(0)
    noisy = [values + rng.normal(0.0, 0.05, len(values)) for values in backend.logprobs(sequences)]
    SAMPLED[:] = [
        dataclasses.replace(sequence, rollout_log_probs=behind(sequence.prompt_length, values) * sequence.loss_mask)
        for sequence, values in zip(sequences, noisy, strict=True)
    ]
    return SAMPLED


def trains(config: Config, *, batches: Sequence[int] = (1, 2)) -> str | None:
    """What went wrong in batches of so many steps each; None if nothing did."""
    backend = build_backend(config, total_batches=3)
    assert isinstance(backend, Trainer)
    backend.setup()
    sequences = sampled(backend)
    for batch, steps in enumerate(batches):
        backend.begin_batch(rollouts=9, steps=steps, version=batch + 1)
        backend.accumulate(sequences[:4])  # groups of 4 sequences, 3 rollouts
        backend.accumulate(sequences[4:])
        for _ in range(steps):
            before = [parameter.detach().clone() for parameter in backend._models.model.parameters()]
            metrics = backend.step()
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            if bad:
                return f"{bad} not finite"
            moved = any(not torch.equal(*pair) for pair in zip(before, backend._models.model.parameters(), strict=True))
            rejected = metrics.get("correction/all_rejected") == 1.0
            if moved == rejected:
                return f"weights moved: {moved}, all rejected: {rejected}, gradient {metrics['train/grad_norm']}"
            if "train/loss" not in metrics:
                return "no loss was logged"
    return None


@pytest.mark.slow
@pytest.mark.usefixtures("quick_loading")
@pytest.mark.parametrize("loss", ["auto", *POLICY_LOSSES])
@pytest.mark.parametrize("estimator", ON_ONE_WORKER)
def test_every_combination_trains_or_is_refused(estimator: str, loss: str, checkpoint: Path, done: set[bytes]) -> None:
    wrong = []
    allowed = 0
    place = ESTIMATORS.index(estimator) + ["auto", *POLICY_LOSSES].index(loss)
    for number, correction in enumerate(unique(corrections())):
        config, faults = configured(checkpoint, {"advantage_estimator": estimator, "policy_loss": loss}, correction)
        if faults:
            # A reason is a sentence that says what is wrong and, behind a semicolon or a colon, what to do.
            wrong += [(correction, fault) for fault in faults if len(fault.split()) < 8]
            continue
        allowed += 1
        content = msgspec.msgpack.encode(config)
        if content in done:  # another way to write what was tried already
            continue
        done.add(content)
        # One step or two in turn: with each loss, each correction meets both, with one estimator or the next.
        fault = trains(config, batches=[1 + (place + number) % 2])
        if fault is not None:
            wrong.append((correction, fault))
    assert not wrong
    assert allowed >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("quick_loading")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_further_terms_train_or_are_refused(estimator: str, checkpoint: Path) -> None:
    wrong = []
    allowed = 0
    for algorithm, other in extras():
        config, faults = configured(checkpoint, {"advantage_estimator": estimator, **algorithm}, {}, **other)
        wrong += [(algorithm, other, fault) for fault in faults if len(fault.split()) < 8]
        if faults:
            continue
        allowed += 1
        fault = trains(config)
        if fault is not None:
            wrong.append((algorithm, other, fault))
    assert not wrong
    assert allowed >= 10
