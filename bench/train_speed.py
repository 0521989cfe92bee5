"""Training steps of every backend on one batch, in processes of their own, beside the speed of plain matrix products.

All contenders of as many processes run one after the other in the same processes; the peak is measured in them, by all
at once, before each. One thread for each process on a CPU.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

from bench.train_work import recorded_batch, step_flops, work_of
from models.train.interface import TrainSequence
from models.train.trainer import Trainer

# Dense bfloat16 FLOP/s by the makers' data sheets, without sparsity.
PUBLISHED: Final = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
_COMMON: Final = {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 151936}
SIZES: Final[dict[str, dict[str, Any]]] = {
    "quick": _COMMON
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 2048,
    },
    "cpu": _COMMON
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    "0.6B": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "1.7B": _COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "4B": _COMMON
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}

RECOMPUTE: Final[dict[str, Any]] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass(frozen=True)
class Contender:
    """A backend in a layout."""

    name: str
    backend: str
    processes: int
    layout: dict[str, Any] = field(default_factory=dict)
    module: str = "torch"  # that must be importable


CONTENDERS: Final = (
    Contender("torch", "torch", 1),
    Contender("fsdp", "fsdp", 1, module="models.train.fsdp.models"),
    Contender("megatron", "megatron", 1, module="megatron.core"),
    Contender("fsdp, 2 processes", "fsdp", 2, module="models.train.fsdp.models"),
    Contender("megatron, TP 2", "megatron", 2, {"tensor_model_parallel_size": 2}, "megatron.core"),
)


@dataclass(frozen=True)
class Setting:
    """What all contenders are given. Crosses to their processes as JSON."""

    checkpoint: str
    size: str
    device: str
    groups: int
    prompt: float  # median tokens
    response: float
    longest: int
    budget: int  # tokens of a micro-batch
    rounds: int
    recompute: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return SIZES[self.size]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def batch(self) -> list[TrainSequence]:
        return recorded_batch(
            self.groups,
            per_group=8,
            longest=self.longest,
            vocabulary=self.config["vocab_size"],
            prompt=self.prompt,
            response=self.response,
        )


@dataclass(frozen=True)
class Measured:
    """Of one contender, over all its processes."""

    step_s: list[float]
    export_s: list[float]
    peak_flops: float  # by matrix products, all processes together
    memory_bytes: int  # of the fullest GPU; 0 on a CPU
    padding_frac: float


def quiet() -> None:
    """No progress bars of loading."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_checkpoint(directory: Path, size: str, device: str) -> None:
    """A Qwen3 of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    quiet()
    fields = {name: value for name, value in SIZES[size].items() if name != "model_type"}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**fields, max_position_embeddings=40960))
    model.to(torch.bfloat16 if device == "cuda" else torch.float32).save_pretrained(directory)


def flops_of(setting: Setting) -> float:
    return step_flops(setting.config, work_of(setting.batch()))


def measure(setting: Setting, contenders: list[Contender], root: Path, deadline_s: float) -> dict[str, Measured | str]:
    """Contenders of equally many processes; a string says why one could not be measured."""
    world = contenders[0].processes
    context = multiprocessing.get_context("spawn")
    out = root / f"world-{world}"
    out.mkdir()
    names = [one.name for one in contenders]
    processes = [
        context.Process(target=_work, args=(setting, names, str(out), rank, world), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    ends = time.monotonic() + deadline_s
    while any(process.is_alive() for process in processes) and time.monotonic() < ends:
        if any(process.exitcode for process in processes):
            break  # the others wait for one that is gone
        time.sleep(0.1)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return {name: _read(out, name) for name in names}


def _read(out: Path, name: str) -> Measured | str:
    result, failure = out / f"{name}.json", out / f"{name}.failed"
    if failure.exists():
        return failure.read_text()
    return Measured(**json.loads(result.read_text())) if result.exists() else "it was not done in time"


# ---------------------------------------------------------------------- in the processes


def _work(setting: Setting, names: list[str], out: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    quiet()
    on_gpu = setting.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{out}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    for name in names:
        contender = next(one for one in CONTENDERS if one.name == name)
        try:
            found = _measure(setting, contender)
        except Exception as error:  # told to the parent, which prints it
            reason = next(iter(str(error).splitlines()), "")
            Path(out, f"{name}.failed").write_text(f"{type(error).__name__}: {reason}")
            if world > 1:
                raise
            continue
        if rank == 0:
            Path(out, f"{name}.json").write_text(json.dumps(vars(found)))
    torch.distributed.destroy_process_group()


def _measure(setting: Setting, contender: Contender) -> Measured:
    peak = _peak(setting)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = _trainer(setting, contender)
    batch = setting.batch()
    metrics: dict[str, float] = {}
    step_s, export_s = [], []
    for number in range(setting.rounds + 1):
        started = _now(setting)
        trainer.begin_batch(rollouts=len(batch), steps=1)
        trainer.accumulate(batch)
        metrics = trainer.step()
        step_s.append(_now(setting) - started)
        if number:
            started = _now(setting)
            for _ in trainer.export_weights():
                continue
            export_s.append(_now(setting) - started)
    memory = torch.cuda.max_memory_allocated() if setting.device == "cuda" else 0
    return Measured(
        step_s=step_s[1:],  # the first one warms up
        export_s=export_s,
        peak_flops=max(peak, _peak(setting)),
        memory_bytes=int(_over_processes(memory, torch.distributed.ReduceOp.MAX)),
        padding_frac=metrics["train/padding_frac"],
    )


def _trainer(setting: Setting, contender: Contender) -> Trainer:
    from configs.schema.algorithm import AlgorithmConfig
    from configs.schema.train import MegatronConfig, ParallelConfig, TrainConfig
    from models.train.huggingface.models import TorchModels
    from models.train.spec import TrainSpec

    spec = TrainSpec(
        TrainConfig(
            hf_checkpoint=setting.checkpoint,
            lr=1e-6,
            max_tokens_per_gpu=setting.budget,
            train_device=setting.device,
            train_dtype="bfloat16" if setting.device == "cuda" else "float32",
            gradient_checkpointing=setting.recompute,
        ),
        AlgorithmConfig(),
        parallel=ParallelConfig(actor_num_gpus_per_node=contender.processes),
        megatron=MegatronConfig(**contender.layout, **(RECOMPUTE if setting.recompute else {})),
    )
    models: Any = TorchModels
    if contender.backend == "fsdp":
        from models.train.fsdp.models import FsdpModels

        models = FsdpModels
    if contender.backend == "megatron":
        from models.train.megatron.models import MegatronModels

        models = MegatronModels
    trainer = Trainer(spec, models)
    trainer.setup()
    return trainer


def _now(setting: Setting) -> float:
    """Seconds, when all processes and their GPUs are done with what they were given."""
    if setting.device == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()
    return time.perf_counter()


def _peak(setting: Setting) -> float:
    """FLOP/s of square matrix products, all processes at once; the best of several."""
    size = 8192 if setting.device == "cuda" else 1024
    left = torch.randn((size, size), dtype=setting.dtype, device=setting.device)
    right, product = torch.randn_like(left), torch.empty_like(left)
    repeats = 20 if setting.device == "cuda" else 4
    best = float("inf")
    for _ in range(5):
        started = _now(setting)
        for _ in range(repeats):
            torch.matmul(left, right, out=product)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return _over_processes(2.0 * size**3 * repeats / best, torch.distributed.ReduceOp.SUM)


def _over_processes(value: float, how: Any) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    torch.distributed.all_reduce(found, op=how)
    return float(found.item())
