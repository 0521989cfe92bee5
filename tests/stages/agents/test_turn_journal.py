"""Turns on the disk: a resumed run goes on from those whose weights are part of its history, to the bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from models.disk import Manifest
from models.tiny import make_tiny_checkpoint
from pipeline.record.episodes import forget_ended, read_lives, uncertain_in, write_lives
from stages.agents.episodes import Episode
from stages.base import LoopStage
from stages.messages import PromptGroup, Sample, VersionRun
from stages.prompts.ledger import LedgerSnapshot, OpenGroup
from stages.records.growing_records import GrowingRecords
from stages.records.once import GroupEnded, Once, groups_in
from stages.records.turns import KIND, TurnJournal
from stages.rollouts import join_runs, new_sample
from tests.stages.agents.play import WORLD, fresh, playing, world, write
from tests.stages.stage_rig import make_config

COUNTER = WORLD.replace("World", "Counter")
SAVES = {"save_interval": 1}


def journal(home: Path, *lives: int, **sections: object) -> TurnJournal:
    return TurnJournal(home, make_config(checkpoint=SAVES, **sections), lives)


def turns(*versions: int, index: int = 0, ids: int = 3, salt: int = 0) -> list[Sample]:
    """A rollout behind each of its turns, made with these versions."""
    sample, runs, found = new_sample([1, 2], index), (VersionRun(-1, 2),), []
    for number, version in enumerate(versions):
        runs = join_runs(runs, (VersionRun(version, ids),))
        sample = write(sample, [number + salt * (number > 0)] * ids, f"é{number} ", "completed")
        found.append(msgspec.structs.replace(sample, version_runs=runs, loop_state=b"%d" % number))
    return found


def same(found: Sample, kept: Sample) -> bool:
    arrays = ("token_ids", "loss_mask", "log_probs")
    plain = {name: None for name in arrays} | {"teacher_log_probs": None, "extras": None}
    return msgspec.structs.replace(found, **plain) == msgspec.structs.replace(kept, **plain) and all(
        np.array_equal(getattr(found, name), getattr(kept, name)) for name in arrays
    )


GROUP = fresh().group


async def restored(
    home: Path, *lives: int, index: int = 0, group: PromptGroup = GROUP, **sections: object
) -> Sample | None:
    begun = new_sample((), index)
    found = await journal(home, *lives, **sections).restore(group, begun)
    return None if found is begun else found


async def test_the_newest_turn_of_the_run_s_history_is_restored_to_the_bit(tmp_path: Path) -> None:
    first, other = turns(3, 4, 6), turns(3, index=1)
    written = journal(tmp_path, 0)
    for sample in (*first, *other):
        await written.keep(GROUP, sample)
    for step, turn in ((7, 2), (6, 2), (5, 1), (4, 1), (3, 0)):
        found = await restored(tmp_path, 0, step)
        assert found is not None
        assert same(found, first[turn]), step
    assert await restored(tmp_path, 0, 2) is None, "its first turn was made by weights that never were"
    found = await restored(tmp_path, 0, 3, index=1)
    assert found is not None
    assert same(found, other[0])
    assert await restored(tmp_path, 0, 7, index=2) is None
    assert await restored(tmp_path, 0) is None, "of this life: what is begun anew is begun anew"
    found = await restored(tmp_path, 0, 4, 9)
    assert found is not None
    assert same(found, first[1]), "version 6 was rolled back by the life in between"


async def test_what_another_prompt_or_setting_made_is_not_restored(tmp_path: Path) -> None:
    await journal(tmp_path, 0).keep(GROUP, turns(0)[0])
    assert await restored(tmp_path, 0, 1) is not None
    assert await restored(tmp_path, 0, 1, rollout={"num_rollout": 99}) is not None
    assert await restored(tmp_path, 0, 1, rollout={"rollout_temperature": 0.5}) is None
    cold = msgspec.structs.replace(GROUP, temperature=0.5)
    assert await restored(tmp_path, 0, 1, group=cold) is None, "its turns are drawn as it was admitted"
    again = msgspec.structs.replace(GROUP, temperature=1.0)
    assert await restored(tmp_path, 0, 1, group=again, rollout={"rollout_temperature": 0.5}) is not None
    assert await restored(tmp_path, 0, 1, group=msgspec.structs.replace(GROUP, seed=GROUP.seed + 1)) is None
    assert await restored(tmp_path, 0, 1, group=msgspec.structs.replace(GROUP, prompt="another")) is None


async def test_records_hold_what_is_new_and_turns_that_were_made_twice_do_not_mix(tmp_path: Path) -> None:
    first, second = turns(0, 0, 0, ids=400), turns(0, 0, 0, ids=400, salt=5)
    written = journal(tmp_path, 0)
    for sample in (first[0], first[1], second[1], first[2], second[2]):
        await written.keep(GROUP, sample)
    [(_, records)] = GrowingRecords(tmp_path, KIND, make_config(), (0, 0)).pieces(GROUP, this_life=False)
    assert [kept.tokens for kept in records] == [0, 402, 0, 0, 0], "whole where another turn came between"
    found = await restored(tmp_path, 0, 0)
    assert found is not None
    assert same(found, first[2])


async def test_a_record_that_is_not_whole_ends_its_file(tmp_path: Path) -> None:
    samples = turns(0, 0)
    written = journal(tmp_path, 0)
    for sample in samples:
        await written.keep(GROUP, sample)
    [path] = groups_in(tmp_path)["0"].iterdir()
    whole = path.read_bytes()
    sizes = [len(whole)]
    path.write_bytes(whole[:-1])
    first = await restored(tmp_path, 0, 0)
    assert first is not None
    assert same(first, samples[0])
    for place in range(0, sizes[0], 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = await restored(tmp_path, 0, 0)
        assert found is None or same(found, samples[0]), place
        path.write_bytes(whole[:place])
        found = await restored(tmp_path, 0, 0)
        assert found is None or same(found, samples[0]), place


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("turns") / "tiny", tokenizer="arithmetic", hidden_size=32, num_layers=1
    )


def timeless(sample: Sample) -> Sample:
    """Without the seconds that the episode has lasted."""
    episode = LoopStage.read_state(sample, Episode)
    assert episode is not None
    return LoopStage.write_state(sample, msgspec.structs.replace(episode, spent_s=0.0))


async def test_a_resumed_episode_goes_on_and_makes_no_call_again(tiny: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    about = {"turns": 3, "counter": str(counter)}
    async with playing(tiny, world(COUNTER), run_dir=tmp_path, lives=(0,), checkpoint=SAVES) as play:
        slice_ = await play.begin(**about)
        slice_ = await play.turn(await play.turn(slice_, "1\n"), "2\n")
    lines = counter.read_text().splitlines()
    assert len(lines) == 2
    async with playing(tiny, world(COUNTER), run_dir=tmp_path, lives=(0, 0), checkpoint=SAVES) as play:
        resumed = await play.begin(**about)
        [sample] = resumed.samples
        assert same(timeless(sample), timeless(slice_.samples[0])), "the second turn with its answer, as it was"
        assert play.stages[0].activity.extra["restored"] == 1.0
        assert counter.read_text().splitlines() == lines
        [sample] = (await play.turn(resumed, "3\n")).samples
        assert sample.done
        assert sample.response == "1\n[1]2\n[2]3\n"
    assert counter.read_text().splitlines() == [*lines, "0/0 2 '3'"]


class Killed(BaseException):
    """The process is gone."""


def checkpoint(step: int, next_group: int, *opened: int) -> Manifest:
    ledger = LedgerSnapshot(next_group, 0, {}, tuple(OpenGroup(group, 0) for group in opened))
    return Manifest(step=step, version=step, run_generation=0, ledger=msgspec.json.encode(ledger).decode())


async def test_what_ended_in_every_checkpoint_is_removed_but_for_uncertain_calls(tmp_path: Path) -> None:
    home = tmp_path / "episodes"
    assert read_lives(home) == ()
    write_lives(home, (0, 7))
    assert read_lives(home) == (0, 7)

    async def call(outcome: str) -> str:
        if outcome == "cut":
            raise Killed
        return outcome

    groups = ("3", "4", "5", "9", "held@2:1", "held@3:1")
    for group in groups:
        if group.isdigit():
            await journal(home, 0).keep(msgspec.structs.replace(GROUP, group_id=int(group)), turns(0)[0])
        await Once(home, f"{group}/0")(call, "done")
    with pytest.raises(Killed):
        await Once(home, "4/1")(call, "cut")
    forget_ended(home, [checkpoint(3, 8, 5), checkpoint(5, 12, 3)])
    assert sorted(groups_in(home)) == ["3", "4", "5", "9", "held@3:1"]
    assert uncertain_in(home) == 1
    assert len(list(groups_in(home)["4"].iterdir())) == 1
    with pytest.raises(GroupEnded, match="group 4 has ended"):
        await Once(home, "4/0")(call, "done")
    assert await Once(home, "5/0")(call, "again") == "again"
