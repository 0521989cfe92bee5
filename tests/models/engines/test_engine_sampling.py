"""Noise and drawing: pure functions of (seed, position), the same bits everywhere, the right distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.engines.core import Completion, SamplingRule
from models.engines.embedded.batch import SamplingBatch, draw, forbid, signed
from models.engines.embedded.batch import uniform as torch_uniform
from models.engines.noise import mix, sample_seed, uniform, uniforms
from tests.models.engines.harness import Bench

CPU = torch.device("cpu")


def completion(seed: int, **rule: float) -> Completion:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, **rule}
    return Completion(
        rid="r",
        group=0,
        sample=0,
        prompt=np.zeros(1, dtype=np.int32),
        prompt_key=b"",
        rule=SamplingRule(**values),  # type: ignore[arg-type]
        seed=seed,
        max_new=1,
        min_new=0,
        stop_ids=(),
        stop_strings=(),
        skip_special=True,
        trim_stop=True,
        stream=False,
        extra_key="",
        score_from=-1,
    )


def sample(logits: torch.Tensor, positions: range, **rule: float) -> torch.Tensor:
    """Tokens [len(positions)] drawn from one row of logits at many positions."""
    count = len(positions)
    batch = SamplingBatch.of([completion(seed=9, **rule)] * count, CPU)
    return draw(logits.expand(count, -1).clone(), batch, torch.tensor(list(positions)))[0].long()


@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_three_implementations_of_the_noise_agree(seed: int, start: int) -> None:
    positions = np.arange(start, start + 5)
    scalar = [uniform(seed, int(position)) for position in positions]
    assert uniforms(seed, positions).tolist() == scalar
    mixed = torch.full((5,), signed(mix(seed)), dtype=torch.int64)
    assert torch_uniform(mixed, torch.from_numpy(positions)).tolist() == scalar
    assert all(0.0 <= value < 1.0 for value in scalar)


def test_noise_is_pinned() -> None:
    """Golden numbers: a change here would silently change every seeded run."""
    assert mix(1) == 0x5692161D100B05E5
    assert sample_seed(7, 0) == 7
    assert sample_seed(7, 1) != sample_seed(7, 2)
    assert 0 <= sample_seed(2**62, 3) < 2**63


def test_noise_looks_uniform() -> None:
    values = np.concatenate([uniforms(seed, np.arange(2000)) for seed in range(10)])
    counts = np.histogram(values, bins=20, range=(0.0, 1.0))[0]
    chi_square = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    for temperature in (1.0, 0.5):
        tokens = sample(logits, range(20_000), temperature=temperature)
        observed = torch.bincount(tokens, minlength=5) / 20_000
        expected = torch.softmax(logits[0] / temperature, -1)
        assert (observed - expected).abs().max() < 0.015


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.5}, {2}),  # the largest has 0.58 > 0.5 and stays, the mass before the next is not below 0.5
        ({"top_p": 0.6}, {1, 2}),
        ({"min_p": 0.2}, {1, 2, 4}),
        ({"top_k": 1}, {2}),
        ({"top_k": 3, "top_p": 0.6}, {1, 2}),
    ],
    ids=str,
)
def test_truncation_keeps_the_right_tokens(rule: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    tokens = sample(logits, range(3000), **rule)
    assert set(tokens.tolist()) == kept
    observed = torch.bincount(tokens, minlength=5) / 3000
    expected = torch.softmax(logits[0], -1) * torch.tensor([float(index in kept) for index in range(5)])
    assert (observed - expected / expected.sum()).abs().max() < 0.04


@given(st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_its_batch(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 17, generator=generator)
    rules: list[dict[str, float]] = [
        {},
        {"top_k": 3},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
        {"min_p": 0.3},
        {},
    ]
    members = [completion(seed + row, **rules[row]) for row in range(rows)]
    positions = torch.arange(rows) + 5
    together = draw(logits, SamplingBatch.of(members, CPU), positions)
    for row in range(rows):
        alone = draw(logits[row : row + 1], SamplingBatch.of(members[row : row + 1], CPU), positions[row : row + 1])
        assert alone[0, 0] == together[0, row]
        assert abs(float(alone[1, 0] - together[1, row])) < 1e-6


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(400, 4)
    forbid(logits, np.arange(400), np.full(400, 2))
    tokens = draw(logits, SamplingBatch.of([completion(3)] * 400, CPU), torch.arange(400))[0].long()
    assert set(tokens.tolist()) == {0, 1, 3}


def test_a_resumed_sample_meets_the_noise_it_would_have_met(checkpoints) -> None:  # type: ignore[no-untyped-def]
    """Abort after some tokens, send prompt and partial output with the sample's own seed: the same response comes."""
    bench = Bench(checkpoints())
    whole = bench.run(bench.make([1, 2, 3], n=3, max_new_tokens=30, sampling_seed=5))
    for index, completion_ in enumerate(whole):
        context = [1, 2, 3, *completion_.output_ids[:13]]
        [rest] = bench.run(bench.make(context, max_new_tokens=17, sampling_seed=sample_seed(5, index)))
        assert rest.output_ids == completion_.output_ids[13:]
