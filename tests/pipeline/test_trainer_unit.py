"""The trainer unit: the process that was lost first, what is started again, what ends the run; GPUs of the ranks."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_servers import Told

from configs.schema import Config
from models.train.trainer_group.rank_spec import PeerGone, RanksDisagree
from pipeline.errors import ReplicaFailed, UsageError, exit_code, user_error
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.launcher import ProcessSpec
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.hosts.machine import engines_gpus, trainer_group_gpus
from pipeline.hosts.rendezvous import CONFIG, Entry
from pipeline.hosts.worker import ReplicaSpec
from pipeline.supervise import trainer_unit as trainer_unit
from pipeline.supervise.health_probe import HealthTracker, until
from pipeline.supervise.restarts import Restarts, Supervision, end_if_silent
from pipeline.supervise.trainer_unit import Loss, Ranks, TrainerUnit, first_lost
from stages.base import TrainOptions
from tests.stages.stage_rig import make_config
from transport import Node

pytestmark = pytest.mark.slow

EIGHT = tuple("01234567")


def config_of(*, ranks: int = 2, per_engine: int = 1, **train: Any) -> Config:
    parallel = {"actor_num_gpus_per_node": ranks}
    return make_config(train=train, parallel=parallel, sglang={"rollout_num_gpus_per_engine": per_engine})


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ({}, None),
        ({"train-0": 0, "rank-0": 0}, None),
        ({"rank-0": 1, "rank-1": -9}, Loss("rank-1", -9)),  # rank 0 failed because rank 1 was killed
        ({"rank-1": 1, "rank-0": 1}, Loss("rank-1", 1)),  # the first to end
        ({"rank-1": 1, "rank-0": 2}, Loss("rank-0", 2)),  # what the user can mend
        ({"train-0": 3, "rank-1": 1}, Loss("rank-1", 1)),  # the stage noticed the end of rank 0
        ({"rank-0": 3, "rank-1": 0, "train-0": -9}, Loss("train-0", -9)),
        ({"train-0": 3}, Loss("train-0", 3)),
        ({"rank-1": 1, "rank-0": 28}, Loss("rank-0", 28)),
    ],
)
def test_the_process_that_was_lost_first(codes: dict[str, int], lost: Loss | None) -> None:
    assert first_lost(codes) == lost


def test_what_a_process_of_the_unit_ends_with() -> None:
    assert exit_code(PeerGone("x")) == 3
    assert exit_code(RanksDisagree("x")) == 1
    assert exit_code(OSError(28, "No space left on device")) == 28
    assert exit_code(ValueError("x")) == 1
    assert exit_code(ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")) == 2
    assert exit_code(ImportError("This model needs flash_attn: pip install flash_attn")) == 2
    assert exit_code(ImportError("cannot import name 'x'", name="models.train")) == 1, "a defect"
    lazily = RuntimeError("Failed to import transformers.models.x because of No module named 'y'")
    lazily.__cause__ = ModuleNotFoundError("No module named 'y'", name="y")
    assert exit_code(lazily) == 2
    words = f"a package cannot be imported \\(Failed .* 'y'\\); install it for {sys.executable}, or do without"
    assert re.match(words, user_error(lazily) or "")


WITHOUT_ROOM = """
import errno, sys
from pipeline.hosts import worker

async def replica(entry, name):
    if name == "reward-0":
        raise OSError(errno.ENOSPC, "No space left on device")

worker._run_replica_process = replica
sys.exit(worker.main(["a405611a", "ipc:///tmp/none", sys.argv[1]]))
"""


@pytest.mark.parametrize(("name", "code"), [("reward-0", 28), ("reward-1", 0)])
def test_a_log_without_room_leaves_the_exit_code_as_it_is(name: str, code: int) -> None:
    """Python would end with 120, which says nothing, and the process would be started again and again."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", WITHOUT_ROOM, name], stdout=full, stderr=full, env=env)
    assert done.returncode == code


def test_ranks_take_the_first_gpus_and_engines_the_others() -> None:
    config = config_of(ranks=4, per_engine=2)
    assert trainer_group_gpus(config, EIGHT) == ("0", "1", "2", "3")
    assert engines_gpus(config, EIGHT, 2) == (("4", "5"), ("6", "7"))
    assert engines_gpus(config, EIGHT, 3) == (("0", "1"), ("2", "3"), ("4", "5")), "too few are left: they share"
    assert trainer_group_gpus(config_of(ranks=2, train_device="cuda:3"), EIGHT) == ("3", "4")
    assert engines_gpus(config_of(ranks=2, train_device="cuda:3"), EIGHT, 4) == (("0",), ("1",), ("2",), ("5",))
    assert trainer_group_gpus(config_of(train_device="cpu"), EIGHT) == ()
    assert trainer_group_gpus(config, ()) == ()
    assert engines_gpus(config_of(ranks=1), EIGHT, 2) == (("1",), ("2",)), "a trainer without a trainer group has one"
    turns = msgspec.structs.replace(config.asynchrony, colocate=True)
    shared = engines_gpus(msgspec.structs.replace(config, asynchrony=turns), EIGHT, 2)
    assert shared == (("0", "1"), ("2", "3")), "they take turns: the trainer's GPUs are the engines' too"


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--actor-num-gpus-per-node 4 needs .* 3 are visible"):
        trainer_group_gpus(config_of(ranks=4), EIGHT[:3])


# One script is stage and ranks: `life` is the incarnation, `name` the process. Ranks end when their stage does.
PROCESS = """
import asyncio, os, pathlib, signal, sys, time
from models.train.trainer_group.rank_spec import Rendezvous
from pipeline.hosts.rendezvous import from_command, read
from pipeline.hosts.worker import ReplicaSpec
from pipeline.hosts.worker import announce_meeting, find_rank_spec
entry, name = from_command(sys.argv[2:])
home = pathlib.Path(sys.argv[1])
async def spec_of():
    async with entry.node(name) as node:
        return (await read(await node.topic(entry.topic), name, ReplicaSpec))[0]
stage = name == "train-0"
life = asyncio.run(spec_of()).built_in.incarnation if stage else asyncio.run(find_rank_spec(entry, name))[0].incarnation
(home / f"{life} {name}").touch()
def others():
    if name == "train-rank-0": asyncio.run(announce_meeting(entry, name, Rendezvous(life, "x")))
    while len(list(home.glob(f"{life} *"))) < 3: time.sleep(0.01)
def die(): os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a unit of a stage and two ranks, which are a few lines of Python; returns what its `Lifecycle` was told."""

    async def run(behaviour: str, *, limit: int = 3, told: Told | None = None) -> Told:
        script, lives = tmp_path / "process.py", tmp_path / "lives"
        script.write_text(PROCESS + behaviour)
        lives.mkdir()
        told = told or Told()
        async with AsyncExitStack() as stack:
            rundir = stack.enter_context(RunDir(tmp_path / "run").open(resume=False))
            launcher, config = LocalLauncher(rundir, 2), config_of(train_device="cpu")
            node = await stack.enter_async_context(Node("run", "controller"))
            topic = await node.topic_server(f"ipc://{rundir.sockets / 'topic'}")
            topic.publish(CONFIG, msgspec.msgpack.encode(config))
            entry = Entry("run", topic.address)
            placement: Any = SimpleNamespace(config=config, rundir=rundir, faults=lambda *_: None)
            shared = Supervision(placement, topic, launcher, Restarts(told, limit), entry)  # type: ignore[arg-type]
            unit = TrainerUnit(shared, Ranks(shared))
            spawn = launcher.spawn

            async def instead(spec: ProcessSpec) -> LocalHandle:
                argv = (sys.executable, str(script), str(lives), *spec.argv[spec.argv.index("-m") + 2 :])
                return await spawn(msgspec.structs.replace(spec, argv=argv))

            monkeypatch.setattr(launcher, "spawn", instead)
            monkeypatch.setattr(trainer_unit, "NOTICE_S", 0.2)
            monkeypatch.setattr(trainer_unit, "END_S", 0.2)
            stage = ReplicaSpec("train", "train-0", "x:Y", 0, 1, 1, str(rundir.path), {}, {}, built_in=TrainOptions())
            try:
                async with asyncio.timeout(90):
                    await unit.run(stage)
            finally:
                alive = [name for name, process in launcher.handles.items() if process.alive]
                await launcher.stop_all()
            assert not alive, "a process outlived its unit"
        return told

    return run


def lives(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "lives").iterdir())


async def test_whatever_is_killed_ends_all_and_all_start_again_until_the_stage_ends_well(
    keep: Any, tmp_path: Path
) -> None:
    """The stage is killed, then a rank; then the stage notices the end of a rank before anybody else, and is not
    blamed."""
    told = await keep("""
others()
if name == "train-0":
    if life == 0: die()
    if life == 2: sys.exit(3)
if name == "train-rank-1":
    if life == 1: die()
    if life == 2: time.sleep(0.1), die()
time.sleep(60 if life < 3 else 0.3)
""")
    why = ["signal SIGKILL", "signal SIGKILL of train-rank-1", "signal SIGKILL of train-rank-1"]
    assert told.events == [("lost", "train", "train-0", one) for one in why]
    names = ("train-0", "train-rank-0", "train-rank-1")
    assert lives(tmp_path) == [f"{life} {name}" for life in range(4) for name in names]
    assert sum("2 ranks are up again" in line for line in told.lines) == 3


async def test_a_stage_that_hangs_is_lost(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_unit, "silence_limit_s", lambda config: 5.0)
    told = await keep("others()\nif life == 0: time.sleep(60)")
    assert told.events == [("lost", "train", "train-0", "signal SIGKILL")]


async def test_a_controller_that_was_stopped_ends_no_other_process_for_it(tmp_path: Path) -> None:
    """Its time limits ran, but it did not listen: news wait to be read, and a look that failed is taken again."""
    loop = asyncio.get_running_loop()
    real, ahead_s = loop.time, 0.0
    loop.time = lambda: real() + ahead_s  # type: ignore[method-assign]
    killed, looks = asyncio.Event(), 0

    async def kill() -> None:
        killed.set()

    async def look() -> str | None:
        nonlocal ahead_s, looks
        looks += 1
        ahead_s += 100.0 if looks < 4 else 0.0
        await asyncio.sleep(0)
        return "no answer within 5 s"

    tracker = HealthTracker(2)
    async with asyncio.timeout(None), Node("run", "controller") as node:
        topic = await node.topic_server(f"ipc://{tmp_path}/t")
        watch = loop.create_task(end_if_silent(topic, "figures", "train-0", SimpleNamespace(kill=kill), 3.0))  # type: ignore[arg-type]
        await until("lost", tracker, look, 0.0)
        assert (looks, killed.is_set()) == (5, False), "three looks during a stop count nothing"
        await watch
    assert killed.is_set(), "silence while awake still counts"


AFTER_ALL_ARE_THERE = "others()\nif not stage: time.sleep(60)\n"


@pytest.mark.parametrize(
    ("behaviour", "kept", "births", "words"),
    [
        ("if stage: time.sleep(60)\nraise RuntimeError('no address for this machine')", {}, 2,
         "exit code 1 of train-rank-. before its ranks .*, 2 times: .*no address"),
        ("if stage: time.sleep(60)\nprint('ERROR TrainConfigInvalid: set --tensor-parallel'); sys.exit(2)", {}, 1,
         "set --tensor-parallel"),
        (f"{AFTER_ALL_ARE_THERE}die()", {"limit": 1}, 2,
         "train-0 ended 2 times within 60 minutes, last with signal SIGKILL"),
        (f"{AFTER_ALL_ARE_THERE}die()", {"told": Told(resumable=False)}, 1,
         "ended with signal SIGKILL; continue from the last checkpoint with --resume"),
        (f"{AFTER_ALL_ARE_THERE}raise RuntimeError('my loss is broken')", {}, 1,
         "ended with exit code 1: .*my loss is broken; continue .*--resume"),
    ],
    ids=["ranks never meet", "a user's mistake", "lost too often", "no state to start from", "it would come again"],
)  # fmt: skip
async def test_what_another_start_cannot_mend_ends_the_run(
    keep: Any, behaviour: str, kept: dict[str, Any], births: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError if "TrainConfigInvalid" in behaviour else ReplicaFailed, match=words):
        await keep(behaviour, **kept)
    assert {life.split()[0] for life in lives(tmp_path)} == set(map(str, range(births)))
