"""Where processes of a run go on a Ray cluster, and what is refused: nodes by hand, no Ray."""

from __future__ import annotations

import sys

import pytest
from launching import SMALL

import launch as program
from configs.load import load
from configs.schema import Config
from pipeline.errors import UsageError
from pipeline.hosts.ray_actor import interface_of
from pipeline.hosts.ray_placement import Node, RayPlacement, ResourceNeeds, choose


def config(*flags: str) -> Config:
    return load([*SMALL, "--runner", "ray", *flags]).config


def node(name: str, cpus: float = 4, gpus: float = 0, *, free: float | None = None, **labels: str) -> Node:
    total = {"CPU": cpus, "GPU": gpus}
    left = total if free is None else {"CPU": free, "GPU": gpus}
    return Node(name, f"10.0.0.{name}", total, left, labels, here=name == "1")


def placements(*flags: str, gpus: bool = False) -> RayPlacement:
    return RayPlacement(config(*flags), gpus=gpus)


def refusal(nodes: list[Node], *flags: str) -> str:
    with pytest.raises(UsageError) as told:
        placements(*flags, gpus=any(n.total["GPU"] for n in nodes)).check(nodes)
    return str(told.value)


def test_a_run_of_defaults_needs_a_cpu_for_the_trainer_and_one_for_each_engine() -> None:
    found = placements("--scale", "engine=2", "--scale", "reward=3")
    assert found.total == ResourceNeeds(3, 0)
    assert found.of("reward-2").needs == ResourceNeeds()
    assert found.of("train-0").here
    assert [found.of(name).group for name in ("engine-0", "engine-1", "engines-0")] == ["engines"] * 3
    assert found.of("engine-7").bundle == -1  # one that came later
    assert placements("--ray-cpus", "cpu=2", "--ray-cpus", "train=3").of("generate-0").needs == ResourceNeeds(2, 0)


def test_the_evaluate_stage_is_where_the_held_out_data_are_whatever_nodes_the_others_want() -> None:
    found = placements("--eval-prompt-data", "arithmetic", "--eval-interval", "2", "--ray-labels", "cpu=pool:cpu")
    assert "evaluate-0" in found.names()
    assert found.of("evaluate-0").here
    assert found.of("evaluate-0").needs == ResourceNeeds()
    assert not found.of("reward-0").here
    assert found.check([node("1"), node("2", pool="cpu")]) == []


def test_engines_that_get_weights_through_their_host_are_on_one_node() -> None:
    two = [node("1", 2), node("2", 2)]
    flags = ("--ray-cpus", "rollout=2", "--ray-cpus", "train=0", "--scale", "engine=2")
    assert "2 x 2 CPU, all on one node" in refusal(two, *flags)
    assert placements(*flags).check([node("1", 2), node("2", 4)]) == []
    shared = ("--update-weight-transport", "delta", "--update-weight-delta-dir", "/shared")
    assert placements(*flags, *shared).check(two) == []


def test_ranks_go_to_as_many_nodes_as_the_trainer_has() -> None:
    two = ("--train-backend", "fsdp", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4")
    found = placements(*two, gpus=True)
    group = found.groups["trainer"]
    assert (group.bundle, group.bundles, group.strategy, group.here) == (ResourceNeeds(4, 4), 2, "STRICT_SPREAD", True)
    assert [found.of(f"train-rank-{rank}").bundle for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert found.of("train-0").needs == ResourceNeeds()  # it only deals batches to them
    assert found.check([node("1", 8, 8), node("2", 8, 4)]) == []
    said = refusal([node("1", 8, 8)], *two)
    assert said.startswith(
        "--runner ray: trainer needs 2 x 4 CPU and 4 GPU, each on a node of its own, the first on the controller's, "
        "but the cluster has 10.0.0.1 (8 CPU, 8 GPU); join more nodes"
    )
    assert "the first on the controller's" in refusal([node("1", 8), node("2", 8, 4), node("3", 8, 4)], *two)


def test_what_is_missing_is_named() -> None:
    said = refusal([node("1", 8), node("2", 8, 1)], "--engine", "embedded", "--engine-device", "cuda", "--scale",
                   "engine=2", "--train-device", "cpu")  # fmt: skip
    assert "engines needs 2 x 1 CPU and 1 GPU, all on one node" in said
    assert "2 nodes: 10.0.0.1 (8 CPU, 0 GPU), 10.0.0.2 (8 CPU, 1 GPU)" in said
    assert "all processes of the run together need 6 CPU, but the cluster has 10.0.0.1 (4 CPU" in refusal(
        [node("1")], "--ray-cpus", "train=3", "--ray-cpus", "rollout=3"
    )


def test_the_first_labels_with_room_are_taken() -> None:
    wanted = ("--ray-labels", "rollout=market:spot|market:on-demand")
    spot, demand = node("1", market="on-demand"), node("2", market="spot")
    found = placements(*wanted)
    group = found.groups["engines"]

    def labels(*nodes: Node) -> dict[str, str]:
        return choose(found.config, "rollout", group, nodes)

    assert labels(spot, demand) == {"market": "spot"}
    assert labels(node("1", market="on-demand")) == {"market": "on-demand"}
    busy = node("2", free=0, market="spot")
    assert labels(node("1", market="on-demand"), busy) == {"market": "on-demand"}
    assert labels(node("1", free=0, market="on-demand"), busy) == {"market": "spot"}  # it waits for the one it prefers
    assert found.check([spot]) == ["--ray-labels: no room for rollout on market=spot; using market=on-demand"]
    assert "with market=spot or market=on-demand" in refusal([node("1")], *wanted)


def test_all_labels_of_one_alternative_must_hold_and_some_may_be_ruled_out() -> None:
    wanted = ("--ray-labels", "rollout=gpu:H200,market:!spot")
    found = placements(*wanted)
    assert found.check([node("1"), node("2", gpu="H200", market="on-demand")]) == []
    assert found.check([node("1"), node("2", gpu="H200")]) == []
    for labels in ({"gpu": "H200", "market": "spot"}, {"market": "on-demand"}):
        assert "with gpu=H200,market=!spot" in refusal([node("1"), node("2", **labels)], *wanted)


def domain(number: str, value: str, gpus: float = 4, **more: str) -> Node:
    return node(number, 8, gpus, **{"nvlink": value, **more})


def test_all_nodes_of_a_group_are_in_one_domain_the_scarcest_that_holds_it() -> None:
    flags = ("--engine", "embedded", "--engine-device", "cuda", "--train-device", "cpu", "--scale", "engine=6",
             "--ray-cpus", "rollout=0", "--update-weight-transport", "delta", "--update-weight-delta-dir", "/shared",
             "--ray-labels", "rollout=nvlink:*")  # fmt: skip
    found = placements(*flags, gpus=True)
    group = found.groups["engines"]

    def chosen(*nodes: Node) -> dict[str, str]:
        return choose(found.config, "rollout", group, nodes)

    a, b = [domain("1", "a"), domain("2", "a")], [domain("3", "b"), domain("4", "b"), domain("5", "b")]
    assert chosen(*b, *a) == {"nvlink": "a"}  # b stays whole
    assert chosen(*b, domain("1", "a"), domain("2", "c")) == {"nvlink": "b"}  # a and c together are no domain
    assert chosen(*b, node("1", 8, 64)) == {"nvlink": "b"}  # a node without the label is in none
    assert found.check([*a, *b]) == []
    assert "with nvlink=*, but the cluster has" in refusal([domain("1", "a"), domain("2", "b")], *flags)


def test_a_domain_has_a_fallback_and_goes_with_other_labels() -> None:
    two = ("--train-backend", "fsdp", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--ray-labels")
    apart = [domain("1", "a", gpu="H200"), domain("2", "b", gpu="H200"), domain("3", "b", gpu="H200")]
    found = placements(*two, "train=nvlink:*,gpu:H200|gpu:H200", gpus=True)
    # The first node must be the controller's, and nobody shares its domain.
    assert found.check(apart) == ["--ray-labels: no room for train on nvlink=*,gpu=H200; using gpu=H200"]
    assert found.check([*apart, domain("4", "a", gpu="H200")]) == []
    assert "nvlink=*" in refusal(apart, *two, "train=nvlink:*,gpu:H200")


def test_the_trainer_is_refused_labels_that_the_controllers_node_lacks() -> None:
    wanted = ("--ray-labels", "train=gpu:H200")
    assert "on the controller's node with gpu=H200" in refusal([node("1"), node("2", gpu="H200")], *wanted)
    assert placements(*wanted).check([node("1", gpu="H200"), node("2")]) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--ray-labels", "rollout:spot"), "must have the form role=key:value; write for example"),
        (("--ray-labels", "rollout=market:spot|"), "must have the form role=key:value,key:value"),
        (("--ray-labels", "rolout=market:spot"), "rolout is no role; did you mean rollout?"),
        (("--ray-labels", "cpu=a:b", "cpu=c:d"), "--ray-labels names cpu twice; join them"),
        (("--ray-cpus", "gpu=1"), "--ray-cpus gpu=1 names no role"),
        (("--ray-cpus", "cpu=-1"), "--ray-cpus cpu=-1 is less than nothing"),
        (("--ray-address", "ray://head:10001"), "the controller must run on a node of the cluster"),
        (("--train-device", "cuda:1"), "--train-device is cuda:1, but with --runner ray it is Ray that chooses"),
        (("--colocate", "--mode", "sync", "--scale", "engine=2"), "is for one engine on one GPU"),
        (("--runner", "local", "--ray-placement", "spread"), "only --runner ray reads it"),
    ],
)
def test_mistakes_are_told_with_their_cure(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*SMALL, "--runner", "ray", *flags]) == 2
    assert said in capsys.readouterr().err


def test_without_ray_installed_the_cure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert program.main(["--run-dir", f"{tmp_path}/run", *SMALL, "--runner", "ray"]) == 2
    assert "--runner ray needs the package ray, which is not installed here; install it" in capsys.readouterr().err


def test_nobody_at_the_address_is_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    pytest.importorskip("ray")
    flags = ["--run-dir", f"{tmp_path}/run", *SMALL, "--runner", "ray", "--ray-address", "127.0.0.1:1"]
    assert program.main(flags) == 2
    assert "--ray-address 127.0.0.1:1: nobody answers there" in capsys.readouterr().err


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
