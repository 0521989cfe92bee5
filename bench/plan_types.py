"""What a simulation is given and what it gives back. Structs alone."""

from __future__ import annotations

import msgspec


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Times in seconds, lengths in tokens; a batch is `groups` groups of `members` rollouts."""

    engines: int
    slots: int  # rollouts that one engine decodes together
    a_s: float  # of a decode step
    c_s: float  # of it, per running rollout
    prefill_s: float = 0.0  # per prompt token
    kv_tokens: int = 1 << 40
    token_s: float = 0.0  # the trainer's time per trained token
    fixed_s: float = 0.0  # and per batch
    groups: int = 32
    members: int = 8
    prompt: int = 0
    mean: float = 400.0
    sigma: float = 1.0
    cap: int = 3200
    turns: int = 1  # of a rollout; its tokens are divided evenly
    tool_s: float = 0.0  # mean wait between two turns (exponential)
    graders: int = 0  # replicas of the reward stage, which grade one rollout at a time; 0: grading takes no time
    reward_s: float = 0.0  # of one rollout
    filtered: float = 0.0  # share of groups whose rewards are all equal
    staleness: int = 1
    interval: int = 1  # batches between two publications
    update_s: float = 0.0  # that an engine stands still for new weights
    rolling: int = 1  # engines that do so at the same time
    streams: bool = True  # the trainer works on groups as they arrive, not only on complete batches
    colocated: bool = False  # engines and trainer on the same GPUs, in turns: engines decode nothing while it trains
    batches: int = 10
    warm_up: int = 3  # batches that are not counted
    seed: int = 1


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; times and shares are of the batches behind the warm-up."""

    step_s: float  # per publication: `interval` batches
    staleness: dict[int, int]  # trained tokens by batches that their weights were behind
    engine_busy: float  # share of the time in which an engine decodes
    slots_busy: float  # mean share of slots that decode
    trainer_busy: float
    stalled: float  # share of an engine's time in which it takes weights
    wasted: float  # share of the generated tokens that are not trained
    admitted: int
    outcomes: dict[str, int]
    open: int

    @property
    def staleness_mean(self) -> float:
        return sum(s * n for s, n in self.staleness.items()) / max(1, sum(self.staleness.values()))

    def staleness_at(self, share: float) -> int:
        """The staleness that this share of the trained tokens does not exceed."""
        left = share * sum(self.staleness.values())
        for s, n in sorted(self.staleness.items()):
            left -= n
            if left <= 0:
                return s
        return max(self.staleness, default=0)
