"""The user's class of an environment or agent in a process of its own: described before a run, and hosting episodes.

    python -m stages.agents.worker SOCKET_FD PARENT_PID     hosts episodes; MEMORY_BYTES IMPORT_PATH OPTIONS ONCE_DIR
    python -m stages.agents.worker                          check IMPORT_PATH OPTIONS: prints a JSON object, `Hosted`
                                    tasks IMPORT_PATH OPTIONS SPLIT SEED COUNT: prints a JSON object for each task

Further arguments stand on the standard input, because options may hold keys (stages/workers/guard.py).
A hosting process gets a `Call` and answers with what the call names. A describing process prints an error as a JSON
string; the output of the user's modules goes to stderr.

Invariants: calls of one episode run one after the other, calls of different episodes concurrently. This module imports
only msgspec and the standard library, because a user's interpreter may have nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from models.errors import UserFault
from models.import_path import ImportPathError, import_path
from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Start, Step, Task, Turn
from stages.records.once import Once
from stages.workers.guard import read_arguments
from stages.workers.serve import Handler, Refusal, become_worker, serve

T = TypeVar("T", Step, Outcome)
K = TypeVar("K")


class EnvironmentFailed(UserFault):
    """An episode cannot continue, or an environment cannot be hosted. The text becomes the rollout's reason."""


class Begin(Struct, frozen=True, tag=True):
    """Make an environment and reset it, or restore its last snapshot. `episode` is its id in this process. Answer:
    Begun, without messages if it was restored."""

    episode: str
    task: Task
    state: bytes = b""


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


Call = Begin | Take | End | Run


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


def import_hosted(path: str) -> tuple[type[Any], Hosted]:
    """The class at an import path, and its description. Raises ImportPathError."""
    imported = import_path(path)
    if not isinstance(imported, type):
        raise ImportPathError(f"import path {path!r} is no class; name the class of an environment or agent")
    kind = "agent" if hasattr(imported, "run") and not hasattr(imported, "step") else "environment"
    for name in ("run",) if kind == "agent" else ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(imported, name, None)):
            raise ImportPathError(
                f"import path {path!r}: {imported.__name__} has no 'async def {name}'; an environment has "
                "reset and step, an agent has run, all of them async"
            )
    snapshots = [name for name in ("snapshot", "restore") if callable(getattr(imported, name, None))]
    if len(snapshots) == 1:
        raise ImportPathError(
            f"import path {path!r}: {imported.__name__} has {snapshots[0]} only; give snapshot and restore, or none"
        )
    return imported, Hosted(kind, tasks=callable(getattr(imported, "tasks", None)), snapshots=bool(snapshots))


def make(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """One object of the class. Raises ImportPathError for unknown options."""
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        taken = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ImportPathError(f"{kind.__name__} does not take these options ({error}); it takes: {taken}") from None
    return kind(**options)


class Episodes:
    """The episodes of one process."""

    def __init__(self, kind: type[Any], hosted: Hosted, options: Mapping[str, Any], once: str) -> None:
        """`once`: directory of the records of calls with side effects."""
        self._kind, self._hosted, self._options, self._once = kind, hosted, options, once
        self._hosting: dict[str, tuple[Any, Once]] = {}

    async def answer(self, raw: msgspec.Raw) -> object:
        """The answer to a call."""
        try:
            return await self._answered(msgspec.msgpack.decode(raw, type=Call))
        except InfrastructureError as error:
            raise Refusal(INFRASTRUCTURE, str(error)) from None

    async def _answered(self, call: Call) -> object:
        match call:
            case Begin(episode, task, state):
                environment, _ = self._hosting[episode] = self._create(task)
                if state:
                    environment.restore(task, state)
                    return Begun(Start(()))
                return Begun(_checked(await environment.reset(task), Start, "reset"), self._state(environment))
            case Take(episode, turn):
                environment, once = self._hosting[episode]
                once.begin_turn(turn.number, turn.text)
                step = _checked(await environment.step(turn), Step, "step")
                return Taken(_with_uncertain(once, step), b"" if step.done else self._state(environment))
            case End(episode):
                environment, _ = self._hosting.pop(episode, (None, None))
                if environment is not None and hasattr(environment, "close"):
                    await environment.close()
                return None
            case Run(task, endpoint):
                agent, once = self._create(task)
                return _with_uncertain(once, _checked(await agent.run(task, endpoint), Outcome, "run"))

    def _create(self, task: Task) -> tuple[Any, Once]:
        """A new environment or agent."""
        created = make(self._kind, self._options)
        task_digest = hashlib.sha256(msgspec.json.encode(task, order="sorted")).hexdigest()
        once = Once(self._once, task.episode, task_digest)
        if not hasattr(created, "once"):  # the class may use the name itself
            created.once = once
        return created, once

    def _state(self, environment: Any) -> bytes:
        return bytes(environment.snapshot()) if self._hosted.snapshots else b""


def _with_uncertain(once: Once, answer: T) -> T:
    return replace(answer, metrics={**answer.metrics, "uncertain": float(once.uncertain)}) if once.calls else answer


def _checked(value: object, kind: type[K], name: str) -> K:
    if not isinstance(value, kind):
        raise TypeError(f"{name} returned {type(value).__name__}, but must return a {kind.__name__}")
    return value


def answers(arguments: Sequence[str]) -> Iterator[object]:
    """The values to print, one for each line."""
    match arguments:
        case ["check", path, options]:
            kind, hosted = import_hosted(path)
            make(kind, json.loads(options))
            yield hosted
        case ["tasks", path, options, split, seed, count]:
            tasks = import_hosted(path)[0].tasks
            yield from islice(tasks(split, int(seed), **_accepted(tasks, json.loads(options))), int(count))


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if everything or name in parameters}


def describe(arguments: Sequence[str]) -> None:
    """Print the answers as JSON lines."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with output, contextlib.redirect_stdout(sys.stderr):
        try:
            for line in answers(arguments):
                output.write(msgspec.json.encode(line) + b"\n")
        except (Exception, SystemExit) as error:  # user code may raise anything
            words = str(error) if isinstance(error, ImportPathError) else f"{type(error).__name__}: {error}"
            output.write(msgspec.json.encode(words) + b"\n")


def main(arguments: Sequence[str]) -> None:
    """Describe the class, or serve until the socket closes and not return."""
    if arguments[0] in ("check", "tasks"):
        describe(arguments)
        return
    socket_fd, parent, memory, path, options, once = arguments

    def prepare() -> tuple[Handler, object]:
        kind, hosted = import_hosted(path)
        return Episodes(kind, hosted, json.loads(options), once).answer, hosted

    serve(become_worker(int(socket_fd), int(parent), int(memory)), prepare)


if __name__ == "__main__":
    main([*sys.argv[1:], *read_arguments()])
