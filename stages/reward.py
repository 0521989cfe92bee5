"""The reward stage: grades each rollout in a pool of processes, with a deadline for each.

Invariant: a grader that raises, hangs or dies fails its sample, with the reason; never the run, never a neighbour.
"""

from __future__ import annotations

import msgspec

from stages.base import MapStage
from stages.graders.pool import GradeRequest, GraderPool
from stages.messages import RolloutSlice, Sample


class RewardStage(MapStage):
    """RolloutSlice in, the same slice with rewards out."""

    async def setup(self) -> None:
        reward = self.config.reward
        self._pool = GraderPool(reward.reward_workers, reward.reward_deadline_s, reward.reward_retries)
        await self._pool.__aenter__()

    async def close(self) -> None:
        await self._pool.__aexit__(None, None, None)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        group = message.group
        grader = self.config.reward.custom_rm_path or group.row_metadata.get("rm_type") or self.config.reward.rm_type
        graded = [s for s in message.samples if s.status in ("completed", "truncated")]
        requests = [
            GradeRequest(
                grader=grader,
                response=sample.response,
                label=group.label,
                metadata=group.metadata,
                n_tokens=sample.n_tokens,
                seed=(group.seed + sample.index) & 0x7FFFFFFFFFFFFFFF,
            )
            for sample in graded
        ]
        grades = dict(zip((s.index for s in graded), await self._pool.grade_many(requests), strict=True))
        samples: list[Sample] = []
        for sample in message.samples:
            grade = grades.get(sample.index)
            if grade is None:
                samples.append(sample)
            elif grade.error is not None:
                self.activity.failures += 1
                samples.append(
                    msgspec.structs.replace(sample, status="failed", error=f"grader {grader}: {grade.error}")
                )
            else:
                samples.append(
                    msgspec.structs.replace(
                        sample, reward=grade.score, reward_parts=grade.parts, is_correct=grade.is_correct
                    )
                )
        return msgspec.structs.replace(message, samples=tuple(samples))
