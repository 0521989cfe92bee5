"""Continuous batching: slots, prefixes, stopping, queueing. Driven step by step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from models.engines.core import Completion
from models.engines.embedded import batch as prefill
from models.engines.embedded.batch import SamplingBatch, draw
from models.engines.noise import mix, mixed_uniforms, sample_seed, uniform, uniforms
from tests.models.engines.harness import Bench, Checkpoints, one_completion


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Bench:
    return Bench(checkpoints())


def outputs(completions: list[Completion]) -> list[list[int]]:
    return [completion.output_ids for completion in completions]


def test_n_samples_compute_their_prompt_once(bench: Bench) -> None:
    bench.run(bench.make(list(range(1, 21)), n=8, max_new_tokens=3))
    totals = bench.stepper.totals
    assert (totals.prompt_tokens, totals.computed_prompt_tokens, totals.cached_tokens) == (160, 20, 7 * 19)
    assert totals.generation_tokens == 24


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prefixes_are_shared_between_requests_only_if_requested(checkpoints: Checkpoints, prefix_cache: bool) -> None:
    bench = Bench(checkpoints(), prefix_cache=prefix_cache)
    prompt = list(range(1, 31))
    bench.run(bench.make(prompt, max_new_tokens=2), bench.make(prompt, max_new_tokens=2))
    bench.run(bench.make(prompt, max_new_tokens=2))
    assert bench.stepper.totals.computed_prompt_tokens == (31 if prefix_cache else 90)


def test_more_requests_than_slots_all_finish_alike(checkpoints: Checkpoints) -> None:
    """Two slots or thirty-two: the same seeds give the same responses, whoever shares a step."""
    results = []
    for slots in (2, 3, 32):
        bench = Bench(checkpoints(), engine_slots=slots)
        requests = [
            bench.make([i + 1, 7], n=2, max_new_tokens=3 + 5 * (i % 4), sampling_seed=i, top_p=0.9 if i % 3 else 1.0)
            for i in range(9)
        ]
        results.append(outputs(bench.run(*requests)))
        assert bench.stepper.running == bench.stepper.waiting == 0
    assert results[0] == results[1] == results[2]


def test_prefix_cache_never_crosses_versions(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints())
    prompt = list(range(1, 41))
    bench.run(bench.make(prompt, max_new_tokens=4))
    bench.submit(bench.make([*prompt[:20], 3], max_new_tokens=20))
    bench.steps(2)
    bench.stepper.pause("in_place")
    bench.swap(checkpoints(seed=1), "w2")
    bench.stepper.resume()
    # Neither the retained prefix nor the one of the request that is still running may be found.
    bench.submit(bench.make(prompt, max_new_tokens=4), bench.make([*prompt[:20], 3, 4], max_new_tokens=4))
    done = bench.finish()
    assert [completion.cached_tokens for completion in done[1:]] == [0, 0]
    [same] = bench.run(bench.make(prompt, max_new_tokens=4))
    assert same.cached_tokens == 39


def test_long_queues_are_prefilled_in_portions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 100)
    bench.submit(*[bench.make([index + 1] * 40, max_new_tokens=10) for index in range(5)])
    bench.steps(1)
    assert (bench.stepper.running, bench.stepper.waiting) == (2, 3)
    assert len(bench.finish()) == 5


def test_min_new_tokens_holds_the_end_back(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints(tokenizer="arithmetic"))
    eos = next(iter(bench.engine.facts.eos_ids))
    done = bench.run(bench.make([1, 2, 3], n=16, max_new_tokens=100, min_new_tokens=30, ignore_eos=False))
    for completion in done:
        assert eos not in completion.output_ids[:30]
        assert len(completion.output_ids) > 30
    assert any(len(completion.output_ids) < 100 for completion in done)


def test_retraction_keeps_the_order_of_the_queue(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints(), engine_slots=3)
    work = [bench.make([index], max_new_tokens=20) for index in range(1, 6)]
    bench.submit(*work)
    bench.steps(3)
    bench.stepper.pause("retract")
    assert (bench.stepper.running, bench.stepper.waiting) == (0, 5)
    bench.stepper.resume()
    bench.steps(1)
    assert [bool(completions[0].admitted_s) for completions in work] == [True, True, True, False, False]
    assert sorted(c.prompt[0] for c in bench.stepper._table.owners.values()) == [1, 2, 3]
    assert [len(completion.output_ids) for completion in bench.finish()] == [20] * 5


async def test_requests_to_an_engine_that_ends_are_answered(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints())
    engine, delivered, busy = bench.engine, list[Completion](), threading.Event()
    engine.start(delivered.extend, lambda error: None)
    engine._send(lambda: bool(busy.wait(10)))
    requested = bench.make([1, 2, 3])
    engine.submit(requested)
    update = asyncio.create_task(engine.update_weights(str(checkpoints()), "late", False))
    await asyncio.sleep(0)
    end = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    busy.set()
    async with asyncio.timeout(120):
        await asyncio.gather(end, update)
    assert delivered == requested
    assert requested[0].finish.type == "abort"


# Noise and drawing: pure functions of (seed, position), the same bits everywhere, the right distribution.


CPU = torch.device("cpu")


def sample(logits: torch.Tensor, positions: range, **rule: float) -> torch.Tensor:
    """Tokens [len(positions)] drawn from one row of logits at many positions."""
    count = len(positions)
    batch = SamplingBatch.of([one_completion([0], seed=9, **rule)] * count, CPU)
    return draw(logits.expand(count, -1).clone(), batch, np.array(positions))[0].long()


@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 2**40))
def test_three_implementations_of_the_noise_agree(seed: int, start: int) -> None:
    positions = np.arange(start, start + 5)
    scalar = [uniform(seed, int(position)) for position in positions]
    assert uniforms(seed, positions).tolist() == scalar
    mixed = np.full(5, mix(seed), dtype=np.uint64)
    assert mixed_uniforms(mixed, positions).tolist() == scalar
    assert all(0.0 <= value < 1.0 for value in scalar)


def test_noise_is_pinned() -> None:
    """Golden numbers: a change here would silently change every seeded run."""
    assert mix(1) == 0x5692161D100B05E5
    assert sample_seed(7, 0) == 7
    assert sample_seed(7, 1) != sample_seed(7, 2)
    assert 0 <= sample_seed(2**62, 3) < 2**63


def test_tokens_are_drawn_by_the_pinned_noise() -> None:
    drawn = sample(torch.zeros(1, 8), range(3, 60))
    assert drawn.tolist() == [int(uniform(9, position) * 8) for position in range(3, 60)]


@given(st.integers(1, 6), st.integers(0, 2**32))
def test_a_row_does_not_depend_on_its_batch(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 17, generator=generator)
    rules = [{}, {"top_k": 3}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}, {"min_p": 0.3}, {}]
    members = [one_completion([0], seed=seed + row, **rules[row]) for row in range(rows)]
    positions = np.arange(rows) + 5
    together = draw(logits, SamplingBatch.of(members, CPU), positions)
    for row in range(rows):
        alone = draw(logits[row : row + 1], SamplingBatch.of(members[row : row + 1], CPU), positions[row : row + 1])
        assert alone[0, 0] == together[0, row]
        assert abs(float(alone[1, 0] - together[1, row])) < 1e-6


def test_a_resumed_sample_meets_the_noise_it_would_have_met(checkpoints) -> None:  # type: ignore[no-untyped-def]
    """Abort after some tokens, send prompt and partial output with the sample's own seed: the same response comes."""
    bench = Bench(checkpoints())
    whole = bench.run(bench.make([1, 2, 3], n=3, max_new_tokens=30, sampling_seed=5))
    for index, completion_ in enumerate(whole):
        context = [1, 2, 3, *completion_.output_ids[:13]]
        [rest] = bench.run(bench.make(context, max_new_tokens=17, sampling_seed=sample_seed(5, index)))
        assert rest.output_ids == completion_.output_ids[13:]


# Operations of torch: on a small model they, and not the arithmetic, are what a step costs.


class OperationCount(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Counts the operations that torch dispatches in this thread, views among them."""

    operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_operations_of_a_decode_step_by_layer(checkpoints: Checkpoints) -> None:
    """Views count as well. More requests, and other rules for each, make no more operations."""

    def operations(layers: int, requests: int) -> int:
        bench = Bench(checkpoints(num_layers=layers))
        bench.submit(*[bench.make([index + 1, 2], max_new_tokens=20) for index in range(requests)])
        bench.steps(3)
        with OperationCount() as count:
            bench.steps(1)
        return int(count.operations)

    two, three = operations(2, 3), operations(3, 3)
    assert three - two <= 34
    assert two - 2 * (three - two) <= 44
    assert operations(2, 20) == two


def test_the_last_layer_computes_what_is_sampled_from(checkpoints: Checkpoints) -> None:
    """Of the other prompt tokens it makes keys and values alone."""

    class Rows(OperationCount):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is torch.ops.aten.addmm.default:
                rows.append(len(out))
            return out

    rows: list[int] = []
    bench = Bench(checkpoints(num_layers=2))
    bench.submit(bench.make(list(range(1, 31)), max_new_tokens=1), bench.make([5, 6], max_new_tokens=1))
    with Rows():
        bench.steps(1)
    assert rows == [60, 60, 2, 2]


def test_a_short_prefix_is_computed_again(bench: Bench) -> None:
    """It would cost a second prefill and a copy, and save next to nothing."""
    prompt = list(range(1, 13))
    bench.run(bench.make(prompt, max_new_tokens=1))
    done = bench.run(bench.make([*prompt[:11], 40], max_new_tokens=1), bench.make([*prompt, 41], max_new_tokens=1))
    assert [completion.cached_tokens for completion in done] == [0, 12]
