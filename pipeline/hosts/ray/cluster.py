"""The connection to a Ray cluster for the time of a run: attach or start, what its nodes have, leave.

Invariant: a cluster that a run started ends with it, however the run ends; one that was there before stays, without any
actor of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Final

from configs.schema import Config
from pipeline.errors import UsageError
from pipeline.hosts.ray.launcher import RayLauncher
from pipeline.hosts.ray.nodes import Node
from pipeline.hosts.ray.placement import RayPlacement

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
def connected(config: Config) -> Iterator[partial[RayLauncher]]:
    """What makes the launchers of a run, for the time of the block. Raises UsageError for a cluster that is not there,
    or that cannot hold the run."""
    ray = imported()
    before = signal.getsignal(signal.SIGTERM)
    try:
        _connect(ray, config)
        signal.signal(signal.SIGTERM, before)  # Ray sets one of its own
        placements = RayPlacement(config, gpus=_gpus(found := nodes()) > 0)
        sys.stderr.write(f"ray: {'; '.join(node.words() for node in found)}\n")
        for note in placements.check(found):
            sys.stderr.write(f"warning: {note}\n")
        yield partial(RayLauncher, placements, nodes)
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
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=_counted(node["Resources"]),
            free=_counted(free.get(node["NodeID"], node["Resources"])),
            labels=dict(node.get("Labels") or {}),
            here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _counted(resources: dict[str, float]) -> dict[str, float]:
    return {kind: float(resources.get(kind, 0)) for kind in ("CPU", "GPU")}


def _gpus(found: Sequence[Node]) -> float:
    return sum(node.total.get("GPU", 0) for node in found)


def _connect(ray: ModuleType, config: Config) -> None:
    address = config.ray.ray_address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"logging_level": "warning", "log_to_driver": False}
    if address is None:
        os.environ.setdefault("RAY_worker_niceness", "0")  # else all processes of the run give way to everything
        # Processes share the processors, as they do without Ray; what it counts must be enough, and for a few more.
        cpus = (os.cpu_count() or 1) + int(RayPlacement(config, gpus=True).total.cpus)
        ray.init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        return
    _reach(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"--ray-address {address}: no cluster of Ray could be joined ({first}); start one with ray start --head, "
            "give the address that it prints, and the same RAY_AUTH_TOKEN; or leave --ray-address out"
        ) from error


def _reach(address: str) -> None:
    """Say at once that nobody is there: Ray itself tries for a minute. Raises UsageError."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        raise UsageError(
            f"--ray-address {address}: nobody answers there ({error.strerror or error}); give the address that `ray "
            "start --head` printed, or leave it out for a cluster of this machine alone"
        ) from error
