"""The agents stage: what an environment says becomes tokens, and what becomes of episodes whose process is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import venv
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from configs.schema import Config
from pipeline.record.health import OutageWatch
from stages.agents import hosting
from stages.agents.stage import AgentsStage
from stages.messages import RolloutSlice, Sample, TurnReward
from stages.tools.tool import function_schema
from stages.workers.process import PRINTED_BYTES
from tests.stages.agents.play import WORLD, fresh, playing, world
from tests.stages.stage_rig import idle, make_sample, make_slice, numbers, until

COUNTER, FORGETFUL, SAVED, SLOW = (WORLD.replace("World", name) for name in ("Counter", "Forgetful", "Saved", "Slow"))


def slowly(*values: object) -> Any:
    """A case that starts several processes, or waits for one to be killed."""
    return pytest.param(*values, marks=pytest.mark.slow)


def only(slice_: RolloutSlice) -> Sample:
    (sample,) = slice_.samples
    return sample


async def test_the_last_turn_is_announced_and_ends_the_episode(tiny: Path, tmp_path: Path) -> None:
    """One that was cut, one behind which no other may follow, and one where the environment is over. The environment
    says what graders read of an episode that ends."""
    notes = [tmp_path / name for name in ("cut", "two")]
    async with playing(tiny, rollout={"max_turns": 2}) as play:
        cut = only(await play.turn(await play.begin(turns=5, note=str(notes[0])), "12", status="truncated"))
        first = await play.turn(await play.begin(1, turns=5, note=str(notes[1]), answer="42"), "7\n")
        assert only(first).response == "7\n[1]", "it goes on"
        last = only(await play.turn(first, "8\n"))
        over = only(await play.turn(await play.begin(2, turns=1, answer="42"), "7\n"))
    announced = [[line.split()[-1] for line in note.read_text().splitlines()] for note in notes]
    assert announced == [["True"], ["False", "True"]]
    for ended in (cut, last):
        assert (ended.done, ended.status, ended.reward) == (True, "truncated", 0.0), "no grader: nothing more is earned"
    assert (cut.turn_rewards, cut.response) == ((TurnReward(4, 0.25),), "12")
    assert ([one.reward for one in last.turn_rewards], last.response) == ([0.25, 0.25], "42")
    assert play.tokenizer.decode(numbers(last.token_ids)) == "5:7[1]8", "what is trained is as it was"
    assert (over.done, over.status, over.response) == (True, "completed", "42")


async def test_where_graders_are_named_they_decide(tiny: Path) -> None:
    async with playing(tiny, reward={"rm_type": "length:3"}, rollout={"max_turns": 1}) as play:
        assert only(await play.turn(await play.begin(turns=5))).reward is None
        assert only(await play.turn(await play.begin(1, turns=1))).reward == 1.0


async def test_a_row_chooses_its_environment(tiny: Path) -> None:
    async with playing(tiny, world(), world(name="other", options={"prompt": "9-"})) as play:
        for group, (name, prompt) in enumerate((("world", "5:"), ("other", "9-"))):
            begun = only(await play.begin(group, environment=name))
            assert play.tokenizer.decode(numbers(begun.token_ids)) == prompt
        lost = only(await play.begin(2, environment="othr"))
        assert (lost.status, lost.reward) == ("failed", None)
        assert lost.error == "metadata.environment is 'othr', but there is none; did you mean other?"


@pytest.mark.parametrize(
    "faults",
    [
        {
            "error": "environment world: RuntimeError: a move that this world cannot make",
            "answer": "environment world: the answer has 178",
            "infrastructure": "environment world: infrastructure failed 3 times, the last time: the sandbox is away",
        },
        slowly(
            {
                "exit": "infrastructure failed 3 times, the last time: its worker process ended with exit status 3",
                "kill": "its worker process ended with signal SIGKILL",
                "eat": "its worker process ended: this call or another one wanted more memory than it may have",
            }
        ),
        slowly({"wait": "the last time: no answer within step_deadline_s 0.2 s"}),
    ],
    ids=" ".join,
)
async def test_what_fails_fails_its_rollout_and_earns_nothing(tiny: Path, faults: dict[str, str]) -> None:
    table = world(step_deadline_s=0.2 if "wait" in faults else 60.0, memory_gb=0.25)
    async with playing(tiny, table) as play:
        neighbour = await play.begin(9, turns=4)
        for group, (fault, words) in enumerate(faults.items()):
            sample = only(await play.turn(await play.begin(group, fault=fault)))
            assert (sample.status, sample.reward, sample.turn_rewards) == ("failed", None, ())
            assert words in (sample.error or "")
            neighbour = await play.turn(neighbour)
            assert only(neighbour).response.endswith(f"7\n[{group + 1}]"), "its neighbour goes on"
        assert play.stages[0].activity.failures == len(faults)


@pytest.mark.parametrize("fault", ["kill", slowly("infrastructure"), slowly("block")])
async def test_an_episode_takes_its_turns_again_where_its_process_was_lost(
    tiny: Path, tmp_path: Path, fault: str
) -> None:
    note = tmp_path / "note"
    table = world(step_deadline_s=1.0 if fault == "block" else 60.0)
    async with playing(tiny, table) as play:
        other = await play.turn(await play.begin(1, turns=3))
        slice_ = await play.begin(turns=4, fault=fault, at=2, once=str(tmp_path / "once"), note=str(note))
        for text in ("1\n", "2\n", "3\n", "4\n"):
            slice_ = await play.turn(slice_, text)
        assert only(slice_).response == "1\n[1]2\n[2]3\n[3]4\n"
        assert (only(slice_).reward, len(only(slice_).turn_rewards)) == (1.0, 3)
        other = await play.turn(other)
        assert only(await play.turn(other)).reward == 1.0
    taken = [f"{number}{text}" for _, number, _, text, _ in map(str.split, note.read_text().splitlines())]
    assert taken == ["0'1'", "1'2'", "0'1'", "1'2'", "2'3'", "3'4'"]


async def test_episodes_change_their_replica_at_any_turn(tiny: Path, tmp_path: Path) -> None:
    """They take their turns again there, or have a snapshot; an environment that answers otherwise then fails."""
    notes = [tmp_path / str(index) for index in range(3)]
    async with playing(tiny, world(), world(FORGETFUL, "forgetful"), world(SAVED, "saved"), replicas=2) as play:
        slices = [await play.begin(index, turns=4, note=str(note)) for index, note in enumerate(notes)]
        for turn in range(4):
            slices = [await play.turn(one, f"{turn}\n", replica=(turn + i) % 2) for i, one in enumerate(slices)]
        assert {only(one).response for one in slices} == {"0\n[1]1\n[2]2\n[3]3\n"}
        assert {only(one).reward for one in slices} == {1.0}
        for note in notes:
            assert len({line.split()[2] for line in note.read_text().splitlines()}) == 2, "both took part"
        moved = await play.turn(await play.begin(3, turns=3, environment="forgetful"))
        lost = only(await play.turn(moved, replica=1))
        assert lost.status == "failed"
        assert "environment forgetful is not deterministic: the answer to turn 0 changed" in (lost.error or "")
        saved = await play.begin(4, turns=3, environment="saved")
        for turn in range(3):
            saved = await play.turn(saved, replica=turn % 2)
        assert only(saved).reward == 1.0


async def test_a_call_that_changes_the_world_is_made_once_though_turns_are_taken_again(
    tiny: Path, tmp_path: Path
) -> None:
    async with playing(tiny, world(COUNTER), run_dir=tmp_path) as play:
        for group, within in enumerate((False, True)):
            counter, once = tmp_path / f"counter-{group}", tmp_path / f"killed-{group}"
            killed = {"fault": "kill", "at": 1, "once": str(once), "within": within}
            slice_ = await play.begin(group, turns=3, counter=str(counter), **killed)
            for text in ("1\n", "2\n", "3\n"):
                slice_ = await play.turn(slice_, text)
            assert only(slice_).response == f"1\n[1]2\n[{0 if within else 2}]3\n", "0: nobody knows"
            assert only(slice_).metrics["env/world/uncertain"] == float(within)
            lines = [f"{group}/0 {number} {text!r}" for number, text in enumerate("123")]
            assert counter.read_text().splitlines() == lines


async def test_a_killed_worker_is_replaced_and_nothing_is_left_running(tiny: Path) -> None:
    async with playing(tiny) as play:
        slices = [await play.begin(index, turns=3) for index in range(4)]
        [hosting] = [host.hosting for host in play.stages[0]._hosts.values()]
        pid = hosting.workers.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        await until(lambda: not hosting.workers.processes[0].open)
        worker, written = hosting.workers.processes[0], [play.written(one, "7\n") for one in slices]
        await play.send(written[0])
        await until(lambda: worker.pid not in (None, pid))
        await idle()
        assert not worker.open, "a process that starts serves nobody yet"
        for one in written[1:]:
            await play.send(one)
        slices = [await play.receive() for _ in slices]
        assert {only(one).response for one in slices} == {"7\n[1]"}
        assert hosting.replayed == 4
        left = [hosting.workers.processes[0].pid, pid]
    assert not any(map(psutil.pid_exists, left))


def test_a_rollout_is_wanted_after_each_turn_that_ended() -> None:
    config = msgspec.structs.replace(Config(), environment=(world(),))
    for status, wanted in (("completed", True), ("truncated", True), ("aborted", False), ("failed", False)):
        assert AgentsStage.wants(config, {}, make_slice(0, make_sample(0, status=status))) is wanted


async def test_an_outage_pauses_the_environment_and_nothing_is_lost(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "FIRST_S", 0.01)
    away = tmp_path / "away"
    away.touch()
    watch = OutageWatch()
    async with playing(tiny, world(retries=5), world(name="well")) as play:
        topic = play.rig.topic
        for index in range(4):
            await play.send(fresh(index, turns=1, fault="away", at=-1, file=str(away), environment="world"))
        await play.rig.topic_until(lambda: bool(topic.items("environment/")))
        (said,) = watch.look(topic)
        assert said == (
            "environment world is out of order (the sandbox is away): agents-0 pauses its episodes, and tries again "
            "after growing waits"
        )
        well = await play.begin(9, turns=1, environment="well")
        assert only(await play.turn(well)).reward == 1.0, "another environment goes on meanwhile"
        retried = play.stages[0]._hosts["world"].hosting
        before = retried.retried
        await until(lambda: retried.retried >= before + 3)  # it is tried, one at a time
        away.unlink()
        begun = [await play.receive() for _ in range(4)]
        assert {only(one).status for one in begun} == {"pending"}, "attempts in an outage are not counted"
        await play.rig.topic_until(lambda: any("works again" in line for line in watch.look(topic)))
        summary = watch.summary()["world"]
        assert (summary.outages, summary.reason) == (1, "the sandbox is away")
        assert summary.seconds > 0
        assert {only(await play.turn(one)).reward for one in begun} == {1.0}


async def test_an_outage_that_lasts_fails_rollouts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "FIRST_S", 0.01)
    away = tmp_path / "away"
    away.touch()
    async with playing(tiny, world(retries=9, outage_s=0.1)) as play:
        for index in range(3):
            await play.send(fresh(index, fault="away", at=-1, file=str(away)))
        lost = [only(await play.receive()) for _ in range(3)]
        assert {(one.status, one.reward) for one in lost} == {("failed", None)}
        assert all("the sandbox is away" in (one.error or "") for one in lost)


async def test_a_drain_waits_for_no_environment(tiny: Path) -> None:
    async with playing(tiny) as play:
        slow = await play.begin(fault="wait")
        await play.send(play.written(slow, "7\n"))
        await until(lambda: bool(play.stages[0]._running))
        play.rig.topic.publish("drain", b"interrupted")
        ended = only(await play.receive())
        assert (ended.status, ended.done, ended.reward) == ("aborted", True, None)
        assert only(await play.begin(1)).status == "aborted"


async def test_an_environment_has_packages_of_its_own(tiny: Path, tmp_path: Path) -> None:
    """An interpreter with msgspec, and nothing else of ours, hosts it."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    table = world(WORLD.replace("World", "Alone"), python=str(home / "bin/python"))
    async with playing(tiny, table) as play:
        begun = only(await play.begin())
        assert play.tokenizer.decode(numbers(begun.token_ids)) == "0", begun.error


async def test_what_a_worker_prints_is_bounded(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with playing(tiny) as play:
        after = only(await play.turn(await play.begin(fault="print")))
        assert after.status == "completed"
        said = ""
        while "dropped" not in said:
            said += capfd.readouterr().err
            await asyncio.sleep(0)
        assert said.count("x") == PRINTED_BYTES
        assert said.endswith("[what this worker process prints from here on is dropped]\n")


async def test_the_deadline_of_an_episode_is_that_of_its_start_and_all_its_turns(tiny: Path) -> None:
    slow = world(SLOW, "slow", episode_deadline_s=0.5)
    async with playing(tiny, world(episode_deadline_s=0.2, retries=9), slow) as play:
        lost = only(await play.begin(fault="wait", at=-1))
        assert (lost.status, lost.reward) == ("failed", None)
        words = "environment world: the episode was in its environment for longer than episode_deadline_s 0.2 s"
        assert words in (lost.error or "")
        assert play.stages[0]._hostings[0].retried == 0, "to try again would take more than there is"
        slice_ = await play.begin(1, turns=9, environment="slow")
        for _ in range(2):  # 0.4 s each
            if only(slice_).status == "failed":
                break
            slice_ = await play.turn(slice_)
        assert "longer than episode_deadline_s 0.5 s" in (only(slice_).error or "")


async def test_only_so_many_turns_with_calls_of_a_tool_are_taken_at_a_time(tiny: Path) -> None:
    """Turns without one are not held up by them."""
    marks = {"tool_call_open": "[", "tool_call_close": "]"}
    tools = [function_schema("add", "", {"what": {"type": "string"}}, ["what"])]
    async with playing(tiny, world(SLOW, tool_concurrency={"add": 1, "other": 1}), tools=marks) as play:
        begun = [await play.begin(index, turns=3, tools=tools) for index in range(5)]
        for slice_ in begun[:3]:
            await play.send(play.written(slice_, "[1+2]"))
        assert [only(await play.receive()).response for _ in range(3)] == ["[1+2][1]"] * 3
        for slice_ in begun[3:]:
            await play.send(play.written(slice_, "1+2"))
        assert {only(await play.receive()).response for _ in range(2)} == {"1+2[2]"}
