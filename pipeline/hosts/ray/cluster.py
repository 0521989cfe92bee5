"""A Ray cluster for the time of a run: attach or start, list the nodes, start actors, leave.

Invariant: a cluster that a run started ends with it, however the run ends; a cluster that was there before stays,
without any actor of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import msgspec

from configs.schema import Config, generates
from models.errors import first_line
from pipeline.errors import UsageError
from pipeline.facts.run_log import show_line
from pipeline.hosts.launcher import SharedFiles, at_most
from pipeline.hosts.machine import ROOT
from pipeline.hosts.ray.actor import ANSWER_TIMEOUT_S, PlacedActor, ProcessActor, gone
from pipeline.hosts.ray.placement import NODE_ID, Node, RayPlacement, ResourceNeeds

STORE_BYTES: Final = 100 << 20  # of a cluster of our own: only logs and small files go through it
REACH_S: Final = 5.0
NO_RAY: Final = (
    "--runner ray needs the package ray, which is not installed here; install it (pip install ray), or use --runner "
    "local"
)


def imported() -> ModuleType:
    """Raises UsageError where Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(NO_RAY) from error
    return ray  # type: ignore[no-any-return]


@contextlib.contextmanager
def connected(config: Config) -> Iterator[RayPlacement]:
    """Connects to the cluster for the time of the block. Raises UsageError for a cluster that is not there, or that
    cannot hold the run."""
    ray = imported()
    before = signal.getsignal(signal.SIGTERM)
    try:
        _connect(ray, config)
        signal.signal(signal.SIGTERM, before)  # Ray sets its own
        found = nodes()
        placements = RayPlacement(config, gpus=any(node.total["GPU"] for node in found))
        if len(found) > 1 and generates(config) and not config.engine.allow_plain_engines:
            raise UsageError(
                f"--runner ray: the cluster has {len(found)} nodes, and requests to engines cross its network as plain "
                "HTTP: whoever can read it reads prompts, responses and the engines' token; add --allow-plain-engines "
                "on a network that you trust"
            )
        show_line(f"ray: {'; '.join(node.words() for node in found)}")
        for note in placements.check(found):
            show_line(f"warning: {note}")
        yield placements
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def nodes() -> list[Node]:
    """The nodes that are alive."""
    import ray
    from ray._private.state import available_resources_per_node  # there is no public way to ask it

    free: dict[str, Any] = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    return [
        Node(
            *(node["NodeID"], node["NodeManagerAddress"]),
            *(_counted(node["Resources"]), _counted(free.get(node["NodeID"], node["Resources"]))),
            *(dict(node.get("Labels") or {}), node["NodeID"] == here),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _counted(resources: dict[str, float]) -> dict[str, float]:
    return {kind: float(resources.get(kind, 0)) for kind in ("CPU", "GPU")}


def _connect(ray: ModuleType, config: Config) -> None:
    address = config.ray.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"logging_level": "warning", "log_to_driver": False}
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else all processes of the run give way to everything
        # Processes share the processors, as without Ray; its count must be enough, with room for a few more.
        cpus = (os.cpu_count() or 1) + int(RayPlacement(config, gpus=True).total.cpus)
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        return
    reach(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise UsageError(
            f"--ray-address {address}: no cluster of Ray could be joined ({first_line(error)}); start one with ray "
            "start --head, give the address that it prints, and the same RAY_AUTH_TOKEN; or leave --ray-address out"
        ) from error


def reach(address: str) -> None:
    """Report an unreachable address at once: Ray itself tries for a minute. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise UsageError(
            f"--ray-address {address}: no server answers there ({error.strerror or error}); give the address that `ray "
            "start --head` printed, or leave it out for a cluster of this machine alone"
        ) from error


POLL_S: Final = 2.0  # between two looks at the cluster


class NotStarted(Exception):
    """Ray has not started an actor."""


async def start_actor(
    name: str, needs: ResourceNeeds, options: dict[str, Any], limit_s: float, threads: str,
    nodes: Callable[[], list[Node]],
) -> PlacedActor:  # fmt: skip
    """Waits for Ray; raises NotStarted after the limit, or when the node is gone. `options`: where it is to be."""
    import ray
    from ray.exceptions import RuntimeEnvSetupError

    options |= {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_restarts": 0}
    if ray.get_runtime_context().runtime_env.get("working_dir"):  # instead of where this program lies
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    actor = ray.remote(ProcessActor).options(**options).remote(os.getcwd(), threads)
    node_id = options.get("label_selector", {}).get(NODE_ID)
    deadline = asyncio.get_running_loop().time() + limit_s
    ready, answer = actor.ready.remote(), None
    try:
        while answer is None:
            async with at_most(POLL_S):
                answer = await ready
            away = node_id is not None and node_id not in {node.id for node in nodes()}
            if answer is None and (away or asyncio.get_running_loop().time() > deadline):
                raise NotStarted
    except gone() as error:
        raise NotStarted(first_line(error)) from error
    except (RuntimeError, RuntimeEnvSetupError) as error:  # how Ray reports a failed import there
        raise UsageError(
            f"--runner ray: the actor of {name} could not be started ({_last(error)}); each node needs this "
            f"project at {ROOT}, and the Python that it is installed for"
        ) from error
    except BaseException:
        ray.kill(actor)
        raise
    return PlacedActor(actor, *answer)


async def lacking(placed: PlacedActor, sees: SharedFiles) -> str | None:
    """What an actor's node has not of the controller's files, in words. Raises NotStarted where it is gone."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            found: str | None = await placed.actor.lacking.remote(msgspec.msgpack.encode(sees))
            return found
    except gone() as error:
        raise NotStarted from error


def _last(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
