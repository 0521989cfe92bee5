"""Rollouts of several sequences, from the loop stages to the trainer, and the common prefixes of their sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stages.slime.convert
from configs.schema import EngineConfig
from stages.group.stage import GroupStage
from stages.messages import Int32Array as Ids
from stages.messages import Prefix, RolloutSlice, Sample, TurnReward, wire
from stages.reward.stage import RewardStage
from stages.rollouts import (
    append_untrained,
    as_rollout,
    branch,
    raw_returns,
    rollout_fault,
    rollouts,
    token_rewards,
    trained_masks,
)
from stages.slime.convert import PrefixTree
from stages.train.batch import Batch, slice_sequences
from tests.models.train.rig import make_backend, train_step
from tests.stages.custom_parts import SHARED, Agents, Game
from tests.stages.engine_rig import LENGTH, Log, started, tensors_of
from tests.stages.stage_rig import join, make_config, make_context, make_group, make_sample, make_slice, running, take

PARTS = "tests.stages.custom_parts"
BACK: dict[str, Any] = {"inlets": {"return": ("generate.return", RolloutSlice)}}


def recipe(name: str, path: str, **options: Any) -> dict[str, Any]:
    """A loop stage of the user's own, as a configuration and as generate is told of it."""
    return {
        **BACK,
        "outlets": {f"loop.{name}": (name, RolloutSlice)},
        "loops": (f"{name}={PARTS}:{path}",),
        "stage": ({"name": name, "path": f"{PARTS}:{path}", "loop": "generate", "options": options},),
    }


# ---------------------------------------------------------------------- loops


async def test_an_episode_ends_when_its_environment_says_so(tmp_path: Path, log: Log) -> None:
    """Two replicas of an environment with a state; whichever takes a turn finds it in the message."""
    async with started(tmp_path, rollout={"max_turns": 9}, **recipe("game", "Game", rounds=3)) as world:
        stages = [Game(make_context(replica=f"game-{i}", options={"rounds": 3})) for i in range(2)]
        ports = [
            await world.rig.ports({"in": "game"}, {"out": "generate.return"}, replica=f"game-{i}", window_items=1)
            for i in range(2)
        ]
        async with running(stages[0], ports[0]), running(stages[1], ports[1]):
            await world.ask(make_group(0, 8, tools="[{}]"))
            slices = [await world.answer() for _ in range(8)]
            samples = [sample for slice_ in slices for sample in slice_.samples]
    assert {(len(s.group.prompt_ids), s.group.tools) for s in slices} == {(0, "[]")}, "nobody behind reads them"
    assert len(log) == 1 + 8 * 2, "after the winning turn no engine is asked for another"
    assert {sample.turns for sample in samples} == {3}
    for sample in samples:
        assert sample.response.endswith("[1][2][3]"), "the state went on wherever the turn before was taken"
        assert (sample.status, sample.reward, sample.loop_state) == ("completed", 1.0, b"")
        assert [turn.reward for turn in sample.turn_rewards] == [0.25] * 3
        assert int(sample.loss_mask.sum()) == 3 * LENGTH
        assert sample.fault() is None
    assert len({replica for sample in samples for replica in (sample.error or "").split(",")}) == 2


async def test_what_wants_raises_fails_its_sample_alone(tmp_path: Path) -> None:
    async with started(tmp_path, rollout={"max_turns": 9}, **recipe("game", "Game", broken=True)) as world:
        samples = await world.rollouts(make_group(0, 2))
        assert [s.status for s in samples] == ["failed"] * 2
        assert {s.error for s in samples} == {"Game.wants: ZeroDivisionError: no such game"}
        await world.ask(make_group(1, 1))
        assert (await world.answer()).group.group_id == 1, "the replica goes on"


# ---------------------------------------------------------------------- from a loop to the trainer


async def test_a_branch_a_compaction_and_sub_agents_are_trained_once(tiny: Path, tmp_path: Path, log: Log) -> None:
    """Through generate, reward, group and its filter: the gradient is that of the flat batch."""
    async with started(
        tmp_path,
        engine=EngineConfig(engine="embedded", engine_slots=32, engine_device="cpu", engine_dtype="float32"),
        model=tiny,
        tensors=tensors_of([tiny]),
        rollout={"max_turns": 9, "rollout_max_response_len": 6},
        **recipe("agents", "Agents"),
    ) as world:
        config = make_config(
            reward={"rm_type": "length:3"}, filter={"dynamic_sampling_filter": ("nonzero_std", "length:8_999")}
        )
        loop = await world.rig.ports({"in": "agents"}, {"out": "generate.return"}, replica="agents-0")
        into, out = {"in": ("made", RolloutSlice)}, {"out": ("group", RolloutSlice)}
        reward = await world.rig.join(into, out, replica="reward-0")
        group = await join(world.rig)
        made, trained = await world.rig.outlet("made"), await world.rig.inlet("train")
        async with (
            running(Agents(make_context()), loop),
            running(RewardStage(make_context(config)), reward),
            running(GroupStage(make_context(config)), group),
        ):
            await world.ask(make_group(0, 4, prompt=[11, 12, 13], seed=3, metadata='{"liar": 1}'))
            indices: set[int] = set()
            while len(indices) < 4:
                part = await world.answer()
                indices |= {sample.index for sample in part.samples}
                await made.send(part, part.key)
            slice_: RolloutSlice = await take(trained)
    assert sorted({s.index for s in slice_.samples}) == [0, 2, 3], "the rollout that contradicts itself is no member"
    assert len(log) == 1 + 4 * 4, "the trunk has ended: four sequences of each rollout go on"
    one = [s for s in slice_.samples if s.index == 0]
    assert [s.sequence for s in one] == [0, 1, 2, 3, 4]
    assert one[1].prefix == Prefix(0, 3 + SHARED)
    assert one[1].token_ids[: 3 + SHARED].tolist() == one[0].token_ids[: 3 + SHARED].tolist()
    assert one[3].token_ids.tolist() != one[4].token_ids.tolist(), "equal prompts, each with its own noise"
    branched = slice_sequences(config, slice_)
    flat = []
    for sequence in branched:
        mask = sequence.loss_mask.copy()
        mask[: 3 + SHARED] *= sequence.prefix is None
        flat.append(dataclasses.replace(sequence, loss_mask=mask, prefix=None))
    found = train_step(make_backend(tiny), [branched])
    expected = train_step(make_backend(tiny), [flat])
    tokens = sum(int(s.loss_mask.sum()) for s in slice_.samples) - SHARED * 3
    assert found[0]["train/trained_tokens"] == expected[0]["train/trained_tokens"] == tokens
    assert found[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], abs=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-6)
    batch = Batch(config, 0)
    batch.add(slice_, [])
    assert batch.trained_tokens == sum(batch.staleness.values()) == tokens
    assert batch.metrics()["rollout/effective_response_len/mean"] == tokens / 3


# ---------------------------------------------------------------------- counted once


def branched(reward: float = 1.0, **changes: Any) -> tuple[Sample, ...]:
    """Trunk: 4 tokens of the model, their turn earns 0.5. Branch: 2 of them, an observation, 3 more that earn 0.25."""
    trunk = make_sample(0, n=4, turn_rewards=(TurnReward(7, 0.5), TurnReward(4, 0.125)))
    head = append_untrained(branch(trunk, 5), [9], "o")
    other = make_sample(
        0,
        runs=[(0, 2), (-1, 1), (0, 3)],
        mask=[1, 1, 0, 1, 1, 1],
        log_probs=[-0.5] * 2 + [0.0] + [-0.5] * 3,
        prefix=head.prefix,
        turn_rewards=(TurnReward(9, 0.25),),
        reward=reward,
    )
    fields = {"token_ids": wire([*head.token_ids.tolist(), 1, 2, 3], Ids), **changes}
    return as_rollout(trunk, msgspec.structs.replace(other, **fields))


def test_rewards_of_turns_stand_at_the_last_token_of_the_model_and_count_once() -> None:
    parts = branched()
    assert rollout_fault(parts) is None
    trunk, other = token_rewards(parts)
    assert trunk.tolist() == [0, 0, 0, 0.125, 0, 0, 0.5]
    assert other.tolist() == [0, 0, 0, 0.125, 0, 0, 0, 0, 0.25], "the prefix has the first turn alone"
    assert raw_returns(parts).tolist() == [1.0 + 0.5 + 0.125 + 0.25]
    assert [mask.sum() for mask in trained_masks(parts)] == [4, 3]
    repeated = branched(turn_rewards=(TurnReward(4, 0.125), TurnReward(9, 0.25)))
    assert rollout_fault(repeated) is None, "a branch may repeat what its prefix earned"
    assert raw_returns(repeated).tolist() == raw_returns(parts).tolist()


def test_the_return_of_a_rollout_is_what_its_group_is_compared_by() -> None:
    """Returns 1.875 and 0.875: mean 1.375, and each is 0.5 away from it."""
    slice_ = make_slice(0, *branched(), make_sample(1, reward=0.875), n_samples=2)
    config = make_config(algorithm={"disable_grpo_std_normalization": True})
    samples = tuple(msgspec.structs.replace(s, reward=1.0) if s.index == 0 else s for s in slice_.samples)
    found = slice_sequences(config, msgspec.structs.replace(slice_, samples=samples))
    assert [sorted(set(s.advantages[s.loss_mask > 0].tolist())) for s in found] == [[0.5], [0.5], [-0.5]]
    assert [s.reward for s in found] == [1.0, 1.0, 0.875]
    assert [s.turn_total for s in found] == [0.875, 0.875, 0.0]
    assert [s.prefix for s in found] == [None, (0, 5), None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"prefix": Prefix(1, 5)},
            "the prefix of sequence 1 names sequence 1; it must name an earlier one of its rollout",
        ),
        ({"prefix": Prefix(0, 8)}, "the prefix of sequence 1 has 8 tokens, but the sequences have 9 and 7"),
        ({"prefix": Prefix(0, 6)}, "the first 6 tokens of sequence 1 are not those of sequence 0, its prefix"),
        ({"turn_rewards": (TurnReward(5, 1.0),)}, "sequence 1 has a turn reward in its prefix that sequence 0 has not"),
        ({"turn_rewards": (TurnReward(3, 1.0),)}, "the turn that ends at 3 of 9 tokens has reward 1.0"),
        ({"turn_rewards": (TurnReward(9, float("nan")),)}, "has reward nan"),
    ],
)
async def test_a_rollout_that_contradicts_itself_fails_its_group(changes: dict[str, Any], words: str) -> None:
    assert words in str(rollout_fault(branched(**changes)))
    mask = branched()[1].loss_mask.copy()
    mask[4] = 0
    assert rollout_fault(branched(loss_mask=mask)) == (
        "the first 5 entries of the loss mask of sequence 1 are not those of its prefix"
    )
    assert rollout_fault(branched()[1:]) == "it has sequences [1] of 2; each must be there once"


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=10), st.booleans())
def test_the_longest_common_beginning_and_of_several_the_first(
    known: list[list[int]], requested: list[int], columns: bool
) -> None:
    def array(ids: list[int]) -> np.ndarray:
        return np.array([(i % 2, i // 2) for i in ids]).reshape(-1, 2) if columns else np.array(ids, np.int32)

    tree = PrefixTree()
    for number, ids in enumerate(known):
        tree.add(array(ids), number)
    lengths = [common(ids, requested) for ids in known]
    best = max(lengths, default=0)
    assert tree.longest(array(requested)) == ((lengths.index(best), best) if best else (-1, 0))


@pytest.mark.parametrize("part", ["one grows", "all branch off"])
def test_each_token_is_compared_twice_at_the_most(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 turns, as a function returns them that gives out one sample for each."""
    turns, tokens = 100, 10
    whole = np.arange(turns * tokens)
    rows = [whole[: (n + 1) * tokens].copy() for n in range(turns)]
    if part == "all branch off":
        for n, row in enumerate(rows):
            row[-1] = -1 - n
    compared, alike = [0], stages.slime.convert.alike

    def counted(first: np.ndarray, second: np.ndarray) -> int:
        compared[0] += min(len(first), len(second))
        return alike(first, second)

    monkeypatch.setattr(stages.slime.convert, "alike", counted)
    tree = PrefixTree()
    for number, row in enumerate(rows):
        tree.longest(row)
        tree.add(row, number)
    looks = 2  # to look for it, and to add it
    assert compared[0] <= looks * 2 * sum(map(len, rows))


def test_rollouts_come_by_their_index_in_whatever_order_their_samples_lie() -> None:
    one, two, three = (make_sample(index) for index in range(3))
    assert rollouts([three, one, two]) == [(one,), (two,), (three,)]
    assert rollouts([one, three]) == [(one,), (three,)]
    assert rollouts([one, two]) == [(one,), (two,)]
