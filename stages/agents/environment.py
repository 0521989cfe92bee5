"""The interfaces for users: environments that answer the model, and agents that call it.

An environment answers the model turn by turn: `reset`, then `step` until a step is `done`. An agent is a program that
sends requests to the model at an address that looks like a model server. A recipe names both by import path:

    [[environment]]
    name = "guess_number"
    path = "stages.agents.packs.guess_number:GuessNumber"
    options = { highest = 20 }

One object serves one episode. It lives in a worker process and may keep any state in its attributes. That state is lost
with the process: the stage then makes a new object and replays the recorded turns to it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from stages.chat.messages import Message, ToolSchema
from stages.errors import InfrastructureError as InfrastructureError  # for users, beside what raises it
from stages.records.once import Once


class Task(Struct, frozen=True):
    """The task of an episode: a row of the data, and the rollout's place in its group."""

    messages: tuple[Message, ...] = ()  # the row's prompt; a plain text is one user message
    label: str | None = None
    metadata: Mapping[str, Any] = {}  # of the row
    tools: tuple[ToolSchema, ...] = ()  # of the row
    seed: int = 0  # equal for all rollouts of a group, which must get the same task
    sample_seed: int = 0  # different for each rollout
    episode: str = ""  # id of this rollout in the run: group/rollout
    evaluation: bool = False


class Start(Struct, frozen=True):
    """The start of an episode."""

    messages: tuple[Message, ...]  # the whole first prompt
    tools: tuple[ToolSchema, ...] = ()  # offered to the model


class Turn(Struct, frozen=True):
    """One turn of the model."""

    number: int  # 0 for the first
    message: Message  # as the chat format reads it: content, reasoning, calls
    text: str  # as the model wrote it
    truncated: bool = False  # a length limit cut the turn, so the episode ends here
    malformed: str = ""  # error in its tool call, written for the model
    last: bool = False  # no turn can follow (--max-turns, or truncated): give the reward now


class Step(Struct, frozen=True):
    """The environment's answer to a turn."""

    messages: tuple[Message, ...] = ()  # observations, not trained; the model's next turn follows
    reward: float | None = None  # of this turn; with `done`, of the episode. None at the end: a grader scores it
    done: bool = False
    metrics: Mapping[str, float] = {}  # averaged over episodes, as env/<environment>/<name>
    answer: str | None = None  # text for the grader if the episode ends here; None: all turns and observations


@runtime_checkable
class Environment(Protocol):
    """One episode. Constructed with the `options` of its table as keyword arguments.

    An exception in `reset` or `step` fails the rollout with that reason, except InfrastructureError. Report the failure
    of a tool as an observation, not as an exception.
    """

    async def reset(self, task: Task) -> Start: ...

    async def step(self, turn: Turn) -> Step: ...

    async def close(self) -> None:
        """Called once when the episode is over, possibly before its last turn. A subclass may leave it out."""
        return


class CallsOnce(Protocol):
    """Set by the worker before `reset` or `restore`, unless the class defines `once` itself.

    It makes calls with side effects exactly once, also when the turns of an episode are replayed. See
    stages/records/once.py."""

    once: Once


class Snapshots(Protocol):
    """Optional methods of an environment: its state as bytes, which then travels in the message.

    Without them, the recorded turns of a lost episode are replayed, and the environment must give the same answers.
    """

    def snapshot(self) -> bytes: ...

    def restore(self, task: Task, state: bytes) -> None:
        """Called instead of `reset`."""


class Tasks(Protocol):
    """Optional method of an environment class: generated tasks, for `prompt_data = ["<environment>"]`."""

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int, **options: Any) -> Iterator[Mapping[str, Any]]:
        """Rows for the data: the metadata of each task. May be endless; the caller takes as many as it needs.

        `options`: those options of the table that are parameters of this method.
        """


class Endpoint(Struct, frozen=True):
    """The gateway's address for one rollout, at which an agent reaches the model."""

    base_url: str  # http://127.0.0.1:PORT; the dialects' own paths (/v1/chat/completions, ...) follow it
    api_key: str  # identifies the session, and so the rollout
    model: str = "policy"


class Outcome(Struct, frozen=True):
    """The result of an agent's episode."""

    reward: float | None = None  # None: a grader scores the text of the last turn
    metrics: Mapping[str, float] = {}


@runtime_checkable
class Agent(Protocol):
    """A program that sends requests to the model. The gateway records the requests, and they are trained as sampled.

    Constructed like an environment. The episode ends when `run` returns; exceptions count as for an environment.
    """

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome: ...


def need_package(package: str, install: str) -> None:
    """Refuse a pack whose package, of the same name, is not installed. Raises ValueError with the cure."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"the pack {package} needs its package: pip install {install}")


def system_message(text: str) -> tuple[Message, ...]:
    """What stands before the other messages of a first prompt: nothing without a text."""
    return (Message("system", text),) if text else ()
