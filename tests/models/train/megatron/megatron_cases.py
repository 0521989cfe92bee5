"""A program: trains recipes on Megatron in every layout of `CASES`, in trainer groups of 1, 2 and 4 processes.

Megatron is imported once; the processes of a trainer group are forked from here.
`python megatron_cases.py MODELS OUT SELECTION`, where the selection is a key of `SELECTIONS`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DEADLINE_S = 200
_ATTENTION = "SdpaCoreAttention"


@dataclass(frozen=True)
class Case:
    """Recipes in one layout."""

    name: str
    world: int
    recipes: Sequence[str]
    layout: dict[str, Any] = field(default_factory=dict)


_SPREAD = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_PLAIN = {"use_distributed_optimizer": False}
_TP2 = {"tensor_model_parallel_size": 2}
_PP2 = {"pipeline_model_parallel_size": 2}
_EXPERTS = {**_TP2, "sequence_parallel": True, "expert_model_parallel_size": 2}
CASES = (
    Case("one", 1, ("chunked", "broken", "supervised", "branches", "branches_flat"), {}),
    Case("one_plain", 1, ("five",), {**_PLAIN, "recompute_granularity": "full"}),
    Case("one_bf16", 1, ("five", "ppo"), {"train_dtype": "bfloat16"}),
    Case("tp2", 2, ("five", "five_qwen2", "ppo", "renewed", "chunked"), _TP2),
    Case("tp2_sequence", 2, ("five_deepseek", "five_glm4_moe", "ppo"), {**_TP2, "sequence_parallel": True}),
    Case("pp2", 2, ("five", "five_glm4", "broken", "ppo"), _PP2),
    Case("pp2_virtual", 2, ("five_untied",), {**_PP2, "virtual_pipeline_model_parallel_size": 2}),
    Case("dp2", 2, ("five", "five_llama", "supervised", "branches"), {}),
    Case("dp2_overlap", 2, ("ppo", "five_untied"), _SPREAD),
    Case("ep2", 2, ("experts",), {"expert_model_parallel_size": 2}),
    Case("cp2", 2, ("five_untied", "ppo"), {"context_parallel_size": 2}),
    Case("tp2_pp2", 4, ("five", "ppo"), {**_TP2, **_PP2, "decoder_first_pipeline_num_layers": 1}),
    Case("pp2_virtual_dp2", 4, ("ppo",), {**_PP2, "virtual_pipeline_model_parallel_size": 2, **_SPREAD}),
    Case("tp2_ep2", 4, ("experts",), {**_EXPERTS, "expert_tensor_parallel_size": 1}),
    Case("tp2_ep2_cut", 4, ("experts",), _EXPERTS),
)
# One layout of each kind, and each recipe that is more than another model.
FEW = {
    "one": ("chunked", "broken", "supervised", "branches", "branches_flat"),
    "tp2": ("five", "ppo", "renewed"),
    "pp2": ("five", "broken"),
    "dp2": ("five", "branches"),
    "ep2": ("experts",),
    "cp2": ("five_untied",),
}
SELECTIONS = {"few": tuple(replace(case, recipes=FEW[case.name]) for case in CASES if case.name in FEW), "all": CASES}


def run(rank: int, world: int, cases: Sequence[Case], models: Path, out: Path) -> None:
    """One process of a trainer group: all cases of its size."""
    from gathered_attention import GatheredAttention
    from megatron_rig import run_case

    from models.train.megatron import layers, processes
    from tests.models.train.rig import joined

    with joined(rank, world, out / f"rendezvous{world}", DEADLINE_S):
        core_attention, engine_installed = getattr(layers, _ATTENTION), processes.engine_installed
        for case in cases:
            if case.world != world:
                continue
            if "context_parallel_size" in case.layout:
                setattr(layers, _ATTENTION, GatheredAttention)
                processes.engine_installed = lambda: True
            run_case(models, out, case.name, case.layout, case.recipes)
            setattr(layers, _ATTENTION, core_attention)
            processes.engine_installed = engine_installed


def main(models: Path, out: Path, cases: Sequence[Case]) -> int:
    """Run the trainer groups one after the other; 0 if all processes of all of them ended well."""
    import torch

    torch.set_num_threads(1)
    from models.train.megatron.processes import install_shim

    install_shim()
    for name in ("build", "models", "weights"):
        importlib.import_module(f"models.train.megatron.{name}")
    fork = multiprocessing.get_context("fork")
    for world in sorted({case.world for case in cases}):
        trainer_group = [fork.Process(target=run, args=(rank, world, cases, models, out)) for rank in range(world)]
        for process in trainer_group:
            process.start()
        for process in trainer_group:
            process.join(DEADLINE_S)
        for process in trainer_group:
            if process.is_alive():
                process.kill()
        if any(process.exitcode for process in trainer_group):
            return 1
    return 0


if __name__ == "__main__":
    sys.path[:0] = os.environ["SLUICE_TEST_PATH"].split(os.pathsep)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), SELECTIONS[sys.argv[3]]))
