"""Scoring in the embedded engine against Hugging Face, in bounded memory; and in the simulated one in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from configs.schema.rollout import SimulatedEngineConfig
from models.engines.core import Completion, SamplingRule
from models.engines.embedded import prefill
from models.engines.protocol import PauseMode
from models.engines.simulated.schedule import Schedule
from models.engines.simulated.writer import simulated_scores
from tests.models.engines.harness import Bench

Checkpoints = Callable[..., Path]


def expected(path: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(ids) - 1] log-probs of all tokens but the first by the Hugging Face forward."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        table = (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
    return table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def gap(completion: Completion, reference: torch.Tensor) -> float:
    values = completion.prompt_log_probs
    assert values[0] is None
    assert len(values) - 1 == len(reference)
    return float((torch.tensor([value for value in values if value is not None]) - reference).abs().max())


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
    bench.submit(others)
    bench.steps(4)
    done = bench.run(*scored)
    assert [len(completion.output_ids) for completion in done[:3]] == [50, 50, 50]
    for completion in done[3:]:
        reference = expected(path, completion.prompt.tolist())[completion.score_from :]
        if len(reference):
            assert gap(completion, reference) < 1e-4


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
    ids = tokens(100)
    [completion] = bench.run(bench.make(ids, max_new_tokens=0, score_from=3))
    assert max(widths) == 7
    assert sum(widths) == 96 + 1  # positions 3 to 98, and the last one, which every prefill reads
    assert gap(completion, expected(path, ids)[3:]) < 1e-4


def test_a_cached_prefix_changes_no_score(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    prompt = tokens(60)
    answers = [[*prompt, *tokens(20, seed=seed)] for seed in (1, 2, 3)]
    found = [bench.run(bench.make(ids, max_new_tokens=0, score_from=59))[0] for ids in answers]
    assert [completion.cached_tokens for completion in found] == [0, 59, 59]
    for completion, ids in zip(found, answers, strict=True):
        assert gap(completion, expected(path, ids)[59:]) < 1e-4
    [whole] = bench.run(bench.make(answers[0], max_new_tokens=0, score_from=0))
    assert whole.cached_tokens == 0, "all logits are read, so nothing can come from the cache"


def test_temperature_of_scores_is_their_own(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    [completion] = bench.make(tokens(30), max_new_tokens=0, score_from=0, temperature=3.0)
    completion.score_temperature = 0.5
    [done] = bench.run([completion])
    assert gap(done, expected(path, tokens(30), temperature=0.5)) < 1e-4


def test_scores_survive_a_retraction(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    ids = tokens(30)
    bench.submit(bench.make(ids, max_new_tokens=20, score_from=10))
    bench.steps(5)
    bench.stepper.pause("retract")
    bench.swap(checkpoints(seed=1), "w2")
    bench.stepper.resume()
    [done] = bench.finish()
    assert gap(done, expected(path, ids)[10:]) < 1e-4  # by the weights that first read the prompt
    assert len(done.output_ids) == 20


def test_equal_prompts_are_scored_each(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    bench = Bench(path)
    ids = tokens(20)
    done = bench.run(bench.make(ids, n=3, max_new_tokens=2, score_from=4), bench.make(ids, max_new_tokens=2))
    for completion in done[:3]:
        assert gap(completion, expected(path, ids)[4:]) < 1e-4
    assert done[3].prompt_log_probs == []


def completion(ids: list[int], *, max_new: int, start: int = -1) -> Completion:
    prompt = np.array(ids, dtype=np.int32)
    return Completion(
        rid="r", group=0, sample=0, prompt=prompt, prompt_key=prompt.tobytes(), rule=SamplingRule(1.0, 1.0, -1, 0.0),
        seed=1, max_new=max_new, min_new=0, stop_ids=(), stop_strings=(), skip_special=True, trim_stop=True,
        stream=False, extra_key="", score_from=start,
    )  # fmt: skip


def schedule(**settings: float) -> Schedule:
    times = {"a_ms": 10.0, "c_ms": 1.0, "prefill_ms_per_token": 2.0, **settings}
    return Schedule(SimulatedEngineConfig(**times), 8, False, "w1", "some/model")  # type: ignore[arg-type]


def test_a_simulated_scoring_takes_a_step_with_its_prefill_and_makes_no_token() -> None:
    timed = schedule()
    scoring = completion(tokens(50), max_new=0, start=9)
    timed.submit(0.0, [scoring])
    assert timed.next_event() == pytest.approx(0.010 + 0.001 + 50 * 0.002)
    assert (timed.running, timed.used_tokens) == (1, 50)
    timed.advance(0.110)
    assert scoring.finish is None
    timed.advance(0.112)
    assert timed.take_finished() == [scoring]
    assert (timed.running, timed.used_tokens, timed.totals.generated_tokens) == (0, 0, 0)
    assert scoring.finish is not None
    assert (scoring.finish.type, scoring.finish.length) == ("length", 0)
    values = simulated_scores(scoring.prompt, 10, "some/model", 256)
    assert scoring.prompt_log_probs == [None, *values.tolist()]


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(2, 90), st.sampled_from([0, 0, 1, 7, 40]), st.floats(0.0, 2.0)), min_size=1, max_size=12
    ),
    looks=st.lists(st.floats(0.0, 3.0), max_size=6),
    kv_tokens=st.integers(140, 400),
    pauses=st.lists(st.tuples(st.floats(0.0, 2.0), st.sampled_from(["in_place", "retract"])), max_size=2),
)
def test_simulated_scorings_among_generations_keep_the_books(
    jobs: list[tuple[int, int, float]], looks: list[float], kv_tokens: int, pauses: list[tuple[float, PauseMode]]
) -> None:
    timed = schedule(kv_tokens=kv_tokens)
    made = [completion(tokens(length, seed=i), max_new=new, start=0) for i, (length, new, _) in enumerate(jobs)]
    events: list[tuple[float, int, Callable[[float], object]]] = []
    for i, (_, _, at) in enumerate(jobs):
        events.append((at, i, lambda now, i=i: timed.submit(now, [made[i]])))  # type: ignore[misc]
    for at, mode in pauses:
        events.append((at, 100, lambda now, mode=mode: timed.pause(now, mode)))  # type: ignore[misc]
        events.append((at + 0.5, 101, timed.resume))
    events += [(at, 102, timed.advance) for at in looks]
    for at, _, act in sorted(events, key=lambda event: event[:2]):
        act(at)
        assert 0 <= timed.used_tokens <= kv_tokens
    timed.resume(5.0)
    timed.advance(1000.0)
    assert {id(one) for one in timed.take_finished()} == {id(one) for one in made}
    for one, (length, new, _) in zip(made, jobs, strict=True):
        assert (len(one.output_ids), len(one.prompt_log_probs)) == (new, length)
    assert timed.totals.generated_tokens == sum(new for _, new, _ in jobs)
    assert (timed.used_tokens, timed.running, timed.waiting) == (0, 0, 0)


def test_an_aborted_simulated_scoring_has_no_scores() -> None:
    timed = schedule()
    timed.pause(0.0, "in_place")
    scoring = completion(tokens(50), max_new=0, start=9)
    timed.submit(0.0, [scoring])
    timed.cancel(1.0, [scoring])
    assert scoring.prompt_log_probs == []
    assert scoring.finish is not None
    assert scoring.finish.type == "abort"


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
