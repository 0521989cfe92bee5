"""Neither the number of processes nor the order of arrival, micro-batches, packing or padding reach the update."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.train import dp_group
from models.train.dp_group import DistributedDpGroup, DpGroup
from models.train.interface import TrainSequence
from models.train.trainer import Trainer
from tests.models.train import rig

DEADLINE_S = 150
# What depends on how micro-batches were formed; and a threshold at 0 of a margin that is 0 but for rounding.
LAYOUT = rig.PACKING | {"custom/accuracy"}
WHITENED = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
REJECTING = {"rollout_rs": ("seq_mean_k2=0.09",)}
DPO = {"loss_type": "custom_loss", "custom_loss_function_path": "models.algorithms.dpo:dpo"}
HOOKS = {
    f"custom_{hook}_function_path": f"tests.models.train.test_slime_hooks:{function}"
    for hook, function in (("tis", "without_first"), ("pg_loss_reducer", "per_token"), ("advantage", "alternating"))
}
# name -> (number of optimizer steps, how many sequences, options)
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "rollout_mean": (1, "all", {}),
    "token_mean": (2, "all", {"loss_aggregation": "token_mean", "entropy_coef": 0.01}),
    "seq_mean": (1, "all", {"loss_aggregation": "seq_mean", "staleness_lr_decay": 0.5}),
    "constant": (1, "few", {"loss_aggregation": "constant", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "whitening": (2, "all", WHITENED | {"kl_coef": 0.1}),
    "critic": (2, "all", rig.PPO),
    "distillation": (1, "all", {"use_opd": True, "opd_kl_coef": 0.3, "normalize_advantages": True}),
    "m2po": (2, "all", {"policy_loss": "m2po", "m2po_threshold": 0.1}),
    # Not kl_cov: |log theta - log old| has a kink where theta is old, on which rounding decides.
    "covariances": (2, "all", {"policy_loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.05}),
    "slime_hooks": (2, "all", HOOKS | {"ess_lr_scale": True, "loss_aggregation": "seq_mean_token_sum"}),
    "normalised_weights": (1, "all", {"tis_batch_normalize": True, "tis_level": "sequence"}),
    "rejected_rollouts": (1, "all", REJECTING | {"rs_unit": "rollout", "renormalize_after_rejection": True}),
    "all_rejected": (1, "all", {"rollout_rs": ("token_k2=1e-12",)}),
    "nothing_here": (1, "one", {}),
    "preferences": (2, "all", DPO | {"use_kl_loss": True, "kl_loss_coef": 0.5}),
}


def sequences_of(how: str) -> list[TrainSequence]:
    """`few`: fewer than there are processes; then some of them have nothing to do."""
    sequences = rig.make_sequences(3, rewards=True)
    return sequences[: {"few": 3, "one": 1, "all": len(sequences)}[how]]


def train(checkpoint: Path, out: Path, rank: int, dp_group: DpGroup | None) -> None:
    """Train every case, and write what came of it."""
    for name, (steps, how, fields) in CASES.items():
        backend = rig.make_backend(checkpoint, dp_group=dp_group, max_tokens_per_gpu=48, **fields)
        metrics, tensors = [], {}
        backend.begin_batch(rollouts=12, steps=steps, version=2)
        calls: list[list[TrainSequence]] = [sequences_of(how)]
        for step in range(steps):
            found, gradient, weights = rig.train_step(backend, calls if step == 0 else [])
            metrics.append(found)
            tensors |= {f"gradient/{step}/{key}": value for key, value in gradient.items()}
        tensors |= {f"weights/{key}": value for key, value in weights.items()}
        if backend._models.critic is not None:
            tensors |= rig.state_of(backend, "critic")
        rig.write(out, f"{name}-{rank}", metrics, tensors)


def run(checkpoint: str, out: str, rank: int, world: int, rendezvous: str) -> None:
    """Entry point of a spawned process."""
    np.random.seed(rank)  # processes must agree without a common random stream
    with rig.joined(rank, world, rendezvous, 60):
        train(
            Path(checkpoint),
            Path(out) / str(world),
            rank,
            DistributedDpGroup(dp_rank=rank, dp_size=world, is_mp_src_rank=True),
        )


@pytest.mark.slow
def test_shares_make_the_update_of_the_whole(tiny: Path, tmp_path: Path) -> None:
    """Four; two are in the tests of a trainer group."""
    for name in ("1", "4"):
        (tmp_path / name).mkdir()
    with rig.trainer_groups(run, (tiny, tmp_path), [4], tmp_path / "rendezvous", DEADLINE_S):
        train(tiny, tmp_path / "1", 0, None)
    for name in CASES:
        wanted, expected = rig.read(tmp_path / "1", f"{name}-0")
        for rank in range(4):
            metrics, found = rig.read(tmp_path / "4", f"{name}-{rank}")
            rig.same(found, expected, 1e-6, 1e-5)
            rig.same_metrics(metrics, wanted, but=LAYOUT)
        if name == "all_rejected":
            assert wanted[0]["correction/all_rejected"] == 1.0
            assert not any(key.startswith("gradient/") for key in expected)
        else:
            assert any(value.abs().max() > 1e-4 for key, value in expected.items() if key.startswith("gradient/"))


Trio = Callable[[bytes, bytes], DistributedDpGroup]


@pytest.fixture
def trio(monkeypatch: pytest.MonkeyPatch) -> Trio:
    """The second of three processes; the first two are one data-parallel rank, whose results the first hands in."""

    def made(first: bytes, third: bytes) -> DistributedDpGroup:
        def gathered(data: bytes, _group: object) -> list[bytes]:
            assert data == b""  # only source ranks send anything
            return [first, data, third]

        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 3)
        monkeypatch.setattr(dp_group, "all_gather", lambda own, group: [torch.tensor([n]) for n in (0, -1, 1)])
        monkeypatch.setattr(dp_group, "gather_bytes", gathered)
        return DistributedDpGroup(dp_rank=0, dp_size=2, is_mp_src_rank=False)

    return made


def test_names_that_a_share_lacks_are_merged_all_the_same(trio: Trio) -> None:
    group = trio(b'{"a": 2.0, "b": 5.0}', b'{"a": 1.0}')
    assert group.merge({"a": 100.0}) == {"a": 3.0, "b": 5.0}
    assert group.merge({"a": 100.0}, largest=True) == {"a": 2.0, "b": 5.0}


def test_what_a_process_does_not_speak_for_is_left_out(trio: Trio) -> None:
    one, two = np.array([1.5], dtype=np.float32), np.array([2.5, 3.5], dtype=np.float32)
    found = trio(one.tobytes(), two.tobytes()).gather_by_dp_rank(np.array([9.0], dtype=np.float32))
    assert [part.tolist() for part in found] == [[1.5], [2.5, 3.5]]


def test_a_gradient_that_no_share_has_stays_absent(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer would move a parameter by its momentum, or its decay, for a gradient of zeros."""
    mine, elsewhere, nowhere = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    mine.grad = torch.tensor([1.0, 2.0])

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        """With a share that has the gradients (10, 20) and (30, 40) of the first two."""
        if op is not None:
            tensor.copy_(torch.maximum(tensor, torch.tensor([1, 1, 0], dtype=torch.uint8)))
        else:
            tensor += torch.tensor([10.0, 20.0, 30.0, 40.0])

    group = trio(b"", b"")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group.all_reduce_gradients([mine, elsewhere, nowhere])
    assert [None if one.grad is None else one.grad.tolist() for one in (mine, elsewhere, nowhere)] == [
        [11.0, 22.0], [30.0, 40.0], None
    ]  # fmt: skip


# ---------------------------------------------------------------------- how a batch is computed

# name -> changes of the packing, options
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one by one": ({}, {"max_tokens_per_gpu": 1}),
    "small, eager": ({"max_tokens": 32}, {"attn_implementation": "eager"}),
    "unpacked, in small chunks": ({"pack": False}, {"logprob_chunk_tokens": 5}),
    "unshared, checkpointed": ({"share_prompts": False, "max_tokens": 64}, {"gradient_checkpointing": True}),
    "one row": ({"share_prompts": False, "single_row": True, "max_tokens": 40}, {}),
}


def calls_of(sequences: list[TrainSequence], *, backwards: bool) -> list[list[TrainSequence]]:
    """One call with all sequences, or one for each rollout from the last to the first."""
    if not backwards:
        return [sequences]
    key = lambda sequence: sequence.rollout_id  # noqa: E731
    rollouts = itertools.groupby(sorted(sequences, key=key, reverse=True), key=key)
    return [list(members)[::-1] for _, members in rollouts]


def update(backend: Trainer, sequences: list[TrainSequence], steps: int, *, backwards: bool) -> list[rig.Trained]:
    backend.begin_batch(rollouts=12, steps=steps, version=2)
    calls = calls_of(sequences, backwards=backwards)
    return [rig.train_step(backend, calls if step == 0 else [], flush=backwards) for step in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_how_a_batch_is_computed_changes_nothing(tiny, name: str) -> None:  # type: ignore[no-untyped-def]
    steps, how, fields = CASES[name]
    sequences = sequences_of(how)
    expected = update(rig.make_backend(tiny, **fields), sequences, steps, backwards=False)
    for changes, options in VARIANTS.values():
        made = rig.make_backend(tiny, **fields, **options)
        models = made._models
        models.packing = dataclasses.replace(models.packing, **changes)
        found = update(made, sequences, steps, backwards=True)
        for have, want in zip(found, expected, strict=True):
            rig.same_metrics(have[:1], want[:1], rel=1e-4, abs=2e-6, but=LAYOUT)
            rig.same(have[1], want[1], 3e-6)  # gradient
            rig.same(have[2], want[2], 3e-6)  # weights


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(sorted(CASES)), wild=st.booleans(), steps=st.integers(1, 3))
def test_whatever_comes_the_weights_stay_finite(tiny, seed: int, case: str, wild: bool, steps: int) -> None:  # type: ignore[no-untyped-def]
    """Lengths from 0, masked sequences, NaN behind the mask, samplers that were sure of what the policy rules out."""
    rng = np.random.default_rng(seed)
    sequences = []
    for one in rig.make_sequences(seed % 50, groups=int(rng.integers(0, 4)), per_group=2, rewards=True):
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
    made = rig.make_backend(tiny, **fields)
    made.begin_batch(rollouts=len(sequences), steps=steps, version=3)
    made.accumulate(sequences)
    for _ in range(steps):
        metrics = made.step()
        assert metrics["train/skipped_steps"] == 0.0
        assert np.isfinite([metrics["train/grad_norm"], metrics["train/lr"]]).all()
    assert all(torch.isfinite(parameter).all() for parameter in made._models.model.parameters())
