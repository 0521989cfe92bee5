"""Prompts that do not come from the prompt files alone: a user's data source, and demonstrations for supervised
training.

A data source (`--data-source-path`) is called as slime calls it: get_samples, save, load. It is called ahead of the
ledger, in a thread. Each of its prompts gets a position in the order of arrival and is kept until its group is
settled:
a checkpoint holds it beside the source's own state. A demonstration is the label of a row, written as a rollout.

Invariants:
- a position has one prompt, also after a resume; the saved state of the source and the kept prompts belong to the
  same moment, so a resumed run gets the prompts that the first run would have got next;
- a demonstration ends with one end-of-sequence token; text that a tool wrote in it (`metadata.tool_spans`, in
  characters) is present and has loss mask 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from configs.schema import Config
from configs.sources import normal_import_path, trusted_functions
from models.import_path import import_path
from stages.data.prompt_set import PreparedPrompt, Preparer
from stages.data.rows import BadValue, LoadReport, RowKeys, parse_row
from stages.errors import DataSourceError
from stages.messages import (
    Float32Array,
    Int32Array,
    PromptGroup,
    RolloutSlice,
    Sample,
    UInt8Array,
    VersionRun,
    wire,
    without_prompt,
)
from stages.prompts.ledger import DrawnRow
from stages.prompts.prompt_order import PromptOrder
from stages.slime.types import slime_arguments

Encode = Callable[[str], list[int]]


def demonstration(
    group: PromptGroup, prompt: PreparedPrompt, version: int, *, eos_id: int | None, encode: Encode | None
) -> RolloutSlice:
    """A complete group with one sample. `encode` gives the ids of a text, for the spans of tools."""
    text, ids = prompt.label or "", prompt.label_ids.tolist()
    if eos_id is not None and ids[-1:] != [eos_id]:
        ids.append(eos_id)
    before = len(prompt.prompt_ids)
    mask = np.ones(len(ids), dtype=np.uint8)
    if encode is not None:
        for start, end in group.row_metadata.get("tool_spans", ()):
            mask[len(encode(text[:start])) : len(encode(text[:end]))] = 0
    sample = Sample(
        index=0,
        status="completed",
        response=text,
        token_ids=wire([*prompt.prompt_ids.tolist(), *ids], Int32Array),
        prompt_length=before,
        loss_mask=wire([*([0] * before), *mask], UInt8Array),
        log_probs=wire(np.zeros(before + len(ids)), Float32Array),
        version_runs=(VersionRun(-1, before), VersionRun(version, len(ids))),
        reward=0.0,
    )
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
        self._members, self._prepare, self._encode, self._limit = (
            config.rollout.n_samples_per_prompt, prepare, encode, limit
        )  # fmt: skip
        self._keys = RowKeys("prompt", "label", "metadata", "tools", trusted_functions(config))
        self._rows: dict[int, PreparedPrompt] = {}
        self._next = 0  # position of what the source gives next
        self._asking = asyncio.Lock()
        directory.mkdir(exist_ok=True)
        where = str(directory)
        self._source = self._called("__init__", lambda: import_path(self.path)(self._arguments(config, where)))
        self._length = int(self._called("__len__", lambda: len(self._source)))

    def _arguments(self, config: Config, directory: str) -> object:
        return slime_arguments(config, save=directory, load=directory)

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
        self._next = max([cursor, *(position + 1 for position in rows)])

    @property
    def reached(self) -> int:
        """The first position that is not there yet."""
        return self._next

    async def reach(self, position: int) -> None:
        """Ask the source until it has given all positions before this one. Waits for it."""
        async with self._asking:
            while self._next < position:
                wanted = position - self._next
                ask = partial(self._source.get_samples, wanted)
                rows = [self._row(group) for group in await asyncio.to_thread(self._called, "get_samples", ask)]
                if not rows:
                    raise DataSourceError(
                        f"{self.path}.get_samples({wanted}) gave no group; a source goes on for as long as the run "
                        "does: begin again with the first row, or set a lower --num-rollout"
                    )
                for row in rows:
                    self._rows[self._next] = row
                    self._next += 1

    async def save(self, step: int) -> None:
        """Have the source save its state after `step` batches; `kept`, called right behind, is of the same moment."""
        async with self._asking:
            await asyncio.to_thread(self._called, "save", lambda: self._source.save(step - 1))

    def kept(self) -> dict[int, DrawnRow]:
        """All rows whose group has not ended."""
        return {
            position: DrawnRow(row.prompt, row.label, row.metadata, row.tools) for position, row in self._rows.items()
        }

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

    def _called(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except DataSourceError:
            raise
        except Exception as error:
            raise DataSourceError(
                f"--data-source-path {self.path}: {name} raised {type(error).__name__}: {error}"
            ) from error
