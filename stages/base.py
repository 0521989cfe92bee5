"""What every stage is: cheap to construct, set up explicitly, run until its inlets end.

Nearly all custom stages subclass `MapStage` and write `process(message)`; a stage on a feedback edge subclasses
`LoopStage` and also says which samples it wants. `TrainOptions` and `GenerateOptions` are what the runner passes to
built-in stages beside the configuration; a custom stage gets the mapping of its recipe instead.

Invariants:
- An input is released (`done`) only after its outputs are in the next hub's custody.
- A message whose processing raises is passed on with its samples marked failed and the reason; the run goes on.
- All tasks live in one TaskGroup; an error that is not about one message ends the replica, and the supervisor
  decides.
- Options are plain values that mean the same on every host, or name what a host of the trainer has.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from configs.schema import Config
from stages.errors import InfrastructureError
from stages.messages import RolloutSlice, Sample
from stages.ports import Inlet, Lease, Outlet, Ports
from stages.rollouts import without_tokens


class TrainOptions(Struct, frozen=True, tag="train"):
    """Where training starts, and where its weights are published."""

    start_step: int = 0
    run_generation: int = 0
    resume_from: str | None = None  # checkpoint directory
    restored: frozenset[int] = frozenset()  # groups that it keeps and the prompt stage leaves to the trainer
    slots: str = ""  # directory for the weight slots; none in supervised training
    first_step: int | None = None  # with which this start of the run began; None: `start_step`
    # Of a trainer that was restarted while the run goes on:
    incarnation: int = 0  # number of restarts before it
    begun: bool = False  # an earlier incarnation reported its first weights
    trained: int = 0  # steps in the ledger: those after `start_step` are trained again
    admitted: int = 0  # groups in the ledger, of which those that are not `open` have ended
    open: frozenset[int] = frozenset()
    floor: int = 0  # the oldest version that may be trained: a rollback made it, of the weights of a checkpoint


class GenerateOptions(Struct, frozen=True, tag="generate"):
    """Facts about the model that a generate replica needs before its first request."""

    max_context: int = 1 << 30
    vocab_size: int | None = None  # a real SGLang server ends with all its requests when it is sent another token id
    lives: tuple[int, ...] = ()  # steps from which this run was started, each time; the last one is this time


StageOptions = TrainOptions | GenerateOptions


log = logging.getLogger("sluice.stages")

OUTAGE_S = 1800.0  # that a message waits for what its stage needs, as an episode does

Options = TypeVar("Options", TrainOptions, GenerateOptions)
State = TypeVar("State", bound=msgspec.Struct)
T = TypeVar("T")


class Spans(Protocol):
    """Receives the spans of a stage for the trace."""

    def add(
        self, name: str, start_s: float, dur_s: float, *, group: int = -1, sample: int = -1, detail: str = ""
    ) -> None:
        """One span; `start_s` is unix time."""


class Activity:
    """Where a replica's time goes: busy, starved, blocked, stalled. The four add up to the time since the start.

    Stalled (a weight update holds the engine) wins over busy, busy over blocked (waiting for a hub to accept), blocked
    over starved (waiting for input).
    """

    def __init__(self) -> None:
        self.seconds = {"busy": 0.0, "starved": 0.0, "blocked": 0.0, "stalled": 0.0}
        self.items_in = self.items_out = self.failures = self.tokens = 0
        self.extra: dict[str, float] = {}
        self._working = self._sending = self._stalls = 0
        self._since = time.monotonic()

    @property
    def in_flight(self) -> int:
        return self._working + self._sending

    def _state(self) -> str:
        if self._stalls:
            return "stalled"
        if self._working:
            return "busy"
        return "blocked" if self._sending else "starved"

    def settle(self) -> dict[str, float]:
        """Bring the four sums up to now and return them."""
        now = time.monotonic()
        self.seconds[self._state()] += now - self._since
        self._since = now
        return self.seconds

    def count(self, name: str, n: float = 1.0) -> None:
        """Add to a figure of `extra`."""
        self.extra[name] = self.extra.get(name, 0.0) + n

    @contextmanager
    def _counting(self, *, working: int = 0, sending: int = 0, stalls: int = 0) -> Iterator[None]:
        """Within the block the counts are higher by these."""
        self._add(working, sending, stalls)
        try:
            yield
        finally:
            self._add(-working, -sending, -stalls)

    def _add(self, working: int, sending: int, stalls: int) -> None:
        self.settle()
        self._working += working
        self._sending += sending
        self._stalls += stalls

    def working(self) -> AbstractContextManager[None]:
        return self._counting(working=1)

    def sending(self) -> AbstractContextManager[None]:
        """Wraps a `send` inside `working`: the time counts as blocked unless other work continues."""
        return self._counting(working=-1, sending=1)

    def stalled(self) -> AbstractContextManager[None]:
        return self._counting(stalls=1)


@dataclass(frozen=True)
class StageContext:
    """What a stage is given at construction."""

    config: Config
    run_dir: Path
    replica: str
    spans: Spans
    index: int = 0  # of this replica among `replicas`
    replicas: int = 1
    concurrency: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)  # [stage.options] of a custom stage, as the user wrote it
    built_in: StageOptions | None = None
    loops: tuple[str, ...] = ()  # import paths of the loop stages behind generate, in their order

    def given(self, kind: type[Options]) -> Options:
        """The runner's options for a built-in stage, or their defaults."""
        return self.built_in if isinstance(self.built_in, kind) else kind()


class Stage(ABC):
    """One replica of one stage."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.config = context.config
        self.activity = Activity()

    async def setup(self) -> None:  # noqa: B027  (a hook: doing nothing is right)
        """Load what the stage needs. Called once, before `run`."""

    async def close(self) -> None:  # noqa: B027  (a hook: doing nothing is right)
        """Give back what `setup` took. Called once, also after an error and after a `setup` that failed half-way."""

    @abstractmethod
    async def run(self, ports: Ports) -> None:
        """Work until the inlets end."""

    @contextmanager
    def span(self, name: str, *, group: int = -1, sample: int = -1, detail: str = "") -> Iterator[list[str]]:
        """A span of the trace around the block, which may append details."""
        start_s, clock, details = time.time(), time.perf_counter(), [detail] if detail else []
        try:
            yield details
        finally:
            self.context.spans.add(
                name, start_s, time.perf_counter() - clock, group=group, sample=sample, detail=", ".join(details)
            )


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and cancel the remaining ones at its end. An error of any ends all."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one) for one in work]
        yield
        for task in running:
            task.cancel()


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results in order. An error of any ends all."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one) for one in work]
    return [task.result() for task in running]


async def outcome_of(work: Awaitable[T]) -> T | Exception:
    """The result, or the exception as a value: raised, it would cancel the caller's task group."""
    try:
        return await work
    except Exception as error:
        return error


def in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function that blocks and cannot be interrupted. Its thread does not delay the end of the process."""
    ended: Future[T] = Future()
    ended.set_running_or_notify_cancel()

    def work() -> None:
        try:
            ended.set_result(function())
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return ended


def failed(slice_: RolloutSlice, reason: str) -> RolloutSlice:
    """The same slice with every sample marked failed for the reason."""
    samples = tuple(msgspec.structs.replace(s, status="failed", error=reason) for s in slice_.samples)
    return msgspec.structs.replace(slice_, samples=samples)


async def send_slice(outlet: Outlet[RolloutSlice], slice_: RolloutSlice) -> None:
    """Send a slice. If it exceeds the stream's limit, send it without tokens, its samples failed.

    Without this the replica would end on the error, and the same message would end the next one that it is given to.
    """
    try:
        await outlet.send(slice_, slice_.key)
    except ValueError as error:
        log.warning("group %d: its samples fail, for %s", slice_.group.group_id, error)
        rest = tuple(without_tokens(sample) for sample in failed(slice_, str(error)).samples)
        await outlet.send(msgspec.structs.replace(slice_, samples=rest), slice_.key)


class MapStage(Stage):
    """One message in, one message out (or None: nothing), `concurrency` of them at a time.

    Write `async def process(self, message: RolloutSlice) -> RolloutSlice | None`. It is called again for the same
    message after `InfrastructureError`, and in another process if its own dies.
    """

    @abstractmethod
    async def process(self, message: RolloutSlice) -> RolloutSlice | None: ...

    async def run(self, ports: Ports) -> None:
        inlet, outlet = ports.inlets["in"], ports.outlets["out"]
        await side_by_side(self._serve(inlet, outlet) for _ in range(self.context.concurrency))

    async def _serve(self, inlet: Inlet[RolloutSlice], outlet: Outlet[RolloutSlice]) -> None:
        """Waits for messages; ends with the inlet."""
        while (lease := await inlet.receive()) is not None:
            await self._work(lease, outlet)

    async def _work(self, lease: Lease[RolloutSlice], outlet: Outlet[RolloutSlice]) -> None:
        """One message, which is released when what became of it is in the next hub's custody."""
        name = type(self).__name__
        with self.activity.working():
            self.activity.items_in += 1
            message = lease.message
            with self.span(name, group=message.group.group_id):
                try:
                    result = await self._processed(message)
                except (Exception, asyncio.CancelledError) as error:
                    # Raised by the work itself it would end this task in silence, and with it a place for messages.
                    task = asyncio.current_task()
                    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                        raise
                    self.activity.failures += 1
                    log.warning("%s failed on group %d: %r", name, message.group.group_id, error, exc_info=True)
                    result = failed(message, f"{name}: {type(error).__name__}: {error}")
            if result is not None:
                with self.activity.sending():
                    await send_slice(outlet, result)
                self.activity.items_out += 1
            lease.done()

    async def _processed(self, message: RolloutSlice) -> RolloutSlice | None:
        """Waits for the end of an outage of what `process` needs: failed at once, message after message would pass
        through here in seconds, until the run gives up."""
        began, pause_s = time.monotonic(), 0.5
        while True:
            try:
                return await self.process(message)
            except InfrastructureError as error:
                if time.monotonic() - began > OUTAGE_S:
                    raise
                level = logging.WARNING if pause_s == 0.5 else logging.DEBUG
                log.log(level, "%s waits, group %d: %s", type(self).__name__, message.group.group_id, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)


class LoopStage(MapStage):
    """A stage on a feedback edge: takes rollouts from generate and returns them to it with more tokens.

    Tools, agents, environments. The slice holds all sequences of one rollout. Any replica may get any turn of it, so
    what an episode has to remember travels in the message: `read_state`, `write_state`. A sequence that comes back with
    `done` set has ended: it gets no further turn, and when all have ended, the rollout leaves for grading.
    """

    @classmethod
    def begins(cls, config: Config) -> bool:
        """Whether rollouts come here before the model's first turn, without a token, and after the last one, also where
        `--max-turns` leaves no further turn. Such a stage makes the prompt and decides when a rollout is done."""
        return False

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        """Whether this stage continues the rollout of the slice. `options`: of this stage in the recipe.

        Called in the generate stage after each turn; an exception fails the rollout.
        """
        raise TypeError(f"the loop stage {cls.__name__} must define the class method wants(config, options, message)")

    @staticmethod
    def read_state(sample: Sample, kind: type[State]) -> State | None:
        """What `write_state` left, None at the first turn. Raises `msgspec.ValidationError` for another kind."""
        return msgspec.msgpack.decode(sample.loop_state, type=kind) if sample.loop_state else None

    @staticmethod
    def write_state(sample: Sample, state: msgspec.Struct) -> Sample:
        """The sample with a struct that whichever replica gets it next can read."""
        return msgspec.structs.replace(sample, loop_state=msgspec.msgpack.encode(state))
