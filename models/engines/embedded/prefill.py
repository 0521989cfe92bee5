"""Admission and prefill: which waiting requests enter, what of them is computed, shared or found in the cache.

Invariants:
- equal contexts that enter together are computed once (always inside one request, across requests if prefixes are
  kept), the others copy the keys and values;
- cached prefixes are looked up, then copied, before anything of the step is written: a slot may be given away in the
  same step in which its old content is still needed;
- a step computes at most `PREFILL_TOKENS` padded tokens, or one request: decoding never waits for the whole queue;
- a prompt that is scored computes all tokens whose logits are read, so a cached prefix ends where the scores begin at
  the latest, and its logits exist only `SCORED_LOGITS` at a time.
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
    output = np.asarray(completion.output_ids, dtype=np.int32)
    context = np.concatenate((completion.prompt, output))
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
        hidden = torch.cat(last) if len(last) > 1 else last[0]
        logits = self._transformer.logits(hidden)
        followers = [admission for admission in admissions if admission.shared]
        if followers:
            sources = [admissions[admission.leader].slot for admission in followers]
            longest = max(admission.length for admission in followers)
            self._cache.copy_prefix(sources, [admission.slot for admission in followers], longest)
        rows = [row_of[admission.leader] for admission in admissions]
        if rows == list(range(len(row_of))):
            return logits
        return logits[torch.tensor(rows, device=logits.device)]

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
