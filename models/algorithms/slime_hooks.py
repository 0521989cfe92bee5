"""Functions with slime's signatures in the loss: what they are handed, and what becomes of their answers.

    flag                                      signature
    --custom-tis-function-path                (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
                                              total_lengths, response_lengths, **kwargs) -> pg_loss, masks, metrics
    --custom-pg-loss-reducer-function-path    (total_lengths, response_lengths, loss_masks, calculate_per_token_loss)
                                              -> a function of pg_loss that gives a scalar

They see responses as slime has them: every token, one response after the other, with a mask. Of tokens that are not
trained, log-probs and losses are 0.

Invariants: a function sees whole responses, also where context-parallel processes share a row, but only those of its
micro-batch; changed masks act on the policy term and leave the divisors alone, as in slime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig
from models.algorithms.tokens import PolicyTokens
from models.errors import AlgorithmError
from models.import_path import has_args, pick
from models.slime_arguments import SlimeArguments


@dataclass(frozen=True)
class Responses:
    """The M tokens of the responses of S sequences, one after the other, and the N among them that are trained."""

    at: Tensor  # [N] int64, their places among the M
    lengths: Sequence[int]  # [S] tokens of each response
    totals: Sequence[int]  # [S] with the prompt
    weights: Tensor  # [N] of each trained token's loss in the numerator of the step

    def spread(self, values: Tensor) -> Tensor:
        """[N] -> [M], 0 elsewhere; differentiable."""
        return values.new_zeros(sum(self.lengths)).index_copy(0, self.at, values)

    def split(self, values: Tensor) -> list[Tensor]:
        """[N] -> one tensor for each response."""
        return list(self.spread(values).split(list(self.lengths)))

    def chosen(self, values: object, name: str) -> Tensor:
        """[M] -> [N]. Raises `AlgorithmError` for another shape."""
        if isinstance(values, Tensor) and values.shape == (sum(self.lengths),):
            return values[self.at]
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise AlgorithmError(f"{name}: shape {shape}; return a number for each of {sum(self.lengths)} response tokens")


@dataclass(frozen=True)
class Hooks:
    """The functions of a run, None where it has none of this signature, and the responses of a micro-batch."""

    args: SlimeArguments = field(default_factory=SlimeArguments)
    tis: Callable[..., Any] | None = None
    reducer: Callable[..., Any] | None = None
    per_token: bool = False  # slime's calculate_per_token_loss: the divisor of the step is its tokens
    responses: Responses | None = None

    def weighted(
        self, pg_loss: Tensor, tokens: PolicyTokens, train_log_probs: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The policy term [N] with its weights, what is left of each token [N] (0 to 1), and metrics [N]."""
        assert self.tis and self.responses  # noqa: PT018
        responses, name = self.responses, "--custom-tis-function-path"
        loss, masks, metrics = self.tis(
            args=self.args,
            pg_loss=responses.spread(pg_loss),
            train_log_probs=responses.split(train_log_probs.detach()),
            rollout_log_probs=responses.split(tokens.rollout_log_probs),
            loss_masks=responses.split(tokens.mask.int()),
            total_lengths=responses.totals,
            response_lengths=responses.lengths,
        )
        left = responses.chosen(torch.cat(list(masks)), f"{name}, the masks").to(pg_loss.dtype).detach()
        means = {f"train/{key}": responses.chosen(value, f"{name}, {key}").detach() for key, value in metrics.items()}
        return responses.chosen(loss, f"{name}, pg_loss") * left, left, means

    def reduced(self, pg_loss: Tensor, left: Tensor) -> Tensor:
        """The scalar of the user's reducer as a loss [N] whose weighted sum it is. `left` [N]: the masks."""
        assert self.reducer and self.responses  # noqa: PT018
        responses = self.responses
        reduce = self.reducer(responses.totals, responses.lengths, responses.split(left), self.per_token)
        value = reduce(responses.spread(pg_loss))
        if value.numel() != 1:
            raise AlgorithmError(f"custom_pg_loss_reducer_function_path gave {list(value.shape)}: return a scalar")
        return (value.reshape(()) / responses.weights.sum()).expand_as(pg_loss)


def hooks_of(algorithm: AlgorithmConfig, correction: CorrectionConfig, args: SlimeArguments) -> Hooks:
    """Those of a configuration. Raises `UnknownAlgorithm`."""
    tis, reducer = correction.custom_tis_function_path, algorithm.custom_pg_loss_reducer_function_path
    weights = pick("importance_weights", tis, {}) if tis is not None and correction.use_tis else None
    reduce = None if reducer is None else pick("reducer", reducer, {})
    return Hooks(args, weights if has_args(weights) else None, reduce, algorithm.loss_aggregation == "token_mean")
