"""Where processes of a run go on a Ray cluster, and what is refused: nodes by hand, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest
import ray.exceptions as ray_errors
from launching import SMALL

import launch as program
from configs.load import load
from configs.schema import Config
from pipeline.errors import UsageError
from pipeline.facts.run_directory import RunDir
from pipeline.hosts import worker
from pipeline.hosts.launcher import ProcessSpec, shared_files
from pipeline.hosts.machine import living
from pipeline.hosts.ray.actor import PlacedActor, ProcessActor, RayHandle, interface_of
from pipeline.hosts.ray.cluster import NotStarted
from pipeline.hosts.ray.launcher import RayLauncher
from pipeline.hosts.ray.placement import Node, PlacementGroup, RayPlacement, ResourceNeeds, Strategy, divide
from pipeline.hosts.worker import TRAINER_LOCK, ReplicaSpec, only_trainer
from stages.base import TrainOptions


def config(*flags: str) -> Config:
    return load([*SMALL, "--runner", "ray", *(word for text in flags for word in text.split())]).config


def node(name: str, cpus: float = 4, gpus: float = 0, *, free: float | None = None, **labels: str) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    left = total if free is None else {"CPU": free, "GPU": gpus}
    return Node(name, f"10.0.0.{name}", total, left, labels, here=name == "1")


def placements(*flags: str, gpus: bool = False) -> RayPlacement:
    return RayPlacement(config(*flags), gpus=gpus)


def refusal(nodes: list[Node], *flags: str) -> str:
    with pytest.raises(UsageError) as reported:
        placements(*flags, gpus=any(n.total["GPU"] for n in nodes)).check(nodes)
    return str(reported.value)


def test_a_run_of_defaults_needs_a_cpu_for_the_trainer_and_one_for_each_engine() -> None:
    found = placements("--scale engine=2 --scale reward=3")
    assert found.total == ResourceNeeds(3, 0)
    assert found.of("reward-2").needs == ResourceNeeds()
    assert found.of("train-0").near
    assert [found.of(name).group for name in ("engine-0", "engine-1")] == ["engines"] * 2
    assert found.of("engines-0").here
    assert found.of("engine-7").group == ""  # one that came later
    assert placements("--ray-cpus cpu=2 --ray-cpus train=3").of("generate-0").needs == ResourceNeeds(2, 0)


def test_the_evaluate_stage_is_where_the_held_out_data_are_whatever_nodes_the_others_want() -> None:
    found = placements("--eval-prompt-data arithmetic --eval-interval 2 --ray-labels cpu=pool:cpu")
    assert "evaluate-0" in found.names()
    assert found.of("evaluate-0").here
    assert found.of("evaluate-0").needs == ResourceNeeds()
    assert not found.of("reward-0").here
    assert found.check([node("1"), node("2", pool="cpu")]) == []


@pytest.mark.parametrize(
    ("strategy", "room", "wanted"),
    [
        ("PACK", {"1": 8, "2": 4, "3": 2}, "2222"),  # the smallest that holds all
        ("PACK", {"1": 2, "2": 3, "3": 1}, "2221"),  # several only as one has not the room, and then few
        ("PACK", {"1": 4, "2": 4}, "1111"),  # the controller's, where no weights need be brought
        ("PACK", {"1": 2, "2": 1}, None),
        ("SPREAD", {"1": 8, "2": 4, "3": 2}, "1231"),
        ("SPREAD", {"1": 9, "2": 0, "3": 1}, "1311"),
    ],
)
def test_engines_are_divided_among_nodes(strategy: Strategy, room: dict[str, int], wanted: str | None) -> None:
    group = PlacementGroup("engines", "rollout", ResourceNeeds(1), 4, strategy)
    found = divide(group, [node(name, 16, free=free) for name, free in room.items()])
    assert (None if found is None else "".join(one.id for one in found)) == wanted


def test_an_engine_that_lost_its_node_stays_within_the_domain_of_the_others() -> None:
    config_ = config("--ray-labels rollout=nvlink:*|zone:near")
    one = PlacementGroup("engine-1", "rollout", ResourceNeeds(1), 1, "PACK")
    full, other = node("1", free=0, nvlink="a"), node("2", nvlink="b")
    for more, others, labels in (
        ([], [full], None),
        ([], [], {"nvlink": "b"}),
        ([node("3", nvlink="a")], [full], {"nvlink": "a"}),
        ([node("3", zone="near")], [full], {"zone": "near"}),
    ):
        seat = RayPlacement(config_, gpus=False).seat_with_room(one, [full, other, *more], "free", others)
        assert (seat and seat.labels) == labels


def launcher_of(found: RayPlacement, nodes: list[Node]) -> RayLauncher:
    nowhere: Any = None
    return RayLauncher(found, lambda: nodes, nowhere)


def room(launcher: RayLauncher, name: str) -> str | None:
    return launcher._room(name, launcher.placements.of(name))


def test_what_was_lost_in_silence_goes_to_a_node_that_is_heard_of() -> None:
    """Ray tells that a node is gone only after a while."""
    there: list[Node] = [node("1"), node("2", 2, side="there"), node("3", 8)]
    launcher = launcher_of(placements("--ray-labels cpu=side:there|side:!there"), there)

    def rooms() -> tuple[str | None, str | None]:
        return room(launcher, "reward-0"), room(launcher, "engine-0")

    assert rooms() == ("2", "2")
    launcher._silent = {"2"}
    assert rooms() == ("3", "1")
    launcher._silent = {"1", "2", "3"}
    assert rooms() == ("2", "2"), "it may be only the process that was silent"
    there[:] = [node("1", free=0)]
    assert rooms() == ("1", None)
    assert launcher._silent == {"1"}


def test_ranks_go_to_as_many_nodes_as_the_trainer_has() -> None:
    two = "--train-backend fsdp --actor-num-nodes 2 --actor-num-gpus-per-node 4"
    found = placements(two, gpus=True)
    group = found.groups["trainer"]
    assert (group.bundle, group.bundles, group.strategy, group.near) == (ResourceNeeds(4, 4), 2, "STRICT_SPREAD", True)
    assert [found.of(f"train-rank-{rank}").bundle for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    stage = found.of("train-0")
    assert (stage.needs, stage.group, stage.bundle) == (ResourceNeeds(), "trainer", 0)  # it only deals batches to them
    assert found.check([node("1", 8, 8), node("2", 8, 4)]) == []
    message = refusal([node("1", 8, 8)], two)
    assert message.startswith(
        "--runner ray: trainer needs 2 x 4 CPU and 4 GPU, each on a node of its own, but the cluster has 10.0.0.1 "
        "(8 CPU, 8 GPU); join more nodes"
    )
    assert found.check([node("1", 8), node("2", 8, 4), node("3", 8, 5)]) == []
    assert "each on a node of its own" in refusal([node("1", 8), node("2", 8, 8)], two)


@pytest.mark.parametrize(
    ("nodes", "labels", "wanted"),
    [
        ([node("1", 8, 1), node("2", 8, 1)], "", "1"),  # the controller's node
        ([node("1", 8, 8), node("2", 8, 1)], "", "1"),  # whatever room it has
        ([node("1", 8), node("2", 8, 8), node("3", 8, 1)], "", "3"),  # a head without a GPU; the least room elsewhere
        ([node("1", 1, 1, free=0), node("2", 8, 1)], "", "2"),  # taken by others
        ([node("1", 1, 1, free=0), node("2", 8, 1, free=0)], "", "1"),  # it waits where it would be best
        ([node("1", 8, 1), node("2", 8, 1, gpu="H200")], "train=gpu:H200", "2"),
        ([node("1", 8, 1, gpu="A100"), node("2", 8, 1, gpu="H200")], "train=gpu:H200|gpu:A100", "2"),
        ([node("1", 8, 1, gpu="A100"), node("2", 8, 0, gpu="H200")], "train=gpu:H200|gpu:A100", "1"),
        ([node("1", 8, 1, rack="b"), node("2", 2, 1, rack="a")], "train=rack:*", "1"),
    ],
)
@pytest.mark.parametrize("ranks", [False, True])
def test_the_trainer_begins_on_the_controllers_node_or_where_there_is_room(
    nodes: list[Node], labels: str, wanted: str, ranks: bool
) -> None:
    backend = "--train-backend fsdp" if ranks else ""
    found = placements(backend, "--engine-device cpu", f"--ray-labels {labels}" if labels else "", gpus=True)
    assert found.trainer.near
    assert found.trainer.bundle == ResourceNeeds(1, 1)
    assert found.choose(found.trainer, nodes).node.id == wanted
    found.check(nodes)


def test_a_shared_gpu_is_the_trainers() -> None:
    flags = "--colocate --mode sync --engine embedded --ray-labels train=side:there"
    found, nodes = placements(flags, gpus=True), [node("1", 8, 1), node("2", 8, 1, side="there")]
    assert [found.of(name).group for name in ("train-0", "engine-0")] == ["trainer", "trainer"]
    assert (found.total, found.trainer.bundle) == (ResourceNeeds(2, 1), ResourceNeeds(2, 1))
    assert found.lenders("engine-0") == ["train-0"]
    assert found.choose(found.trainer, nodes).node.id == "2"
    assert found.check(nodes) == []
    message = refusal(nodes, flags, "rollout=side:here")
    assert "with --colocate the engine has the trainer's GPU; leave rollout out" in message


@pytest.mark.parametrize(
    ("engines", "bundle", "lenders", "bundles"),
    [
        ("--engine embedded --scale engine=4", ResourceNeeds(4, 2), [[0], [1], [2], [3]], [0, 0, 1, 1]),
        ("--engine embedded --scale engine=3", ResourceNeeds(4, 2), [[0], [1], [2]], [0, 0, 1]),
        (
            "--engine sglang --rollout-num-gpus-per-engine 2 --rollout-num-gpus 4", ResourceNeeds(3, 2),
            [[0, 1], [2, 3]], [0, 1],
        ),
    ],
)  # fmt: skip
def test_engines_share_the_gpus_of_ranks(
    engines: str, bundle: ResourceNeeds, lenders: list[list[int]], bundles: list[int]
) -> None:
    flags = "--colocate --mode sync --train-backend fsdp --actor-num-nodes 2 --actor-num-gpus-per-node 2"
    found = placements(flags, engines, gpus=True)
    assert list(found.groups) == ["trainer"]
    assert (found.trainer.bundle, found.trainer.bundles) == (bundle, 2)
    names = [f"engine-{number}" for number in range(len(lenders))]
    assert [found.lenders(name) for name in names] == [[f"train-rank-{n}" for n in one] for one in lenders]
    placed = [found.of(name) for name in names]
    assert [(one.group, one.bundle, one.needs) for one in placed] == [
        ("trainer", number, ResourceNeeds(1)) for number in bundles
    ]
    assert found.total.gpus == 4
    assert found.lenders("train-rank-0") == found.lenders("reward-0") == []
    assert placements(flags, engines).lenders("engine-0") == [], "on CPUs"


def test_engines_of_evaluations_are_placed_with_the_others() -> None:
    flags = "--eval-prompt-data arithmetic --eval-interval 2 --eval-engines 3 --engine embedded --scale engine=2"
    found = placements(flags, "--ray-labels rollout=nvlink:* --train-device cpu", gpus=True)
    group = found.groups["engines"]
    assert (group.bundle, group.bundles) == (ResourceNeeds(1, 1), 5)
    assert (found.total, found.of("eval-engine-1").role) == (ResourceNeeds(6, 5), "rollout")
    there = [node("1"), domain("2", "a", 4), domain("3", "b", 3), domain("4", "b", 2)]
    launcher = launcher_of(found, there)
    names = ("engine-0", "engine-1", "eval-engine-0", "eval-engine-1", "eval-engine-2")
    planned = [asyncio.run(launcher._plan(name, group)) for name in names]
    assert (sorted(planned), {found.of(name).group for name in names}) == (["3", "3", "3", "4", "4"], {"engines"})
    for name, place in zip(names[:2], planned, strict=False):
        launcher._placed[name] = PlacedActor(cast(Any, None), place, "")
    assert room(launcher, "eval-engine-1") in {"3", "4"}, "in the domain of the others"
    there[2:] = []
    launcher._placed["engine-0"].lost = launcher._placed["engine-1"].lost = True
    assert room(launcher, "eval-engine-1") == "2"
    elsewhere = placements(flags, "--eval-engines 0 --eval-external-engine-addrs http://localhost:1", gpus=True)
    assert "eval-engine-0" not in elsewhere.names()


def test_a_lost_trainer_goes_back_to_its_node_then_to_one_that_sees_its_files() -> None:
    nodes = [node("1", 0), node("2", 4), node("3", 8)]
    launcher, anything = launcher_of(placements(), nodes), cast(Any, None)
    lost = launcher._placed["train-0"] = PlacedActor(anything, "3", "10.0.0.3")
    lost.lost, launcher._sees["train-0"] = True, cast(Any, object())
    nodes[2] = node("3", 8, free=0)  # Ray has not told yet that it gave back what it held
    assert room(launcher, "train-0") == "3"
    assert room(launcher, "train-0") == "2", "others took it"
    launcher._unfit.add("2")
    assert room(launcher, "train-0") is None
    launcher._wait("train-0", launcher.placements.of("train-0"))
    assert launcher.waiting["train-0"].endswith("free are 10.0.0.1 (0 CPU, 0 GPU), 10.0.0.3 (0 CPU, 0 GPU)")
    nodes[2] = node("3", 8)
    assert room(launcher, "train-0") == "3"
    launcher._silent = {"3"}
    nodes.append(node("4", 16))
    assert room(launcher, "train-0") == "4"
    nodes[0] = node("1", 8)
    assert room(launcher, "train-0") == "1", "the controller's"


def test_engines_leave_the_trainer_its_place() -> None:
    nodes = [node("1", 4, 1), node("2", 8, 8)]
    launcher = launcher_of(placements("--engine embedded", gpus=True), nodes)
    assert asyncio.run(launcher._plan("engine-0", launcher.placements.groups["engines"])) == "2"
    nodes[0] = node("1", 4, 0)
    launcher._planned.clear()
    assert asyncio.run(launcher._plan("engine-0", launcher.placements.groups["engines"])) == "2"


def test_what_is_missing_is_named() -> None:
    flags = "--engine embedded --engine-device cuda --scale engine=2 --train-device cpu"
    message = refusal([node("1", 8), node("2", 8, 1)], flags)
    assert "engines needs 2 x 1 CPU and 1 GPU, but the cluster has" in message
    assert "2 nodes: 10.0.0.1 (8 CPU, 0 GPU), 10.0.0.2 (8 CPU, 1 GPU)" in message
    assert "all processes of the run together need 6 CPU, but the cluster has 10.0.0.1 (4 CPU" in refusal(
        [node("1")], "--ray-cpus", "train=3", "--ray-cpus", "rollout=3"
    )


def engines_labels(found: RayPlacement, *nodes: Node) -> dict[str, str]:
    return found.choose(found.groups["engines"], nodes).labels


def test_the_first_labels_with_room_are_taken() -> None:
    wanted = "--ray-labels rollout=market:spot|market:on-demand"
    found, demand, busy = placements(wanted), node("1", market="on-demand"), node("2", free=0, market="spot")
    assert engines_labels(found, demand, node("2", market="spot")) == {"market": "spot"}
    assert engines_labels(found, demand) == {"market": "on-demand"}
    assert engines_labels(found, demand, busy) == {"market": "on-demand"}
    waits = engines_labels(found, node("1", free=0, market="on-demand"), busy)
    assert waits == {"market": "spot"}, "it waits for the one it prefers"
    assert found.check([demand]) == ["--ray-labels: no room for rollout on market=spot; using market=on-demand"]
    assert "with market=spot or market=on-demand" in refusal([node("1")], wanted)


def domain(number: str, value: str, gpus: float = 4, **more: str) -> Node:
    return node(number, 8, gpus, **{"nvlink": value, **more})


def test_all_nodes_of_a_group_are_in_one_domain_the_scarcest_that_holds_it() -> None:
    flags = "--engine embedded --engine-device cuda --train-device cpu --scale engine=6 --ray-cpus rollout=0 "
    flags += "--update-weight-transport delta --update-weight-delta-dir /shared --ray-labels rollout=nvlink:*"
    found = placements(flags, gpus=True)
    a, b = [domain("1", "a"), domain("2", "a")], [domain("3", "b"), domain("4", "b"), domain("5", "b")]
    assert engines_labels(found, *b, *a) == {"nvlink": "a"}  # b stays whole
    assert engines_labels(found, *b, domain("1", "a"), domain("2", "c")) == {
        "nvlink": "b"
    }  # a and c together are no domain
    assert engines_labels(found, *b, node("1", 8, 64)) == {"nvlink": "b"}  # a node without the label is in none
    assert found.check([*a, *b]) == []
    assert "with nvlink=*, but the cluster has" in refusal([domain("1", "a"), domain("2", "b")], flags)


def test_a_domain_has_a_fallback_and_goes_with_other_labels() -> None:
    two = "--train-backend fsdp --actor-num-nodes 2 --actor-num-gpus-per-node 4 --ray-labels"
    apart = [domain("1", "a", gpu="H200"), domain("2", "b", gpu="H200"), domain("3", "b", gpu="H200")]
    found = placements(two, "train=nvlink:*,gpu:H200|gpu:H200", gpus=True)
    alone = [*apart[:2], domain("5", "c", gpu="H200")]
    assert found.check(alone) == ["--ray-labels: no room for train on nvlink=*,gpu=H200; using gpu=H200"]
    assert found.check(apart) == []  # in the domain of two others than the controller's
    for nodes, first in ((apart, "2"), ([*apart, domain("4", "a", gpu="H200")], "1")):
        assert found.choose(found.groups["trainer"], nodes).node.id == first
    assert "nvlink=*" in refusal(alone, two, "train=nvlink:*,gpu:H200")


def test_labels_of_the_trainer_do_not_move_what_stays_with_the_controller() -> None:
    wanted = "--ray-labels train=gpu:H200 cpu=gpu:H200 --ray-cpus cpu=2 --eval-prompt-data arithmetic --eval-interval 2"
    found = placements(wanted)
    assert all(found.of(name).here for name in ("evaluate-0", "engines-0"))
    assert found.check([node("1"), node("2", 32, gpu="H200")]) == []
    message = refusal([node("1", 1), node("2", 32, gpu="H200")], wanted)
    assert "evaluate-0 needs 2 CPU on the controller's node, but the cluster has 2 nodes: 10.0.0.1 (1 CPU" in message
    assert "with gpu=H200, but the cluster has" in refusal([node("1")], wanted)


SHARED = (
    "--colocate", "--mode", "sync", "--train-backend", "fsdp", "--actor-num-nodes", "2", "--actor-num-gpus-per-node",
    "2", "--engine", "sglang", "--rollout-num-gpus-per-engine", "2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ray-labels", "rollout:spot"), "must have the form role=key:value; write for example"),
        (("--ray-labels", "rollout=market:spot|"), "must have the form role=key:value,key:value"),
        (("--ray-labels", "rolout=market:spot"), "rolout is no role; did you mean rollout?"),
        (("--ray-labels", "cpu=a:b", "cpu=c:d"), "--ray-labels names cpu twice; join them"),
        (("--ray-cpus", "gpu=1"), "--ray-cpus gpu=1 names no role"),
        (("--ray-cpus", "cpu=-1"), "--ray-cpus cpu=-1 is less than nothing"),
        (("--ray-address", "ray://head:10001"), "the controller must run on a node of the cluster"),
        (("--train-device", "cuda:1"), "--train-device is cuda:1, but with --runner ray it is Ray that chooses"),
        (
            ("--colocate", "--mode", "sync", "--scale", "engine=2"),
            "has: 1 (--rollout-num-gpus-per-engine) for each of 2 engines, but the trainer has 1 (--actor-num-gpus-per",
        ),
        (
            (*SHARED, "--rollout-num-gpus", "6"),
            "for each of 3 engines, but the trainer has 2 (--actor-num-gpus-per-node) on 2 (--ac",
        ),
        (
            (*SHARED[:-1], "4", "--rollout-num-gpus", "4"),
            "has: 4 (--rollout-num-gpus-per-engine) for each of 1 engines",
        ),
        (("--runner", "local", "--ray-placement", "spread"), "only --runner ray reads it"),
    ],
)
def test_mistakes_are_reported_with_their_cure(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*SMALL, "--runner", "ray", *flags]) == 2
    assert message in capsys.readouterr().err


def test_without_ray_installed_the_cure_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert program.main(["--run-dir", f"{tmp_path}/run", *SMALL, "--runner", "ray"]) == 2
    assert "--runner ray needs the package ray, which is not installed here; install it" in capsys.readouterr().err


def test_a_missing_peer_is_reported_at_once(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    pytest.importorskip("ray")
    flags = ["--run-dir", f"{tmp_path}/run", *SMALL, "--runner", "ray", "--ray-address", "127.0.0.1:1"]
    assert program.main(flags) == 2
    assert "--ray-address 127.0.0.1:1: no server answers there" in capsys.readouterr().err


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


# The actor that owns a process, without a cluster: of Ray it asks only which node it is on.


SLEEPS = ProcessSpec("one-0", (sys.executable, "-c", "import time; time.sleep(600)"))


@pytest.fixture
async def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessActor]:
    node = SimpleNamespace(get_node_id=lambda: "node")
    ray = SimpleNamespace(
        get_runtime_context=lambda: node, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the actor goes there itself; other tests are not to follow it
    made = ProcessActor(str(tmp_path), "1")
    yield made
    await made.kill()
    await made.close()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_process_that_is_being_started_when_the_run_ends_is_ended(actor: ProcessActor, how: str) -> None:
    """The run would wait for its end for ever."""
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(actor.spawn(msgspec.msgpack.encode(SLEEPS)))
        await asyncio.sleep(0)  # it has begun
        assert not starting.done()
        await getattr(actor, how)()
    process, _ = starting.result()
    assert not living(process)
    assert (await actor.output(0))[1] is not None, "whoever waits learns of it"


LOST = [
    kind
    for kind in vars(ray_errors).values()
    if isinstance(kind, type) and issubclass(kind, ray_errors.RayError) and kind is not ray_errors.RayError
]
CODE = {"CrossLanguageError", "UserCodeException", "UnserializableException", "AuthenticationError", "RayTaskError"}
CODE |= {"RuntimeEnvSetupError"}


@pytest.mark.parametrize("kind", LOST, ids=lambda kind: str(kind.__name__))
async def test_whatever_ends_an_actor_is_a_loss_with_a_sentence(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is a restart. What the code of an actor raises is none: another start would repeat it."""
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    error = type("Raised", (kind,), {"__init__": lambda self: None, "__str__": lambda self: "the node\nran out"})()

    async def fail(*_: object) -> None:
        raise error

    remote = SimpleNamespace(remote=fail)
    placed = PlacedActor(SimpleNamespace(output=remote, spawn=remote, missing=remote, kill=remote), "node", "10.0.0.1")
    for call in ("start", "wait", "kill"):
        placed.lost = False
        handle = RayHandle(SLEEPS, placed, tmp_path / f"{call}.log")
        if kind.__name__ in CODE:
            with pytest.raises(kind):
                await getattr(handle, call)()
            continue
        assert await getattr(handle, call)() == (0 if call == "start" else -9)
        assert (handle.alive, placed.lost) == (False, True)
        assert handle.log.read_text() == "the Ray actor of one-0 is gone: the node\n"


# Whether a node has the run directory and the model of the controller, and one train stage at a time.


def model(place: Path, weights: bytes) -> Path:
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(weights)
    return place


def config_of(checkpoint: Path, *flags: str) -> Config:
    return load([*SMALL, "--hf-checkpoint", str(checkpoint), *flags]).config


def test_a_run_directory_is_known_by_a_secret(tmp_path: Path) -> None:
    checkpoint = model(tmp_path / "model", b"w" * 100)
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        reported = shared_files(rundir, config_of(checkpoint))
        assert reported.lacking() is None
        rundir.path.rename(tmp_path / "away")
        (tmp_path / "run").mkdir()  # as another machine may have one, with all that a run leaves
        for path in (tmp_path / "away").iterdir():
            if path.name != rundir.seal.name:
                path.rename(tmp_path / "run" / path.name)
        assert reported.lacking() == f"does not see the controller's run directory {tmp_path / 'run'}"
    with RunDir(tmp_path / "again").open(resume=False) as rundir:
        (rundir.path / ".seal-0123").touch()  # a run that was killed
        rundir.write_config("")
    with RunDir(tmp_path / "again").open(resume=True) as rundir:
        assert [path.name for path in rundir.path.glob(".seal-*")] == [rundir.seal.name]
        assert shared_files(rundir, config_of(checkpoint)).lacking() is None
    assert list((tmp_path / "again").glob(".seal-*")) == []


def test_a_model_is_compared_by_what_it_holds(tmp_path: Path, rundir: RunDir) -> None:
    weights = bytes(range(256)) * 4096
    checkpoint, reference = model(tmp_path / "model", weights), model(tmp_path / "reference", weights)
    reported = shared_files(rundir, config_of(checkpoint, "--ref-load", str(reference), "--kl-loss-coef", "0.1"))
    assert sorted(reported.models) == [str(checkpoint), str(reference)]
    assert reported.lacking() is None
    (checkpoint / "README").touch()  # nobody reads it
    assert reported.lacking() is None
    (checkpoint / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 4096)
    other = f"has another model than the controller's at {checkpoint}, or not all of its files"
    assert reported.lacking() == other
    (checkpoint / "model.safetensors").unlink()
    assert reported.lacking() == other
    (checkpoint / "model.safetensors").write_bytes(weights)
    (reference / "config.json").unlink()
    (reference / "model.safetensors").unlink()
    reference.rmdir()
    assert reported.lacking() == f"does not see the controller's model {reference}"
    assert msgspec.structs.replace(reported, models={}).lacking() is None
    assert shared_files(rundir, config_of(Path("org/name"))).models == {}


async def test_a_train_stage_waits_for_the_end_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def train() -> None:
        async with only_trainer(tmp_path):
            begun.set()
            with (tmp_path / TRAINER_LOCK).open("w") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        with (tmp_path / TRAINER_LOCK).open("w") as zombie:
            fcntl.flock(zombie, fcntl.LOCK_EX)
            tasks.create_task(train())
            while "another train stage still writes" not in caplog.text:  # noqa: ASYNC110  (a log announces nothing)
                await asyncio.sleep(0.01)
            assert not begun.is_set()
        await begun.wait()
    with (tmp_path / TRAINER_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("host", ["", "192.0.2.1"])
async def test_a_train_stage_that_others_may_replace_holds_its_place_while_it_runs(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, ran = MagicMock(), list[ReplicaSpec]()
    entry.serving_node.return_value.__aenter__.return_value.topic = AsyncMock()
    spec = ReplicaSpec("train", "train-0", "x:X", 0, 1, 1, str(tmp_path), {}, {}, built_in=TrainOptions(), host=host)

    async def run(spec: ReplicaSpec, *_: object) -> None:
        with (tmp_path / TRAINER_LOCK).open("w") as other:
            held = pytest.raises(BlockingIOError) if host else contextlib.nullcontext()
            with held:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran.append(spec)

    monkeypatch.setattr(worker, "run_replica", run)
    monkeypatch.setattr(worker.rendezvous, "read", AsyncMock(return_value=(spec, Config())))
    monkeypatch.setattr(worker.rendezvous, "trainers_place", lambda *_: TrainOptions(slots="here"))
    await worker._run_replica_process(entry, "train-0")
    assert [one.built_in for one in ran] == [TrainOptions(slots="here")]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_actor_that_joins_a_run_after_a_loss_is_tried_again(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that was lost is taken apart, and Ray may kill the new processes for memory before they have started."""
    tries: list[str] = []

    async def start_actor(name: str, *_: Any) -> PlacedActor:
        tries.append(name)
        if len(tries) < 3:
            raise NotStarted("a worker was killed due to the node running low on memory")
        return PlacedActor(None, "1", "10.0.0.1")

    monkeypatch.setattr("pipeline.hosts.ray.launcher.start_actor", start_actor)
    monkeypatch.setattr("pipeline.hosts.ray.launcher.ROOM_POLL_S", 0.0)
    launcher = RayLauncher(placements(), lambda: [node("1")], RunDir(tmp_path))
    if begun:
        launcher._placed["generate-0"] = PlacedActor(None, "1", "10.0.0.1")
        launcher._placed["generate-0"].lost = True
        await launcher.place("group-0")
        assert (tries, launcher.address("group-0")) == (["group-0"] * 3, "10.0.0.1")
    else:
        with pytest.raises(UsageError, match=r"Ray started no actor for group-0 within 120 s .*low on memory"):
            await launcher.place("group-0")
        assert tries == ["group-0"], "nothing has begun, so the user is asked"
