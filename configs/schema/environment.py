"""Environments and agents that rollouts live in. Owner: `stages/agents/stage`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

PACKS = "stages.agents.packs"


class EnvironmentConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One environment. A row of the data chooses one by its metadata's `environment`; else it gets the first."""

    name: str
    path: Annotated[str, Meta(description="import path of the class; default: the built-in pack of this name")] = ""
    options: Annotated[dict[str, Any], Meta(description="keyword arguments of the class")] = {}
    workers: Annotated[int, Meta(ge=1, description="worker processes per replica of the agents stage")] = 1
    python: Annotated[
        str | None,
        Meta(description="Python interpreter of the workers, for packages of their own; default: the run's"),
    ] = None
    step_deadline_s: Annotated[float, Meta(gt=0, description="seconds for one reset or step")] = 60.0
    concurrency: Annotated[
        int, Meta(ge=0, description="resets, steps and agents at a time per replica of the agents stage; 0 = no limit")
    ] = 0
    tool_concurrency: Annotated[
        dict[str, Annotated[int, Meta(ge=1)]],
        Meta(description="turns at a time that call the tool of this name, per replica of the agents stage"),
    ] = {}
    episode_deadline_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that an episode may spend in its environment, from the start of its world on; its "
            "rollout fails then. An agent has them for all of its run, and is then graded as it is",
        ),
    ] = 1800.0
    ignore_reasoning: Annotated[
        bool,
        Meta(description="an agent's conversation goes on where its client leaves reasoning out of earlier turns"),
    ] = False
    memory_gb: Annotated[float, Meta(ge=0, description="most memory of one worker process, GiB; 0 = no limit")] = 4.0
    retries: Annotated[int, Meta(ge=0, description="fresh starts of an episode after infrastructure failed")] = 3
    outage_s: Annotated[
        float, Meta(ge=0, description="seconds of an outage after which rollouts fail instead of waiting")
    ] = 1800.0

    @property
    def class_path(self) -> str:
        """Import path of the class. A pack's class is its module's name in capitals: guess_number, GuessNumber."""
        pack = "".join(word.capitalize() for word in self.name.split("_"))
        return self.path or f"{PACKS}.{self.name}:{pack}"
