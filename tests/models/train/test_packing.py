"""Packing: every token exactly once, the budget kept, and no sequence sees another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.train import TrainConfig
from models.tiny import make_tiny_checkpoint
from models.train.loading import load_model
from models.train.packing import Layout, pack_rows, plan
from models.train.scoring import Scorer

lengths = st.lists(st.integers(1, 60), min_size=0, max_size=60)


@given(lengths, st.integers(1, 200), st.booleans(), st.booleans())
def test_every_sequence_once_and_the_budget_kept(
    sizes: list[int], budget: int, pack: bool, single_row: bool
) -> None:
    layouts = plan(sizes, budget, pack=pack, single_row=single_row)
    assert sorted(item for layout in layouts for item in layout.items) == list(range(len(sizes)))
    for layout in layouts:
        assert all(sum(sizes[item] for item in row) <= layout.row_length for row in layout.rows)
        assert layout.padded_tokens <= budget or (len(layout.items) == 1 and sizes[layout.items[0]] > budget)
        if single_row:
            assert len(layout.rows) == 1
            assert layout.padded_tokens == sum(sizes[item] for item in layout.items)
        elif not pack:
            assert all(len(row) == 1 for row in layout.rows)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 100), st.randoms())
def test_arrays_hold_every_token_exactly_once(sizes: list[int], budget: int, random: object) -> None:
    rng = np.random.default_rng(random.randint(0, 2**31))  # type: ignore[attr-defined]
    tokens = [rng.integers(1, 1000, size + 1).astype(np.int32) for size in sizes]
    chosen = [np.flatnonzero(rng.random(size) < 0.5) + 1 for size in sizes]
    for layout in plan(sizes, budget):
        rows = pack_rows(layout, tokens, chosen)
        assert rows.input_ids.shape == (len(layout.rows), layout.row_length)
        seen = []
        for row, members in enumerate(layout.rows):
            at = 0
            for item in members:
                size = sizes[item]
                np.testing.assert_array_equal(rows.input_ids[row, at : at + size], tokens[item][:-1])
                if rows.position_ids is not None:
                    np.testing.assert_array_equal(rows.position_ids[row, at : at + size], np.arange(size))
                seen.extend((row * layout.row_length + at + chosen[item] - 1).tolist())
                at += size
            assert (rows.input_ids[row, at:] == 0).all()
            if rows.position_ids is not None and at < layout.row_length:
                assert rows.position_ids[row, at] == 0  # padding begins a sequence of its own
        assert rows.source.tolist() == seen
        np.testing.assert_array_equal(rows.targets, np.concatenate([tokens[i][chosen[i]] for i in layout.items]))


def test_uniform_sequences_get_a_row_each_without_padding() -> None:
    (layout,) = plan([9] * 64, 16384)
    assert layout.row_length == 9
    assert len(layout.rows) == 64


def test_short_sequences_fill_up_the_rows_of_long_ones() -> None:
    (layout,) = plan([100] + [10] * 30, 16384)
    assert layout.row_length == 100
    assert len(layout.rows) == 4


def test_uneven_sequences_leave_little_padding() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(6, 11, 256).tolist()
    layouts = plan(sizes, 16384)
    assert sum(layout.padded_tokens for layout in layouts) < 1.1 * sum(sizes)


def test_a_sequence_beyond_the_budget_travels_alone() -> None:
    layouts = plan([5, 50, 5], 16)
    assert sorted(layout.items for layout in layouts) == [(0, 2), (1,)]


def test_nothing_to_pack() -> None:
    assert plan([], 10) == []
    assert plan([], 10, single_row=True) == []


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    names = ("qwen3", "qwen2", "llama")
    return {
        name: make_tiny_checkpoint(
            root / name,
            architecture=name,  # type: ignore[arg-type]
            hidden_size=32,
            num_layers=2,
            intermediate_size=64,
            max_position_embeddings=128,
        )
        for name in names
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_packed_log_probs_are_those_of_each_sequence_alone(
    checkpoints: dict[str, Path], architecture: str, attention: str
) -> None:
    config = TrainConfig(hf_checkpoint=str(checkpoints[architecture]), attn_implementation=attention)
    device = torch.device("cpu")
    loaded = load_model(config.hf_checkpoint, "hf_checkpoint", config, device, seed=0)
    assert loaded.can_pack
    # Larger weights than at initialisation, so that attending to a neighbour would show.
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3.0)
    score = Scorer(loaded.model, device=device, autocast_dtype=None, temperature=0.7, chunk_tokens=16)
    rng = np.random.default_rng(1)
    sizes = [17, 3, 8, 1, 1, 12, 5, 9]
    tokens = [rng.integers(0, 256, size + 1).astype(np.int32) for size in sizes]
    chosen = [np.arange(1, size + 1) for size in sizes]
    packed = Layout(rows=((0, 1), (5, 3, 2), (4, 7, 6)), row_length=23)
    padded = Layout(rows=tuple((item,) for item in range(8)), row_length=20)
    with torch.no_grad():
        alone = [score(pack_rows(Layout(((i,),), sizes[i]), tokens, chosen))[0] for i in range(8)]
        for layout in (packed, padded):
            found, _ = score(pack_rows(layout, tokens, chosen))
            expected = torch.cat([alone[item] for item in layout.items])
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        # The same against transformers' own logits.
        ids = torch.from_numpy(tokens[0].astype(np.int64))
        logits = loaded.model(input_ids=ids[None, :-1]).logits[0].float() / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(alone[0], expected, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=5)
@given(st.integers(1, 40))
def test_chunks_of_the_head_change_nothing(chunk: int) -> None:
    """Log-probs, entropies and gradients, whatever number of tokens has logits at one time."""
    torch.manual_seed(0)

    class Config:
        def get_text_config(self) -> Config:
            return self

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 6)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, use_cache: bool) -> object:
            return type("Output", (), {"last_hidden_state": self.embedding(input_ids)})

    class Model(torch.nn.Module):
        config = Config()

        def __init__(self) -> None:
            super().__init__()
            self.base_model = Decoder()
            self.head = torch.nn.Linear(6, 11)

        def get_output_embeddings(self) -> torch.nn.Linear:
            return self.head

    model = Model()
    ids = np.arange(38, dtype=np.int32) % 11
    rows = pack_rows(Layout(((0,),), 37), [ids], [np.arange(1, 38)])
    results = []
    for size in (chunk, 1000):
        score = Scorer(model, device=torch.device("cpu"), autocast_dtype=None, temperature=0.7, chunk_tokens=size)
        log_probs, entropy = score(rows, entropy="graph")
        assert entropy is not None
        model.zero_grad()
        (log_probs.sum() + 0.3 * entropy.square().sum()).backward()
        results.append((log_probs, entropy, model.head.weight.grad.clone(), model.base_model.embedding.weight.grad.clone()))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
