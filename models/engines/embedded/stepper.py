"""Continuous batching, one step at a time: admit and prefill what fits, then decode all. It has no thread.

Invariants:
- tokens of a step are made by the weights, and stamped with the label, that stand at the step's beginning: nothing
  changes weights inside a step, so a version boundary is exact;
- a swap starts a new weights generation, and no prefix crosses generations, whatever the caller flushes;
- first in, first out: a retracted request returns to the head of the queue, with its output kept.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from models.engines.core import ABORTED, Completion, Totals
from models.engines.embedded.batch import Prefill, SamplingBatch, draw, forbid, plan
from models.engines.embedded.kv_cache import KVCache, SlotTable
from models.engines.embedded.transformer import Transformer
from models.engines.protocol import FinishReason, PauseMode
from models.engines.text import TextCodec, find_stop, tail_tokens

RECORD_AFTER: Final = 8  # steps of a shape before it is recorded, which takes as long as two or three of them
MOST_RECORDED: Final = 32  # shapes


@dataclass(frozen=True)
class _Batch:
    """What stays the same in a decode batch of R rows until its members change."""

    slots: torch.Tensor | slice  # of the rows
    rows: npt.NDArray[np.int64] | slice  # rows of the active slots
    kept: torch.Tensor | None  # the same on the device; None: all rows
    idle: npt.NDArray[np.int64]  # [3, R] token, position and place of rows that have nothing to do
    first: npt.NDArray[np.int64]  # [active] place of position 0
    held_back: bool  # some response must not stop yet
    sampling: SamplingBatch


class Stepper:
    """The single-threaded core of the embedded engine."""

    def __init__(
        self, transformer: Transformer, cache: KVCache, table: SlotTable, codec: TextCodec, label: str
    ) -> None:
        self._transformer, self._cache, self._table, self._codec = transformer, cache, table, codec
        self._prefill = Prefill(transformer, cache)
        self._waiting: deque[Completion] = deque()
        self._watched: set[int] = set()  # slots that stream or look for a stop string
        self._batch: tuple[npt.NDArray[np.int64], _Batch] | None = None
        self._progressed: list[Completion] = []
        self._generation = 0
        self.label = label
        self.paused = False
        self.holding = False  # admit nothing: an update waits for the running requests
        self.totals = Totals()
        # On a GPU a step's kernels, twenty a layer, take longer to start than to run: recorded, they start as one.
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._uses: Counter[tuple[int, int]] = Counter()

    @property
    def running(self) -> int:
        return len(self._table.owners)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        return self._table.used_tokens

    @property
    def has_work(self) -> bool:
        return not self.paused and bool(self._table.owners or (self._waiting and not self.holding))

    def submit(self, completions: Iterable[Completion]) -> None:
        self._waiting.extend(completions)

    def cancel(self, completions: Sequence[Completion]) -> None:
        """End completions as aborted, with their output so far."""
        doomed = {id(c) for c in completions if c.finish is None}
        if not doomed:
            return
        for slot in [slot for slot, c in self._table.owners.items() if id(c) in doomed]:
            self._finish(slot, ABORTED)
        for completion in [c for c in self._waiting if id(c) in doomed]:
            self._close(completion, ABORTED)
        self._waiting = deque(c for c in self._waiting if id(c) not in doomed)

    def cancel_all(self) -> None:
        self.cancel([*self._table.owners.values(), *self._waiting])

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        if mode == "abort":
            self.cancel_all()
        elif mode == "retract":
            self._retract()

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Forget retained prefixes; False if requests are running."""
        if self._table.owners:
            return False
        self._table.flush()
        self._forget_recorded()
        return True

    def swap(self, change: Callable[[], object], label: str | None) -> None:
        """Change the weights between two steps. If `change` raises, nothing has changed."""
        change()
        self._forget_recorded()
        self._generation += 1
        self._table.flush()
        if label is not None:
            self.relabel(label)

    def relabel(self, label: str) -> None:
        """Call the weights `label` from the next token on."""
        self.label = label
        for slot, completion in self._table.owners.items():
            completion.mark_version(label, int(self._table.length[slot]) - completion.prompt_tokens)

    def take_progressed(self) -> list[Completion]:
        """Completions that finished, or progressed while streaming, since the last call."""
        progressed, self._progressed = self._progressed, []
        return progressed

    def step(self) -> None:
        """Admit, prefill, decode. Requests that finish are in `take_progressed`."""
        self.totals.engine_steps += 1
        with torch.inference_mode():
            if self._waiting and not self.holding and self._table.free:
                self._admit()
            if self._table.owners:
                self._decode()

    def _admit(self) -> None:
        admissions = plan(self._waiting, self._table, self._generation)
        now = time.monotonic()
        for admission in admissions:
            completion = admission.completion
            completion.admitted_s = completion.admitted_s or now
            completion.mark_version(self.label, len(completion.output_ids))
            self.totals.prompt_tokens += admission.length
            self.totals.cached_tokens += admission.cached
            self.totals.computed_prompt_tokens += 0 if admission.shared else admission.length - admission.start
            if completion.stream or completion.stop_strings:
                self._watched.add(admission.slot)
        logits = self._prefill.run(admissions)
        self._batch = None
        for admission in admissions:
            if not admission.completion.max_new:  # it is scored, and wants no token
                self._finish(admission.slot, FinishReason(type="length", length=0))
        sampled = [index for index, admission in enumerate(admissions) if admission.completion.max_new]
        if len(sampled) < len(admissions):
            logits = logits[torch.tensor(sampled, dtype=torch.int64, device=logits.device)]
        if sampled:
            chosen = [admissions[index] for index in sampled]
            slots = np.array([admission.slot for admission in chosen], dtype=np.int64)
            batch = SamplingBatch.of([admission.completion for admission in chosen], self._cache.device)
            drawn = self._draw(logits, slots, batch)
            now = time.monotonic()
            for admission in chosen:
                admission.completion.first_token_s = admission.completion.first_token_s or now
            self._emit(slots, drawn)

    def _decode(self) -> None:
        slots = self._table.active
        batch = self._batch_of(slots)
        positions = self._table.length[slots] - 1
        host = batch.idle.copy()
        host[0, batch.rows] = self._table.tokens[slots, positions]
        host[1, batch.rows] = positions
        host[2, batch.rows] = batch.first + positions
        hidden = self._hidden(torch.from_numpy(host), batch.slots, self._cache.rounded(int(positions.max()) + 1))
        if batch.kept is not None:
            hidden = hidden.index_select(0, batch.kept)
        logits = self._transformer.logits(hidden)
        self._emit(slots, self._draw(logits, slots, batch.sampling, batch.held_back))

    def _hidden(self, inputs: torch.Tensor, slots: torch.Tensor | slice, keys: int) -> torch.Tensor:
        """Hidden states [R, hidden] of the tokens, positions and places `inputs` [3, R], which lie on the host."""
        device = self._cache.device
        shape = inputs.shape[1], keys
        if device.type != "cuda" or not isinstance(slots, slice):
            return self._forward(inputs.to(device, non_blocking=True), slots, keys)
        if shape not in self._recorded:
            self._uses[shape] += 1
            here = inputs.to(device, non_blocking=True)
            if self._uses[shape] <= RECORD_AFTER:
                return self._forward(here, slots, keys)
            if len(self._recorded) == MOST_RECORDED:
                self._recorded.pop(next(iter(self._recorded)))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                made = self._forward(here, slots, keys)
            self._recorded[shape] = graph, here, made
        graph, here, made = self._recorded[shape]
        here.copy_(inputs, non_blocking=True)
        graph.replay()
        return made

    def _forward(self, inputs: torch.Tensor, slots: torch.Tensor | slice, keys: int) -> torch.Tensor:
        token_ids, seen, places = inputs.unbind()
        return self._transformer.hidden(token_ids, seen, self._cache.decode(places, slots, seen, keys))

    def _forget_recorded(self) -> None:
        """What was recorded reads the weights and the cache of that time, wherever they lay."""
        self._recorded.clear()
        self._uses.clear()

    def _batch_of(self, slots: npt.NDArray[np.int64]) -> _Batch:
        """The decode batch of these slots: a plain slice of the cache if half of that is in use, else gathered."""
        if self._batch is not None and self._batch[0] is slots:
            return self._batch[1]
        device, first, span = self._cache.device, int(slots[0]), int(slots[-1] - slots[0]) + 1
        if device.type == "cuda":  # few shapes
            first, span = 0, min(1 << int(slots[-1]).bit_length(), self._table.slots)
        rows: npt.NDArray[np.int64] | slice = slice(None)
        kept: torch.Tensor | None = None
        if 2 * len(slots) <= span:
            used: torch.Tensor | slice = torch.from_numpy(slots).to(device)
            of_rows = slots
        else:
            used, of_rows = slice(first, first + span), np.arange(first, first + span)
            if len(slots) < span:
                rows = slots - first
                kept = torch.from_numpy(rows).to(device)
        # Idle rows of the slice compute garbage at position 0 and store it in the scratch position.
        idle = np.zeros((3, len(of_rows)), dtype=np.int64)
        idle[2] = of_rows * self._cache.slot_stride + self._cache.scratch
        batch = _Batch(
            slots=used,
            rows=rows,
            kept=kept,
            idle=idle,
            first=slots * self._cache.slot_stride,
            held_back=self._table.forbidden(slots) is not None,
            sampling=SamplingBatch.of([self._table.owners[slot] for slot in slots.tolist()], device),
        )
        self._batch = (slots, batch)
        return batch

    def _draw(
        self, logits: torch.Tensor, slots: npt.NDArray[np.int64], batch: SamplingBatch, held_back: bool = True
    ) -> npt.NDArray[np.float64]:
        forbidden = self._table.forbidden(slots) if held_back else None
        if forbidden is not None:
            logits = logits.clone()
            forbid(logits, *forbidden)
        drawn: npt.NDArray[np.float64] = draw(logits, batch, self._table.length[slots]).cpu().numpy()
        return drawn

    def _emit(self, slots: npt.NDArray[np.int64], drawn: npt.NDArray[np.float64]) -> None:
        """Store a sampled token for each slot and finish completed responses."""
        tokens = drawn[0].astype(np.int64)
        stopped, full = self._table.append(slots, tokens, drawn[1])
        self.totals.generation_tokens += len(slots)
        for index in np.flatnonzero(stopped | full).tolist():
            slot = int(slots[index])
            matched: int | str | None = int(tokens[index])
            if not stopped[index]:
                matched = self._stop_string(slot) if slot in self._watched else None
            if matched is None:
                self._finish(slot, FinishReason(type="length", length=self._table.owners[slot].max_new))
            else:
                self._finish(slot, FinishReason(type="stop", matched=matched))
        if self._watched:
            self._watch(slots, drawn)

    def _watch(self, slots: npt.NDArray[np.int64], drawn: npt.NDArray[np.float64]) -> None:
        for index, slot in enumerate(slots.tolist()):
            if slot not in self._watched:
                continue
            matched = self._stop_string(slot)
            if matched is not None:
                self._finish(slot, FinishReason(type="stop", matched=matched))
                continue
            completion = self._table.owners[slot]
            if completion.stream:
                completion.output_ids.append(int(drawn[0, index]))
                completion.log_probs.append(float(drawn[1, index]))
                if (len(completion.output_ids) - 1) % completion.stream_interval == 0:
                    self._progressed.append(completion)

    def _stop_string(self, slot: int) -> str | None:
        """The stop string that the newest token completed."""
        completion = self._table.owners[slot]
        length = int(self._table.length[slot])
        if not completion.stop_strings or length <= self._table.floor[slot]:
            return None
        start = max(completion.prompt_tokens, length - tail_tokens(completion.stop_strings))
        tail = self._codec.decode(self._table.tokens[slot, start:length].tolist(), completion.rule.skip_special_tokens)
        return find_stop(tail, completion.stop_strings)

    def _retract(self) -> None:
        for slot in reversed(self._table.active.tolist()):
            completion = self._table.release(slot)
            completion.retractions += 1
            self.totals.num_retractions += 1
            self._waiting.appendleft(completion)
        self._watched.clear()
        self._batch = None
        self._table.flush()

    def _finish(self, slot: int, reason: FinishReason) -> None:
        completion = self._table.release(slot)
        self._watched.discard(slot)
        self._batch = None
        self._close(completion, reason)

    def _close(self, completion: Completion, reason: FinishReason) -> None:
        self.totals.num_requests += 1
        self.totals.num_aborted_requests += reason.type == "abort"
        completion.close(reason)
        self._progressed.append(completion)
