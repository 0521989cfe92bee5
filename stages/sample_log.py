"""`samples.jsonl` in the run directory: a few rollouts of the run as people read them, with how each group ended.

The train stage writes groups that it trained or refused; the group stage writes groups that it filtered or failed.
One line is one sequence of a rollout.

Invariants:
- a writer holds the file's lock for one append and first cuts off an unfinished line of a killed writer, so that every
  line is whole;
- the file exceeds `--samples-max-mb` by at most one batch, and covers the whole run: the steps between two written ones
  double with each sixteenth of the file that is full;
- a resumed run drops lines after the step that it resumes from;
- a full disk costs samples, not the run.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType

from configs.schema import Config
from stages.chat.messages import TokenizerError
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.messages import Outcome, Prefix, PromptGroup, RolloutSlice, Sample, Status
from stages.rollouts import rollouts, runs_of, trained_mask
from stages.tools.tool import shortened

log = logging.getLogger("sluice.samples")

SAMPLES_FILE: Final = "samples.jsonl"
TEXT_CHARS: Final = 65_536  # of one turn
DECIMALS: Final = 4  # of log-probs and advantages

Run = tuple[int, int]  # value, tokens
# Of a group's sequences by its id, in the order of `rollouts`; of no group where the trainer makes them.
Advantages = Mapping[int, Sequence[float]]
LogProbs = Mapping[int, Sequence[npt.NDArray[np.float32]]]


class TurnRow(Struct, frozen=True, omit_defaults=True):
    """One part of a sequence: text of the model, or text given to it."""

    role: Literal["model", "observation"]
    tokens: int
    text: str
    reward: float | None = None


class SampleRow(Struct, frozen=True, kw_only=True):
    """One line: a sequence of T tokens, and what became of it."""

    step: int  # that trained its group, or that was the newest when the group ended otherwise
    outcome: Outcome
    detail: str = ""  # why it was not trained
    group: int
    index: int  # of the rollout in its group
    sequence: int = 0
    sequences: int = 1
    prefix: Prefix | None = None
    prompt_index: int = 0
    label: str | None = None
    status: Status
    error: str | None = None
    reward: float | None  # of the rollout
    raw_reward: float | None = None
    is_correct: bool | None = None
    removed: bool = False
    prompt: str
    turns: tuple[TurnRow, ...]
    prompt_tokens: int
    response_tokens: int
    loss_mask: tuple[Run, ...]  # over T, as (0 or 1, tokens)
    versions: tuple[Run, ...]  # over T, as (version, tokens); -1: by no weights of the run
    ids: tuple[int, ...]  # T
    # Absent where they are unknown. Over T; null for a token that is not trained.
    log_probs: tuple[float | None, ...] | UnsetType = UNSET  # of the policy that made the token
    train_log_probs: tuple[float | None, ...] | UnsetType = UNSET  # of the trainer, with which the batch began
    advantages: tuple[tuple[float | None, int], ...] | UnsetType = UNSET  # as (value, tokens)


def stretches(sample: Sample) -> list[tuple[Literal["model", "observation"], int, int]]:
    """(role, start, end) of what follows the prompt: tokens that weights of the run made, and others, in turns."""
    spans = [(version >= 0, max(start, sample.prompt_length), end) for version, start, end in sample.spans()]
    filled = [span for span in spans if span[1] < span[2]]
    turns = [list(turn) for _, turn in groupby(filled, key=itemgetter(0))]
    return [("model" if turn[0][0] else "observation", turn[0][1], turn[-1][2]) for turn in turns]


class SampleLog:
    """One writer. `start_step`: where a resumed run begins, given by the writer that knows it."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        observe = config.observe
        self.path = run_dir / SAMPLES_FILE
        self._every = observe.samples_interval if config.train.loss_type != "sft_loss" else 0
        self._groups, self._limit = observe.samples_groups, observe.samples_max_mb * 1e6
        self._checkpoint = config.train.hf_checkpoint
        functions = (config.rollout.custom_generate_function_path, config.rollout.rollout_function_path)
        self._row_is_task = bool(config.environment or any(functions))  # and what the model reads is made from it
        self._tokenizer: Tokenizer | None = None
        self._period, self._left = -1, 0  # of the groups that were not trained
        self._warned = False

    def wanted(self, step: int) -> int:
        """How many groups of batch `step` (1 = the first) will be written."""
        interval = self._interval()
        return self._groups if interval and (step == 1 or step % interval == 0) else 0

    async def trained(
        self, step: int, groups: Sequence[RolloutSlice], advantages: Advantages, log_probs: LogProbs
    ) -> None:
        """After batch `step` was trained: write its first groups, if it is its turn, before others those with
        `log_probs` of the trainer."""
        chosen = sorted(groups, key=lambda one: (one.group.group_id not in log_probs, one.group.group_id))
        if chosen := chosen[: self.wanted(step)]:
            await asyncio.to_thread(self._write, step, chosen, "trained", "", advantages, log_probs)

    async def ended(self, step: int, group: RolloutSlice, outcome: Outcome, detail: str) -> None:
        """A group ended untrained after `step` batches: write it unless enough were written in this interval."""
        interval = self._interval()
        if not interval or group.group.purpose != "train":
            return
        if step // interval != self._period:
            self._period, self._left = step // interval, self._groups
        if self._left > 0:
            self._left -= 1
            await asyncio.to_thread(self._write, step, [group], outcome, detail, {}, {})

    def _interval(self) -> int:
        """Steps between two that are written, 0 for none."""
        if not self._every:
            return 0
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        sixteenths = math.floor(16 * size / self._limit)
        return 0 if sixteenths >= 16 else self._every * 2**sixteenths

    def _write(
        self,
        step: int,
        groups: Sequence[RolloutSlice],
        outcome: Outcome,
        detail: str,
        advantages: Advantages,
        log_probs: LogProbs,
    ) -> None:
        encoder = msgspec.json.Encoder()
        lines = []
        for slice_ in groups:
            values = iter(advantages.get(slice_.group.group_id, ()))
            current = iter(log_probs.get(slice_.group.group_id, ()))
            for parts in rollouts(slice_.samples):
                for sample in parts:
                    row = self._row(slice_.group, parts, sample, step, outcome, detail)
                    if (value := next(values, None)) is not None:  # of each trained token
                        value = round(value, DECIMALS)
                        runs = tuple((value if trained else None, n) for trained, n in runs_of(trained_mask(sample)))
                        row = msgspec.structs.replace(row, advantages=runs)
                    if (scored := next(current, None)) is not None:
                        given = [*[0.0] * (len(sample.token_ids) - len(scored)), *scored.tolist()]
                        row = msgspec.structs.replace(row, train_log_probs=_of_trained(given, sample))
                    lines.append(encoder.encode(row))
        try:
            with _locked(self.path) as file:
                _append(file, b"".join(line + b"\n" for line in lines))
        except FileNotFoundError:
            return  # there is no run directory on this host
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written (%s): samples are left out", self.path, error)
            self._warned = True

    def _row(
        self, group: PromptGroup, parts: Sequence[Sample], sample: Sample, step: int, outcome: Outcome, detail: str
    ) -> SampleRow:
        last = parts[-1]
        ids = sample.token_ids
        whole = len(ids) == len(sample.loss_mask) == len(sample.log_probs)  # not of a group that failed for it
        prompt = "" if self._row_is_task else group.prompt
        own = {name: getattr(sample, name) for name in ("index", "sequence", "sequences", "prefix", "status", "error")}
        return SampleRow(
            **own,
            step=step,
            outcome=outcome,
            detail=detail,
            group=group.group_id,
            prompt_index=group.prompt_index,
            label=group.label,
            reward=_finite(last.reward),
            raw_reward=_finite(last.raw_reward),
            is_correct=last.is_correct,
            removed=sample.remove_sample,
            prompt=shortened(prompt or self._text(ids[: sample.prompt_length]) or group.prompt, TEXT_CHARS),
            turns=self._turns(sample),
            prompt_tokens=sample.prompt_length,
            response_tokens=sample.response_length,
            loss_mask=tuple(runs_of(sample.loss_mask)),
            versions=tuple((run.version, run.n_tokens) for run in sample.version_runs),
            ids=tuple(ids.tolist()),
            log_probs=_of_trained(sample.log_probs.tolist(), sample) if whole else UNSET,
        )

    def _turns(self, sample: Sample) -> tuple[TurnRow, ...]:
        found = stretches(sample)
        alone = len(found) == 1
        return tuple(
            TurnRow(
                role,
                end - start,
                shortened(sample.response if alone else self._text(sample.token_ids[start:end]), TEXT_CHARS),
                _sum([turn.reward for turn in sample.turn_rewards if start < turn.end <= end]),
            )
            for role, start, end in found
        )

    def _text(self, ids: npt.NDArray[Any]) -> str:
        """Loads the tokenizer at its first use, which a run of single turns never comes to."""
        try:
            self._tokenizer = self._tokenizer or load_tokenizer(self._checkpoint)
            return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        except TokenizerError:
            return ""


def drop_after(run_dir: Path, step: int) -> None:
    """Remove what a run wrote after this step: it is resumed from there, and the rest never happened."""
    try:
        with _locked(run_dir / SAMPLES_FILE) as file:
            os.lseek(file, 0, os.SEEK_SET)
            with os.fdopen(os.dup(file), "rb") as reading:
                kept = b"".join(line for line in reading if line.endswith(b"\n") and _step(line) <= step)
            if len(kept) != os.fstat(file).st_size:
                os.ftruncate(file, 0)
                _append(file, kept)
    except OSError as error:
        log.warning("the samples of %s cannot be put back to step %d (%s)", run_dir, step, error)


class _Step(Struct):
    step: int


def _step(line: bytes) -> float:
    """The step of a line; infinite for a line of unknown format, which is dropped."""
    try:
        return msgspec.json.decode(line, type=_Step).step
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return math.inf


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending, under a lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _append(file: int, data: bytes) -> None:
    """All of it or, where the disk is full, nothing."""
    end = _whole_lines(file)
    if end != os.fstat(file).st_size:
        os.ftruncate(file, end)
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, end)
        raise


def _whole_lines(file: int) -> int:
    """Bytes up to the last newline; what follows it is the torn line of a writer that was killed."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - 65_536, 0)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _of_trained(values: Sequence[float], sample: Sample) -> tuple[float | None, ...]:
    """[T], null for a token that is not trained."""
    pairs = zip(values, sample.loss_mask.tolist(), strict=True)
    return tuple(round(value, DECIMALS) if trained else None for value, trained in pairs)


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _sum(rewards: Sequence[float]) -> float | None:
    return sum(rewards) if rewards else None
