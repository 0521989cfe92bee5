"""Log-probs of the embedded engine against the Hugging Face forward of the same checkpoint, also across updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.core import Completion
from models.engines.embedded import batch as prefill
from models.engines.protocol import PauseMode
from models.engines.simulated.responses import simulated_scores
from models.engines.simulated.schedule import Schedule
from tests.models.engines.forward_reference import by_one, model_of
from tests.models.engines.harness import EMBEDDED, Bench, Checkpoints, one_completion, variant

TOLERANCE = 1e-5


def off(path: Path, completion: Completion) -> float:
    """The largest distance of its log-probs from those of the Hugging Face forward."""
    expected = by_one(path, completion.prompt.tolist(), completion.output_ids)
    return float((torch.tensor(completion.log_probs) - expected).abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_log_probs_equal_hugging_face(checkpoints: Checkpoints, architecture: str, tied: bool) -> None:
    path = checkpoints(architecture=architecture, tie_word_embeddings=tied)
    bench = Bench(path)
    prompts = [[7], [1, 2, 3, 4, 5], list(range(10, 60))]
    done = bench.run(*[bench.make(prompt, n=2, max_new_tokens=20 + 7 * len(prompt) % 40) for prompt in prompts])
    assert len(done) == 6
    for completion in done:
        assert off(path, completion) < TOLERANCE


def test_random_biases_are_applied(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A fresh checkpoint has biases of zero, which would hide a forward that forgets them."""
    source = checkpoints(architecture="qwen2")
    variant(source, tmp_path)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator) * ("bias" in name or "norm" in name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bench = Bench(tmp_path)
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=30))
    assert off(tmp_path, completion) < TOLERANCE
    assert off(source, completion) > 1e-2


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_stretched_rotary_embeddings(checkpoints: Checkpoints, tmp_path: Path, rope: dict[str, Any]) -> None:
    source = checkpoints(architecture="llama")
    bench = Bench(variant(source, tmp_path, rope_parameters=rope))
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=90))
    assert off(tmp_path, completion) < TOLERANCE
    assert off(source, completion) > 1e-4


def test_greedy_is_argmax_with_raw_log_probs(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    greedy = bench.make([3, 1, 4], temperature=0.0, max_new_tokens=20)
    [completion, _] = bench.run(greedy, bench.make([5], max_new_tokens=20))
    context = [3, 1, 4]
    for token in completion.output_ids:
        with torch.no_grad():
            assert int(model_of(path)(torch.tensor([context])).logits[0, -1].argmax()) == token
        context.append(token)
    assert off(path, completion) < TOLERANCE


def test_cached_prefixes_change_no_log_prob(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
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
        assert off(path, completion) < TOLERANCE


def test_bfloat16_is_close(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path, engine_dtype="bfloat16")
    assert EMBEDDED.engine_dtype == "auto"
    [completion] = bench.run(bench.make([1, 2, 3], max_new_tokens=30))
    assert off(path, completion) < 0.1


# Scoring in the embedded engine against Hugging Face, in bounded memory; and in the simulated one in virtual time.


def scored_off(path: Path, completion: Completion) -> float:
    """The largest distance of its scores from the log-probs of the Hugging Face forward."""
    first, *values = completion.prompt_log_probs
    assert first is None
    ids = completion.prompt.tolist()
    expected = by_one(path, ids[:1], ids[1:])[completion.score_from :]
    assert len(values) == len(expected)
    return max(map(abs, (torch.tensor(values) - expected).tolist()), default=0.0)


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 264, count).tolist()
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_scores_equal_hugging_face_in_a_crowd(checkpoints: Checkpoints, architecture: str) -> None:
    path = checkpoints(architecture=architecture)
    bench = Bench(path)
    lists = [tokens(count, seed=count) for count in (2, 7, 40, 150)]
    others = bench.make([5, 6], n=3, max_new_tokens=50)
    scored = [
        bench.make(ids, max_new_tokens=0, score_from=min(start, len(ids) - 1)) for ids in lists for start in (0, 5)
    ]
    equal, unscored = [bench.make(lists[2], max_new_tokens=2, **more) for more in ({"n": 3, "score_from": 4}, {})]
    bench.submit(others)
    bench.steps(4)
    done = bench.run(*scored, equal, unscored)
    assert [len(completion.output_ids) for completion in done[:3]] == [50, 50, 50]
    for completion in done[3:-1]:
        assert scored_off(path, completion) < 1e-4
    assert done[-1].prompt_log_probs == []


def test_no_more_logits_than_a_chunk_exist_at_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints()
    bench = Bench(path)
    monkeypatch.setattr(prefill, "SCORED_LOGITS", 264 * 7 + 5)
    transformer = bench.stepper._transformer
    original, widths = transformer.logits, list[int]()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(len(hidden))
        return original(hidden)

    monkeypatch.setattr(transformer, "logits", logits)
    [completion] = bench.run(bench.make(tokens(100), max_new_tokens=0, score_from=3))
    assert max(widths) == 7
    assert sum(widths) == 96 + 1  # positions 3 to 98, and the last one, which every prefill reads
    assert scored_off(path, completion) < 1e-4


def test_scores_survive_a_retraction(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    bench.submit(bench.make(tokens(30), max_new_tokens=20, score_from=10))
    bench.steps(5)
    bench.stepper.pause("retract")
    bench.swap(checkpoints(seed=1), "w2")
    bench.stepper.resume()
    [done] = bench.finish()
    assert scored_off(path, done) < 1e-4  # by the weights that first read the prompt
    assert len(done.output_ids) == 20


def schedule(slots: int = 8, **settings: float) -> Schedule:
    times = {"a_ms": 10.0, "c_ms": 1.0, "prefill_ms_per_token": 2.0, **settings}
    return Schedule(SimulatedEngineConfig(**times), slots, False, "w1", "some/model")  # type: ignore[arg-type]


def test_a_simulated_scoring_takes_a_step_with_its_prefill_and_makes_no_token() -> None:
    timed = schedule()
    scoring = one_completion(tokens(50), max_new=0, score_from=9)
    timed.submit(0.0, [scoring])
    assert timed.next_event() == pytest.approx(0.010 + 0.001 + 50 * 0.002)
    assert (timed.running, timed.used_tokens) == (1, 50)
    timed.advance(0.110)
    assert scoring.finish is None
    timed.advance(0.112)
    assert timed.take_finished() == [scoring]
    assert (timed.running, timed.used_tokens, timed.totals.generation_tokens) == (0, 0, 0)
    assert (scoring.finish.type, scoring.finish.length) == ("length", 0)
    values = simulated_scores(scoring.prompt, 10, "some/model", 256)
    assert scoring.prompt_log_probs == [None, *values.tolist()]


TOKENS = st.sampled_from([0, 0, 1, 7, 40])


@settings(max_examples=150)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 90), TOKENS, st.floats(0.0, 2.0)), min_size=1, max_size=12),
    looks=st.lists(st.floats(0.0, 3.0), max_size=6),
    kv_tokens=st.integers(132, 400),
    slots=st.integers(1, 8),
    prefill_ms=st.sampled_from([0.0, 2.0]),
    pauses=st.lists(st.tuples(st.floats(0.0, 2.0), st.sampled_from(["in_place", "retract"])), max_size=2),
    one_by_one=st.booleans(),
)
def test_simulated_scorings_among_generations_keep_the_books(
    jobs: list[tuple[int, int, float]], looks: list[float], kv_tokens: int, slots: int, prefill_ms: float,
    pauses: list[tuple[float, PauseMode]], one_by_one: bool,
) -> None:  # fmt: skip
    """Whether each event is looked at when it comes, or many have passed at the next look."""
    timed = schedule(slots, kv_tokens=kv_tokens, prefill_ms_per_token=prefill_ms)
    made = [
        one_completion(tokens(length, seed=i), max_new=new, score_from=0) for i, (length, new, _) in enumerate(jobs)
    ]

    def work(until: float) -> None:
        while one_by_one and (event := timed.next_event()) is not None and event <= until:
            timed.advance(event)
            assert (timed.used_tokens <= kv_tokens, timed.running <= slots) == (True, True)

    events: list[tuple[float, int, Callable[[float], object]]] = []
    for i, (_, _, at) in enumerate(jobs):
        events.append((at, i, lambda now, i=i: timed.submit(now, [made[i]])))  # type: ignore[misc]
    for at, mode in pauses:
        events.append((at, 100, lambda now, mode=mode: timed.pause(now, mode)))  # type: ignore[misc]
        events.append((at + 0.5, 101, timed.resume))
    events += [(at, 102, timed.advance) for at in looks]
    for at, _, act in sorted(events, key=lambda event: event[:2]):
        work(at)
        act(at)
        assert (timed.used_tokens <= kv_tokens, timed.running <= slots) == (True, True)
    timed.resume(5.0)
    work(1000.0)
    timed.advance(1000.0)
    assert {id(one) for one in timed.take_finished()} == {id(one) for one in made}
    for one, (length, new, _) in zip(made, jobs, strict=True):
        assert (len(one.output_ids), len(one.prompt_log_probs)) == (new, length)
    assert timed.totals.generation_tokens == sum(new for _, new, _ in jobs)
    assert (timed.used_tokens, timed.running, timed.waiting) == (0, 0, 0)


def test_an_aborted_simulated_scoring_has_no_scores() -> None:
    timed = schedule()
    timed.pause(0.0, "in_place")
    scoring = one_completion(tokens(50), max_new=0, score_from=9)
    timed.submit(0.0, [scoring])
    timed.cancel(1.0, [scoring])
    assert (scoring.prompt_log_probs, scoring.finish.type) == ([], "abort")


def test_simulated_scores_tell_checkpoints_contexts_and_places_apart() -> None:
    ids = np.array(tokens(64), dtype=np.int32)
    one = simulated_scores(ids, 1, "a", 256)
    assert (one < 0.0).all()
    np.testing.assert_array_equal(one[9:], simulated_scores(ids, 10, "a", 256))
    assert np.abs(one - simulated_scores(ids, 1, "b", 256)).max() > 0.1
    other = ids.copy()
    other[30] = (other[30] + 1) % 256
    changed = np.flatnonzero(one != simulated_scores(other, 1, "a", 256)) + 1
    assert changed.tolist() == [30, 31]
