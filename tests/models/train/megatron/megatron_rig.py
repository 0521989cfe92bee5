"""Small models, sequences and trainers, on Megatron in one process of several and on torch in one.

Its parent may import this: Megatron itself is imported only where a case runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from models.train.interface import TrainSequence
from models.train.spec import TrainSpec
from models.train.trainer import Trainer
from tests.models.train import rig
from tests.models.train.branches import branched_batch
from tests.models.train.families.family_models import config_of
from tests.models.train.rig import joined

VOCABULARY = 33  # odd: matrices are padded wherever they are split


@dataclass(frozen=True)
class Recipe:
    """What is trained, whatever trains it."""

    model: str
    steps: int = 2
    steps_per_batch: int = 1
    broken: tuple[int, ...] = ()  # batches whose gradient is not finite
    batches: Literal["groups", "branches", "flat"] = "groups"
    fields: dict[str, Any] = field(default_factory=dict)


_POLICY = {"entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1, "use_tis": True}
_FAMILIES = ("qwen2", "llama", "glm4", "glm4_moe", "deepseek")
RECIPES: dict[str, Recipe] = {
    "five": Recipe("tied", 5, fields=_POLICY),
    "five_untied": Recipe("untied", 5, fields=_POLICY),
    "experts": Recipe("experts", 3, fields=_POLICY),
    "chunked": Recipe("untied", 1, fields={**_POLICY, "logprob_chunk_tokens": 5}),
    "renewed": Recipe("untied", 3, fields={**_POLICY, "ref_update_interval": 1, "ref_load": "other"}),
    "broken": Recipe("untied", 3, broken=(1,), fields={"entropy_coef": 0.01}),
    "ppo": Recipe("tied", 4, 2, fields=rig.PPO),
    **{f"five_{family}": Recipe(family, 5, fields=_POLICY) for family in _FAMILIES},
    "branches": Recipe("untied", 3, batches="branches", fields=_POLICY),
    "branches_flat": Recipe("untied", 3, batches="flat", fields=_POLICY),
    "supervised": Recipe("untied", 2, fields={"loss_type": "sft_loss", "weight_decay": 0.1, "lr_warmup_iters": 3}),
}


_QWEN = {"head_dim": 8, "num_hidden_layers": 4}
# name -> (family, changes of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {**_QWEN, "tie_word_embeddings": True}),
    "untied": ("qwen3", _QWEN),
    "other": ("qwen3", _QWEN),
    "experts": ("qwen3_moe", {**_QWEN, "mlp_only_layers": []}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama3", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 2}),
    "deepseek": ("deepseek_v3", {"num_hidden_layers": 2}),
}


def make_models(directory: Path) -> None:
    """Checkpoints whose norms are not 1 and whose logits are not flat, so that no swap of weights goes unnoticed."""
    import transformers

    generator = torch.Generator().manual_seed(7)
    for name, (family, changes) in MODELS.items():
        config = config_of(family, vocab_size=VOCABULARY, max_position_embeddings=128, **changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                noise = torch.randn(tensor.shape, generator=generator)
                if "norm" in key:
                    tensor.copy_(1.0 + 0.1 * noise)
                elif tensor.ndim > 1 or key.endswith("bias"):
                    tensor.copy_(0.05 * noise)
        model.save_pretrained(directory / name)


def make_sequences(seed: int, **fields: Any) -> list[TrainSequence]:
    """Groups with common prompts, masked tokens; rewards, truncated ends, two temperatures."""
    return rig.make_sequences(
        seed, vocabulary=VOCABULARY, prompt_lengths=(2, 9), fan_out=False, dark=False, ends=True, **fields
    )


def make_spec(recipe: Recipe, models: Path, layout: dict[str, Any] | None = None) -> TrainSpec:
    """Of a recipe, in a parallel layout."""
    fields = {"max_tokens_per_gpu": 48, **recipe.fields, **(layout or {})}
    if "ref_load" in fields:
        fields["ref_load"] = str(models / fields["ref_load"])
    return rig.make_spec(models / recipe.model, **fields)


def train(trainer: Trainer, recipe: Recipe) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train a recipe: what was measured, and log-probs and weights as tensors."""
    trainer.setup()
    before = trainer.logprobs(make_sequences(99))
    metrics = []
    batches = recipe.steps // recipe.steps_per_batch
    for batch in range(batches):
        rig.leave_device(trainer)
        trainer.begin_batch(rollouts=12, steps=recipe.steps_per_batch)
        for part in parts_of(recipe, batch):
            trainer.accumulate(part)
            trainer.flush()
        metrics += [trainer.step() for _ in range(recipe.steps_per_batch)]
    # First the weights: a forward pass would wait for parameters that are still on their way.
    weights = [(name, tensor.clone()) for name, tensor in trainer.export_weights()]
    after = trainer.logprobs(make_sequences(99))
    tensors = {f"weights/{name}": tensor for name, tensor in weights}
    tensors |= {"before": torch.from_numpy(np.concatenate(before)), "after": torch.from_numpy(np.concatenate(after))}
    return {"metrics": metrics, "names": [name for name, _ in weights]}, tensors


def parts_of(recipe: Recipe, batch: int) -> list[list[TrainSequence]]:
    """A batch as it is handed over: in two calls, each of whole rollouts."""
    if recipe.batches == "groups":
        sequences = make_sequences(batch, broken=batch in recipe.broken)
        return [sequences[:5], sequences[5:]]
    sequences = branched_batch(batch, VOCABULARY, as_flat=recipe.batches == "flat")
    first = sequences[0].group_id
    return [[s for s in sequences if (s.group_id == first) is early] for early in (True, False)]


class Sent:
    """A tensor that is on its way: it may be read until its handle was waited for, so until then nobody changes it."""

    def __init__(self, handle: Any, tensor: torch.Tensor) -> None:
        self._handle, self._tensor, self._as_sent = handle, tensor, tensor.detach().clone()

    def wait(self) -> None:
        assert torch.equal(self._tensor.detach(), self._as_sent), "a tensor was changed while it was being sent"
        self._handle.wait()


class Counts:
    """Schedules with a backward pass, exchanges of policy and reference, and sends to a stage of the pipeline that
    are waited for later (each is checked, see `Sent`), in this process."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import p2p_communication

        from models.train.megatron.forward import Pipeline
        from models.train.megatron.trained_models import SwappedReference

        self.begin()
        p2p_ops = p2p_communication._p2p_ops

        def checked_p2p_ops(**sides: Any) -> dict[str, Any]:
            requests = p2p_ops(**sides)
            for side in requests.keys() & {"send_next", "send_prev"}:
                requests[side] = Sent(requests[side], sides[f"tensor_{side}"])
                self.sends += 1
            return requests

        p2p_communication._p2p_ops = checked_p2p_ops
        train, exchange = Pipeline.train, SwappedReference._exchange

        def counted_train(pipeline: Any, *args: Any) -> None:
            self.schedules += 1
            train(pipeline, *args)

        def counted_exchange(reference: Any) -> None:
            self.exchanges += 1
            exchange(reference)

        Pipeline.train, SwappedReference._exchange = counted_train, counted_exchange  # type: ignore[method-assign]

    def begin(self) -> None:
        self.schedules = self.exchanges = self.sends = 0


HOOKED: list[str] = []  # calls of slime's hooks in this process
HOOKS = {
    "custom_megatron_init_path": f"{__name__}:hook_init",
    "custom_megatron_before_log_prob_hook_path": f"{__name__}:hook_log_prob",
    "custom_megatron_before_train_step_hook_path": f"{__name__}:hook_step",
}


def hook_init(args: Any) -> None:
    from megatron.core import parallel_state

    assert parallel_state.model_parallel_is_initialized()
    HOOKED[:] = ["init"]


def hook_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    assert all(chunk.buffers is not None for chunk in model), "Megatron's DistributedDataParallel"
    HOOKED.append(f"log_prob {store_prefix}")


def hook_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    assert all(not parameter.main_grad.any() for chunk in model for parameter in chunk.parameters()), "no gradient yet"
    assert optimizer.param_groups
    HOOKED.append(f"step {rollout_id} {step_id}")


def run_case(models: Path, out: Path, name: str, layout: dict[str, Any], recipes: Sequence[str]) -> None:
    """Train recipes in one layout, in this process of the trainer group."""
    from models.train.megatron.models import MegatronModels

    rank = torch.distributed.get_rank()
    counts = Counts()
    for recipe in recipes:
        hooks = HOOKS if recipe == "five" else {}
        trainer = Trainer(make_spec(RECIPES[recipe], models, {**layout, **hooks}), MegatronModels)
        counts.begin()
        found, tensors = train(trainer, RECIPES[recipe])
        found |= {name: getattr(counts, name) for name in ("schedules", "exchanges", "sends")} | {"hooks": [*HOOKED]}
        rig.write(out, f"{name}-{recipe}-{rank}", found, tensors)


# ---------------------------------------------------------------------- recipes in every layout

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


def run_cases(models: str, out: str, selection: str, rank: int, world: int, rendezvous: str) -> None:
    """One process of a trainer group: all cases of its size."""
    from gathered_attention import GatheredAttention

    from models.train.megatron import layers, processes

    with joined(rank, world, rendezvous, DEADLINE_S):
        core_attention, has_engine = layers.SdpaCoreAttention, processes.has_transformer_engine
        for case in SELECTIONS[selection]:
            if case.world != world:
                continue
            if "context_parallel_size" in case.layout:
                layers.SdpaCoreAttention = GatheredAttention  # type: ignore[misc]
                processes.has_transformer_engine = lambda: True
            run_case(Path(models), Path(out), case.name, case.layout, case.recipes)
            layers.SdpaCoreAttention = core_attention  # type: ignore[misc]
            processes.has_transformer_engine = has_engine
