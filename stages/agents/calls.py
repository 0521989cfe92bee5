"""Messages between the agents stage and a worker process (stages/agents/worker.py): calls, answers and errors."""

from __future__ import annotations

from msgspec import Struct

from stages.agents.environment import Endpoint, Start, Step, Task, Turn


class EnvironmentFailed(Exception):
    """An episode cannot continue, or an environment cannot be hosted. The text becomes the rollout's reason."""


class Begin(Struct, frozen=True, tag=True):
    """Make an environment and reset it. `episode` is its id in this process. Answer: Begun."""

    episode: str
    task: Task


class Restore(Struct, frozen=True, tag=True):
    """Make an environment and restore its last snapshot. Answer: nil."""

    episode: str
    task: Task
    state: bytes


class Take(Struct, frozen=True, tag=True):
    """One turn of an episode that lives in this process. Answer: Taken."""

    episode: str
    turn: Turn


class End(Struct, frozen=True, tag=True):
    """The episode is over. Answer: nil, also for an unknown episode."""

    episode: str


class Run(Struct, frozen=True, tag=True):
    """Make an agent and run it. Answer: Outcome."""

    task: Task
    endpoint: Endpoint


Call = Begin | Restore | Take | End | Run


class Begun(Struct, frozen=True):
    start: Start
    state: bytes = b""  # snapshot, if the environment has snapshots


class Taken(Struct, frozen=True):
    step: Step
    state: bytes = b""


class Hosted(Struct, frozen=True):
    """What a worker reports about the class that it hosts."""

    kind: str  # environment or agent
    tasks: bool = False  # the class generates tasks
    snapshots: bool = False


INFRASTRUCTURE = "infrastructure"  # kind of the refusal of a call that raised InfrastructureError
