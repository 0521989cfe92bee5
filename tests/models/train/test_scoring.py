"""Log-probs of sequences, and how many micro-batches and exchanges of the reference go through at one time."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from configs.schema.train import TrainConfig
from models.algorithms.tokens import StepStatistics, token_log_probs
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.dp_group import DpGroup, Float32Array
from models.train.huggingface.loading import fuse_norms, load_model
from models.train.huggingface.scoring import Passes, Scorer, output_layer
from models.train.interface import TrainSequence
from models.train.model_set import Scored
from models.train.spec import UpdateResult
from models.train.step import running_batch
from models.train.step.examples import Example
from models.train.step.micro_batch_loss import PolicyNumerator, StepTotals
from models.train.step.micro_batches import MicroBatch, pack_rows
from models.train.step.packing import Layout, Packing, Unit
from models.train.trainer import Trainer
from tests.models.living import Living
from tests.models.train.rig import TINY, behind, make_spec, sequence


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    names: tuple[Any, ...] = ("qwen3", "qwen2", "llama")
    return {name: make_tiny_checkpoint(root / name, TinyRecipe(architecture=name, **TINY)) for name in names}


@pytest.mark.parametrize(("attention", "mask_tokens"), [("sdpa", 1000), ("sdpa", 0), ("eager", 0)])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_packed_log_probs_are_those_of_each_sequence_alone(
    checkpoints: dict[str, Path], architecture: str, attention: str, mask_tokens: int
) -> None:
    config = TrainConfig(hf_checkpoint=str(checkpoints[architecture]), attn_implementation=attention)
    device = torch.device("cpu")
    loaded = load_model(config.hf_checkpoint, "hf_checkpoint", config, device, seed=0)
    assert loaded.packing.pack
    assert loaded.packing.share_prompts
    # Larger weights than at initialisation, so that attending to a neighbour would show.
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0)
    score = Scorer(loaded.model, Passes(device, mask_tokens=mask_tokens), temperature=0.7, chunk_tokens=16)
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 256, 6)
    sizes = [17, 8, 12, 6, 1, 3, 9, 5]  # the first four share a prompt of 6; the fourth has one response token
    tokens = [rng.integers(0, 256, size + 1).astype(np.int32) for size in sizes]
    for ids in tokens[:4]:
        ids[:6] = prompt
    chosen = [np.arange(6 if item < 4 else 1, size + 1) for item, size in enumerate(sizes)]
    single = [Unit((item,), 0, size) for item, size in enumerate(sizes)]
    family, pair = Unit((0, 1, 2, 3), 6, 6 + 11 + 2 + 6 + 0), Unit((2, 1), 6, 6 + 6 + 2)
    layouts = {
        "packed": Layout(((single[0], single[1]), (single[5], single[3], single[2]), (single[4],)), 26),
        "padded": Layout(tuple((unit,) for unit in single), 20),
        "shared prompt": Layout(((family,),), 25),
        "shared and packed": Layout(((single[4], family), (single[6], single[5], single[7])), 27),
        "shared twice": Layout(((pair, Unit((0, 3), 6, 17)), (single[6],)), 31),
    }
    with torch.no_grad():
        alone = [score(pack_rows(Layout(((unit,),), unit.length), tokens, chosen))[0] for unit in single]
        for name, layout in layouts.items():
            found, _ = score(pack_rows(layout, tokens, chosen))
            expected = torch.cat([alone[item] for item in layout.items])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        with Living(score.model.get_output_embeddings().weight, width=loaded.model.config.vocab_size) as logits:
            score(pack_rows(layouts["padded"], tokens, chosen))
        assert logits.rows == 16, "no more than a chunk of tokens has logits at a time"
        # The same against transformers' own logits.
        ids = torch.from_numpy(tokens[6].astype(np.int64))
        logits = loaded.model(input_ids=ids[None, :-1]).logits[0].float() / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(alone[6], expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_adapters_of_the_output_layer_count_and_are_trained(checkpoints: dict[str, Path]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    config = TrainConfig(hf_checkpoint=str(checkpoints["qwen3"]))
    model = load_model(config.hf_checkpoint, "hf_checkpoint", config, torch.device("cpu"), seed=0).model
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"), model)
    adapted = model.get_output_embeddings()
    torch.nn.init.normal_(adapted.lora_B["default"].weight)
    ids = torch.arange(1, 20)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0].detach()
    layer, targets = output_layer(model), torch.arange(19)
    torch.testing.assert_close(layer(hidden), adapted(hidden))
    adapted._disable_adapters = True
    torch.testing.assert_close(output_layer(model)(hidden), adapted.base_layer(hidden))
    expected = (hidden @ layer.weight.T).log_softmax(-1)[torch.arange(19), targets]
    found, _ = token_log_probs(hidden, layer, targets)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(float(one.weight.grad.norm()) > 0 for one in (adapted.lora_A["default"], adapted.lora_B["default"]))


class Recorder:
    """Models that write down what they are asked, and find 0 everywhere. One data-parallel rank."""

    critic, vocab_size, device = None, 1 << 20, torch.device("cpu")

    def __init__(self, shares: int, stages: int, *, reference: bool = False) -> None:
        self.dp_group = DpGroup()
        self.dp_group.dp_size = shares
        self.pass_micro_batches = 4 * stages if stages > 1 else 1
        self.packing = Packing(max_tokens=512)
        self.has_reference = self.reference_apart = reference
        self.trained: list[int] = []  # micro-batches of each pass
        self.scored: dict[str, list[int]] = {"policy": [], "reference": []}
        self.seen: list[tuple[int, int]] = []  # rollouts that were trained
        self.metrics: dict[str, float] = {}  # of the step

    def log_probs(self, batches: Sequence[MicroBatch], model: Scored = "policy") -> list[Float32Array]:
        self.scored[model].append(len(batches))
        return [np.zeros(sum(len(one.chosen) for one in batch.members), np.float32) for batch in batches]

    def backward(self, batches: Sequence[MicroBatch], statistics: StepStatistics, totals: StepTotals) -> None:
        self.trained.append(len(batches))
        self.seen += [one.key for batch in batches for one in batch.members]
        totals.metrics.means["train/loss"] = torch.zeros(())

    def update(self, denominator: float, *, lr_scale: float = 1.0) -> UpdateResult:
        return UpdateResult(applied=True, grad_norm=1.0, lr=1.0)


def trained(models: Recorder, batch: Sequence[Sequence[TrainSequence]], **algorithm: Any) -> Recorder:
    """Train a batch whose groups arrive one by one; after every tenth the caller is idle."""
    spec = make_spec(Path("unused"), **algorithm)
    trainer = Trainer(spec, lambda _: models)  # type: ignore[arg-type, return-value]
    trainer.setup()
    trainer.begin_batch(rollouts=sum(map(len, batch)), steps=1)
    for at, group in enumerate(batch):
        trainer.accumulate(group)
        if at % 10 == 9:
            trainer.flush()
    models.metrics = trainer.step()
    return models


def groups(count: int) -> list[list[TrainSequence]]:
    """Eight responses to each prompt."""
    rng = np.random.default_rng(0)
    made = []
    for group in range(count):
        prompt, sizes = rng.integers(1, 1000, 12).tolist(), rng.integers(8, 128, 8).tolist()
        made.append([response(group, member, prompt, size) for member, size in enumerate(sizes)])
    return made


def response(group: int, member: int, prompt: list[int], size: int) -> TrainSequence:
    teacher = behind(len(prompt), np.full(size, -1.0))
    ids = [*prompt, *range(size)]
    return sequence(group=group, rollout=8 * group + member, tokens=ids, mask=[1] * size, teacher_log_probs=teacher)


def test_a_batch_that_is_there_is_dealt_to_the_ranks_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight data-parallel ranks meet after each call; the mean of their costs, as a share of the largest. Lengths are
    lognormal with a long tail, a sixteenth of a mean of 5k and a cap of 32k."""
    rng, packing = np.random.default_rng(0), Packing(max_tokens=1024, quadratic_tokens=512)
    sizes = np.minimum(rng.lognormal(math.log(200), 1.0, (64, 8)), 2048).astype(int)
    batch = [
        [response(g, member, [g + 1], size) for member, size in enumerate(row)] for g, row in enumerate(sizes.tolist())
    ]
    deal, costs = running_batch.micro_batches, list[list[float]]()

    def noted(assigned: Sequence[Sequence[Layout]], *rest: Any) -> list[MicroBatch]:
        ranks = [sum(len(one.rows) * packing.cost(one.row_length) for one in layouts) for layouts in assigned]
        costs.append(ranks)
        return deal(assigned, *rest)

    def balance(calls: Sequence[Sequence[TrainSequence]]) -> float:
        costs.clear()
        models = Recorder(8, 1)
        models.packing = packing
        trained(models, calls)
        found = sum(sum(ranks) / len(ranks) for ranks in costs) / sum(max(ranks) for ranks in costs)
        assert models.metrics["train/dp_balance"] == pytest.approx(found, rel=1e-5)
        return found

    monkeypatch.setattr(running_batch, "micro_batches", noted)
    assert balance([[one for group in batch for one in group]]) > 0.99
    assert balance(batch) < 0.9, "group by group, as it comes, it cannot be"


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_schedule_of_a_pipeline_takes_four_micro_batches_for_each_stage(stages: int) -> None:
    """Of four data-parallel ranks, whose sequences come group by group from a rollout that goes on."""
    batch = groups(40 * stages)
    models, plain = trained(Recorder(4, stages), batch), trained(Recorder(4, 1), batch)
    assert len(plain.trained) > 4 * stages
    assert len(models.trained) > 1  # training begins before the batch is there
    assert min(models.trained) >= 4 * stages
    assert sum(models.trained) <= 1.05 * sum(plain.trained)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_reference_takes_the_place_of_the_policy_once_for_a_batch(stages: int) -> None:
    """Old log-probs are computed meanwhile."""
    batch = groups(80)
    fields = {"use_kl_loss": True, "kl_loss_coef": 0.1, "normalize_advantages": True, "use_opd": True}
    models = trained(Recorder(1, stages, reference=True), batch, **fields)
    assert len(models.scored["reference"]) == 1
    assert len(models.scored["policy"]) > 1
    assert min(models.scored["policy"]) >= (4 * stages if stages > 1 else 1)
    assert len(models.trained) == 1
    assert sorted(models.seen) == [(one.group_id, one.rollout_id) for group in batch for one in group]


def test_a_batch_of_fewer_micro_batches_is_one_schedule() -> None:
    batch = groups(10)
    models = trained(Recorder(1, 8), batch)
    assert len(models.trained) == 1
    assert 1 < models.trained[0] < 4 * 8
    assert sorted(models.seen) == [(one.group_id, one.rollout_id) for group in batch for one in group]


class _OneMore(torch.nn.Module):  # type: ignore[misc]
    """A norm that adds 1 to its weight, as Gemma's does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_say_what_those_of_transformers_say(dtype: torch.dtype) -> None:
    norms = torch.nn.ModuleList([Qwen3RMSNorm(48, eps=1e-5), _OneMore(48, eps=1e-5)])
    plain = copy.deepcopy(norms)
    with torch.no_grad():
        for ours, theirs in zip(norms, plain, strict=True):
            ours.weight.uniform_(0.5, 1.5)
            theirs.load_state_dict(ours.state_dict())
    fuse_norms(norms)
    assert ["forward" in vars(norm) for norm in norms] == [True, False]
    x = torch.randn(3, 7, 48).to(dtype)
    for ours, theirs in zip(norms, plain, strict=True):
        assert torch.equal(ours(x), theirs(x))
        for found, known in zip(
            torch.autograd.grad(ours(x).square().sum(), ours.parameters()),
            torch.autograd.grad(theirs(x).square().sum(), theirs.parameters()), strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(found, known)


class _Copies(TorchDispatchMode):
    """Notes what a device is given and waited for. `meta` has no values, so that to wait for one is an error there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default and str(named.get("device")) == "meta":
            self.copies += 1
            self.waits += not named.get("non_blocking", False)
        return func(*args, **named)


def test_the_loss_of_a_micro_batch_never_waits_for_the_device(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, there = torch.tensor, list[Any]()  # a list that becomes a tensor on the device is waited for too

    def tensor(values: Any, **fields: Any) -> torch.Tensor:
        there.extend([values] if str(fields.get("device", "cpu")) == "meta" else [])
        return made(values, **fields)

    monkeypatch.setattr(torch, "tensor", tensor)
    numerator = PolicyNumerator(make_spec(checkpoints["qwen3"]))
    members = [
        Example(
            tokens=np.arange(6, dtype=np.int32), prompt=2, chosen=np.arange(2, 6),
            rollout_log_probs=np.full(4, -0.5, np.float32), advantages=np.ones(4, np.float32), coefficient=0.25,
            key=(0, index), staleness=np.ones(4, np.int64),
        )
        for index in range(2)
    ]  # fmt: skip
    log_probs = torch.zeros(8, device="meta", requires_grad=True)
    with _Copies() as copies:
        numerator(members, log_probs, None, StepStatistics(entropy=False), StepTotals())
    assert copies.copies >= 5  # columns
    assert copies.waits == 0
    assert there == []
