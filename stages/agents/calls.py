"""Calls from the agents stage to a worker process (stages/agents/worker.py), their answers, and how they fail."""

from __future__ import annotations

from msgspec import Struct

from stages.agents.environment import Endpoint, Start, Step, Task, Turn


class EnvironmentFailed(Exception):
    """An episode cannot go on, or an environment cannot be hosted. The text is the rollout's reason."""


class Begin(Struct, frozen=True, tag=True):
    """Make an environment and reset it. `episode` names it in this process. Answer: Begun."""

    episode: str
    task: Task


class Restore(Struct, frozen=True, tag=True):
    """Make an environment and give it the state of its last snapshot. Answer: nil."""

    episode: str
    task: Task
    state: bytes


class Take(Struct, frozen=True, tag=True):
    """One turn of an episode that is there. Answer: Taken."""

    episode: str
    turn: Turn


class End(Struct, frozen=True, tag=True):
    """The episode is over. Answer: nil, also where it is not there."""

    episode: str


class Run(Struct, frozen=True, tag=True):
    """Make an agent and have it run. Answer: Outcome."""

    task: Task
    endpoint: Endpoint


Call = Begin | Restore | Take | End | Run


class Begun(Struct, frozen=True):
    start: Start
    state: bytes = b""  # a snapshot, of an environment that gives them


class Taken(Struct, frozen=True):
    step: Step
    state: bytes = b""


class Hosted(Struct, frozen=True):
    """What a worker reports about the class that it hosts."""

    kind: str  # environment or agent
    tasks: bool = False  # it makes tasks of its own
    snapshots: bool = False


INFRASTRUCTURE = "infrastructure"  # how a call ends that raised InfrastructureError
