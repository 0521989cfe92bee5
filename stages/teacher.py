"""The teacher stage: has a frozen engine score each rollout, for on-policy distillation.

Token in, token out: the teacher reads the prompt's and the response's ids as they are and gives the log-prob of every
response token given all before it; nothing is generated and nothing tokenised again. The row names its teacher in its
metadata, under `opd_teacher_key`; rows that name none take the first.

Invariants:
- `teacher_log_probs` has one entry for each token, 0.0 where the loss mask is 0;
- a sample that cannot be scored fails with the reason; never the run, never a neighbour;
- what has no reward (evaluation, failed or aborted samples) passes unread.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
import numpy.typing as npt

from models.errors import EngineError
from stages.base import MapStage, StageContext, beside, side_by_side
from stages.chat.tokenizer import load_tokenizer
from stages.messages import Float32Array, PromptGroup, RolloutSlice, Sample, wire
from stages.ports import Ports
from stages.sampling.requests import ScoreRequest
from stages.sampling.sampler import Sampler

log = logging.getLogger("sluice.teacher")

LogProbs = npt.NDArray[np.float32]
PROBE_GAP = 1e-3  # log-probs at two temperatures that differ by less are of one


class TeacherStage(MapStage):
    """RolloutSlice in, the same slice with the teacher's log-probs out."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        frozen = tuple(entry.partition("=")[0] for entry in self.config.engine.frozen_engine)
        self.teachers = self.config.distill.opd_teacher or frozen  # the first one is that of rows that name none
        self.temperature = context.config.rollout.rollout_temperature  # constant during a run

    async def setup(self) -> None:
        self.sampler = Sampler(self.context, policies=self.teachers)
        self.sampler.directory.vocab_size = load_tokenizer(self.config.train.hf_checkpoint).vocab_size

    async def close(self) -> None:
        if hasattr(self, "sampler"):  # not after a setup that failed
            await self.sampler.close()

    async def run(self, ports: Ports) -> None:
        probed = () if self.temperature == 1.0 else self.teachers
        async with beside(self.sampler.follow(ports.topic), *map(self._probe, probed)):
            await super().run(ports)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        group = message.group
        if group.purpose == "eval":
            return message
        scored = await side_by_side(self._scored(group, sample) for sample in message.samples)
        self.activity.extra["teacher_retries"] = float(self.sampler.retries)
        return msgspec.structs.replace(message, samples=tuple(scored))

    async def _scored(self, group: PromptGroup, sample: Sample) -> Sample:
        """The sample with its teacher's log-probs, or failed with the reason."""
        if sample.status not in ("completed", "truncated"):
            return sample
        metadata = group.row_metadata
        named = metadata.get(self.config.distill.opd_teacher_key) if isinstance(metadata, dict) else None
        name = self.teachers[0] if named is None else str(named)  # as text, whatever it is in the row's metadata
        try:
            with self.span("teacher", group=group.group_id, sample=sample.index, detail=name):
                found = await self._score(name, sample)
        except (EngineError, ValueError) as error:
            self.activity.failures += 1
            reason = f"teacher {name}: {type(error).__name__}: {error}"
            return msgspec.structs.replace(sample, status="failed", error=reason)
        self.activity.tokens += sample.response_length
        return msgspec.structs.replace(sample, teacher_log_probs=found)

    async def _score(self, name: str, sample: Sample) -> Float32Array:
        """[T] log-probs. Scores only the tokens from the first to the last trained token."""
        found = np.zeros(sample.length, dtype=np.float32)
        trained = np.flatnonzero(sample.loss_mask)
        if not len(trained):
            return wire(found, Float32Array)
        first, end = int(trained[0]), int(trained[-1]) + 1
        found[first:end] = await self._log_probs(name, sample.token_ids[:end], first, self.temperature)
        found[sample.loss_mask == 0] = 0.0
        return wire(found, Float32Array)

    async def _log_probs(self, name: str, ids: npt.NDArray[np.int32], start: int, temperature: float) -> LogProbs:
        deadline_s = self.config.rollout.request_timeout_secs
        return await self.sampler.score(ScoreRequest(ids, start, temperature, policy=name, deadline_s=deadline_s))

    async def _probe(self, name: str) -> None:
        """Say once if a teacher scores at temperature 1 although the policy samples at another one."""
        ids = np.array([1, 2, 3, 4], dtype=np.int32)
        try:
            raw = await self._log_probs(name, ids, 1, 1.0)
            scaled = await self._log_probs(name, ids, 1, self.temperature)
        except EngineError as error:
            log.warning("the probe of how teacher %s scores failed: %s", name, error)
            return
        if float(np.abs(raw - scaled).max()) < PROBE_GAP:
            log.warning(
                "teacher %s scores at temperature 1, but rollout_temperature is %g: its distribution is compared with "
                "the policy's at that temperature; use an embedded teacher, or --rollout-temperature 1",
                name,
                self.temperature,
            )
