"""The work of one training step: a batch with the spread of lengths that rollouts have, and its FLOPs.

FLOPs of a step are those that the mathematics asks for, forward and backward:

    6 * (weights of all matrices of the layers) * (tokens)                         a prompt common to several
    + 12 * layers * heads * head_dim * (pairs of tokens that see each other)       responses is counted once
    + 6 * hidden * vocabulary * (tokens whose log-prob is wanted)

Padding, recomputation and masked pairs are no work: they lower the share of the peak. Of experts, those that a token
goes to. The embedding is a look-up and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.train.interface import TrainSequence

Ids = npt.NDArray[np.int32]


def recorded_batch(
    groups: int, *, per_group: int = 8, longest: int, vocabulary: int, prompt: float, response: float
) -> list[TrainSequence]:
    """The same batch each time: groups of responses to one prompt, by group.

    Prompts are log-normal (sigma 0.5), responses too (sigma 0.8, and 0.5 of it common to the group: hard prompts have
    long answers), with the given medians; both are cut at `longest`, where a part of the responses of a reasoning
    model ends.
    """
    rng = np.random.default_rng(20261121)
    out = []
    for group in range(groups):
        size = int(np.clip(rng.lognormal(np.log(prompt), 0.5), 8, longest // 2))
        common, start = rng.normal(0.0, 0.5), rng.integers(3, vocabulary, size)
        for number in range(per_group):
            length = int(np.clip(response * np.exp(common + rng.normal(0.0, 0.62)), 4, longest - size))
            mask, advantage = np.repeat([0, 1], [size, length]), rng.normal()
            out.append(
                TrainSequence(
                    group_id=group,
                    rollout_id=group * per_group + number,
                    tokens=np.concatenate([start, rng.integers(3, vocabulary, length)]).astype(np.int32),
                    prompt_length=size,
                    loss_mask=mask.astype(np.uint8),
                    rollout_log_probs=(-np.log(vocabulary) * mask).astype(np.float32),
                    advantages=(advantage * mask).astype(np.float32),
                    versions=(mask - 1).astype(np.int32),
                )
            )
    return out


def ids_and_prompts(sequences: Sequence[TrainSequence]) -> tuple[list[Ids], list[int]]:
    """What packing and dealing ask for."""
    return [one.tokens for one in sequences], [one.prompt_length for one in sequences]


@dataclass(frozen=True)
class Work:
    """What a batch asks for, whatever the model."""

    tokens: int  # model inputs, prompts once for each group
    pairs: int  # of tokens that see each other
    chosen: int  # tokens whose log-prob is wanted
    sequence_tokens: int  # as rollouts are counted: prompts once for each response


def work_of(sequences: Sequence[TrainSequence]) -> Work:
    """Of sequences by group, as responses after one prompt."""
    tokens = pairs = 0
    seen: set[int] = set()
    for one in sequences:
        prompt, response = one.prompt_length, one.response_length - 1
        if one.group_id not in seen:
            seen.add(one.group_id)
            tokens += prompt
            pairs += prompt * (prompt + 1) // 2
        tokens += response
        pairs += response * prompt + response * (response + 1) // 2
    return Work(
        tokens=tokens,
        pairs=pairs,
        chosen=sum(int(one.loss_mask.sum()) for one in sequences),
        sequence_tokens=sum(len(one.tokens) for one in sequences),
    )


def step_flops(config: Mapping[str, Any], work: Work) -> float:
    """Of one update. `config`: contents of a Qwen2 or Qwen3 config.json, with or without experts."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    attention = hidden * head * (2 * heads + 2 * config["num_key_value_heads"])
    experts = config.get("num_experts_per_tok")
    mlp = 3 * hidden * (experts * config["moe_intermediate_size"] if experts else config["intermediate_size"])
    router = hidden * config["num_experts"] if experts else 0
    return float(
        6.0 * layers * (attention + mlp + router) * work.tokens
        + 12.0 * layers * heads * head * work.pairs
        + 6.0 * hidden * config["vocab_size"] * work.chosen
    )
