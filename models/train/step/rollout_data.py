"""What functions with slime's signature are given of a batch: `--custom-advantage-function-path (args, rollout_data)`,
and with the advantages `--rollout-data-postprocess-path (args, rollout_id, rollout_data)`.

`rollout_data` has one entry for each sequence in every list. Tensors are on the CPU, over all tokens of a response; of
tokens that are not trained, log-probs, values and `kl` are 0.

    tokens, total_lengths, response_lengths, loss_masks, truncated
    rewards                  the values that the estimator gives to rollouts (under grpo: normalised in the group)
    raw_reward               the rewards, those of turns included
    log_probs                of the policy at the batch's start (with bypass: of the engine)
    rollout_log_probs        of the engine
    ref_log_probs, values, teacher_log_probs    where the run has a reference, a critic, a teacher
    kl                       log-ratio to the reference; 0 without --kl-coef

The function sets `rollout_data["advantages"]`, and `["returns"]` for a critic: one tensor for each sequence.

Invariants: the first sees the whole batch at once, before distillation and whitening, the second after both; every
process of a data-parallel group calls them with the same numbers, and must get the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.algorithms.advantages import TokenAdvantages
from models.algorithms.returns import FloatArray
from models.errors import AlgorithmError
from models.import_path import pick
from models.slime_arguments import SlimeArguments
from models.train.dp_group import Float32Array
from models.train.step.examples import Example


def rollout_data(examples: Sequence[Example], *, student: str, kl_coef: float) -> dict[str, Any]:
    """`student`: the field with the policy's log-probs. `kl_coef`: above 0 where there is a reference whose KL is part
    of the reward."""
    data: dict[str, Any] = {
        "tokens": [torch.from_numpy(one.tokens.astype(np.int64)) for one in examples],
        "total_lengths": [len(one.tokens) for one in examples],
        "response_lengths": [len(one.tokens) - one.prompt for one in examples],
        "loss_masks": [_spread(one, np.ones(len(one.chosen))).int() for one in examples],
        "truncated": [int(one.truncated) for one in examples],
        "rewards": [float(one.advantages.mean()) for one in examples],
        "raw_reward": [one.reward + one.turn_total for one in examples],
        "sample_indices": [one.key[1] for one in examples],
    }
    for field in (student, "rollout_log_probs", "ref_log_probs", "values", "teacher_log_probs"):
        if all(getattr(one, field) is not None for one in examples):
            data[field] = [_spread(one, getattr(one, field)) for one in examples]
    data["log_probs"] = data[student]
    away = zip(data["log_probs"], data["ref_log_probs" if kl_coef > 0 else "log_probs"], strict=True)
    data["kl"] = [own - other for own, other in away]
    return data


def post_process(
    path: str, args: SlimeArguments, rollout_id: int, data: dict[str, Any], examples: Sequence[Example]
) -> None:
    """Set the advantages that a function `(args, rollout_id, rollout_data)` leaves; those of tokens whose `loss_masks`
    it sets to 0 are 0. Raises `AlgorithmError`, `UnknownAlgorithm`."""
    data["advantages"] = [_spread(one, one.advantages) for one in examples]
    pick("rollout_data_postprocess", path, {})(args, rollout_id, data)
    flag = "--rollout-data-postprocess-path"
    columns = (_column(data, name, examples, flag) for name in ("advantages", "loss_masks"))
    for example, advantages, mask in zip(examples, *columns, strict=True):
        example.advantages = (advantages * (mask > 0)).astype(np.float32)


def custom_advantages(
    path: str, args: SlimeArguments, data: dict[str, Any], examples: Sequence[Example]
) -> list[TokenAdvantages]:
    """Of each example. Raises `AlgorithmError`, `UnknownAlgorithm`."""
    pick("custom_advantages", path, {})(args, data)
    names = ("advantages", "returns") if "values" in data or "returns" in data else ("advantages",)
    columns = (_column(data, name, examples, "--custom-advantage-function-path") for name in names)
    return [TokenAdvantages(*of_one) for of_one in zip(*columns, strict=True)]


def _spread(example: Example, values: Float32Array | FloatArray) -> Tensor:
    """[K] of trained tokens -> [response], 0 elsewhere."""
    spread = np.zeros(len(example.tokens) - example.prompt, dtype=np.float32)
    spread[example.chosen - example.prompt] = values
    return torch.from_numpy(spread)


def _column(data: dict[str, Any], name: str, examples: Sequence[Example], flag: str) -> list[FloatArray]:
    """[K] of each example, from the tensors that the function has set."""
    found = [torch.as_tensor(values).double() for values in data.get(name) or ()]
    shapes, lengths = [list(values.shape) for values in found], data["response_lengths"]
    if shapes != [[length] for length in lengths]:
        raise AlgorithmError(
            f'{flag}: rollout_data["{name}"] has shapes {shapes!r:.200}; set one tensor for '
            f"each of the {len(lengths)} sequences, as long as its response: {lengths!r:.200}"
        )
    return [values.numpy()[one.chosen - one.prompt] for values, one in zip(found, examples, strict=True)]
