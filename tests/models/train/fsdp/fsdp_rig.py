"""Training in shards, small enough for a test: sequences, trainers, the cases, and what a spawned process runs.

Results are written as JSON and safetensors, since nothing here is pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.schema.train import FsdpConfig
from models.train.huggingface.hf_files import whole
from models.train.huggingface.sharded_models import FsdpModels
from models.train.huggingface.whole_models import TorchModels
from models.train.interface import TrainSequence
from models.train.model_set import ModelSet
from models.train.spec import TrainSpec
from models.train.trainer import Trainer
from tests.models.train import rig
from tests.models.train.families.family_models import config_of
from tests.models.train.rig import VOCABULARY, joined, make_spec

STEPS = 4
Fields = dict[str, Any]

GRPO: Fields = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01}
PPO: Fields = rig.PPO | GRPO | {"use_tis": True}
LORA: Fields = GRPO | {"lora_rank": 2, "lora_alpha": 8.0, "lr": 1e-2}
HOOKS: Fields = {  # functions with slime's signatures: they see whole responses in every process
    "custom_tis_function_path": "tests.models.train.test_slime_hooks:without_first",
    "custom_advantage_function_path": "tests.models.train.test_slime_hooks:alternating",
}
TIED, UNTIED, EXPERTS = "tied", "untied", "experts"

# name -> (checkpoint, sequences of each step, options)
CASES: dict[int, dict[str, tuple[str, int | None, Fields]]] = {
    2: {
        "fsdp": (TIED, None, PPO | {"logprob_chunk_tokens": 8}),
        "ddp": (UNTIED, None, PPO | {"fsdp_shard_size": 1}),
        "recomputing": (TIED, None, GRPO | {"gradient_checkpointing": True, "logprob_chunk_tokens": 8}),
        "nothing_here": (TIED, 1, GRPO),
        "context": (TIED, None, PPO | {"fsdp_context_parallel_size": 2, "gradient_checkpointing": True}),
        "context_hooks": (TIED, None, HOOKS | {"fsdp_context_parallel_size": 2, "use_tis": True}),
        "experts": (EXPERTS, None, GRPO),
        "renewed": (TIED, None, GRPO | {"ref_update_interval": 2}),
        "bf16": (TIED, None, GRPO | {"train_dtype": "bfloat16"}),
        "lora": (UNTIED, None, LORA),
    },
    4: {
        "hsdp": (UNTIED, None, PPO | {"fsdp_shard_size": 2}),
        "hsdp_context": (UNTIED, 5, GRPO | {"fsdp_shard_size": 2, "fsdp_context_parallel_size": 2}),
        "lora": (UNTIED, None, LORA),  # more processes than rows of an adapter: some shards are empty
    },
}


ARCHITECTURES = ("glm4", "gemma2", "qwen3_moe", "glm4_moe", "deepseek_v3")


def make_architecture(name: str, directory: Path) -> Path:
    """A small random checkpoint of an architecture."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name, vocab_size=VOCABULARY), dtype=torch.float32)
        model.save_pretrained(directory)
    return directory


def make_sequences(seed: int, count: int | None = None) -> list[TrainSequence]:
    """Common prompts, masked tokens, rewards, truncated ends, two temperatures."""
    return rig.make_sequences(seed, prompt_lengths=(2, 9), fan_out=False, dark=False, ends=True)[:count]


def make_trainer(
    checkpoint: Path, models: Callable[[TrainSpec], ModelSet] = FsdpModels, *, sharded: bool = True, **fields: Any
) -> Trainer:
    """A trainer that is set up; `fields` may be of any configuration. `sharded`: whether those of shards count."""
    spec = make_spec(checkpoint, **{"max_tokens_per_gpu": 48, "weight_decay": 0.1, **fields})
    made = Trainer(spec if sharded else replace(spec, fsdp=FsdpConfig()), models)
    made.setup()
    return made


def train(trainer: Trainer, steps: range, count: int | None = None) -> list[dict[str, float]]:
    """One batch of one step each; odd ones in two calls, with what is possible done in between."""
    metrics = []
    for step in steps:
        rig.leave_device(trainer)
        sequences = make_sequences(step, count)
        trainer.begin_batch(rollouts=len(sequences), steps=1, version=2)
        if step % 2 and len(sequences) > 6:
            trainer.accumulate(sequences[:6])
            trainer.flush()
            trainer.accumulate(sequences[6:])
        else:
            trainer.accumulate(sequences)
        metrics.append(trainer.step())
    return metrics


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, optimizer state of policy and critic, and weights of critic and reference. Collective."""
    models: Any = trainer._models
    cpu = torch.device("cpu")
    out = {f"weights/{name}": tensor.clone() for name, tensor in trainer.export_weights()}
    for part, updater in {"policy": models.updater, "critic": getattr(models.critic, "updater", None)}.items():
        if updater is None:
            continue
        out |= {f"{part}/moments/{name}": whole(one, cpu).clone() for name, one in updater.state_tensors().items()}
        out |= {f"{part}/parameters/{name}": whole(one, cpu).clone() for name, one in updater.named_parameters}
    return out


def run_case(checkpoint: Path, trainer: Trainer, count: int | None, out: Path, name: str) -> None:
    """Train, and write what came of it."""
    before = {key: one for key, one in state_of(trainer).items() if "/parameters/" in key or "weights/" in key}
    metrics = train(trainer, range(STEPS), count)
    log_probs = np.concatenate(trainer.logprobs(make_sequences(9)))
    exported = [key for key, _ in trainer.export_weights()]
    tensors = state_of(trainer) | {f"before/{key}": one for key, one in before.items()}
    write(out, name, {"metrics": metrics, "names": exported, "log_probs": log_probs.tolist()}, tensors)


def write(out: Path, name: str, found: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    rig.write(out, f"{name}-{rank}", found, tensors)


# ---------------------------------------------------------------------- checkpoints

RESUMED = {"ppo": (TIED, PPO | {"ref_update_interval": 2}), "lora": (UNTIED, LORA)}


def save_and_go_on(checkpoints: Path, out: Path, states: Path) -> None:
    """Two steps, a checkpoint while the third is being trained, and on to the end without interruption."""
    for name, (checkpoint, fields) in RESUMED.items():
        trainer = make_trainer(checkpoints / checkpoint, lambda spec: FsdpModels(spec, async_save=True), **fields)
        train(trainer, range(2))
        trainer.save(states / name)
        draw = torch.rand(1).item()
        metrics = train(trainer, range(2, STEPS))
        trainer._models.finish_save()  # type: ignore[attr-defined]
        write(out, f"unbroken-{name}", {"metrics": metrics, "draw": draw}, state_of(trainer))


def resume(checkpoints: Path, out: Path, states: Path, again: Path, **others: Any) -> None:
    """From the checkpoint to the end, saved and loaded once more on the way, then with `others` as options."""
    for name, (checkpoint, fields) in RESUMED.items():
        trainer = make_trainer(checkpoints / checkpoint, **fields)
        torch.manual_seed(99)
        trainer.load(states / name)
        draw = torch.rand(1).item()
        metrics = train(trainer, range(2, 3))
        trainer.save(again / name)
        trainer = make_trainer(checkpoints / checkpoint, **fields | others)
        trainer.load(again / name)
        metrics += train(trainer, range(3, STEPS))
        write(out, f"resumed-{name}", {"metrics": metrics, "draw": draw}, state_of(trainer))


def expected_of(checkpoints: Path, out: Path, world: int) -> None:
    """The same cases, in one process that knows of no shards."""
    for name, (checkpoint, count, fields) in CASES[world].items():
        models: Any = FsdpModels if "lora_rank" in fields else TorchModels
        path = checkpoints / checkpoint
        run_case(path, make_trainer(path, models, sharded=False, **fields), count, out, name)


def run(checkpoints: str, out: str, states: str, rank: int, world: int, rendezvous: str) -> None:
    """Entry point of a spawned process."""
    np.random.seed(rank)  # processes must agree without a common random stream
    torch.manual_seed(rank)
    with joined(rank, world, rendezvous, 120):
        for name, (checkpoint, count, fields) in CASES[world].items():
            path = Path(checkpoints) / checkpoint
            run_case(path, make_trainer(path, **fields), count, Path(out), name)
        if world == 2:
            save_and_go_on(Path(checkpoints), Path(out), Path(states))
        else:
            resume(Path(checkpoints), Path(out), Path(states), Path(states) / "of_four", fsdp_shard_size=2)
