"""Recipes that are trained on Megatron in every layout of `CASES`, in trainer groups of 1, 2 and 4 processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.models.train.rig import joined

DEADLINE_S = 200


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


def run(models: str, out: str, selection: str, rank: int, world: int, rendezvous: str) -> None:
    """One process of a trainer group: all cases of its size."""
    from gathered_attention import GatheredAttention
    from megatron_rig import run_case

    from models.train.megatron import layers, processes

    with joined(rank, world, rendezvous, DEADLINE_S):
        core_attention, engine_installed = layers.SdpaCoreAttention, processes.engine_installed
        for case in SELECTIONS[selection]:
            if case.world != world:
                continue
            if "context_parallel_size" in case.layout:
                layers.SdpaCoreAttention = GatheredAttention  # type: ignore[misc]
                processes.engine_installed = lambda: True
            run_case(Path(models), Path(out), case.name, case.layout, case.recipes)
            layers.SdpaCoreAttention = core_attention  # type: ignore[misc]
            processes.engine_installed = engine_installed
