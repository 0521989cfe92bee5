"""What a user writes to train a model in an environment, and to train it through an agent of their own.

An environment answers the model turn by turn (`reset`, then `step` until a step is `done`); an agent is a program that
sends requests to the model itself, at an address that looks like a model server. A recipe names both by import path:

    [[environment]]
    name = "guess_number"
    path = "stages.agents.packs.guess_number:GuessNumber"
    options = { highest = 20 }

One object serves one episode. It lives in a worker process, may keep whatever it likes in its attributes, and is lost
with that process: the stage then makes another one and has it take the recorded turns again (`replay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct

from stages.chat.messages import Message, ToolSchema
from stages.records.once import Once


class Task(Struct, frozen=True):
    """What an episode is about: a row of the data, and which of its rollouts this is."""

    messages: tuple[Message, ...] = ()  # the row's prompt; a plain text is one user message
    label: str | None = None
    metadata: Mapping[str, Any] = {}  # of the row
    tools: tuple[ToolSchema, ...] = ()  # of the row
    seed: int = 0  # the same for all rollouts of a group: they must meet the same task
    sample_seed: int = 0  # different for each
    episode: str = ""  # names this rollout in the run: group, rollout
    evaluation: bool = False


class Start(Struct, frozen=True):
    """How an episode begins."""

    messages: tuple[Message, ...]  # the whole first prompt
    tools: tuple[ToolSchema, ...] = ()  # offered to the model


class Turn(Struct, frozen=True):
    """What the model did."""

    number: int  # 0 for the first
    message: Message  # as the chat format reads it: content, reasoning, calls
    text: str  # as the model wrote it
    truncated: bool = False  # it ran into a length limit: nothing more will come of this episode
    malformed: str = ""  # what is wrong with its tool call, in words for the model
    last: bool = False  # no turn can follow (--max-turns, or truncated): say what the episode is worth


class Step(Struct, frozen=True):
    """What the environment answers."""

    messages: tuple[Message, ...] = ()  # observations, which are not trained; the model's next turn follows them
    reward: float | None = None  # of this turn; with `done`, of the episode. None at the end: a grader decides
    done: bool = False
    metrics: Mapping[str, float] = {}  # averaged over episodes, as env/<environment>/<name>
    answer: str | None = None  # what a grader reads if the episode ends here; None: all turns and observations


class InfrastructureError(Exception):
    """The world of an environment is out of order, for a reason that is not the model's.

    The episode is begun anew on a fresh worker, a few times; it is never given reward 0 for it. While more than a few
    end like this, the environment is paused, with a line in the terminal.
    """


@runtime_checkable
class Environment(Protocol):
    """One episode. Constructed with the `options` of its table as keyword arguments.

    What `reset` or `step` raises other than InfrastructureError fails the rollout, with the reason. A tool that fails
    is no exception: say so in an observation.
    """

    async def reset(self, task: Task) -> Start: ...

    async def step(self, turn: Turn) -> Step: ...

    async def close(self) -> None:
        """The episode is over, also in the middle. Called once."""


class CallsOnce(Protocol):
    """What an environment is given before `reset` or `restore`, unless its class has that name: for calls that change
    the world, which must not be made again when the episode takes its turns again. See stages/records/once.py."""

    once: Once


class Snapshots(Protocol):
    """What an environment may have besides: its state as bytes, which then travels in the message.

    Without, a lost episode takes its recorded turns again, and must answer as it did before.
    """

    def snapshot(self) -> bytes: ...

    def restore(self, task: Task, state: bytes) -> None:
        """Instead of `reset`."""


class Tasks(Protocol):
    """What the class of an environment may have besides: tasks of its own, for `prompt_data = ["<environment>"]`."""

    @classmethod
    def tasks(cls, split: Literal["train", "heldout"], seed: int, **options: Any) -> Iterator[Mapping[str, Any]]:
        """Rows for the data: metadata of each task, in any number; as many as are wanted are taken.

        `options`: the options of the table for which it has parameters.
        """


class Endpoint(Struct, frozen=True):
    """Where an agent finds the model: an address of the gateway that stands for one rollout."""

    base_url: str  # http://127.0.0.1:PORT; the dialects' own paths (/v1/chat/completions, ...) follow it
    api_key: str  # names the session; requests with another key are no part of it
    model: str = "policy"


class Outcome(Struct, frozen=True):
    """How an agent's episode ended."""

    reward: float | None = None  # None: a grader decides, by the text of the last turn
    metrics: Mapping[str, float] = {}


@runtime_checkable
class Agent(Protocol):
    """A program that sends requests to the model. The gateway records them, and they are trained exactly as sampled.

    Constructed as an environment is. It has ended when `run` returns; what `run` raises counts as for an environment.
    """

    async def run(self, task: Task, endpoint: Endpoint) -> Outcome: ...


def text_of(messages: Sequence[Message]) -> str:
    """The contents of messages, one below the other."""
    return "\n".join(message.content for message in messages if message.content)
