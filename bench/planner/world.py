"""The world of a simulated cluster: its structs, stand-ins for data and records, and a loop in virtual time.

`Cluster` goes in, `Result` comes out. Streams, topic and engines replace sockets, clocks and servers.

Invariants: time moves only where the loop would wait, and then to the next event; a message is received once, in the
order in which it was sent; an engine is the simulated engine's schedule itself, with its client's slots.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from models.engines.core import Completion, SamplingRule
from models.engines.simulated.responses import Writer
from models.engines.simulated.schedule import Schedule
from stages.data.prompt_set import PreparedPrompt
from stages.messages import Float32Array, Int32Array, Sample, Settled, StepDone, UInt8Array, VersionRun, wire
from stages.sampling.engine_choice import Slots
from transport.core.topic import Entries


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Times in seconds, lengths in tokens; a batch is `groups` groups of `members` rollouts."""

    engines: int
    slots: int  # rollouts that one engine decodes together
    a_s: float  # of a decode step
    c_s: float  # of it, per running rollout
    prefill_s: float = 0.0  # per prompt token
    kv_tokens: int = 1 << 40
    token_s: float = 0.0  # the trainer's time per trained token
    fixed_s: float = 0.0  # and per batch
    groups: int = 32
    members: int = 8
    prompt: int = 0
    mean: float = 400.0
    sigma: float = 1.0
    cap: int = 3200
    turns: int = 1  # of a rollout; its tokens are divided evenly
    tool_s: float = 0.0  # mean wait between two turns (exponential)
    graders: int = 0  # replicas of the reward stage, which grade one rollout at a time; 0: grading takes no time
    reward_s: float = 0.0  # of one rollout
    filtered: float = 0.0  # share of groups whose rewards are all equal
    staleness: int = 1
    interval: int = 1  # batches between two publications
    update_s: float = 0.0  # that an engine stands still for new weights
    rolling: int = 1  # engines that do so at the same time
    streams: bool = True  # the trainer works on groups as they arrive, not only on complete batches
    colocated: bool = False  # engines and trainer on the same GPUs, in turns: engines decode nothing while it trains
    batches: int = 10
    warm_up: int = 3  # batches that are not counted
    seed: int = 1


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; times and shares are of the batches behind the warm-up."""

    step_s: float  # per publication: `interval` batches
    staleness: dict[int, int]  # trained tokens by batches that their weights were behind
    engine_busy: float  # share of the time in which an engine decodes
    slots_busy: float  # mean share of slots that decode
    trainer_busy: float
    stalled: float  # share of an engine's time in which it takes weights
    wasted: float  # share of the generated tokens that are not trained
    admitted: int
    outcomes: dict[str, int]
    open: int

    @property
    def staleness_mean(self) -> float:
        return sum(s * n for s, n in self.staleness.items()) / max(1, sum(self.staleness.values()))

    def staleness_at(self, share: float) -> int:
        """The staleness that this share of the trained tokens does not exceed."""
        left = share * sum(self.staleness.values())
        for s, n in sorted(self.staleness.items()):
            left -= n
            if left <= 0:
                return s
        return max(self.staleness, default=0)


class NoRecord:
    """The controller's part: the ledger knows all that is wanted."""

    def __init__(self, batches: int) -> None:
        self.batches, self.whole = batches, asyncio.Event()  # set when the ledger has the last batch

    def admitted(self, group: Any) -> None:
        pass

    def settled(self, groups: Sequence[tuple[int, Settled]]) -> None:
        pass

    async def step(self, report: StepDone) -> None:
        if report.step == self.batches:
            self.whole.set()

    async def evaluated(self, report: Any) -> None:
        pass

    async def commit(self, report: Any, ledger: Any) -> None:
        pass


class OnePrompt:
    def __init__(self, tokens: int) -> None:
        self.prompt = PreparedPrompt("", wire([0] * tokens, Int32Array), None, "{}", "[]")

    def __len__(self) -> int:
        return 1

    def get(self, index: int) -> PreparedPrompt:
        return self.prompt


async def unrecorded(*_: Any) -> None:
    """Groups that end untrained are counted by the ledger."""


def turns_of(length: int, turns: int) -> list[int]:
    """The tokens of each turn: as even as they can be, none without a token."""
    turns = min(turns, length)
    return [length * (i + 1) // turns - length * i // turns for i in range(turns)]


def sample_of(index: int, runs: Sequence[tuple[int, int]], reward: float) -> Sample:
    """A rollout as the stages see it, with one token for each version: they look at nothing else of its tokens."""
    n = len(runs)
    return Sample(
        index=index,
        status="completed",
        response="",
        token_ids=wire([0] * n, Int32Array),
        prompt_length=0,
        loss_mask=wire([1] * n, UInt8Array),
        log_probs=wire([0.0] * n, Float32Array),
        version_runs=tuple(VersionRun(version, 1) for version, _ in runs),
        turns=1,
        reward=reward,
    )


RULE = SamplingRule(1.0, 1.0, -1, 0.0)


class _Clock(selectors.SelectSelector):
    """Where the event loop would wait for the time, the time moves."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task of the simulation waits, and no event is left")
        self.now += 0.0 if ready else timeout or 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is that of the simulation. Nothing in it may use a thread."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class _Silent(Writer):
    """Completions have the requested length; their tokens are not read."""

    def extend(self, completion: Completion, count: int) -> None:
        pass


class Engine(Schedule):
    """The simulated engine's schedule, driven by timers of the loop; and the client's slots for it."""

    def begin(self, client: Slots) -> None:
        self.client = client
        self._writer = _Silent(self.config, "")
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._since = self.loaded_s = self.stalled_s = self.slot_s = 0.0

    @property
    def load(self) -> int:
        """What the clients' routing looks at: samples in flight and queued."""
        return self.client.taken + self.client.queued

    def ask(self, completions: Sequence[Completion]) -> None:
        """Send one request; `ended` waits for each of its completions."""
        self.count()
        for completion in completions:
            self._ended[id(completion)] = self._loop.create_future()
        self.submit(self._loop.time(), completions)
        self.look()

    async def ended(self, completion: Completion) -> None:
        """Waits until it has all its tokens, and gives its slot back."""
        try:
            await self._ended[id(completion)]
        finally:
            self._ended.pop(id(completion), None)
            self.client.release(1)

    def count(self) -> None:
        """Bring the sums of busy time up to now."""
        now = self._loop.time()
        if not self.paused:
            self.loaded_s += (now - self._since) * (self.running > 0)
            self.slot_s += (now - self._since) * self.running
        self._since = now

    def look(self) -> None:
        """Run the due events, and plan the next call."""
        self.count()
        self.advance(self._loop.time())
        for completion in self.take_finished():
            self._ended[id(completion)].set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        event = self.next_event()
        self._timer = None if event is None else self._loop.call_at(event, self.look)

    def stand(self, paused: bool) -> None:
        """Stop decoding and keep the cache, or continue."""
        self.look()
        if paused:
            self.pause(self._loop.time(), "in_place")
        else:
            self.resume(self._loop.time())
        self.look()

    async def update(self, version: int, seconds: float) -> None:
        """Take new weights: running completions continue with them."""
        held = self.paused  # by the trainer, whose turn it is
        self.stand(True)
        await asyncio.sleep(seconds)
        self.stalled_s += seconds
        self.relabel(self._loop.time(), str(version))
        if not held:
            self.stand(False)


def completion_of(serial: int, context: int, tokens: int) -> Completion:
    prompt = np.zeros(context, dtype=np.int32)
    return Completion(
        rid=str(serial), group=serial, sample=0, prompt=prompt, prompt_key=b"", rule=RULE, seed=serial, max_new=tokens,
        min_new=0, stop_ids=(), stop_strings=(), skip_special=True, trim_stop=True, stream=False, extra_key="",
        score_from=-1,
    )  # fmt: skip


class Item:
    """A message in the care of its only consumer."""

    attempt = 1

    def __init__(self, message: Any, key: str) -> None:
        self.message, self.key = message, key

    def done(self) -> None:
        """No other task waits for it."""

    def poison(self, reason: str) -> None:
        raise RuntimeError(f"message {self.key} was refused: {reason}")


class Pipe:
    """Both ends of a stream: each message is received once, in the order of sending."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()

    async def send(self, message: Any, key: str) -> None:
        self._items.append(Item(message, key))
        self._arrived.set()

    async def receive(self) -> Item | None:
        """Waits for a message; a simulation is cancelled, it does not end."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()


class Board:
    """The topic. Values that change at one moment wake a reader once."""

    def __init__(self) -> None:
        self._entries = Entries()
        self._changed = asyncio.Event()

    def get(self, key: str) -> bytes | None:
        return self._entries.values.get(key)

    def items(self, prefix: str) -> Mapping[str, bytes]:
        return {key: value for key, value in self._entries.values.items() if key.startswith(prefix)}

    def put(self, key: str, value: msgspec.Struct) -> None:
        self._change(key, msgspec.msgpack.encode(value))

    async def publish(self, key: str, value: bytes) -> None:
        self._change(key, value)

    def _change(self, key: str, value: bytes) -> None:
        self._entries.change({key: value})
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, revision: int, *prefixes: str) -> int:
        while not self._entries.changed_since(revision, prefixes or ("",)):
            await self._changed.wait()
        return self._entries.revision
