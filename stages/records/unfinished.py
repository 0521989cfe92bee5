"""Records of unfinished rollouts on the disk: finished turns, partial responses within a turn, answers to agents.

`RUN/episodes/<group>/turns-*.log` has a record for each message with a new turn of the model, for a resume after the
controller was killed: all hubs live in its process. In a resumed run, a rollout that an earlier life had started
continues from its newest recorded turn whose weights are part of the run's history.

`RUN/episodes/<group>/responses-*.log` gets a record of a response for every `--response-journal-tokens` final tokens,
and one at its end. Shorter responses get no record. A turn that starts on another replica or after a resume begins with
the longest record of it, as after the loss of an engine.

Invariants of turns: a record is on the disk before the environment gets its turn; records of the current life are never
read, so an intended restart is complete; records of another message format, sampling or prompt are not restored.

Invariants of responses:
- A restored response follows exactly the tokens with which the turn begins, with this group's prompt, seed and
  settings. Its weights are part of the run's history and within the bound of staleness.
- Nothing waits for a record: if a response grows faster than the disk writes, only its newest state is written.
- Records reach the operating system and are not synced: a machine failure loses the last seconds.

`RUN/episodes/<group>/answers-*.log` has a record for each request of an agent or a generate function that engines
answered (stages/gateway/answers.py). When the rollout's program is started again, after the death of its worker, of its
replica or of the controller, a request that the record has needs no engine. Another request is new; the rest of the
record stays available. A request is known by its content, that is the tokens of its context and what decides the answer
beside them, and by how many requests with this content its session has had before. So the order of concurrent requests
does not matter.

Invariants of answers:
- An answer is on the disk before the client gets it. Disk failures are logged, and the run continues.
- A recorded answer is used whole and unchanged: tokens, log-probs, versions, end. Its weights are part of the run's
  history and within the bound of staleness, as for responses; its prompt, seed and settings are the same.
- The records of a rollout are bounded. Evaluations have none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from msgspec.structs import replace

from configs.schema import Config
from stages.messages import PromptGroup, Sample
from stages.records.growing_records import ANSWERS, RESPONSES, TURNS, GrowingRecords, Key, Kind
from stages.records.once import begun_again, home_of
from stages.sampling.requests import SampleResult

log = logging.getLogger("sluice.agents")

TURN_KIND: Final = Kind(TURNS, Sample, ("token_ids", "loss_mask", "log_probs"), "response", synced=True)


class TurnJournal:
    """The turns of one replica. `lives`: the step from which each life of the run continued; the last is the current
    life.

    A record is a rollout whose last turn has no answer of the environment yet."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = GrowingRecords(directory, TURN_KIND, config, lives)
        self.restored = 0

    async def keep(self, group: PromptGroup, sample: Sample) -> None:
        """Record a rollout with a new turn. A disk failure is logged, and the run continues."""
        if self._records.writes and group.purpose != "eval":
            # extras do not grow with the tokens, so a rollout with extras is written whole each time
            await asyncio.to_thread(self._records.append, group, (sample.index,), sample, grows=not sample.extras)

    async def restore(self, group: PromptGroup, sample: Sample) -> Sample:
        """The rollout with the turns that earlier lives recorded, or unchanged."""
        if len(self._records.lives) < 2 or group.purpose == "eval":
            return sample
        recorded = await asyncio.to_thread(self._read, group, sample.index)
        if recorded is None:
            return sample
        self.restored += 1
        log.info(
            "group %s: rollout %d continues from turn %d of an earlier life", group.key, sample.index, recorded.turns
        )
        return recorded

    def _read(self, group: PromptGroup, index: int) -> Sample | None:
        fitting = (
            sample
            for bound, (rollout,), sample in self._records.read(group, this_life=False)
            if rollout == index and max(sample.model_versions, default=0) <= bound
        )
        return max(fitting, key=lambda sample: sample.turns, default=None)


response_log = logging.getLogger("sluice.generate")

RESPONSE_KIND: Final = Kind(RESPONSES, SampleResult, ("token_ids", "log_probs"), "text", synced=False)


class ResponseJournal:
    """The responses of one replica. `lives` as in `GrowingRecords`; empty: no records are written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = GrowingRecords(directory, RESPONSE_KIND, config, lives)
        self.tokens = config.checkpoint.response_journal_tokens if self._records.writes else 0
        self._reads = bool(lives) and config.checkpoint.response_journal_tokens > 0
        self._due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]] = {}
        self._changed = asyncio.Event()
        self.restored_tokens = 0

    def keep(self, group: PromptGroup, sample: Sample, result: SampleResult) -> None:
        """Queue a record of the partial result of a turn of `sample`."""
        worth = 0 < self.tokens <= len(result.token_ids) and result.finish in ("aborted", "stop", "length")
        if worth and not result.reason and group.purpose == "train":
            self._due[group.key, _turn(sample)] = group, result
            self._changed.set()

    async def run(self) -> None:
        """Write queued records; runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write the queued records."""
        due, self._due = self._due, {}
        await asyncio.to_thread(self._write, due)

    def _write(self, due: dict[tuple[str, Key], tuple[PromptGroup, SampleResult]]) -> None:
        if not self._records.directory.is_dir():
            return  # another host: nothing would ever remove its files
        for (_, turn), (group, result) in due.items():
            self._records.append(group, turn, result, grows=result.finish == "aborted")

    async def restore(self, group: PromptGroup, samples: Sequence[Sample], oldest: int) -> tuple[SampleResult, ...]:
        """Recorded partial results of this turn, one for each sample; empty if there are none at all.

        `oldest`: the oldest version that later batches may train.
        """
        if not self._reads or group.purpose == "eval":
            return ()
        records = await asyncio.to_thread(self._read, group, {_turn(sample) for sample in samples}, oldest)
        if not records:
            return ()
        tokens = sum(len(result.token_ids) for result in records.values())
        self.restored_tokens += tokens
        response_log.info("group %s: %d responses continue after %d recorded tokens", group.key, len(records), tokens)
        return tuple(records.get(_turn(sample), SampleResult()) for sample in samples)

    def _read(self, group: PromptGroup, turns: set[Key], oldest: int) -> dict[Key, SampleResult]:
        best: dict[Key, SampleResult] = {}
        for newest, turn, result in self._records.read(group, this_life=True):
            if turn not in turns or not is_whole(result):
                continue
            versions = [run.version for run in result.runs]
            further = turn not in best or _reach(result) > _reach(best[turn])
            if oldest <= min(versions) and max(versions) <= newest and further:
                best[turn] = result
        return {turn: replace(result, reused_tokens=len(result.token_ids)) for turn, result in best.items()}


def _turn(sample: Sample) -> Key:
    """Rollout, sequence, turn, number of restarts, hash of the tokens."""
    prefix_hash = xxhash.xxh3_64_intdigest(np.ascontiguousarray(sample.token_ids).tobytes())
    return sample.index, sample.sequence, sample.turns, sample.replaced, prefix_hash


def is_whole(result: SampleResult) -> bool:
    n = len(result.token_ids)
    lengths = len(result.log_probs), sum(run.n_tokens for run in result.runs)
    return n > 0 and lengths == (n, n) and result.error is None


def _reach(result: SampleResult) -> tuple[bool, int]:
    """How far a result is: further if it has ended, or if it is longer."""
    return result.finish != "aborted", len(result.token_ids)


ANSWER_KIND: Final = Kind(ANSWERS, SampleResult, ("token_ids", "log_probs"), "text", synced=True, own=True)
MOST_BYTES: Final = 64 << 20  # in the records of one rollout; further answers are not recorded
_TOKEN_BYTES: Final = 16  # at most, on the disk: id, log-prob, text


class AnswerJournal:
    """The answers of one replica. `lives` as in `GrowingRecords`; empty: no records are written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._records = GrowingRecords(directory, ANSWER_KIND, config, lives)
        self.restored = 0  # rollouts

    async def open(self, group: PromptGroup, index: int) -> SessionRecord:
        """The record of a rollout whose program is about to start. If there are answers, this is not its first start:
        what the program did before is then reported as uncertain."""
        directory = self._records.directory
        if not self._records.lives or group.purpose == "eval" or not directory.is_dir():  # else another host
            return SessionRecord()
        answers = await asyncio.to_thread(self._read, group, index)
        if answers:
            self.restored += 1
            log.info("group %s: rollout %d starts again with %d recorded answers", group.key, index, len(answers))
            await begun_again(home_of(directory, group.key), f"{group.key}/{index}")
        return SessionRecord(self._records, group, index, answers)

    def _read(self, group: PromptGroup, index: int) -> dict[int, SampleResult]:
        """By name. Of several answers to a request that with the newest weights counts, and the last of these."""
        found: dict[int, SampleResult] = {}
        for newest, (rollout, name), result in self._records.read(group, this_life=True):
            fits = rollout == index and is_whole(result) and _newest(result) <= newest
            if fits and (name not in found or _newest(found[name]) <= _newest(result)):
                found[name] = result
        return found


@dataclass
class SessionRecord:
    """The record of one session. Without records it only names requests."""

    records: GrowingRecords[SampleResult] | None = None
    group: PromptGroup | None = None
    index: int = 0
    answers: Mapping[int, SampleResult] = field(default_factory=dict)  # of the program's earlier attempts, by name

    def __post_init__(self) -> None:
        self._bytes = sum(map(_size, self.answers.values()))
        self._names: set[int] = set()  # of requests that were answered or are under way

    @contextmanager
    def named(self, content: bytes) -> Iterator[int]:
        """The name of a request, 64 bits. One that fails leaves its name to the client's next try."""
        digest, before = xxhash.xxh3_128_digest(content), 0
        while (name := xxhash.xxh3_64_intdigest(digest, before)) in self._names:
            before += 1
        self._names.add(name)
        try:
            yield name
        except BaseException:
            self._names.discard(name)
            raise

    def find(self, name: int, oldest: int) -> SampleResult | None:
        """The recorded answer. `oldest`: the oldest version that later batches may train."""
        result = self.answers.get(name)
        if result is None or min(run.version for run in result.runs) < oldest:
            return None
        return replace(result, reused_tokens=len(result.token_ids))

    async def keep(self, name: int, result: SampleResult) -> None:
        """Record an answer of an engine."""
        if self.records is None or self.group is None or self._bytes + _size(result) > MOST_BYTES:
            return
        self._bytes += _size(result)
        await asyncio.to_thread(self.records.append, self.group, (self.index, name), result, grows=False)


def _newest(result: SampleResult) -> int:
    return max(run.version for run in result.runs)


def _size(result: SampleResult) -> int:
    return _TOKEN_BYTES * len(result.token_ids) + len(result.routed_experts)
