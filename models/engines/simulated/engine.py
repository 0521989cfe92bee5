"""The simulated engine: the protocol of a real one, a latency model in place of a model. No torch.

It shares server, intake and answers with the embedded engine; `schedule` decides what happens when, this
module only sleeps until the next event. Deadlines are absolute and lie between changes of membership, per token only
for what streams, so that the grain of the event loop's timers (about 1 ms) does not add up.

Known differences from a real engine: contents never stop a response (only its drawn length does, so stop strings and
stop token ids end nothing early; the first stop token id is what a finished response ends with), scores of a prompt
hang on two tokens and know no temperature, any path passes as new weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from configs.schema.rollout import EngineConfig
from models.engines.core import Completion, Deliver, EngineCore, EngineFacts, MemoryAccount, MemoryTag, nowhere
from models.engines.protocol import DEFAULT_LABEL, Load, PauseMode
from models.engines.simulated.schedule import Schedule
from models.weights.shared_memory_reader import SlotManifest

_UNBOUNDED: Final = 1 << 20  # context length if neither the configuration nor a checkpoint bounds it, tokens


class SimulatedEngine(EngineCore):
    """Serves the latency model of `config.simulated`. Lives in the event loop that starts it."""

    def __init__(
        self, config: EngineConfig, model_path: str, *, max_context_len: int | None, label: str = DEFAULT_LABEL
    ) -> None:
        simulated = config.simulated
        self._update_s = simulated.update_s * simulated.time_scale
        self._prepare_s = simulated.prepare_s * simulated.time_scale
        self.schedule = Schedule(simulated, config.engine_slots, config.prefix_cache, label, model_path)
        path = Path(model_path, "config.json")
        checkpoint: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        bound = max_context_len or int(checkpoint.get("max_position_embeddings", _UNBOUNDED))
        facts = EngineFacts(
            engine="simulated",
            model_path=model_path,
            model_type="simulated",
            architectures=("Simulated",),
            # A prompt may hold any id of the tokenizer; sampled ids stay below the configured size.
            vocab_size=max(simulated.vocab_size, int(checkpoint.get("vocab_size", 0))),
            context_length=min(bound, simulated.kv_tokens),
            max_running_requests=config.engine_slots,
            max_total_num_tokens=simulated.kv_tokens,
            device="simulated",
            dtype="none",
            eos_ids=frozenset({simulated.vocab_size - 1}),
        )
        super().__init__(facts, self.schedule)
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._updating = asyncio.Lock()
        self._memory = MemoryAccount()
        self._stopped = False
        self._deliver: Deliver = nowhere

    def start(self, deliver: Deliver, on_crash: Callable[[BaseException], None]) -> None:
        """Begin; there is no thread that could die, so `on_crash` is never called."""
        self._deliver = deliver

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.schedule.cancel_all(self._now)
            self._pump()

    def submit(self, completions: Sequence[Completion]) -> None:
        if self._stopped:
            for completion in completions:
                completion.refuse("the engine has stopped")
            self._deliver(completions)
            return
        self.schedule.submit(self._now, completions)
        self._pump()

    def cancel(self, completions: Sequence[Completion]) -> None:
        self.schedule.cancel(self._now, completions)
        self._pump()

    async def pause(self, mode: PauseMode) -> None:
        self.schedule.pause(self._now, mode)
        self._pump()

    async def resume(self) -> None:
        """Waits for an update that is under way; unblocked by its end."""
        async with self._updating:
            self._memory.check_whole()
            self.schedule.resume(self._now)
            self._pump()

    async def flush_cache(self) -> bool:
        self.schedule.advance(self._now)
        return self.schedule.flush()

    async def update_weights(
        self, path: str, label: str | None, abort_all: bool, claim: SlotManifest | None = None
    ) -> None:
        """Waits for the running requests unless paused, then stands still for the configured time."""
        async with self._updating:
            self._memory.check_load()
            if abort_all:
                self.schedule.cancel_all(self._now)
            self.schedule.holding = True
            try:
                self._pump()
                await self._drain()
                await asyncio.sleep(self._update_s)
                self.schedule.relabel(self._now, label if label is not None else self.schedule.label)
                self._memory.unloaded = False
            finally:
                self.schedule.release(self._now)
                self._pump()

    async def prepare_weights(self, path: str, label: str | None, claim: SlotManifest | None = None) -> bool:
        """There are no tensors: requests go on for the configured time."""
        await asyncio.sleep(self._prepare_s)
        return False

    async def relabel(self, label: str) -> None:
        self.schedule.relabel(self._now, label)
        self._pump()

    async def checksums(self) -> dict[str, str]:
        """There are no tensors: the label stands for the weights."""
        self._memory.check_weights()
        return {"label": self.schedule.label}

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """There is no memory: the release is recorded, and calls that need the memory are refused."""
        self.schedule.advance(self._now)
        if self._memory.release(tags, paused=self.schedule.paused, running=self.schedule.running):
            self.schedule.flush()
            self.schedule.totals.memory_releases += 1

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        self._memory.resume(tags)

    def load(self) -> Load:
        self.schedule.advance(self._now)
        self._pump()
        return self.measure()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _drain(self) -> None:
        """Wait until nothing runs or the engine is paused; unblocked by the pump, which sees either first."""
        while self.schedule.running and not self.schedule.paused:
            self._drained.clear()
            await self._drained.wait()

    def _pump(self) -> None:
        """Hand out what has ended or streams, and sleep until the next event or chunk."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.schedule.advance(self._now)
        progressed = [*self.schedule.take_chunks(), *self.schedule.take_finished()]
        if progressed:
            self._deliver(progressed)
        if not self.schedule.running or self.schedule.paused:
            self._drained.set()
        times = [time for time in (self.schedule.next_event(), self.schedule.next_chunk()) if time is not None]
        if times:
            self._timer = asyncio.get_running_loop().call_at(min(times), self._pump)
