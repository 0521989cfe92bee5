"""What a user of the engine would write: stages, filters and graders that the tests name by import path."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from configs.schema import Config
from stages.base import LoopStage, MapStage
from stages.group.filters import FilterDecision
from stages.messages import RolloutSlice, Sample


class Shout(MapStage):
    """A whole custom stage."""

    async def process(self, message: RolloutSlice) -> RolloutSlice | None:
        if message.group.label == "skip":
            return None
        if message.group.label == "raise":
            raise ValueError("nothing to shout about")
        loud = tuple(msgspec.structs.replace(s, response=s.response.upper()) for s in message.samples)
        return msgspec.structs.replace(message, samples=loud)


class Once(LoopStage):
    """A loop stage that wants each sample once."""

    @classmethod
    def wants(cls, config: Config, message: RolloutSlice) -> bool:
        return message.samples[0].turns == 1

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return message


class Failing(Once):
    """A loop stage whose environment breaks."""

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        raise ConnectionError("the environment is gone")


class Forgetful(LoopStage):
    """A loop stage without `wants`."""

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        return message


def no_sevens(slice_: RolloutSlice) -> bool:
    return all(sample.response != "7" for sample in slice_.samples)


async def short_only(slice_: RolloutSlice) -> FilterDecision:
    longest = max(sample.response_length for sample in slice_.samples)
    return FilterDecision(longest < 8, f"longest_{longest}")


def divide(slice_: RolloutSlice) -> bool:
    return bool(1 / 0)


def grade(response: str, label: str | None, metadata: Mapping[str, object]) -> dict[str, float]:
    """Behave as the response says."""
    if response == "raise":
        raise ValueError("no such answer")
    if response == "hang":
        time.sleep(3600)
    return {"score": float(len(response)), "words": float(len(response.split()))}


def newest_first(waiting: Sequence[RolloutSlice], version: int) -> int:
    """A buffer order."""
    return len(waiting) - 1


def beyond_the_end(waiting: Sequence[RolloutSlice], version: int) -> int:
    """A buffer order that is wrong."""
    return len(waiting)


def ranks(rewards: list[float], samples: Sequence[Sample]) -> list[float]:
    """Advantages by rank instead of the group's normalisation."""
    assert [sample.reward for sample in samples] == rewards
    return [float(sorted(rewards).index(reward)) for reward in rewards]


def one_number(rewards: list[float], samples: Sequence[Sample]) -> list[float]:
    """A post-process function that is wrong."""
    return [1.0]


def best_of_group(responses: list[str], label: str | None, metadata: Mapping[str, object]) -> list[float]:
    """A group grader: 1 for the longest response, 0 for the others."""
    longest = max(map(len, responses))
    return [float(len(response) == longest) for response in responses]


def no_numbers(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """An advantage estimator that divides nothing by nothing."""
    return [float("nan")] * len(rewards)
