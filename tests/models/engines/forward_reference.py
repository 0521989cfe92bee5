"""Log-probs of recorded tokens by Hugging Face models: of one version, and of several that share one KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from models.engines.protocol import GenerateOutput, VersionSpan


@cache
def model_of(path: Path) -> Any:
    """The checkpoint in fp32, loaded once."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _gather(logits: torch.Tensor, tokens: Sequence[int], temperature: float) -> torch.Tensor:
    table = (logits.float() / temperature).log_softmax(-1)
    return table.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def by_one(path: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(output)] log-probs if one version had made all tokens."""
    with torch.no_grad():
        logits = model_of(path)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return _gather(logits, output, temperature)


def gaps(path: str, prompt: list[int], output: GenerateOutput, temperature: float = 1.0) -> torch.Tensor:
    """[len(output_ids)] distance of the recorded log-probs from one checkpoint's."""
    return (torch.tensor(output.output_log_probs) - by_one(Path(path), prompt, output.output_ids, temperature)).abs()


def by_spans(
    paths: Mapping[str, Path], spans: Sequence[VersionSpan], prompt: list[int], output: list[int], *, recomputed: bool
) -> torch.Tensor:
    """[len(output)] log-probs if the versions made the tokens as `spans` say: each with the keys and values of all
    tokens before `recomputed` by itself, or else with those that the versions before it left in the cache."""
    if recomputed:
        return torch.cat([by_one(paths[s.version], prompt, output)[s.start : s.end] for s in spans])
    pieces = [(paths[span.version], span.end - span.start) for span in spans]
    pieces[0] = (pieces[0][0], pieces[0][1] + len(prompt) - 1)  # a span's last token is the first that the next reads
    return by_pieces(pieces, [*prompt, *output])[len(prompt) - 1 :]


def by_pieces(pieces: Sequence[tuple[Path, int]], tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens) - 1] log-probs of all tokens but the first. Each checkpoint in turn reads as many tokens as its
    piece says (all but the last one are read), on top of the keys and values that those before it left."""
    from transformers import DynamicCache

    past, found, begin = DynamicCache(), [], 0
    for path, count in pieces:
        end = begin + count
        if not count:
            continue
        with torch.no_grad():
            answer = model_of(path)(
                torch.tensor([tokens[begin:end]]), past_key_values=past, use_cache=True,
                cache_position=torch.arange(begin, end),
            )  # fmt: skip
        found.append(_gather(answer.logits[0], tokens[begin + 1 : end + 1], 1.0))
        begin = end
    assert begin == len(tokens) - 1, "the pieces must read all tokens but the last"
    return torch.cat(found)
