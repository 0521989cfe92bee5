"""A closed loop of stages with known speeds, as the meter would see it: what an advisor has to find out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.control.advice import StageLoad, Window


@dataclass
class SyntheticPipeline:
    """`demand`: seconds of a replica for one rollout, by stage; `train`: of the trainer; `delays`: seconds that a
    rollout spends in a stage however many replicas it has."""

    demand: Mapping[str, float]
    replicas: dict[str, int]
    train: float
    in_flight: float = 500.0
    delays: Mapping[str, float] = field(default_factory=dict)
    step: int = 0

    def capacity(self, stage: str) -> float:
        return self.replicas[stage] / self.demand[stage]

    def rate(self) -> float:
        most = min([1 / self.train, *map(self.capacity, self.demand)])
        delay = sum(self.delays.values())
        return min(most, self.in_flight / delay) if delay else most

    def bottleneck(self) -> str:
        slowest = min(self.demand, key=self.capacity)
        return slowest if self.capacity(slowest) < 1 / self.train else "train"

    def window(self, noise: float = 1.0) -> Window:
        rate, slow = self.rate(), self.bottleneck()
        held = {stage: rate * demand for stage, demand in self.demand.items()}
        held |= {stage: rate * delay for stage, delay in self.delays.items()}
        saturated = rate >= 0.999 * min([1 / self.train, *map(self.capacity, self.demand)])
        stages = []
        for stage, count in self.replicas.items():
            if stage in self.delays:
                stages.append(StageLoad(name=stage, replicas=count, busy=1.0, starved=0.0, here=held[stage]))
                continue
            busy = min(1.0, rate / self.capacity(stage))
            waiting = max(0.0, self.in_flight - sum(held.values())) if stage == slow and saturated else 0.0
            stages.append(
                StageLoad(
                    name=stage, replicas=count, busy=busy, starved=1 - busy, here=held[stage] + waiting,
                    waiting=waiting, queued=float(waiting > 0),
                )
            )  # fmt: skip
        self.step += 5
        return Window(
            batches=5, step=self.step, rate=rate * noise, open=self.in_flight, train=rate * self.train,
            stages=tuple(stages),
        )  # fmt: skip
