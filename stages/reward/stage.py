"""The reward stage: grades each rollout in a pool of processes, with a deadline for each, or by asking outside.

Invariant: a grader that raises, hangs or dies fails its sample, with the reason; never the run, never a neighbour.
"""

from __future__ import annotations

from stages.base import MapStage, StageContext, beside
from stages.messages import RolloutSlice
from stages.ports import Ports
from stages.reward.grading import Grading


class RewardStage(MapStage):
    """RolloutSlice in, the same slice with rewards out.

    Under --group-rm an incomplete slice of a group passes as it is, and the group stage grades the whole group.
    """

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._grading = Grading(self.config, self.activity)

    async def setup(self) -> None:
        await self._grading.open()

    async def close(self) -> None:
        await self._grading.close()

    async def run(self, ports: Ports) -> None:
        async with beside(self._grading.follow(ports.topic)):
            await super().run(ports)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return await self._grading.grade(message)
