"""The seam between a server and its engine: the calls of `EngineCore`, and the record of one response.

All inference engines have SGLang's HTTP protocol. A generate stage imports `client` and `protocol` (no torch). `serve`
starts a server of that protocol over one of two engines: `embedded` (a torch model with continuous batching) or
`simulated` (a latency model). Real SGLang servers need only `launch`.

Invariants:
- only the engine writes a `Completion`; the server reads it after a delivery. `finish` is set last and once;
- every token of a completion lies in exactly one entry of `span_starts`, stamped when the token was sampled;
- `submit` and `cancel` never block and may be called at any time, also while paused;
- no request is lost: each submitted completion is delivered with `finish` set, whatever happens to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.engines.protocol import FinishReason, Load, PauseMode, SamplingParams, VersionSpan
from models.errors import RequestRefused, WeightsRefused
from models.weights.shared_memory_reader import SlotManifest

# --------------------------------------------------------------------------------------------------
# Device memory that an engine releases while another process uses the device. Bookkeeping only: nothing is allocated.
#
# Invariants:
# - an engine releases memory only while it is paused and runs nothing, and does not resume without all of it;
# - released weights are undefined until new weights are loaded, also after their memory has been restored;
# - releasing released memory, and restoring present memory, do nothing: a call may be repeated.


MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
ALL_TAGS: Final[tuple[MemoryTag, ...]] = ("kv_cache", "weights", "cuda_graph")


class MemoryRequest(Struct, frozen=True):
    """Body of both memory calls; without tags it means all memory."""

    tags: list[MemoryTag] | None = None

    @property
    def wanted(self) -> tuple[MemoryTag, ...]:
        return ALL_TAGS if self.tags is None else tuple(dict.fromkeys(self.tags))


class MemoryAccount:
    """Which memory of one engine is released."""

    def __init__(self) -> None:
        self.away: set[MemoryTag] = set()
        self.unloaded = False  # the weights are undefined

    def release(self, tags: Iterable[MemoryTag], *, paused: bool, running: int) -> frozenset[MemoryTag]:
        """Record a release; return the newly released tags. Raises RequestRefused, with nothing recorded."""
        if not paused or running:
            state = f"{running} requests are running" if running else "generation is not paused"
            raise RequestRefused(
                f"memory cannot be given back while {state}; call /pause_generation with mode abort first"
            )
        news = frozenset(tags) - self.away
        self.away |= news
        self.unloaded |= "weights" in news
        return news

    def resume(self, tags: Iterable[MemoryTag]) -> frozenset[MemoryTag]:
        """Record a restore; return the tags that were released."""
        news = frozenset(tags) & self.away
        self.away -= news
        return news

    def check_load(self) -> None:
        """Raise WeightsRefused if there is no memory for weights."""
        if "weights" in self.away:
            raise WeightsRefused(
                "the memory of the weights is given back, so that none can be loaded; call "
                "/resume_memory_occupation with the tag weights first"
            )

    def check_weights(self) -> None:
        """Raise RequestRefused if there are no weights to read."""
        if self.unloaded:
            raise RequestRefused("the memory of the weights was given back; load weights first")

    def check_whole(self) -> None:
        """Raise RequestRefused unless generation has all its memory and weights."""
        if self.away:
            names = ", ".join(sorted(self.away))
            raise RequestRefused(
                f"generation cannot continue without the memory of {names}; call /resume_memory_occupation first"
            )
        if self.unloaded:
            raise RequestRefused("generation cannot continue: the weights' memory was released; load weights first")


ABORTED = FinishReason(type="abort", message="Aborted")


@dataclass(frozen=True)
class EngineFacts:
    """Constants of an engine while it serves, under SGLang's names. Lengths and counts in tokens."""

    engine: str
    model_path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    context_length: int
    max_running_requests: int
    max_total_num_tokens: int
    device: str
    dtype: str
    eos_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Completion:
    """One growing response: sample `sample` of the request `group`."""

    rid: str
    group: int  # completions of one request share it, and `prompt`
    sample: int
    prompt: npt.NDArray[np.int32]  # [P]
    prompt_key: bytes  # prompt.tobytes(), made once for all samples
    rule: SamplingParams  # how tokens are drawn and shown; what bounds the response is below
    seed: int
    max_new: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    stream: bool  # the client wants its progress, not only its end
    extra_key: str
    score_from: int  # prompt tokens behind this position are scored, -1 for none
    stream_interval: int = 1  # new tokens per chunk; the first token makes a chunk at once
    score_temperature: float = 1.0  # divides the logits of the scores, and of nothing else
    received_s: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    prompt_log_probs: list[float | None] = field(default_factory=list)
    span_starts: list[tuple[str, int]] = field(default_factory=list)  # (version, first output token)
    cached_tokens: int = 0
    retractions: int = 0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    finish: FinishReason | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def to_score(self) -> bool:
        """True while the scores of the prompt are wanted and missing."""
        return self.score_from >= 0 and not self.prompt_log_probs

    def mark_version(self, label: str, start: int) -> None:
        """The weights `label` make the output tokens from `start` on. Replaces a span that would be empty."""
        while self.span_starts and self.span_starts[-1][1] >= start:
            self.span_starts.pop()
        if not self.span_starts or self.span_starts[-1][0] != label:
            self.span_starts.append((label, start))

    def refuse(self, why: str) -> None:
        """End a response that the engine never took, because it has stopped."""
        self.close(FinishReason(type="abort", message=why, status_code=503))

    def close(self, reason: FinishReason) -> None:
        """End the response; its outputs must be complete by now."""
        self.finished_s = time.monotonic()
        self.finish = reason

    def spans_over(self, count: int) -> list[VersionSpan]:
        """Half-open spans over the first `count` output tokens; none if the request never entered."""
        ends = [start for _, start in self.span_starts[1:]] + [count]
        return [
            VersionSpan(label, start, min(end, count))
            for (label, start), end in zip(self.span_starts, ends, strict=False)
            if start < min(end, count)
        ]


@dataclass
class Totals:
    """Counts of an engine since its start, under SGLang's names where they exist."""

    engine_steps: int = 0
    prompt_tokens: int = 0  # of requests that entered, again after each retraction
    computed_prompt_tokens: int = 0  # of these, neither shared nor found in the cache
    cached_tokens: int = 0
    generation_tokens: int = 0
    num_retractions: int = 0
    num_requests: int = 0  # that have ended
    num_aborted_requests: int = 0
    busy_s: float = 0.0  # time in steps
    memory_releases: int = 0

    @property
    def cache_hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def metrics(self) -> dict[str, float]:
        return {f"{name}_total": count for name, count in asdict(self).items() if name != "busy_s"}


Deliver = Callable[[Sequence[Completion]], None]


def nowhere(completions: Sequence[Completion]) -> None:
    """Deliveries before the start: there are none."""


class Scheduler(Protocol):
    """What decides in an engine which completions run."""

    label: str
    paused: bool
    totals: Totals

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...


class EngineCore(Protocol):
    """An engine without its HTTP front. Every coroutine waits until the engine has done its work."""

    facts: EngineFacts
    scheduler: Scheduler

    def __init__(self, facts: EngineFacts, scheduler: Scheduler) -> None:
        self.facts, self.scheduler = facts, scheduler

    @property
    def label(self) -> str:
        """The label of the current weights."""
        return self.scheduler.label

    @property
    def paused(self) -> bool:
        return self.scheduler.paused

    def totals(self) -> Totals:
        return self.scheduler.totals

    def measure(self) -> Load:
        """The load at this moment, for an engine that may look at its scheduler now."""
        facts, now = self.facts, self.scheduler
        return Load(
            num_running_reqs=now.running,
            num_waiting_reqs=now.waiting,
            num_used_tokens=now.used_tokens,
            max_total_num_tokens=facts.max_total_num_tokens,
            max_running_requests=facts.max_running_requests,
            token_usage=now.used_tokens / facts.max_total_num_tokens,
            cache_hit_rate=now.totals.cache_hit_rate,
            busy_s=now.totals.busy_s,
        )

    def start(self, deliver: Deliver, on_crash: Callable[[BaseException], None]) -> None:
        """Start. `deliver` gets completions that finished or, if they stream, have enough for a chunk, at most
        once per step; it may be called from another thread. `on_crash` is called once if the engine dies."""

    async def stop(self) -> None:
        """Stop; open completions are delivered as aborted."""

    def submit(self, completions: Sequence[Completion]) -> None:
        """Take completions of one request. They wait while the engine is paused."""

    def cancel(self, completions: Sequence[Completion]) -> None:
        """End completions with their output so far. A finished completion does not change."""

    async def pause(self, mode: PauseMode) -> None:
        """Generate nothing until `resume`."""

    async def resume(self) -> None:
        """Continue. Raises `RequestRefused` while memory is released or the weights are undefined."""

    async def flush_cache(self) -> bool:
        """Forget all reusable prefixes. False, and nothing is done, if a request is running."""

    async def update_weights(
        self, path: str, label: str | None, abort_all: bool, claim: SlotManifest | None = None
    ) -> None:
        """Load new weights and call them `label`. Unpaused, waits until the running requests have finished on the old
        weights, and meanwhile holds new requests back. Raises `WeightsRefused`, with nothing changed unless files were
        overwritten while they were read."""

    async def prepare_weights(self, path: str, label: str | None, claim: SlotManifest | None = None) -> bool:
        """Load what the next `update_weights` of this path and label will take, while generation goes on. An engine
        without the memory for it does nothing. Returns whether it did and has compared the bytes with the claim. Raises
        `WeightsRefused`."""

    async def relabel(self, label: str) -> None:
        """Change the label only."""

    async def checksums(self) -> dict[str, str]:
        """Checksum of each tensor by its Hugging Face name."""

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Release memory. Raises `RequestRefused` unless the engine is paused and runs nothing."""

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Restore the memory. Its content is lost: update the weights before `resume`."""

    def load(self) -> Load: ...
