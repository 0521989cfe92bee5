"""Whom packed tokens see, in each form that attention takes: the same numbers, no mask of a whole row, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from test_packing import batches, packings
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from configs.schema.train import TrainConfig
from models.tiny import TinyRecipe, make_tiny_checkpoint
from models.train.huggingface import attention, scoring
from models.train.huggingface.attention import (
    FLASH_ATTENTION,
    MASK_TOKENS,
    PACKED_SDPA,
    Segment,
    attention_allowed,
    segments,
)
from models.train.huggingface.loading import enable_checkpointing, load_model
from models.train.huggingface.scoring import Passes, Scorer
from models.train.step.micro_batches import PackedRows, pack_rows
from models.train.step.packing import Layout, Unit, plan
from tests.models.living import Living
from tests.models.train.rig import TINY

CPU = torch.device("cpu")
LENGTH = 2048
MODEL: dict[str, Any] = {**TINY, "max_position_embeddings": LENGTH}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("attention") / "model", TinyRecipe(initializer_range=0.2, **MODEL)
    )


def scorer_of(checkpoint: Path, **passes: Any) -> Scorer:
    train = TrainConfig(hf_checkpoint=str(checkpoint))
    model = load_model(str(checkpoint), "hf_checkpoint", train, CPU, seed=0).model
    assert model.config._attn_implementation == PACKED_SDPA
    return Scorer(model, Passes(CPU, **passes), temperature=1.0, chunk_tokens=1024)


def apart(*lengths: int, length: int) -> PackedRows:
    """One row."""
    return rows_of(tuple(Unit((item,), 0, size) for item, size in enumerate(lengths)), lengths, 0, length)


def shared(*responses: int, prompt: int, length: int) -> PackedRows:
    """One row: responses after one prompt, and a sequence of a response's length for itself."""
    alone = responses[0]
    family = Unit(tuple(range(len(responses))), prompt, prompt + sum(responses))
    sizes = (*(prompt + one for one in responses), alone)
    return rows_of((family, Unit((len(responses),), 0, alone)), sizes, prompt, length)


def rows_of(units: tuple[Unit, ...], sizes: tuple[int, ...], prompt: int, length: int) -> PackedRows:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 250, size + 1).astype(np.int32) for size in sizes]
    for ids in tokens[: -1 if prompt else 0]:
        ids[:prompt] = tokens[0][:prompt]
    firsts = [max(prompt, 1) if item < len(sizes) - 1 else 1 for item in range(len(sizes))]
    chosen = [np.arange(first, len(ids)) for first, ids in zip(firsts, tokens, strict=True)]
    return pack_rows(Layout((units,), length), tokens, chosen)


PACKED = apart(750, 450, 350, 250, 200, length=LENGTH)  # and 48 of padding
BRANCHED = shared(350, 1, 400, 450, prompt=300, length=LENGTH)


def results(score: Scorer, rows: PackedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and gradients of a loss that weights each differently."""
    score.zero_grad()
    log_probs, _ = score(rows)
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    gradients = {name: one.grad.clone() for name, one in score.model.named_parameters() if one.grad is not None}
    return log_probs.detach(), gradients


@pytest.mark.parametrize("rows", [PACKED, BRANCHED], ids=["apart", "shared prompt"])
def test_a_long_row_makes_nothing_of_its_length_squared(
    checkpoint: Path, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; and the numbers are those of the mask."""

    def unseen(*size: int) -> Tensor:
        with _disable_current_modes():  # no mode lets a subclass of tensors be made
            return causal_lower_right(*size)

    monkeypatch.setattr(torch.nn.attention.bias, "causal_lower_right", unseen)
    score, with_mask = scorer_of(checkpoint), scorer_of(checkpoint, mask_tokens=LENGTH)
    with Living() as one_by_one:
        log_probs, gradients = results(score, rows)
    with Living() as masked:
        expected, of_mask = results(with_mask, rows)
    assert masked.largest >= LENGTH**2
    assert one_by_one.largest < LENGTH**2 / 8
    torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)
    assert gradients.keys() == of_mask.keys()
    for name, gradient in gradients.items():
        scale = float(of_mask[name].abs().max())
        torch.testing.assert_close(gradient, of_mask[name], atol=1e-4 * scale, rtol=1e-3, msg=lambda m, n=name: n + m)


def test_recomputed_layers_see_the_same(checkpoint: Path) -> None:
    """And the numbers of a row do not change from pass to pass."""
    score, recomputed = scorer_of(checkpoint), scorer_of(checkpoint)
    recomputed.model.train()
    enable_checkpointing(recomputed.model)
    for rows in (PACKED, BRANCHED):
        (first, gradients), (second, again) = results(score, rows), results(recomputed, rows)
        assert torch.equal(first, second)
        assert all(torch.equal(gradients[name], again[name]) for name in gradients)


def test_attention_in_bf16_is_that_of_the_mask(checkpoint: Path) -> None:
    """Rotated queries and keys come in fp32, values in bf16."""
    rows = shared(30, 1, 40, prompt=20, length=128)
    exact = scorer_of(checkpoint)(rows)[0].detach()
    kinds = (0, LENGTH)
    found = [scorer_of(checkpoint, autocast_dtype=torch.bfloat16, mask_tokens=one)(rows)[0].detach() for one in kinds]
    rounding = float((found[1] - exact).abs().max())
    assert 0 < float((found[0] - exact).abs().max()) < 2 * rounding


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[Any]]:
    """What each call of a function of `scoring` returned."""
    calls: list[Any] = []
    function: Callable[..., Any] = getattr(scoring, name)

    def note(*args: Any) -> Any:
        calls.append(function(*args))
        return calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(scoring, name, note)
        yield calls


def test_segments_are_found_once_for_all_layers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = scorer_of(checkpoint)
    with counted(monkeypatch, "seen_by") as calls:
        results(score, PACKED)
        results(score, BRANCHED)
    assert len(calls) == 2


def test_short_rows_get_one_mask(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short sequences are one call of attention then."""
    score = scorer_of(checkpoint)
    short, long = (apart(100, 50, 90, length=MASK_TOKENS + more) for more in (0, 1))
    with counted(monkeypatch, "seen_by") as of_segments, counted(monkeypatch, "allowed_in") as masks:
        score(short)
        assert (len(of_segments), len(masks)) == (0, 1)
        score(long)
        assert (len(of_segments), len(masks)) == (1, 1)


def test_each_response_has_its_own_prompt() -> None:
    tokens = [np.full(size + 1, 7, dtype=np.int32) for size in (3, 6, 5, 4, 3, 5)]
    units = (Unit((0,), 0, 3), Unit((1, 2), 4, 7), Unit((3, 4, 5), 3, 6))
    rows = pack_rows(Layout((units, (Unit((0,), 0, 3),)), 17), tokens, [np.array([len(ids) - 1]) for ids in tokens])
    first = [Segment(3), Segment(4), Segment(2, 1), Segment(1, 1), Segment(3), Segment(1, 4), Segment(2, 4), Segment(1)]
    assert list(segments(rows)) == [*first, Segment(3), Segment(14)]  # the fifth has one token behind the prompt


@given(batches(), packings)
def test_segments_say_the_same_as_the_mask(batch: Any, packing: Any) -> None:
    tokens, prompts = batch
    chosen = [np.arange(prompt, len(ids)) for ids, prompt in zip(tokens, prompts, strict=True)]
    for layout in plan(tokens, prompts, packing):
        rows = pack_rows(layout, tokens, chosen)
        if rows.position_ids is None:
            continue
        unit = np.cumsum(rows.position_ids == 0, axis=1) if rows.unit is None else rows.unit
        branch = None if rows.branch is None else torch.from_numpy(rows.branch)
        expected = attention_allowed(torch.from_numpy(unit), branch)[:, 0].numpy()
        np.testing.assert_array_equal(seen_in(rows), expected)


def seen_in(rows: PackedRows) -> npt.NDArray[np.bool_]:
    """The mask [B, L, L] that the segments of the rows describe."""
    height, length = rows.input_ids.shape
    whole = np.zeros((height * length, height * length), dtype=bool)
    places, at = [], 0
    for segment in segments(rows):
        own = slice(at, at + segment.length)
        places.append(own)
        whole[own, own] = np.tril(np.ones((segment.length, segment.length), dtype=bool))
        if segment.prompt is not None:
            whole[own, places[segment.prompt]] = True
        at = own.stop
    assert at == height * length
    blocks = whole.reshape(height, length, height, length)
    assert blocks.sum() == sum(blocks[row, :, row].sum() for row in range(height)), "a row sees another"
    return np.stack([blocks[row, :, row] for row in range(height)])


# ---------------------------------------------------------------------- FlashAttention


def test_flash_attention_is_given_the_ends_once_for_all_layers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is not here: one in plain torch reads the same arguments."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    given: list[dict[str, Any]] = []

    def flash(_module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        assert mask is None
        given.append(rest)
        ends = rest["cu_seq_lens_q"].tolist()
        assert rest["cu_seq_lens_k"] is rest["cu_seq_lens_q"]
        assert rest["cu_seq_lens_q"].dtype == torch.int32
        assert rest["max_length_q"] == rest["max_length_k"] == max(np.diff(ends))
        assert isinstance(rest["max_length_q"], int)
        sizes = np.diff(ends).tolist()
        flat = [one.transpose(1, 2).flatten(0, 1).split(sizes) for one in (query, key, value)]
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(one.transpose(0, 1)[None] for one in each), is_causal=True, scale=rest["scaling"], enable_gqa=True
            )[0].transpose(0, 1)
            for each in zip(*flat, strict=True)
        ]
        return torch.cat(parts).unflatten(0, (query.shape[0], query.shape[2])), None

    score = scorer_of(checkpoint)
    rows = [apart(100, 50, 90, length=256), apart(70, length=70), pack_two_rows()]
    expected = [score(one)[0] for one in rows]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FLASH_ATTENTION, flash)
    score.model.config._attn_implementation = FLASH_ATTENTION
    for one, wanted in zip(rows, expected, strict=True):
        given.clear()
        with counted(monkeypatch, "flash_arguments") as calls:
            torch.testing.assert_close(score(one)[0], wanted, atol=1e-5, rtol=0)
        assert len(calls) == 1
        assert len(given) == MODEL["num_layers"]
        assert len({id(layer["cu_seq_lens_q"]) for layer in given}) == 1


def pack_two_rows() -> PackedRows:
    """A sequence in each, one of them padded: what `--micro-batch-size 2` makes."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 250, size + 1).astype(np.int32) for size in (40, 25)]
    layout = Layout(((Unit((0,), 0, 40),), (Unit((1,), 0, 25),)), 40)
    return pack_rows(layout, tokens, [np.arange(1, len(ids)) for ids in tokens])


# ---------------------------------------------------------------------- which models


def test_models_whose_layers_see_windows_keep_their_own_masks(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name, windows in (("full", {}), ("windows", {"use_sliding_window": True, "sliding_window": 4})):
        config = Qwen2Config(**shape, **heads, **windows, max_window_layers=1)
        Qwen2ForCausalLM(config).save_pretrained(tmp_path / name)
        train = TrainConfig(hf_checkpoint=str(tmp_path / name))
        loaded = load_model(train.hf_checkpoint, "hf_checkpoint", train, CPU, seed=0)
        assert loaded.model.config._attn_implementation == (PACKED_SDPA if name == "full" else "sdpa")


def test_a_model_that_loses_the_segments_keeps_the_mask(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some architectures do not pass further arguments on to their attention."""
    attend = attention._attend
    monkeypatch.setattr(attention, "_attend", lambda *args, segments=None, **rest: attend(*args, segments=None, **rest))
    train = TrainConfig(hf_checkpoint=str(checkpoint))
    loaded = load_model(str(checkpoint), "hf_checkpoint", train, CPU, seed=0)
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.packing.share_prompts


def test_context_parallelism_takes_the_place_of_both() -> None:
    context = scoring.ContextParallel(None)
    context._group, context.size = object(), 2
    for name in ("sdpa", PACKED_SDPA):
        taken: list[str] = []
        config = SimpleNamespace(_attn_implementation=name)
        context.prepare(SimpleNamespace(config=config, set_attn_implementation=taken.append))
        assert taken == [scoring.ATTENTION]
