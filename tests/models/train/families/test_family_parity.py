"""Each family in Megatron-core against transformers: log-probs, and weights there and back, at several layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import FAMILIES, VOCAB, gradients, log_probs, save_model, token_ids
from safetensors.torch import load_file, save_file

from models.convert import main, megatron_to_hf
from models.errors import CheckpointUnavailable
from models.train.spec import TrainSpec
from tests.models.train.rig import MEGATRON, joined, make_spec, trainer_groups

TOLERANCE = 1e-5
DEADLINE_S = 600


SMALL_BUCKET = 16384  # bytes: several for each layer
ENGINE = "-engine"  # ending of cases with layers in the shape of Transformer Engine's; the last ones of a world

TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EXPERT: dict[str, Any] = {"expert_model_parallel_size": 2}
# The name of a case, the model's, options of Megatron.
ONE = [
    *[(name, name, {}) for name in FAMILIES],
    ("deepseek_v3-recompute", "deepseek_v3", {"recompute_granularity": "full"}),
    ("glm4-recompute", "glm4", {"recompute_activations": True}),
    *[(f"{name}{ENGINE}", name, {}) for name in ("qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "moonlight")],
]
TWO = [
    *[(f"{name}-tp2", name, TENSOR) for name in FAMILIES if name not in ("glm", "qwen2_yarn", "qwen3_moe_raw_scores")],
    *[(f"{name}-ep2", name, EXPERT) for name in ("qwen3_moe", "glm4_moe_groups", "deepseek_v3")],
    *[(f"{name}-pp2", name, PIPELINE) for name in ("qwen2_tied", "glm4")],
    ("glm4-tp2-whole-sequences", "glm4", {"tensor_model_parallel_size": 2}),
    ("qwen3-two-chunks", "qwen3", {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}),
    ("moonlight-pp2", "moonlight", {**PIPELINE, "decoder_last_pipeline_num_layers": 1}),
    ("glm4_moe-uneven-stages", "glm4_moe", {**PIPELINE, "decoder_first_pipeline_num_layers": 1}),
    ("deepseek_v3-tp2-whole-experts", "deepseek_v3", {**TENSOR, "expert_tensor_parallel_size": 1, **EXPERT}),
    *[(f"{name}-tp2{ENGINE}", name, TENSOR) for name in ("qwen2_tied", "glm4", "deepseek_v3")],
]
FOUR = [
    ("qwen2_tied-tp2-pp2", "qwen2_tied", {**TENSOR, **PIPELINE}),
    ("qwen2-tp4", "qwen2", {"tensor_model_parallel_size": 4, "sequence_parallel": False}),  # of 2 query groups
    ("deepseek_v3-tp2-ep2", "deepseek_v3", {**TENSOR, **EXPERT, "expert_tensor_parallel_size": 1}),
    ("qwen3_moe-ep2-pp2", "qwen3_moe", {**EXPERT, **PIPELINE, "decoder_first_pipeline_num_layers": 2}),
]
CASES: dict[int, list[tuple[str, str, dict[str, Any]]]] = {1: ONE, 2: TWO, 4: FOUR}


class Reference(NamedTuple):
    """What transformers finds."""

    log_probs: torch.Tensor  # [2, 13]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Results:
    """`root`: a directory with one checkpoint per family; `written`: by the first process of each case."""

    root: Path
    references: dict[str, Reference]
    written: dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root, out = (tmp_path_factory.mktemp(name) for name in ("families", "worlds"))
    models, references = {name: save_model(name, root / name) for name in FAMILIES}, {}
    with trainer_groups(run, (root, out), list(CASES), out / "rendezvous", DEADLINE_S, MEGATRON):
        for name, model in models.items():
            with torch.no_grad():
                scores = log_probs(model(token_ids()).logits, token_ids())
            references[name] = Reference(scores, gradients(model))
    cases = [case for cases in CASES.values() for case, *_ in cases]
    return Results(root, references, {case: load_file(out / f"{case}.safetensors") for case in cases})


def check(result: dict[str, torch.Tensor], reference: Any, checkpoint: Path) -> None:
    ids = token_ids()
    if "logits/rows" in result:
        rows = log_probs(result["logits/rows"], ids)
        assert (rows - reference.log_probs).abs().max() < TOLERANCE
        packed = log_probs(result["logits/packed"].reshape(*ids.shape, -1), ids)
        assert (packed - reference.log_probs).abs().max() < TOLERANCE
    for name, gradient in reference.gradients.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        difference = (result[f"gradient/{name}"] - gradient).abs().max()
        assert difference < 1e-4 * scale, f"{name}: {difference} of {scale}"
    saved = load_file(checkpoint / "model.safetensors")
    exported = {name: tensor for name, tensor in result.items() if not name.startswith(("logits/", "gradient/"))}
    assert exported.keys() == saved.keys()
    for name, tensor in saved.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name


@pytest.mark.slow
@pytest.mark.xdist_group("families")
@pytest.mark.parametrize(("case", "name"), [case[:2] for cases in CASES.values() for case in cases])
def test_a_family_scores_as_transformers_does_and_comes_back(case: str, name: str, results: Results) -> None:
    check(results.written[case], results.references[name], results.root / name)


# In a process of its own: Megatron's replacements for a machine without a GPU change torch in the whole process.


def run(root: str, out: str, rank: int, world: int, rendezvous: str) -> None:
    """One process of `world`: all cases of so many."""
    with joined(rank, world, rendezvous, 120), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, model, megatron in CASES[world]:
            run_case(case, Path(root) / model, megatron, Path(out))


def run_case(case: str, checkpoint: Path, megatron: dict[str, Any], out: Path) -> None:
    """Load, score, export; then the gradient, exported as if it were the weights."""
    from models.train.megatron.processes import build_layout

    if case.endswith(ENGINE):
        import engine_stand_ins

        engine_stand_ins.install()
    spec = make_spec(checkpoint, **megatron)
    sizes = build_layout(spec)
    from models.train.megatron.weights import export_hf, load_hf

    hf_config = json.loads((checkpoint / "config.json").read_text())
    chunks = build_chunks(hf_config, spec, sizes.virtual_pipeline)
    for tensor in [tensor for chunk in chunks for tensor in [*chunk.parameters(), *chunk.buffers()]]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)  # what is not loaded shows
    load_hf(chunks, hf_config, checkpoint)
    result = {name: tensor.clone() for name, tensor in export_hf(chunks, hf_config, bucket_bytes=SMALL_BUCKET)}
    if sizes.pipeline == 1:
        with torch.no_grad():
            for name, inputs in scored_inputs().items():
                result[f"logits/{name}"] = whole_logits(chunks[0](**inputs))
    fill_with_gradients(chunks)
    result |= {f"gradient/{name}": tensor.clone() for name, tensor in export_hf(chunks, hf_config)}
    if torch.distributed.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in result.items()}, out / f"{case}.safetensors")


def build_chunks(hf_config: dict[str, Any], spec: TrainSpec, virtual: int | None) -> list[Any]:
    """All chunks of this process."""
    from megatron.core import parallel_state as ps

    from models.train.megatron.build import build_gpt

    first, last = ps.is_pipeline_first_stage(ignore_virtual=True), ps.is_pipeline_last_stage(ignore_virtual=True)
    count = virtual or 1
    return [
        build_gpt(
            hf_config,
            spec,
            pre_process=first and stage == 0,
            post_process=last and stage == count - 1,
            vp_stage=stage if virtual else None,
        )
        for stage in range(count)
    ]


def fill_with_gradients(chunks: list[Any]) -> None:
    """Replace the weights by the gradient of minus the sum of the log-probs, as training finds it: a row at a time."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = chunks[0].config
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    ids = token_ids()
    rows = [iter(ids.split(1)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=rows if len(rows) > 1 else rows[0],
        model=wrapped,
        num_microbatches=len(ids),
        seq_length=ids.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.copy_(parameter.main_grad)


def forward_step(rows: Any, model: Any) -> Any:
    """One row through one chunk."""
    from megatron.core import parallel_state as ps

    from models.algorithms.tokens import OutputLayer, Vocabulary, token_log_probs

    row = next(rows)

    def loss(logits: torch.Tensor) -> Any:
        logits = logits[:, :-1].reshape(-1, logits.shape[-1])
        group, width = ps.get_tensor_model_parallel_group(), logits.shape[-1]
        part = Vocabulary(group.rank() * width, VOCAB, group)
        as_they_are = OutputLayer(torch.eye(width, dtype=logits.dtype))
        found, _ = token_log_probs(logits, as_they_are, row[:, 1:].reshape(-1), vocabulary=part)
        return -found.sum() * len(token_ids()), {}  # the schedule takes the mean over rows

    return model(row, None, None), loss


def scored_inputs() -> dict[str, dict[str, Any]]:
    """Plain rows; and the same two texts in one packed row, with positions and a mask of their own."""
    ids = token_ids()
    rows, length = ids.shape
    text = torch.arange(rows).repeat_interleave(length)
    allowed = (text[:, None] == text[None]) & torch.ones(rows * length, rows * length, dtype=torch.bool).tril()
    return {
        "rows": {"input_ids": ids, "position_ids": None, "attention_mask": None},
        "packed": {
            "input_ids": ids.reshape(1, -1),
            "position_ids": torch.arange(length).repeat(rows)[None],
            "attention_mask": ~allowed[None, None],
        },
    }


def whole_logits(part: torch.Tensor) -> torch.Tensor:
    """[b, s, vocabulary] of what each tensor-parallel process has."""
    from megatron.core import parallel_state as ps

    group = ps.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :VOCAB]


# `python -m models.convert`: there and back in processes of their own, and what `verify` finds.


ROOT = Path(__file__).parents[4]


THERE_AND_BACK = """
import sys
from models.convert import main

source, megatron, back = sys.argv[1:]
assert main(["hf-to-megatron", "--hf", source, "--out", megatron]) == 0
assert main(["megatron-to-hf", "--megatron", megatron, "--out", back]) == 0
assert main(["verify", "--megatron", megatron]) == 0
"""


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.full
def test_a_conversion_there_and_back_is_bit_identical_and_verify_sees_one_changed_bit(tmp_path: Path) -> None:
    source, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    save_model("deepseek_v3", source, dtype=torch.bfloat16)
    done = python("-c", THERE_AND_BACK, source, megatron, back)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all tensors are equal\n"
    was, now = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in was)

    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    was[name].view(torch.int16)[0, 0] ^= 1
    save_file(was, source / "model.safetensors", metadata={"format": "pt"})
    seen = python("-m", "models.convert", "verify", "--megatron", megatron, "--hf", source)
    assert seen.returncode == 1, seen.stderr
    assert seen.stdout.count("\n") == 1
    assert seen.stdout.startswith(f"{name}: bfloat16:24x32:")


def test_directories_that_cannot_be_used_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointUnavailable, match="is not empty; give a directory that does not exist yet"):
        megatron_to_hf(tmp_path / "none", tmp_path / "full")
    assert main(["megatron-to-hf", "--megatron", str(tmp_path / "none"), "--out", str(tmp_path / "new")]) == 2
    assert "has no config.json; give --hf DIR" in capsys.readouterr().err


def test_verify_without_anything_to_compare_with_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert main(["verify", "--megatron", str(tmp_path)]) == 2
    assert "checksums.json does not exist; give --hf DIR to compare with" in capsys.readouterr().err
