"""What tests of the trainer share: sequences, settings, trainers, one training step, and processes that train together.

Importing it starts nothing and imports neither Megatron nor transformers. Results of processes are written as JSON and
safetensors, since nothing here is pickled.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DistillConfig
from configs.schema.train import FsdpConfig, LoraConfig, MegatronConfig, ParallelConfig, TrainConfig
from models.algorithms.correction import Correction
from models.slime_arguments import SlimeArguments
from models.train.dp_group import DpGroup
from models.train.huggingface.hf_files import local
from models.train.huggingface.whole_models import TorchModels
from models.train.interface import TrainBackend, TrainSequence
from models.train.spec import TrainSpec
from models.train.trainer import Trainer
from tests.copies import copied_call
from tests.models.corrections import corrected

VOCABULARY = 32
Tensors = dict[str, torch.Tensor]
Trained = tuple[dict[str, float], Tensors, Tensors]
PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 1e-3, "gamma": 0.97, "lambd": 0.9}
PPO |= {"normalize_advantages": True, "bootstrap_truncated": True}
TINY: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_position_embeddings": 128}
# Metrics that depend on how micro-batches were packed.
PACKING = frozenset(("train/dp_balance", "train/micro_batches", "train/padding_frac", "train/shared_prompt_frac"))

# ---------------------------------------------------------------------- sequences


def sequence(
    *,
    group: int = 0,
    rollout: int = 0,
    tokens: Any,
    mask: Any,
    rollout_log_probs: Any = None,
    advantage: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> TrainSequence:
    """`mask` and `rollout_log_probs` are of the tokens behind the prompt, which is what `tokens` has before them."""
    prompt, n = len(tokens) - len(mask), len(mask)
    return TrainSequence(
        group_id=group,
        rollout_id=rollout,
        tokens=np.asarray(tokens, dtype=np.int32),
        prompt_length=prompt,
        loss_mask=behind(prompt, mask).astype(np.uint8),
        rollout_log_probs=behind(prompt, np.zeros(n) if rollout_log_probs is None else rollout_log_probs),
        advantages=behind(prompt, np.full(n, advantage)),
        versions=np.repeat([-1, version], [prompt, n]).astype(np.int32),
        **fields,
    )


def behind(prompt: int, values: Any) -> npt.NDArray[np.float32]:
    """[prompt + n] float32: the values, and 0 for the prompt before them."""
    return np.concatenate([np.zeros(prompt), np.asarray(values)]).astype(np.float32)


def scored(backend: TrainBackend, sequences: Sequence[TrainSequence]) -> list[npt.NDArray[np.float32]]:
    """[T] for each sequence: its log-probs under the current weights, and 0 for the prompt."""
    return [behind(s.prompt_length, found) for s, found in zip(sequences, backend.logprobs(sequences), strict=True)]


def make_sequences(
    seed: int = 0,
    *,
    groups: int = 4,
    per_group: int = 3,
    vocabulary: int = VOCABULARY,
    prompt_lengths: tuple[int, int] = (1, 9),
    response_lengths: tuple[int, int] = (1, 14),
    masked: float = 0.25,
    fan_out: bool = True,
    dark: bool = True,
    rewards: bool = False,
    ends: bool = False,
    broken: bool = False,
) -> list[TrainSequence]:
    """Uneven lengths, common prompts, tokens masked at the rate `masked`; upper ends of lengths are exclusive.

    `fan_out`: the first rollout of each group has two sequences. `dark`: one sequence is masked. `rewards`: with
    rewards, truncated responses and a teacher. `ends`: with rewards, truncated responses and two temperatures.
    `broken`: advantages are infinite.
    """
    rng = np.random.default_rng(seed)
    out = []
    for group in range(groups):
        prompt = rng.integers(1, vocabulary, int(rng.integers(*prompt_lengths)))
        for index in range(per_group):
            for part in range(2 if fan_out and index == 0 else 1):
                response = int(rng.integers(*response_lengths))
                mask = (rng.random(response) > masked).astype(np.uint8)
                if dark and index == 1 and group == 0:
                    mask[:] = 0
                made = sequence(
                    group=seed * 1000 + group,
                    rollout=(seed * 1000 + group) * 10 + index,
                    tokens=np.concatenate([prompt, rng.integers(1, vocabulary, response)]),
                    mask=mask,
                    rollout_log_probs=np.where(mask, rng.normal(-3.4, 0.4, response), 0.0),
                    advantage=np.inf if broken else rng.normal(),
                    version=part,
                )
                if ends:
                    temperature, reward = 1.4 if group % 2 else None, float(rng.integers(0, 4))
                    made = dataclasses.replace(made, reward=reward, truncated=bool(index % 2), temperature=temperature)
                out.append(made)
    return with_rewards(out, seed) if rewards else out


def with_rewards(sequences: list[TrainSequence], seed: int = 0) -> list[TrainSequence]:
    """Rewards and ends by rollout, log-probs of a teacher by token."""
    rng = np.random.default_rng(seed + 1)
    reward = {s.rollout_id: float(rng.integers(0, 4)) for s in sequences}
    return [
        dataclasses.replace(
            s,
            reward=reward[s.rollout_id],
            truncated=bool(s.rollout_id % 2),
            teacher_log_probs=behind(s.prompt_length, rng.normal(-3.0, 0.5, s.response_length)),
        )
        for s in sequences
    ]


# ---------------------------------------------------------------------- trainers


def make_spec(
    checkpoint: Path,
    *,
    staleness: int = 1,
    temperature: float = 0.9,
    total_steps: int | None = None,
    correction: Correction | None = None,
    arguments: SlimeArguments | None = None,
    **fields: Any,
) -> TrainSpec:
    """Settings of a trainer on the CPU; `fields` may be of any of the trainer's configurations."""

    def take(kind: Any) -> dict[str, Any]:
        return {name: fields.pop(name) for name in list(fields) if name in kind.__struct_fields__}

    fields = {"hf_checkpoint": str(checkpoint), "lr": 1e-3, "adam_eps": 1e-4, "train_device": "cpu", **fields}
    train, off_policy = TrainConfig(**take(TrainConfig)), CorrectionConfig(**take(CorrectionConfig))
    parts: dict[str, Any] = {
        "critic": CriticConfig(**{"critic_lr": 1e-5, **take(CriticConfig)}),
        "distill": DistillConfig(**take(DistillConfig)),
        "parallel": ParallelConfig(**take(ParallelConfig)),
        "fsdp": FsdpConfig(**take(FsdpConfig)),
        "lora": LoraConfig(**take(LoraConfig)),
        "megatron": MegatronConfig(**take(MegatronConfig)),
    }
    algorithm = AlgorithmConfig(**fields)
    return TrainSpec(
        train,
        algorithm,
        temperature=temperature,
        max_response_len=16,
        seed=0,
        total_steps=total_steps,
        arguments=arguments or SlimeArguments(),
        correction=correction or corrected(off_policy, max_staleness=staleness, policy_loss=algorithm.policy_loss),
        **parts,
    )


def make_backend(checkpoint: Path, *, dp_group: DpGroup | None = None, **fields: Any) -> Trainer:
    """A trainer on torch that is set up."""
    made = Trainer(make_spec(checkpoint, **fields), lambda spec: TorchModels(spec, dp_group))
    made.setup()
    return made


def train_batch(
    backend: TrainBackend, *calls: Sequence[TrainSequence], steps: int = 1, version: int = 0
) -> list[dict[str, float]]:
    """One batch, handed over in these calls: the metrics of its steps."""
    rollouts = {(one.group_id, one.rollout_id) for call in calls for one in call}
    backend.begin_batch(rollouts=len(rollouts), steps=steps, version=version)
    for call in calls:
        backend.accumulate(call)
    return [backend.step() for _ in range(steps)]


@contextmanager
def unchanged(backend: Trainer) -> Iterator[None]:
    """All that a checkpoint would hold stays as it is within it, bit by bit."""
    before = {name: tensor.clone() for name, tensor in state_of(backend).items()}
    yield
    assert differing(state_of(backend), before) == []


def train_step(backend: Trainer, calls: Sequence[Sequence[TrainSequence]], *, flush: bool = False) -> Trained:
    """Train one step: metrics, gradient (divided by the denominator) and the weights afterwards."""
    gradient: dict[str, torch.Tensor] = {}
    updater = backend._models.updater
    update, summed = updater.update, updater._summed

    def spy(denominator: float, **factors: float) -> Any:
        def seen() -> Any:
            found = summed()
            for name, parameter in updater.named_parameters:
                if parameter.grad is not None:
                    gradient[name] = parameter.grad.clone() / denominator
            return found

        updater._summed = seen  # type: ignore[method-assign]
        return update(denominator, **factors)

    updater.update = spy  # type: ignore[method-assign]
    for call in calls:
        backend.accumulate(call)
        if flush:
            backend.flush()
    metrics = backend.step()
    updater.update, updater._summed = update, summed  # type: ignore[method-assign]
    return metrics, gradient, weights_of(backend)


def leave_device(backend: Trainer) -> None:
    """What an engines' turn does between two batches of a colocated run: all memory goes, and comes back."""
    tensors = [local(tensor) for part in backend._models.device_tensors() for tensor in part]
    backend.offload()
    resizable = [tensor.untyped_storage() for tensor in tensors if tensor.untyped_storage().resizable()]
    assert resizable
    assert not any(storage.nbytes() for storage in resizable)
    backend.discard()  # of a batch that did not fill up
    backend.onload()


def state_of(backend: Trainer, part: str = "") -> Tensors:
    """What a checkpoint would hold, of a part or of all; live tensors."""
    models: Any = backend._models
    return {name: one for name, one in models.parts().tensors().items() if name.startswith(part)}


def weights_of(backend: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export_weights()}


def same(left: Tensors, right: Tensors, atol: float = 1e-6, rtol: float = 1e-4) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def same_metrics(
    found: Sequence[dict[str, float]],
    wanted: Sequence[dict[str, float]],
    *,
    rel: float = 1e-5,
    abs: float = 1e-6,
    but: Set[str] = PACKING,
) -> None:
    """The metrics of several steps, but for those that depend on how micro-batches were packed."""
    for step, (have, want) in enumerate(zip(found, wanted, strict=True)):
        assert have.keys() == want.keys(), step
        for key in want.keys() - but:
            assert have[key] == pytest.approx(want[key], rel=rel, abs=abs), (step, key)


def differing(left: Tensors, right: Tensors) -> list[str]:
    """Names of tensors that are not equal bit by bit, or that one side lacks."""
    lacking = left.keys() ^ right.keys()
    return sorted(lacking) + [name for name in left.keys() & right.keys() if not torch.equal(left[name], right[name])]


# ---------------------------------------------------------------------- processes

MEGATRON = ("tests.models.train.megatron.megatron_loaded",)  # imports of trainer groups on Megatron


@contextmanager
def trainer_groups(
    target: Callable[..., None],
    arguments: Sequence[Any],
    worlds: Sequence[int],
    meetings: Path,
    deadline_s: float,
    imports: Sequence[str] = ("transformers.models.qwen3.modeling_qwen3",),
) -> Iterator[None]:
    """Call `target(*arguments, rank, world, meeting)` in groups of so many processes, one after the other, beside the
    block; at its end wait for them, and check that all of them ended well.

    `imports`: what all of them need, imported once, in a process that has trained nothing, from which they are forked.
    """
    leader = copied_call(_lead, target, tuple(map(str, arguments)), worlds, str(meetings), deadline_s, imports)
    try:
        yield
        assert leader.wait() == 0, "a process failed, or it waits for the others: they took different decisions"
    finally:
        leader.kill()
        leader.wait()


def _lead(
    target: Callable[..., None],
    arguments: tuple[str, ...],
    worlds: Sequence[int],
    meetings: str,
    deadline_s: float,
    imports: Sequence[str],
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in imports:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    for world in worlds:
        group = [
            fork.Process(target=target, args=(*arguments, rank, world, f"{meetings}-{world}")) for rank in range(world)
        ]
        for process in group:
            process.start()
        for process in group:
            process.join(deadline_s)
        for process in group:
            process.kill()
        if any(process.exitcode for process in group):
            sys.exit(1)


@contextmanager
def joined(rank: int, world: int, rendezvous: str | Path, timeout_s: float) -> Iterator[None]:
    """Within it, this process is one of the default group, with one thread."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def write(out: Path, name: str, found: Any, tensors: Tensors) -> None:
    """What a process found, where its parent reads it."""
    save_file({key: value.contiguous() for key, value in tensors.items()}, out / f"{name}.safetensors")
    (out / f"{name}.json").write_text(json.dumps(found))


def read(out: Path, name: str) -> tuple[Any, Tensors]:
    """What `write` wrote."""
    return json.loads((out / f"{name}.json").read_text()), load_file(out / f"{name}.safetensors")
