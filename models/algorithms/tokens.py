"""The tokens that a loss sees: flat tensors over the trainable part of whole sequences, safe ratios, and log-probs.

Invariants:
- a micro-batch holds whole sequences, so that statistics of a sequence never cross micro-batches;
- values at masked positions are never used: they are replaced before any arithmetic, so that NaN there is harmless;
- a log-ratio is clamped to +-20 inside the exponent only; linear terms keep the true value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.schema.train import LOGPROB_CHUNK_IDS

EXPONENT_BOUND: Final = 20.0


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the whole optimizer step, the same in each of its micro-batches."""

    weight_mean: float = 1.0  # of the importance weights after their bounds: the divisor of tis_batch_normalize
    m2po_bound: float = float("inf")  # tokens whose (log theta - log mu)^2 is larger are dropped
    advantage_mean: float = 0.0  # of the step's tokens, for covariances
    log_prob_mean: float = 0.0
    cov_bound: float = float("-inf")  # chosen up to it: by minus the covariance (kl_cov), by the draw (clip_cov)
    entropy: bool = True  # it is measured, where no term of the loss needs it


@dataclass(frozen=True)
class PolicyTokens:
    """N tokens of S sequences. Log-probs are natural logarithms under the sampling temperature."""

    log_probs: Tensor  # [N] log theta, with gradient
    old_log_probs: Tensor  # [N] log old, the ratio's denominator, no gradient
    rollout_log_probs: Tensor  # [N] log mu, no gradient
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True = trainable
    sequence: Tensor  # [N] int64, 0 .. S - 1
    n_sequences: int  # S
    ref_log_probs: Tensor | None = None  # [N] frozen reference, no gradient
    entropy: Tensor | None = None  # [N] of the whole next-token distribution
    staleness: Tensor | None = None  # [N] int64 >= 0, weights versions between the token and the batch; None = all 0
    rejected: Tensor | None = None  # [S] bool, sequences whose rollout failed a rule (rs_unit rollout)
    kept_scale: Tensor | None = None  # [S] factor of the policy term, for renormalize_after_rejection; None = 1
    statistics: StepStatistics = StepStatistics()

    @property
    def log_rho(self) -> Tensor:
        """log theta - log mu [N], 0 where masked, with gradient."""
        return log_ratio(self.log_probs, self.rollout_log_probs, self.mask)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator where the mask is set, else exactly 0. Shapes [N]."""
    zero = torch.zeros((), dtype=numerator.dtype, device=numerator.device)
    return torch.where(mask, numerator, zero) - torch.where(mask, denominator, zero)


def bounded_exp(log_value: Tensor) -> Tensor:
    """exp with its exponent clamped to +-20."""
    return log_value.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where the mask is set, else exactly 0, in value and gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def sequence_sum(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Sum of masked values [N] within each sequence, [S]; differentiable."""
    return torch.zeros(tokens.n_sequences, dtype=values.dtype, device=values.device).index_add(
        0, tokens.sequence, masked(values, tokens.mask)
    )


def sequence_mean(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Mean of values [N] over each sequence's trainable tokens, [S], 0 where there is none; differentiable."""
    return sequence_sum(values, tokens) / sequence_sum(torch.ones_like(values), tokens).clamp(min=1.0)


def sequence_max(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """Largest of non-negative values [N] over each sequence's trainable tokens, [S], 0 where there is none."""
    empty = torch.zeros(tokens.n_sequences, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, tokens.sequence, masked(values, tokens.mask), reduce="amax")


# --------------------------------------------------------------------------------------------------
# Log-probs of chosen tokens and entropies of whole distributions, from last hidden states and the output layer.
#
# The logits of a micro-batch may take more memory than its model: 16,384 tokens x 152,000 ids are 10 GB in fp32, and
# the backward pass would hold them several times. Here they exist block by block, of a few tokens and a part of the
# vocabulary, and the backward pass computes them again. Sums over blocks are those of an online softmax
# (arXiv:1805.02867).
#
#     d log p(t) / d z_j = [j = t] - p_j        d H / d z_j = -p_j (z_j - sum of p z)
#
# Invariants: arithmetic on logits in fp32 at least, whatever the model's precision; logits are divided by the
# temperature first, so that the trainer's numbers and the engine's describe the same distribution; an id whose logit is
# minus infinity has no share in values or gradients; a logit that is not a number makes the token's values and
# gradients so.


@dataclass(frozen=True)
class OutputLayer:
    """Logits z of hidden states h: y = multiply (h W^T + b), z = cap tanh(y / cap), or y without a cap."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    multiply: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H], all at one time."""
        logits: Tensor = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.multiply
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class Vocabulary:
    """The ids that the rows of the output layer are: from `first` on; those from `size` on do not exist.

    `group`: the processes among which the rows are divided; None: this one has all.
    """

    first: int = 0
    size: int | None = None
    group: Any = None

    def ids(self, rows: int) -> Iterator[slice]:
        """The rows of ids that exist, a block at a time."""
        real = rows if self.size is None else max(min(self.size - self.first, rows), 0)
        return _slices(real, LOGPROB_CHUNK_IDS)


ALL: Final = Vocabulary()


def token_log_probs(
    hidden: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: str = "none",
    chunk_tokens: int = 1024,
    vocabulary: Vocabulary = ALL,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets` [N] under softmax(logits / temperature), and the entropies [N].

    `hidden` [N, H]. `temperature`: of all tokens, or [N] of each. `entropy`: "none"; "value" computes it without a
    graph; "graph" keeps the graph, for a bonus in the loss. `chunk_tokens`: of a block. Where the vocabulary is
    divided, collective over its group: all find the same numbers; the gradient of `hidden` is that of the own rows, to
    be summed over the group.
    """
    weight, bias, device = layer.weight, layer.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    blocks = _Blocks(layer.multiply, layer.cap, temperature, entropy, chunk_tokens, vocabulary)
    log_probs, entropies = _TokenLogProbs.apply(hidden, weight, bias, targets, blocks)
    return log_probs, None if entropy == "none" else entropies


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True)
class _Blocks:
    """How logits are made, and how many at a time."""

    multiply: float
    cap: float | None
    temperature: float | Tensor
    entropy: str
    chunk_tokens: int
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    def temperature_of(self, own: slice) -> float | Tensor:
        """Of a block of tokens: one for all, or [n, 1], by which blocks of logits are scaled in place."""
        return self.temperature[own, None] if isinstance(self.temperature, Tensor) else self.temperature

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [n, v] over the temperature, in memory of their own, and, with a cap, their slope in (h W^T + b)."""
        scaled = _product(hidden, weight)
        if bias is not None:
            scaled += bias
        if self.cap is None:
            plain = self.multiply == 1.0 and isinstance(temperature, float) and temperature == 1.0
            return scaled if plain else scaled.mul_(self.multiply / temperature), None
        tanh = scaled.mul_(self.multiply / self.cap).tanh_()
        slope = (1.0 - tanh.square()).mul_(self.multiply / temperature)
        return tanh.mul_(self.cap / temperature), slope

    def places(self, targets: Tensor, ids: slice) -> tuple[Tensor, Tensor]:
        """Where the targets [n] are within a block of ids, and whether they are there."""
        at = targets - (self.vocabulary.first + ids.start)
        inside = (at >= 0) & (at < ids.stop - ids.start)
        return torch.where(inside, at, 0).unsqueeze(-1), inside


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """h W^T [n, v] in fp32 at least. Where the device can only make it in bf16, a logit of 20 is off by up to 0.06."""
    if hidden.dtype in (torch.bfloat16, torch.float16) and _makes_float32(hidden.device):
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    made = hidden @ weight.T
    return made if made.dtype == torch.float64 else made.float()


def _makes_float32(device: torch.device) -> bool:
    """Whether a product of two matrices in bf16 can be had in fp32."""
    return device.type == "cuda" and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")


class _TokenLogProbs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, blocks: _Blocks
    ) -> tuple[Tensor, Tensor]:
        every = _slices(len(targets), blocks.chunk_tokens)
        parts = [_statistics(hidden, weight, bias, targets, own, blocks) for own in every]
        empty = hidden.new_zeros(3, 0, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        normaliser, chosen, mean = _over_group(torch.cat([empty, *parts], dim=1), blocks.vocabulary.group)
        entropies = normaliser - mean if blocks.entropy != "none" else normaliser.new_zeros(0)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, mean)
        ctx.blocks = blocks
        if blocks.entropy != "graph":
            ctx.mark_non_differentiable(entropies)
        return chosen - normaliser, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, mean = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        by_entropy = of_entropies if blocks.entropy == "graph" else None
        _, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over blocks are in fp32: rounded to the model's precision once, at the end.
        to_hidden = torch.zeros(hidden.shape, dtype=normaliser.dtype, device=hidden.device)
        to_weight = torch.zeros_like(weight) if wants_weight else None
        to_bias = torch.zeros_like(bias) if wants_bias else None
        for ids in blocks.vocabulary.ids(len(weight)):
            rows, row_bias = weight[ids], None if bias is None else bias[ids]
            to_rows = torch.zeros(rows.shape if wants_weight else (0,), dtype=normaliser.dtype, device=rows.device)
            for own in _slices(len(targets), blocks.chunk_tokens):
                temperature = blocks.temperature_of(own)
                logits, slope = blocks.logits(hidden[own], rows, row_bias, temperature)
                entropy = None if by_entropy is None else (by_entropy[own], mean[own])
                gradient = _to_logits(logits, normaliser[own], of_log_probs[own], entropy)
                at, inside = blocks.places(targets[own], ids)
                gradient.scatter_add_(-1, at, torch.where(inside, of_log_probs[own], 0.0).unsqueeze(-1))
                gradient.mul_(blocks.multiply / temperature if slope is None else slope)
                if to_bias is not None:
                    to_bias[ids] += gradient.sum(0)
                del logits, slope
                gradient = gradient.to(rows.dtype)
                to_hidden[own] += gradient @ rows
                if wants_weight:
                    to_rows += gradient.T @ hidden[own]
                del gradient  # before the next block is computed
            if to_weight is not None:
                to_weight[ids] = to_rows
        return to_hidden.to(hidden.dtype), to_weight, to_bias, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, own: slice, blocks: _Blocks
) -> Tensor:
    """Of the tokens `own`, over the own part of the vocabulary [3, n]: log of the sum of exp, logit of the target, mean
    logit."""
    hidden, targets, temperature = hidden[own], targets[own], blocks.temperature_of(own)
    found: Tensor | None = None
    for ids in blocks.vocabulary.ids(len(weight)):
        logits, _ = blocks.logits(hidden, weight[ids], None if bias is None else bias[ids], temperature)
        part = _of_block(logits, targets, ids, blocks)
        del logits  # before the next block is computed
        found = part if found is None else _joined(torch.stack([found, part]))
    if found is None:  # rows of padding alone
        found = hidden.new_zeros(3, len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        found[0] = -torch.inf
    return found


def _of_block(logits: Tensor, targets: Tensor, ids: slice, blocks: _Blocks) -> Tensor:
    """The statistics [3, n] of one block, whose logits are changed."""
    at, inside = blocks.places(targets, ids)
    chosen = torch.where(inside, logits.gather(-1, at).squeeze(-1), 0.0)
    normaliser = logits.logsumexp(-1)
    mean = torch.zeros_like(normaliser) if blocks.entropy == "none" else _mean(logits, normaliser)
    return torch.stack([normaliser, chosen, mean])


def _mean(logits: Tensor, normaliser: Tensor) -> Tensor:
    """Mean [n] of logits [n, v] under their softmax; changes them."""
    probabilities = (logits - _finite(normaliser).unsqueeze(-1)).exp_()
    logits.masked_fill_(probabilities == 0, 0.0)  # before the product: minus infinity has no share
    return logits.mul_(probabilities).sum(-1)


def _joined(parts: Tensor) -> Tensor:
    """Statistics [3, n] of several parts of the vocabulary [parts, 3, n] together."""
    normalisers, chosen, means = parts.unbind(1)
    normaliser = normalisers.logsumexp(0)
    shares = (_finite(normalisers) - _finite(normaliser)).exp()
    return torch.stack([normaliser, chosen.sum(0), (shares * means).sum(0)])


def _over_group(own: Tensor, group: Any) -> Tensor:
    """Statistics [3, n] over the whole vocabulary, in each of the processes that share it."""
    if group is None or group.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own.contiguous(), group=group)
    return _joined(torch.stack(parts))


def _to_logits(
    logits: Tensor, normaliser: Tensor, of_log_probs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient [n, v] of a loss to the logits, but for what the targets get; in their memory.

    `entropy`: the loss's gradient [n] to the entropies, and the means of the logits [n].
    """
    normaliser = _finite(normaliser).unsqueeze(-1)
    if entropy is None:
        return logits.sub_(normaliser).exp_().mul_(-of_log_probs.unsqueeze(-1))
    of_entropies, mean = entropy
    probabilities = (logits - normaliser).exp_()
    logits.masked_fill_(probabilities == 0, 0.0)
    logits.sub_(mean.unsqueeze(-1)).mul_(of_entropies.unsqueeze(-1)).add_(of_log_probs.unsqueeze(-1))
    return logits.mul_(probabilities).neg_()


def _finite(values: Tensor) -> Tensor:
    """Minus infinity as the smallest number, so that differences are numbers. NaN stays."""
    return values.clamp(min=torch.finfo(values.dtype).min)
