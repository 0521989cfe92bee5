"""The keeper of a trainer group: who was lost first, which GPUs the ranks get, what it refuses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config
from models.train.trainer_group.errors import RanksDisagree, StageGone
from pipeline.errors import ReplicaFailed, UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.hosts.gpu_placement import check_trainer_group, engines_gpus, trainer_group_gpus
from pipeline.hosts.launcher import ProcessSpec, Resources
from pipeline.hosts.local_launcher import LocalHandle, LocalLauncher
from pipeline.hosts.rendezvous import CONFIG, Entry
from pipeline.hosts.trainer_rank import rank_exit_code
from pipeline.supervise import trainer_group as trainer_group
from pipeline.supervise.restarts import Restarts
from pipeline.supervise.trainer_group import (
    Loss,
    TrainerGroup,
    verdict,
)
from tests.stages.stage_rig import until
from transport import Node

pytestmark = pytest.mark.slow

EIGHT = tuple("01234567")


def config_of(*, ranks: int = 2, nodes: int = 1, per_engine: int = 1, **train: Any) -> Config:
    replace, config = msgspec.structs.replace, Config()
    return replace(
        config,
        train=replace(config.train, **train),
        parallel=replace(config.parallel, actor_num_gpus_per_node=ranks, actor_num_nodes=nodes),
        sglang=replace(config.sglang, rollout_num_gpus_per_engine=per_engine),
    )


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ({}, None),
        ({0: 0, 1: 0}, None),
        ({0: 1, 1: -9}, Loss(1, -9)),  # rank 0 failed because rank 1 was killed
        ({1: 1, 0: 1}, Loss(1, 1)),  # the first to end
        ({1: 1, 0: 2}, Loss(0, 2)),  # what the user can mend
        ({0: 0, 1: 1}, Loss(1, 1)),
        ({1: 1, 0: 28}, Loss(0, 28)),
    ],
)
def test_the_rank_that_was_lost_first(codes: dict[int, int], lost: Loss | None) -> None:
    assert verdict(codes) == lost


def test_what_a_rank_ends_with() -> None:
    assert rank_exit_code(StageGone("x")) == 3
    assert rank_exit_code(RanksDisagree("x")) == 1
    assert rank_exit_code(OSError(28, "No space left on device")) == 28
    assert rank_exit_code(ValueError("x")) == 1


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


def test_several_nodes_are_refused_with_what_would_place_them() -> None:
    with pytest.raises(UsageError, match=r"--actor-num-nodes 2 .* --runner local .* --runner ray"):
        check_trainer_group(config_of(nodes=2))
    check_trainer_group(config_of(nodes=1))


class Told:
    """A `Lifecycle` that remembers what it was told."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, str, str]] = []
        self.lines: list[str] = []

    def lost(self, stage: str, name: str, why: str) -> None:
        self.losses.append((stage, name, why))

    def say(self, line: str) -> None:
        self.lines.append(line)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a trainer group says nothing of {name}")


RANK = """
import asyncio, os, pathlib, signal, sys, time
from models.train.trainer_group.rank_spec import Rendezvous
from pipeline.hosts.rendezvous import from_command
from pipeline.hosts.trainer_rank import announce, find
entry, name = from_command(sys.argv[2:])
spec, _ = asyncio.run(find(entry, name))
with pathlib.Path(sys.argv[1]).open("a") as file:
    file.write(f"{spec.incarnation}.{spec.rank} {os.environ['RANK']}/{os.environ['WORLD_SIZE']}\\n")
def up():
    asyncio.run(announce(entry, name, Rendezvous(spec.incarnation, "x")))
"""


Stage = Callable[[TrainerGroup, LocalLauncher], Coroutine[Any, Any, None]]


async def nothing(kept: TrainerGroup, launcher: LocalLauncher) -> None:
    """The train stage lives as long as its ranks."""


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a trainer group whose ranks are a few lines of Python; returns what its `Lifecycle` was told."""

    async def run(behaviour: str, limit: int = 3, beside: Stage = nothing) -> Told:
        async with AsyncExitStack() as stack:
            return await kept_by(stack, behaviour, limit, beside)

    async def kept_by(stack: AsyncExitStack, behaviour: str, limit: int, beside: Stage) -> Told:
        script = tmp_path / "rank.py"
        script.write_text(RANK + behaviour)
        told = Told()
        with RunDir(tmp_path / "run").open(resume=False) as rundir:
            launcher, config = LocalLauncher(rundir, 2), config_of(train_device="cpu")
            node = await stack.enter_async_context(Node("run", "controller"))
            topic = await node.topic_server(f"ipc://{rundir.sockets / 'topic'}")
            topic.publish(CONFIG, msgspec.msgpack.encode(config))
            entry = Entry("run", topic.address)
            kept = TrainerGroup(config, rundir, launcher, Restarts(told, limit), entry, topic)
            spawn = launcher.spawn

            async def instead(spec: ProcessSpec, resources: Resources) -> LocalHandle:
                argv = (
                    sys.executable,
                    str(script),
                    str(tmp_path / "lives"),
                    *spec.argv[spec.argv.index("pipeline.hosts.trainer_rank") + 1 :],
                )
                return await spawn(msgspec.structs.replace(spec, argv=argv), resources)

            monkeypatch.setattr(launcher, "spawn", instead)
            monkeypatch.setattr(trainer_group, "NOTICE_S", 0.2)
            try:
                async with asyncio.timeout(60):
                    stage = asyncio.create_task(beside(kept, launcher))
                    await kept.run()
                    await stage
            finally:
                alive = [name for name, rank in launcher.handles.items() if rank.alive]
                await launcher.stop_all()
            assert not alive, "a rank outlived its trainer group"
        return told

    return run


async def test_one_killed_rank_ends_all_and_all_start_again(keep: Any, tmp_path: Path) -> None:
    told = await keep("""
if spec.rank == 0: up()
if spec.incarnation < 2:
    if spec.rank == 1:
        while f"{spec.incarnation}.0 " not in pathlib.Path(sys.argv[1]).read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
""")
    assert told.losses == [("train", "trainer-group", "signal SIGKILL of rank 1")] * 2
    lives = sorted((tmp_path / "lives").read_text().split("\n"))[1:]
    assert lives == [f"{incarnation}.{rank} {rank}/2" for incarnation in range(3) for rank in range(2)]
    assert any("up again" in line for line in told.lines)


async def test_a_trainer_group_that_never_came_up_is_started_twice(keep: Any) -> None:
    with pytest.raises(ReplicaFailed, match=r"exit code 1 of rank . before it came up, 2 times: .*no address"):
        await keep("raise RuntimeError('no address for this machine')")


async def test_a_users_mistake_ends_the_run_at_once(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set --tensor-model-parallel-size"):
        await keep("print('ERROR TrainConfigInvalid: set --tensor-model-parallel-size'); sys.exit(2)")
    assert all(life.startswith("0.") for life in (tmp_path / "lives").read_text().splitlines())


async def test_a_trainer_group_that_is_lost_too_often_ends_the_run(keep: Any) -> None:
    with pytest.raises(ReplicaFailed, match=r"trainer-group ended 2 times within 60 minutes, last with exit code 7"):
        await keep("up(); sys.exit(7)", limit=1)


async def test_ranks_that_end_well_are_not_started_again(keep: Any, tmp_path: Path) -> None:
    told = await keep("up()")
    assert told.losses == []
    assert all(life.startswith("0.") for life in (tmp_path / "lives").read_text().splitlines())


ENDS_IN_ITS_SECOND_LIFE = """
if spec.rank == 0: up()
if spec.incarnation == 0: time.sleep(60)
"""


async def test_ranks_end_with_a_killed_train_stage_and_start_with_the_next_which_is_no_loss(
    keep: Any, tmp_path: Path
) -> None:
    lives = tmp_path / "lives"

    async def stage(kept: TrainerGroup, launcher: LocalLauncher) -> None:
        await until(lambda: lives.exists() and len(lives.read_text().splitlines()) == 2)
        await kept.stage_lost()
        assert not [name for name, rank in launcher.handles.items() if rank.alive]
        await asyncio.sleep(0.3)
        assert len(lives.read_text().splitlines()) == 2, "they wait for the next train stage"
        kept.stage_again()

    told = await keep(ENDS_IN_ITS_SECOND_LIFE, limit=0, beside=stage)
    assert told.losses == []
    assert sorted(life.split()[0] for life in lives.read_text().splitlines()) == ["0.0", "0.1", "1.0", "1.1"]


async def test_ranks_may_notice_the_end_of_their_train_stage_before_the_runner(keep: Any, tmp_path: Path) -> None:
    async def stage(kept: TrainerGroup, launcher: LocalLauncher) -> None:
        await until(lambda: len(launcher.handles) == 2 and not any(rank.alive for rank in launcher.handles.values()))
        await asyncio.sleep(0.5)
        await kept.stage_lost()
        kept.stage_again()

    told = await keep("up()\nif spec.incarnation == 0: sys.exit(3 if spec.rank == 0 else 0)", limit=0, beside=stage)
    assert told.losses == []


async def test_ranks_that_lost_a_train_stage_that_lives_are_lost(keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_group, "STAGE_GONE_S", 0.1)
    told = await keep("up()\nif spec.incarnation == 0: sys.exit(3 if spec.rank == 0 else 0)")
    assert told.losses == [("train", "trainer-group", "exit code 3 of rank 0")]


def test_a_socket_fits_into_its_name(tmp_path: Path) -> None:
    """The kernel takes 107 bytes; the private directory of a run is short for that reason."""
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        assert len(str(rundir.sockets / "trainer-group-100.sock")) < 108
