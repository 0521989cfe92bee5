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
from models.engines.noise import MASK, mix_array, mixed_uniforms
from models.engines.protocol import SamplingParams

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


def plan(waiting: deque[Completion], table: SlotTable, generation: int) -> list[Admission]:
    """Take from the queue what fits into free slots and one prefill, and give out the slots."""
    admissions: list[Admission] = []
    leaders: dict[_Key, int] = {}
    rows, widest, free = 0, 0, table.free
    while waiting and len(admissions) < free:
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
        cache, rows = self._cache, len(admissions)
        starts, lengths, slots = np.array([(a.start, a.length, a.slot) for a in admissions], dtype=np.int64).T
        width = int((lengths - starts).max())
        steps = np.arange(width)
        used = steps < (lengths - starts)[:, None]
        tokens = np.zeros((rows, width), dtype=np.int64)
        tokens[used] = np.concatenate([a.context[a.start :] for a in admissions])
        seen = np.where(used, starts[:, None] + steps, 0)
        written = slots[:, None] * cache.slot_stride + np.where(used, seen, cache.scratch)
        host = torch.from_numpy(np.stack((tokens, seen, written)).reshape(3, -1))
        token_ids, positions, places = host.to(cache.device).unbind()
        if admissions[0].start:
            slots_there = torch.from_numpy(slots.copy()).to(cache.device)
            attend = cache.extend(places, slots_there, positions.view(rows, width), int(lengths.max()))
        else:
            attend = cache.prefill(places, rows)
        ends = torch.from_numpy(np.arange(rows) * width + lengths - starts - 1).to(cache.device)
        scored = [row for row, admission in enumerate(admissions) if admission.completion.to_score]
        if not scored:
            return self._transformer.hidden(token_ids, positions, attend, ends)
        hidden = self._transformer.hidden(token_ids, positions, attend)
        for row in scored:
            part = slice(row * width, (row + 1) * width)
            self._score(admissions[row], hidden[part], token_ids[part])
        return hidden.index_select(0, ends)

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


@dataclass(frozen=True)
class SamplingBatch:
    """Rules of the rows of a batch; on the device but for the seeds. None where no row needs it."""

    mixed_seeds: npt.NDArray[np.uint64]  # [B]
    inverse_temperature: torch.Tensor | None  # [B, 1]
    greedy: torch.Tensor | None  # [B, 1] bool
    samples: bool  # some row is not greedy
    truncation: Truncation | None

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> SamplingBatch:
        seeds = mix_array(np.array([c.seed & MASK for c in completions], dtype=np.uint64))
        temperatures = np.array([[c.rule.temperature] for c in completions])
        is_greedy = temperatures == 0.0
        temperatures[is_greedy] = 1.0
        inverse = torch.from_numpy(1.0 / temperatures).float().to(device) if (temperatures != 1.0).any() else None
        greedy = torch.from_numpy(is_greedy).to(device) if is_greedy.any() else None
        return cls(seeds, inverse, greedy, not is_greedy.all(), Truncation.of(completions, device))


@dataclass(frozen=True)
class Truncation:
    """Rows that keep only part of the vocabulary."""

    rows: torch.Tensor  # [N] int64
    top_k: torch.Tensor  # [N, 1]
    top_p: torch.Tensor  # [N, 1]
    min_p: torch.Tensor  # [N, 1]

    @classmethod
    def of(cls, completions: Sequence[Completion], device: torch.device) -> Truncation | None:
        rows = [index for index, c in enumerate(completions) if _truncates(c.rule)]
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


def _truncates(rule: SamplingParams) -> bool:
    """A `temperature` of 0 is greedy; `top_k` <= 0, `top_p` 1 and `min_p` 0 do not truncate."""
    return rule.temperature != 0.0 and (rule.top_p < 1.0 or rule.top_k > 0 or rule.min_p > 0.0)


def draw(logits: torch.Tensor, batch: SamplingBatch, positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """Tokens and log-probs of fp32 logits [B, V], as float64 [2, B] so that one transfer brings both.

    `positions` [B]: where the new token will stand, counted from the start of the prompt.
    """
    scaled = logits if batch.inverse_temperature is None else logits * batch.inverse_temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if batch.samples:
        probabilities = log_probs.exp()
        if batch.truncation is not None:
            batch.truncation.apply(probabilities)
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        noise = torch.from_numpy(mixed_uniforms(batch.mixed_seeds, positions)).to(logits.device).unsqueeze(-1)
        target = noise * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    else:
        tokens = logits.argmax(dim=-1, keepdim=True)
    return torch.cat((tokens, log_probs.gather(-1, tokens).double()), dim=1).t()


def forbid(logits: torch.Tensor, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
    """Make tokens impossible in rows, in place: stop tokens before `min_new_tokens` is reached."""
    logits[torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)] = float("-inf")
