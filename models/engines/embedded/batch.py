"""The work of one step: admit and prefill waiting requests, then draw a token for each running request.

Invariants of admission:
- equal contexts that enter together are computed once (always inside one request, across requests if the engine keeps
  prefixes); the others copy the keys and values;
- cached prefixes are found and copied before the step writes anything: a slot may change its owner in the same step in
  which another request still needs its old content;
- a step computes at most `PREFILL_TOKENS` padded tokens, or one request: decoding never waits for the whole queue;
- a scored prompt computes all tokens whose logits are read, so a cached prefix ends where the scores begin at the
  latest; logits of scores exist only `SCORED_LOGITS` at a time.

Invariants of drawing:
- the token of a row depends on the logits, rule, seed and position of the row only, whatever else is in the batch:
  truncated rows are filtered in vocabulary order, so that they draw like rows without truncation;
- the log-prob of a token is log_softmax(logits / T) over the whole vocabulary, before truncation; for T = 0 (greedy) T
  counts as 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from models.engines.core import Completion
from models.engines.embedded.kv_cache import KVCache, SlotTable
from models.engines.embedded.transformer import Transformer
from models.engines.noise import GOLDEN, MASK, MIX_1, MIX_2, mix

PREFILL_TOKENS: Final = 16_384
SCORED_LOGITS: Final = 1 << 25  # numbers; 128 MiB

_Key = tuple[int, str, bytes]  # request (-1 for any), extra key, tokens


@dataclass
class Admission:
    """One request that enters at `slot`. `leader` is the index of the admission with the same context (its own index
    if it is the one that is computed); `source` the slot of a cached prefix of `start` tokens."""

    completion: Completion
    context: npt.NDArray[np.int32]
    leader: int
    source: int
    start: int
    shared: bool = False
    slot: int = -1

    @property
    def length(self) -> int:
        return len(self.context)

    @property
    def cached(self) -> int:
        """Tokens found or shared. As in SGLang, a context's last token never counts as cached."""
        return self.length - 1 if self.shared else self.start

    @property
    def computed(self) -> int:
        """Tokens that the prefill computes for this request."""
        return 0 if self.shared else self.length - self.start


def plan(waiting: deque[Completion], table: SlotTable, generation: int) -> list[Admission]:
    """Take from the queue what fits into free slots and one prefill, and give out the slots."""
    admissions: list[Admission] = []
    leaders: dict[_Key, int] = {}
    rows, widest = 0, 0
    while waiting and len(admissions) < table.free:
        completion = waiting[0]
        context, key = _context(completion, across_requests=table.retains)
        leader = leaders.get(key) if not completion.to_score else None
        if leader is None:
            limit = completion.score_from if completion.to_score else len(context)
            source, start = table.find_prefix(context, completion.extra_key, generation, limit)
            wider = max(widest, len(context) - start)
            if rows and (rows + 1) * wider > PREFILL_TOKENS:
                break
            rows, widest = rows + 1, wider
            leader = len(admissions)
            leaders.setdefault(key, leader)
            admissions.append(Admission(completion, context, leader, source, start))
        else:
            admissions.append(Admission(completion, context, leader, -1, 0, shared=True))
        waiting.popleft()
    for admission in admissions:
        admission.slot = table.take(admission.source)
    for admission in admissions:
        completion = admission.completion
        if not completion.retractions:
            completion.cached_tokens = admission.cached
        table.occupy(admission.slot, completion, generation)
    return admissions


def _context(completion: Completion, across_requests: bool) -> tuple[npt.NDArray[np.int32], _Key]:
    """All tokens of a completion so far, and what another must equal to share their computation."""
    group = -1 if across_requests else completion.group
    if not completion.output_ids:
        return completion.prompt, (group, completion.extra_key, completion.prompt_key)
    context = np.concatenate((completion.prompt, np.asarray(completion.output_ids, dtype=np.int32)))
    return context, (group, completion.extra_key, context.tobytes())


class Prefill:
    """Computes admitted contexts into their slots."""

    def __init__(self, transformer: Transformer, cache: KVCache) -> None:
        self._transformer, self._cache = transformer, cache

    def run(self, admissions: Sequence[Admission]) -> torch.Tensor:
        """fp32 logits [len(admissions), vocabulary] at the last token of each context."""
        leaders = [index for index, admission in enumerate(admissions) if not admission.shared]
        self._copy_cached([admissions[index] for index in leaders])
        fresh = [index for index in leaders if not admissions[index].start]
        extended = [index for index in leaders if admissions[index].start]
        row_of: dict[int, int] = {}
        last: list[torch.Tensor] = []
        for indices in (fresh, extended):
            if indices:
                row_of.update({index: len(row_of) + row for row, index in enumerate(indices)})
                last.append(self._compute([admissions[index] for index in indices]))
        logits = self._transformer.logits(torch.cat(last) if len(last) > 1 else last[0])
        followers = [admission for admission in admissions if admission.shared]
        if followers:
            sources = [admissions[admission.leader].slot for admission in followers]
            longest = max(admission.length for admission in followers)
            self._cache.copy_prefix(sources, [admission.slot for admission in followers], longest)
        rows = [row_of[admission.leader] for admission in admissions]
        return logits if rows == list(range(len(row_of))) else logits[torch.tensor(rows, device=logits.device)]

    def _copy_cached(self, leaders: Sequence[Admission]) -> None:
        moved = [admission for admission in leaders if admission.start and admission.source != admission.slot]
        if moved:
            longest = max(admission.start for admission in moved)
            self._cache.copy_prefix([a.source for a in moved], [a.slot for a in moved], longest)

    def _compute(self, admissions: Sequence[Admission]) -> torch.Tensor:
        """Hidden states [R, hidden] of the last tokens; keys and values go to the slots."""
        device = self._cache.device
        counts = [admission.length - admission.start for admission in admissions]
        width = max(counts)
        tokens = np.zeros((len(counts), width), dtype=np.int64)
        written = np.full((len(counts), width), self._cache.scratch, dtype=np.int64)
        seen = np.zeros((len(counts), width), dtype=np.int64)
        for row, (admission, count) in enumerate(zip(admissions, counts, strict=True)):
            tokens[row, :count] = admission.context[admission.start :]
            written[row, :count] = seen[row, :count] = np.arange(admission.start, admission.length)
        token_rows, written_rows, seen_rows = torch.from_numpy(np.stack((tokens, written, seen))).to(device)
        slots = torch.tensor([admission.slot for admission in admissions], device=device)
        flat = self._cache.flat_index(slots[:, None].expand(-1, width), written_rows)
        if admissions[0].start:
            longest = max(admission.length for admission in admissions)
            attend = self._cache.extend(flat, slots, seen_rows, longest)
        else:
            attend = self._cache.prefill(flat)
        hidden = self._transformer.hidden(token_rows, seen_rows, attend)
        for row, admission in enumerate(admissions):
            if admission.completion.to_score:
                self._score(admission, hidden[row], token_rows[row])
        ends = torch.tensor(counts, device=device) - 1
        return hidden[torch.arange(len(counts), device=device), ends]

    def _score(self, admission: Admission, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Log-probs of the prompt's tokens behind `score_from`, whose own entry is None, as SGLang has it.

        `hidden` [T, hidden] and `tokens` [T] begin at `admission.start`. The score of a token is read one position
        before it.
        """
        completion = admission.completion
        first, last = completion.score_from - admission.start, completion.prompt_tokens - admission.start - 1
        rows = max(1, SCORED_LOGITS // self._transformer.spec.shape.vocabulary)
        values: list[float | None] = [None]
        for start in range(first, last, rows):
            end = min(start + rows, last)
            logits = self._transformer.logits(hidden[start:end])
            if completion.score_temperature != 1.0:
                logits = logits / completion.score_temperature
            chosen = logits.gather(-1, tokens[start + 1 : end + 1, None]).squeeze(-1)
            values += (chosen - logits.logsumexp(dim=-1)).tolist()
        completion.prompt_log_probs = values


def signed(x: int) -> int:
    """The 64 bits of `x` as torch's int64 has them."""
    x &= MASK
    return x - (1 << 64) if x >> 63 else x


def uniform(mixed_seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`noise.uniform` for int64 tensors [B]; `mixed_seeds` are mixed already. Returns float64 [B]."""
    x = mixed_seeds + positions * signed(GOLDEN)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(MIX_2)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


@dataclass(frozen=True)
class SamplingBatch:
    """Rules of the rows of a batch on the device; None where no row needs it."""

    mixed_seeds: torch.Tensor  # [B] int64
    inverse_temperature: torch.Tensor | None  # [B, 1]
    greedy: torch.Tensor | None  # [B] bool
    truncation: Truncation | None

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> SamplingBatch:
        rules = [c.rule for c in completions]
        seeds = torch.tensor([signed(mix(c.seed)) for c in completions], dtype=torch.int64)
        inverse: torch.Tensor | None = None
        greedy: torch.Tensor | None = None
        if any(rule.temperature != 1.0 for rule in rules):
            inverse = torch.tensor([[1.0 if rule.greedy else 1.0 / rule.temperature] for rule in rules]).to(device)
        if any(rule.greedy for rule in rules):
            greedy = torch.tensor([rule.greedy for rule in rules]).to(device)
        return cls(seeds.to(device), inverse, greedy, Truncation.of(completions, device))


@dataclass(frozen=True)
class Truncation:
    """Rows that keep only part of the vocabulary."""

    rows: torch.Tensor  # [N] int64
    top_k: torch.Tensor  # [N, 1]
    top_p: torch.Tensor  # [N, 1]
    min_p: torch.Tensor  # [N, 1]

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> Truncation | None:
        rows = [index for index, c in enumerate(completions) if c.rule.truncates and not c.rule.greedy]
        if not rows:
            return None
        rules = [completions[index].rule for index in rows]
        return cls(
            rows=torch.tensor(rows).to(device),
            top_k=torch.tensor([[rule.top_k if rule.top_k > 0 else 1 << 30] for rule in rules]).to(device),
            top_p=torch.tensor([[rule.top_p] for rule in rules], dtype=torch.float64).to(device),
            min_p=torch.tensor([[rule.min_p] for rule in rules], dtype=torch.float64).to(device),
        )

    def apply(self, probabilities: torch.Tensor) -> None:
        """Zero the truncated tokens, in place. A token stays if its rank is below top_k, the mass before it (of the
        whole distribution) is below top_p, and it has at least min_p times the largest probability."""
        part = probabilities[self.rows]
        ordered, order = part.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        ranks = torch.arange(part.shape[-1], device=part.device)
        kept = (ranks < self.top_k) & (before < self.top_p) & (ordered >= self.min_p * ordered[:, :1])
        probabilities[self.rows] = part * torch.zeros_like(kept).scatter_(-1, order, kept)


def draw(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    """Tokens and log-probs of fp32 logits [B, V], as float64 [2, B] so that one transfer brings both.

    `positions` [B]: where the new token will stand, counted from the start of the prompt.
    """
    scaled = logits if batch.inverse_temperature is None else logits * batch.inverse_temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    probabilities = log_probs.exp()
    if batch.truncation is not None:
        batch.truncation.apply(probabilities)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = uniform(batch.mixed_seeds, positions).unsqueeze(-1) * cumulative[:, -1:]
    tokens = (cumulative <= target).sum(dim=-1).clamp_(max=logits.shape[-1] - 1)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, logits.argmax(dim=-1), tokens)
    chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return torch.stack((tokens.to(torch.float64), chosen.to(torch.float64)))


def forbid(logits: torch.Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
    """Make tokens impossible in rows, in place: stop tokens before `min_new_tokens` is reached."""
    logits[torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)] = float("-inf")
