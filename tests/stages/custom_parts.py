"""What a user of the engine would write: stages, filters and graders that the tests name by import path."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from configs.schema import Config
from stages.base import LoopStage, MapStage
from stages.group.filters import FilterDecision
from stages.messages import Prefix, RolloutSlice, Sample, TurnReward
from stages.rollouts import append_untrained, as_rollout, branch, new_sample

SHARED = 2  # tokens of the first turn that the branch of `Agents` keeps


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
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
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


def words_alone(response: str, label: str | None, metadata: Mapping[str, object]) -> dict[str, float]:
    """Its answer has no score."""
    return {"words": float(len(response.split())), "characters": float(len(response))}


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


class Round(msgspec.Struct):
    """What an episode of `Game` remembers."""

    number: int
    replicas: tuple[str, ...]


class Game(LoopStage):
    """An environment with a state: each turn earns 0.25, and after `options.rounds` of them it is won."""

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        if options.get("broken"):
            raise ZeroDivisionError("no such game")
        return bool(options["rounds"] > 0)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        (sample,) = message.samples
        before = self.read_state(sample, Round) or Round(0, ())
        after = Round(before.number + 1, (*before.replicas, self.context.replica))
        turns = (*sample.turn_rewards, TurnReward(sample.length, 0.25))
        sample = append_untrained(sample, [5, 6], f"[{after.number}]")
        if after.number == self.context.options["rounds"]:
            sample = msgspec.structs.replace(sample, done=True, reward=1.0, error=",".join(after.replicas))
        sample = msgspec.structs.replace(self.write_state(sample, after), turn_rewards=turns)
        return msgspec.structs.replace(message, samples=(sample,))


class Agents(LoopStage):
    """After the first turn: a branch of it, a compaction of its context and two sub-agents go on; it has ended."""

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        return len(message.samples) == 1

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        (trunk,) = message.samples
        trunk = msgspec.structs.replace(trunk, done=True, turn_rewards=(TurnReward(trunk.length, 0.5),))
        shared = trunk.prompt_length + SHARED
        parts = as_rollout(
            trunk,
            append_untrained(branch(trunk, shared), [9], "again"),
            new_sample([3, 4], trunk.index),
            new_sample([7, 8, 9], trunk.index),
            new_sample([7, 8, 9], trunk.index),
        )
        if trunk.index == message.group.row_metadata.get("liar", -1):
            parts = (*parts[:1], msgspec.structs.replace(parts[1], prefix=Prefix(4, shared)), *parts[2:])
        return msgspec.structs.replace(message, samples=parts)
