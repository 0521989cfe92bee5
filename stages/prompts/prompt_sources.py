"""Which prompt comes next: the order of visits, the curriculum that skips some, and a user's data source. Also
demonstrations for supervised training.

The order is a function of (seed, epoch) with random access. Positions 0, 1, 2, ... run through the epochs; each epoch
is a permutation of all prompts, or with --prompt-data-weights of those of one source. The curriculum keeps a moving
average of each prompt's pass rate. While it lies outside [low, high], the prompt is visited only with probability
`keep`.

A data source (`--data-source-path`) is called as slime calls it: get_samples, save, load. It is called ahead of the
ledger, in a thread. Each of its prompts gets a position in the order of arrival and is kept until its group is settled:
a checkpoint holds it beside the source's own state. A demonstration is the label of a row, written as a rollout.

Invariants:
- `index(position)` depends only on (n, seed, shuffle, position), so the resumable cursor is the position itself. The
  hash is written out here, so that a resumed run meets the same order under another numpy version;
- the draw of a visit depends only on (seed, epoch, position), so that a resumed run repeats it;
- a prompt without a known pass rate is always visited, every other one with a probability above 0;
- a search skips at most one epoch of positions, then takes the next prompt;
- a position has one prompt, also after a resume; the saved state of the source and the kept prompts belong to the
  same moment, so a resumed run gets the prompts that the first run would have got next;
- a demonstration ends with one end-of-sequence token; text that a tool wrote in it (`metadata.tool_spans`, in
  characters) is present and has loss mask 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from configs.schema import Config, DataConfig
from models.engines.noise import GOLDEN, mix64, mix_array
from models.import_path import import_path, raised
from models.slime_arguments import slime_arguments
from stages.base import in_daemon_thread
from stages.data.prepare import PreparedPrompt, Preparer
from stages.data.prompt_set import PromptSet
from stages.data.rows import BadValue, LoadReport, RowKeys, parse_row, trusted_functions
from stages.errors import DataSourceError, EmptyDataError
from stages.graders.registry import normal_import_path
from stages.messages import Int32Array, PromptGroup, RolloutSlice, VersionRun, wire, without_prompt
from stages.prompts.ledger import DrawnRow
from stages.rollouts import new_sample, with_tokens


def _permutation(n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[n] prompt indices of one epoch: the indices sorted by a keyed hash of themselves."""
    key = mix64(mix64(seed) ^ epoch)
    keys = mix_array((np.arange(n, dtype=np.uint64) ^ np.uint64(key)) + GOLDEN)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


class PromptOrder:
    """Maps a position in the endless run over the prompts to (epoch, prompt index)."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError(f"the order needs at least one prompt, got n = {n}")
        self.n, self.shuffle = n, shuffle
        # Two epochs: around an epoch's end, requeued prompts of the old one interleave with the new one.
        self._of_epoch = lru_cache(maxsize=2)(partial(_permutation, n, seed))

    def index(self, position: int) -> tuple[int, int]:
        """(epoch, prompt index) at a position >= 0. The first call of an epoch costs O(n log n), the others O(1)."""
        epoch, offset = divmod(position, self.n)
        if not self.shuffle:
            return epoch, offset
        return epoch, int(self._of_epoch(epoch)[offset])


CYCLE: Final = 1000


class WeightedOrder(PromptOrder):
    """Several sources, visited in shares. Each has epochs of its own, so a small one comes round more often.

    Which source is visited is a cycle of about 1000 positions, in which each has its share, evenly spread: the one that
    is furthest behind its share is next.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        """`sizes`: usable rows of each source. Raises EmptyDataError for a source without any."""
        if 0 in sizes:
            raise EmptyDataError(f"source {sizes.index(0) + 1} of --prompt-data has a weight, but no usable row")
        super().__init__(sum(sizes), seed, shuffle)
        self._orders = [PromptOrder(n, seed + place, shuffle) for place, n in enumerate(sizes)]
        self._starts = np.cumsum([0, *sizes[:-1]]).tolist()
        counts = np.maximum(1, np.rint(CYCLE * np.array(weights) / sum(weights))).astype(np.int64)
        self._counts, behind = counts.tolist(), np.zeros(len(sizes), np.int64)
        self._cycle: list[tuple[int, int]] = []  # (source, its visits before) at each position
        seen = [0] * len(sizes)
        for _ in range(counts.sum()):
            behind += counts
            source = int(behind.argmax())
            behind[source] -= counts.sum()
            self._cycle.append((source, seen[source]))
            seen[source] += 1

    def index(self, position: int) -> tuple[int, int]:
        """(Epoch of its source, prompt index)."""
        cycles, place = divmod(position, len(self._cycle))
        source, before = self._cycle[place]
        epoch, index = self._orders[source].index(cycles * self._counts[source] + before)
        return epoch, self._starts[source] + index


WEIGHT = 0.5  # of the newest pass rate in the average: rates move as the policy learns


class PassRateCurriculum:
    """Pass rates by prompt index, and which visits are left out."""

    def __init__(self, data: DataConfig, order: PromptOrder, rates: Mapping[int, float] | None = None) -> None:
        self.on = data.curriculum == "pass_rate"
        self._data, self._order = data, order
        self.rates: dict[int, float] = dict(rates or {})

    def observe(self, index: int, pass_rate: float | None) -> None:
        """Record the pass rate of a graded group; None is no information."""
        if not self.on or pass_rate is None:
            return
        before = self.rates.get(index, pass_rate)
        self.rates[index] = before + WEIGHT * (pass_rate - before)

    def skips(self, position: int) -> bool:
        """Whether the visit at this position of the order is left out."""
        epoch, index = self._order.index(position)
        rate = self.rates.get(index)
        if rate is None or self._data.curriculum_low <= rate <= self._data.curriculum_high:
            return False
        draw = mix64(mix64(mix64(self._data.rollout_seed) ^ epoch) ^ position)
        return draw / 2**64 >= self._data.curriculum_keep

    def next_position(self, cursor: int) -> int:
        """The first position from `cursor` on whose visit takes place."""
        if not self.on:
            return cursor
        positions = range(cursor, cursor + self._order.n)
        return next((position for position in positions if not self.skips(position)), positions.stop)


Encode = Callable[[str], list[int]]


def demonstration(
    group: PromptGroup, prompt: PreparedPrompt, version: int, *, eos_id: int | None, encode: Encode | None
) -> RolloutSlice:
    """A complete group with one sample. `encode` gives the ids of a text, for the spans of tools."""
    text, ids = prompt.label or "", prompt.label_ids.tolist()
    if eos_id is not None and ids[-1:] != [eos_id] and not prompt.ended:
        ids.append(eos_id)
    mask = np.ones(len(ids), dtype=np.uint8)
    if encode is not None:
        for start, end in group.row_metadata.get("tool_spans", ()):
            mask[len(encode(text[:start])) : len(encode(text[:end]))] = 0
    runs = (VersionRun(version, len(ids)),)
    sample = with_tokens(new_sample(prompt.prompt_ids, 0), text, ids, mask, np.zeros(len(ids)), runs)
    sample = msgspec.structs.replace(sample, status="completed", reward=0.0)
    return RolloutSlice(without_prompt(group), (sample,))


class DrawnOrder(PromptOrder):
    """Positions are the prompts' own numbers."""

    def index(self, position: int) -> tuple[int, int]:
        return position // self.n, position


class DrawnPrompts:
    """Prompts by position. Raises DataSourceError for whatever is wrong with the source."""

    def __init__(
        self, config: Config, directory: Path, prepare: Preparer, encode: Callable[[str], list[int]], limit: int | None
    ) -> None:
        """
        Args:
            directory: where the source saves its state: `args.save` and `args.load`.
            limit: most tokens of a prompt.
        """
        self.path = config.data.data_source_path or ""
        self.report, self.fingerprint = LoadReport(), f"--data-source-path {self.path}"
        self._members = config.rollout.n_samples_per_prompt
        self._prepare, self._encode, self._limit = prepare, encode, limit
        self._keys = RowKeys("prompt", "label", "metadata", "tools", trusted_functions(config))
        self._rows: dict[int, PreparedPrompt] = {}
        self.reached = 0  # the first position that is not there yet
        self._asking = asyncio.Lock()
        directory.mkdir(exist_ok=True)
        arguments = slime_arguments(config, save=str(directory), load=str(directory))
        self._source = self._called("__init__", lambda: import_path(self.path)(arguments))
        self._length = int(self._called("__len__", lambda: len(self._source)))

    def __len__(self) -> int:
        return self._length

    def get(self, position: int) -> PreparedPrompt:
        return self._rows[position]

    def forget(self, position: int) -> None:
        """The group of a position is settled: its prompt is not needed again."""
        self._rows.pop(position, None)

    def resume(self, rows: Mapping[int, DrawnRow], cursor: int, step: int) -> None:
        """Go on from the checkpoint of `step`: with its rows, the first one that is not admitted at `cursor`."""
        self._called("load", lambda: self._source.load(step - 1))
        for position, row in rows.items():
            ids = wire(self._encode(row.prompt), Int32Array)
            self._rows[position] = PreparedPrompt(row.prompt, ids, row.label, row.metadata, row.tools)
        self.reached = max([cursor, *(position + 1 for position in rows)])

    async def reach(self, position: int) -> None:
        """Ask the source until it has given all positions before this one. Waits for it."""
        async with self._asking:
            while self.reached < position:
                wanted = position - self.reached
                ask = partial(self._source.get_samples, wanted)
                groups = await self._in_thread("get_samples", ask)
                if not isinstance(groups, list | tuple):
                    raise DataSourceError(
                        f"--data-source-path {self.path}: get_samples returned {type(groups).__name__}; return a list "
                        "of groups, each a list of samples"
                    )
                rows = [self._row(group) for group in groups]
                if not rows:
                    raise DataSourceError(
                        f"{self.path}.get_samples({wanted}) gave no group; a source goes on for as long as the run "
                        "does: begin again with the first row, or set a lower --num-rollout"
                    )
                for row in rows:
                    self._rows[self.reached] = row
                    self.reached += 1

    async def save(self, step: int) -> None:
        """Have the source save its state after `step` batches; `kept`, called right behind, is of the same moment."""
        async with self._asking:
            await self._in_thread("save", lambda: self._source.save(step - 1))

    def kept(self) -> dict[int, DrawnRow]:
        """All rows whose group has not ended."""
        return {at: DrawnRow(row.prompt, row.label, row.metadata, row.tools) for at, row in self._rows.items()}

    def _row(self, group: Any) -> PreparedPrompt:
        """One group of samples as a prompt; its members are begun by the run, all alike."""
        samples = group if isinstance(group, list | tuple) else [group]
        if len(samples) != self._members:
            raise DataSourceError(
                f"{self.path}.get_samples gave a group of {len(samples)} samples, but --n-samples-per-prompt is "
                f"{self._members}; give as many copies of each prompt"
            )
        first, keys = samples[0], self._keys
        metadata = dict(first.metadata or {})
        row = {"prompt": first.prompt, "label": first.label, "metadata": metadata, "tools": metadata.get("tools", [])}
        function = getattr(first, "generate_function_path", None)
        if function:  # the source's code names it, unlike an entry of the metadata, which may come from its data
            metadata["generate_function_path"] = function
            if keys.trusted is not None:
                keys = msgspec.structs.replace(keys, trusted=keys.trusted | {normal_import_path(function)})
        try:
            prepared = self._prepare(parse_row(row, keys), self._limit)
        except BadValue as error:
            raise DataSourceError(
                f"{self.path}.get_samples gave a sample that is no prompt: {error.reason}; leave such rows out"
            ) from None
        if self._limit is not None and len(prepared.prompt_ids) > self._limit:
            raise DataSourceError(
                f"{self.path}.get_samples gave a prompt of {len(prepared.prompt_ids)} tokens, above the limit of "
                f"{self._limit}; leave such rows out, or raise --rollout-max-context-len"
            )
        return prepared

    async def _in_thread(self, name: str, call: Callable[[], Any]) -> Any:
        """Waits for a method of the source. One that hangs does not keep the process from ending."""
        return await asyncio.wrap_future(in_daemon_thread(partial(self._called, name, call), "data-source"))

    def _called(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DataSourceError:
            raise
        except Exception as error:
            raise DataSourceError(f"--data-source-path {self.path}: {name} raised {raised(error)}") from error


def order_of(data: DataConfig, prompts: PromptSet | DrawnPrompts) -> PromptOrder:
    """The order in which the prompts are visited. Raises EmptyDataError for a weighted source without any."""
    if isinstance(prompts, DrawnPrompts):
        return DrawnOrder(len(prompts), data.rollout_seed, False)
    if not data.prompt_data_weights:
        return PromptOrder(len(prompts), data.rollout_seed, data.rollout_shuffle)
    sizes = [source.kept for source in prompts.report.sources]
    return WeightedOrder(sizes, data.prompt_data_weights, data.rollout_seed, data.rollout_shuffle)
