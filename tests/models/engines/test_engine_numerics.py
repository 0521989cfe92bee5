"""Log-probs of the embedded engine against the Hugging Face forward of the same checkpoint, also across updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.engines.harness import EMBEDDED, Bench

TOLERANCE = 1e-5
Checkpoints = Callable[..., Path]


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def log_probs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(output)] log-probs of the output tokens by the Hugging Face forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0].float() / temperature
    table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return table.gather(-1, torch.tensor(output)[:, None])[:, 0]


def gap(values: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(values) - expected).abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_log_probs_equal_hugging_face(checkpoints: Checkpoints, architecture: str, tied: bool) -> None:
    path = checkpoints(architecture=architecture, tie_word_embeddings=tied)
    bench, model = Bench(path), reference(path)
    prompts = [[7], [1, 2, 3, 4, 5], list(range(10, 60))]
    done = bench.run(*[bench.make(prompt, n=2, max_new_tokens=20 + 7 * len(prompt) % 40) for prompt in prompts])
    assert len(done) == 6
    for completion in done:
        expected = log_probs(model, completion.prompt.tolist(), completion.output_ids)
        assert gap(completion.log_probs, expected) < TOLERANCE


def test_random_biases_are_applied(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A fresh checkpoint has biases of zero, which would hide a forward that forgets them."""
    source = checkpoints(architecture="qwen2")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator) * ("bias" in name or "norm" in name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path)
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=30))
    expected = log_probs(reference(tmp_path), [1, 2, 3], completion.output_ids)
    assert gap(completion.log_probs, expected) < TOLERANCE
    assert gap(completion.log_probs, log_probs(reference(source), [1, 2, 3], completion.output_ids)) > 1e-2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_stretched_rotary_embeddings(checkpoints: Checkpoints, tmp_path: Path, rope: dict[str, Any]) -> None:
    source = checkpoints(architecture="llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    bench = Bench(tmp_path)
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=90))
    expected = log_probs(reference(tmp_path), [1, 2, 3], completion.output_ids)
    assert gap(completion.log_probs, expected) < TOLERANCE
    assert gap(completion.log_probs, log_probs(reference(source), [1, 2, 3], completion.output_ids)) > 1e-4


def test_log_probs_are_after_temperature_and_before_truncation(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench, model = Bench(path), reference(path)
    cases = [{"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5, "temperature": 2.0}]
    done = bench.run(*[bench.make([3, 1, 4], max_new_tokens=25, **case) for case in cases])
    for completion, case in zip(done, cases, strict=True):
        expected = log_probs(model, [3, 1, 4], completion.output_ids, float(case.get("temperature", 1.0)))
        assert gap(completion.log_probs, expected) < TOLERANCE


def test_greedy_is_argmax_with_raw_log_probs(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench, model = Bench(path), reference(path)
    greedy = bench.make([3, 1, 4], temperature=0.0, max_new_tokens=20)
    [completion, _] = bench.run(greedy, bench.make([5], max_new_tokens=20))
    context = [3, 1, 4]
    for token in completion.output_ids:
        with torch.no_grad():
            assert int(model(torch.tensor([context])).logits[0, -1].argmax()) == token
        context.append(token)
    assert gap(completion.log_probs, log_probs(model, [3, 1, 4], completion.output_ids)) < TOLERANCE


def test_cached_prefixes_change_no_log_prob(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench, model = Bench(path), reference(path)
    prompt = list(range(5, 45))
    [first] = bench.run(bench.make(prompt, max_new_tokens=10))
    turn_two = [*prompt, *first.output_ids, 1, 2, 3]
    done = bench.run(
        bench.make(turn_two, max_new_tokens=10),
        bench.make([*prompt, 9, 9], n=2, max_new_tokens=10),
        bench.make([8, 8, 8], max_new_tokens=10),
    )
    assert [completion.cached_tokens for completion in done] == [49, 40, 41, 0]
    for completion in done:
        expected = log_probs(model, completion.prompt.tolist(), completion.output_ids)
        assert gap(completion.log_probs, expected) < TOLERANCE


@pytest.mark.parametrize("n", [1, 3])
def test_retract_recomputes_under_the_new_weights(checkpoints: Checkpoints, n: int) -> None:
    old, new = checkpoints(), checkpoints(seed=1)
    bench, before, after = Bench(old), reference(old), reference(new)
    work = [bench.make([1, 2, 3], n=n, max_new_tokens=40), bench.make([9, 8], max_new_tokens=30)]
    bench.submit(*work)
    bench.steps(11)
    bench.stepper.pause("retract")
    assert (bench.stepper.running, bench.stepper.waiting) == (0, n + 1)
    bench.swap(new, "w2")
    bench.stepper.resume()
    for completion in bench.finish():
        # The first step makes two tokens: one by the prefill, one by the decode that follows it.
        assert [(span.version, span.start, span.end) for span in completion.spans_over(len(completion.output_ids))] == [
            ("w1", 0, 12),
            ("w2", 12, completion.max_new),
        ]
        assert completion.retractions == 1
        prompt, output = completion.prompt.tolist(), completion.output_ids
        assert gap(completion.log_probs[:12], log_probs(before, prompt, output)[:12]) < TOLERANCE
        assert gap(completion.log_probs[12:], log_probs(after, prompt, output)[12:]) < TOLERANCE
        assert gap(completion.log_probs[12:], log_probs(before, prompt, output)[12:]) > 1e-2


def test_in_place_keeps_the_old_cache_and_the_boundary_is_exact(checkpoints: Checkpoints) -> None:
    old, new = checkpoints(), checkpoints(seed=1)
    bench, before, after = Bench(old), reference(old), reference(new)
    bench.submit(bench.make([1, 2, 3], max_new_tokens=40))
    bench.steps(9)
    bench.stepper.pause("in_place")
    bench.swap(new, "w2")
    bench.stepper.resume()
    [completion] = bench.finish()
    assert [(span.version, span.start, span.end) for span in completion.spans_over(len(completion.output_ids))] == [
        ("w1", 0, 10),
        ("w2", 10, 40),
    ]
    by_old = log_probs(before, [1, 2, 3], completion.output_ids)
    assert gap(completion.log_probs[:10], by_old[:10]) < TOLERANCE
    # The first token after the boundary is made by the new weights over the old cache: neither model alone.
    for model in (before, after):
        assert abs(completion.log_probs[10] - float(log_probs(model, [1, 2, 3], completion.output_ids)[10])) > 1e-3
    [fresh] = bench.run(bench.make([1, 2, 3], max_new_tokens=10))
    assert gap(fresh.log_probs, log_probs(after, [1, 2, 3], fresh.output_ids)) < TOLERANCE


def test_prompt_scores_are_raw_log_probs(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    prompt = [3, 1, 4, 1, 5, 9]
    [whole, part] = bench.run(
        bench.make(prompt, max_new_tokens=0, score_from=0),
        bench.make(prompt, max_new_tokens=4, score_from=3, temperature=0.5),
    )
    expected = log_probs(reference(path), prompt[:1], prompt[1:])
    assert whole.prompt_log_probs[0] is None
    assert gap([value for value in whole.prompt_log_probs if value is not None], expected) < TOLERANCE
    assert part.prompt_log_probs[0] is None
    assert gap([value for value in part.prompt_log_probs if value is not None], expected[3:]) < TOLERANCE


def test_bfloat16_is_close(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path, engine_dtype="bfloat16")
    assert EMBEDDED.engine_dtype == "auto"
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=30))
    assert gap(completion.log_probs, log_probs(reference(path), [1, 2, 3], completion.output_ids)) < 0.1
