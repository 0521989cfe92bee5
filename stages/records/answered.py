"""Answers of engines to agents and generate functions, on the disk. A program that is started again gets them again.

`RUN/episodes/<group>/answers-*.log` has a record for each request that engines answered (stages/gateway/answers.py).
When the rollout's program is started again, after the death of its worker, of its replica or of the controller, a
request that the record has needs no engine. Another request is new; the rest of the record stays available.

A request is known by its content, that is the tokens of its context and what decides the answer beside them, and by how
many requests with this content its session has had before. So the order of concurrent requests does not matter.

Invariants:
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
from pathlib import Path
from typing import Final

import xxhash
from msgspec.structs import replace

from configs.schema import Config
from stages.messages import PromptGroup
from stages.records.growing_records import ANSWERS, GrowingRecords, Kind
from stages.records.once import begun_again, home_of
from stages.records.unfinished import is_whole
from stages.sampling.requests import SampleResult

log = logging.getLogger("sluice.agents")

ANSWER_KIND: Final = Kind(ANSWERS, SampleResult, ("token_ids", "log_probs"), "text", synced=True, own=True)
MOST_BYTES: Final = 64 << 20  # in the records of one rollout; further answers are not recorded
_TOKEN_BYTES: Final = 16  # at most, on the disk: id, log-prob, text


class AnswerJournal:
    """The answers of one replica. `lives` as in `GrowingRecords`; empty: no records are written or restored."""

    def __init__(self, directory: Path, config: Config, lives: Sequence[int]) -> None:
        self._directory, self._lives = directory, lives
        self._records = GrowingRecords(directory, ANSWER_KIND, config, lives)
        self.restored = 0  # rollouts

    async def open(self, group: PromptGroup, index: int) -> SessionRecord:
        """The record of a rollout whose program is about to start. If there are answers, this is not its first start:
        what the program did before is then reported as uncertain."""
        if not self._lives or group.purpose == "eval" or not self._directory.is_dir():  # else another host
            return SessionRecord()
        answers = await asyncio.to_thread(self._read, group, index)
        if answers:
            self.restored += 1
            log.info("group %s: rollout %d starts again with %d recorded answers", group.key, index, len(answers))
            await begun_again(home_of(self._directory, group.key), f"{group.key}/{index}")
        return SessionRecord(self._records, group, index, answers)

    def _read(self, group: PromptGroup, index: int) -> dict[int, SampleResult]:
        """By name. Of several answers to a request that with the newest weights counts, and the last of these."""
        found: dict[int, SampleResult] = {}
        for newest, (rollout, name), result in self._records.read(group, this_life=True):
            if rollout == index and is_whole(result) and _newest(result) <= newest:
                before = found.get(name)
                found[name] = result if before is None or _newest(before) <= _newest(result) else before
        return found


class SessionRecord:
    """The record of one session. Without records it only names requests."""

    def __init__(
        self,
        records: GrowingRecords[SampleResult] | None = None,
        group: PromptGroup | None = None,
        index: int = 0,
        answers: Mapping[int, SampleResult] | None = None,
    ) -> None:
        self._records, self._group, self._index = records, group, index
        self._answers = answers or {}
        self._bytes = sum(map(_size, self._answers.values()))
        self._names: set[int] = set()  # of requests that were answered or are under way

    @property
    def restored(self) -> bool:
        """Whether the program had answers in an earlier attempt."""
        return bool(self._answers)

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
        result = self._answers.get(name)
        if result is None or min(run.version for run in result.runs) < oldest:
            return None
        return replace(result, reused_tokens=len(result.token_ids))

    async def keep(self, name: int, result: SampleResult) -> None:
        """Record an answer of an engine."""
        if self._records is None or self._group is None or self._bytes + _size(result) > MOST_BYTES:
            return
        self._bytes += _size(result)
        await asyncio.to_thread(self._records.append, self._group, (self._index, name), result, grows=False)


def _newest(result: SampleResult) -> int:
    return max(run.version for run in result.runs)


def _size(result: SampleResult) -> int:
    return _TOKEN_BYTES * len(result.token_ids) + len(result.routed_experts)
