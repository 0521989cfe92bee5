"""Starting one actor of a run, and asking it what its node has. Waits for Ray, no longer than it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

import pipeline
from pipeline.errors import UsageError
from pipeline.hosts.ray.actor import ProcessActor
from pipeline.hosts.ray.handle import ANSWER_TIMEOUT_S, PlacedActor, gone
from pipeline.hosts.ray.nodes import Node, ResourceNeeds
from pipeline.hosts.ray.placement import NODE_ID
from pipeline.hosts.shared_files import SharedFiles

POLL_S: Final = 2.0  # between two looks at the cluster
ROOT: Final = str(Path(pipeline.__file__).parent.parent)


class NotStarted(Exception):
    """Ray has not started an actor."""


async def start_actor(
    name: str, needs: ResourceNeeds, options: dict[str, Any], limit_s: float, threads: str,
    nodes: Callable[[], list[Node]],
) -> PlacedActor:  # fmt: skip
    """Waits for Ray; raises NotStarted after the limit, or when the node is gone. `options`: where it is to be."""
    import ray

    options |= {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_restarts": 0}
    if ray.get_runtime_context().runtime_env.get("working_dir"):  # instead of where this program lies
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        options["runtime_env"] = {"env_vars": {"PYTHONPATH": path}}
    actor = ray.remote(ProcessActor).options(**options).remote(os.getcwd(), threads)
    node_id = options.get("label_selector", {}).get(NODE_ID)
    deadline = asyncio.get_running_loop().time() + limit_s
    ready, answer = actor.ready.remote(), None
    try:
        while answer is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    answer = await ready
            away = node_id is not None and node_id not in {node.id for node in nodes()}
            if answer is None and (away or asyncio.get_running_loop().time() > deadline):
                raise NotStarted
    except gone() as error:
        raise NotStarted from error
    except RuntimeError as error:  # how Ray says that an import failed there
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
