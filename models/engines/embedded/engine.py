"""The embedded engine: a stepper in its own thread, behind the `EngineCore` protocol.

A small engine on torch: continuous batching over a static KV cache, weights swapped in place. `transformer` reads
checkpoints and is the functional forward, `kv_cache` holds what runs, `batch` prefills and draws tokens, and `stepper`
is one step of continuous batching (no thread).

Invariants:
- only the worker thread touches the stepper; everything else reaches it as a command that runs between two steps;
- an idle engine sleeps on a condition: no polling;
- another thread may prepare a second set of weights, and a forward over it, which the worker takes between two steps:
  whatever keeps a tensor of the weights must be part of `Transformer`;
- completions are delivered once per step, all together;
- if the thread dies, every open request is delivered as aborted with the reason, and `on_crash` is called.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

import torch

from configs.schema.rollout import EngineConfig
from models.engines.core import Completion, Deliver, EngineCore, EngineFacts, MemoryAccount, MemoryTag, nowhere
from models.engines.embedded.kv_cache import KVCache, SlotTable
from models.engines.embedded.model_spec import ModelSpec
from models.engines.embedded.stepper import Stepper
from models.engines.embedded.transformer import LiveWeights, Transformer
from models.engines.protocol import DEFAULT_LABEL, Load, PauseMode
from models.engines.text import TextCodec
from models.errors import EngineServerError, EngineStartError, WeightsRefused
from models.weights.shared_memory_reader import SlotManifest

T = TypeVar("T")
logger = logging.getLogger(__name__)

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_SHARE: Final = 0.5  # of physical memory that the KV cache may take, touched or not
_CUDA_SHARE: Final = 0.8  # of a GPU, unless the configuration says otherwise, and of what is free after the weights


class EmbeddedEngine(EngineCore):
    """Serves one Hugging Face checkpoint. Construction loads it and allocates the KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        max_context_len: int | None,
        label: str = DEFAULT_LABEL,
        codec: TextCodec | None = None,
    ) -> None:
        # cuDNN's attention plans for a second whenever a length is new; in decoding, each 16 tokens.
        torch.backends.cuda.enable_cudnn_sdp(False)
        directory = Path(model_path)
        spec = ModelSpec.read(directory)
        device = _device(config.engine_device)
        dtype = _dtype(config, device)
        codec = codec or TextCodec.load(directory)
        self._weights = LiveWeights(spec, device, dtype)
        try:
            self._weights.load(directory)
        except WeightsRefused as error:
            raise EngineStartError(str(error)) from error
        length = min(spec.max_positions, max_context_len or spec.max_positions)
        share = config.engine_memory_fraction or _CUDA_SHARE
        slots = _affordable_slots(config.engine_slots, length, spec.kv_bytes_per_token(dtype), device, share)
        table = SlotTable(slots, length, retain=config.prefix_cache)
        self._cache = KVCache(spec, slots, length, device, dtype)
        self._memory = MemoryAccount()
        self._transformer = Transformer(spec, self._weights, length)
        self._prepared: tuple[str, str | None, Transformer] | None = None  # path, label, what computes with them
        self._spare: Transformer | None = None  # on a CPU, where fresh memory costs more than the copy into it
        self.stepper = Stepper(self._transformer, self._cache, table, codec, label)
        facts = EngineFacts(
            engine="embedded",
            model_path=model_path,
            model_type=spec.model_type,
            architectures=(spec.architecture,),
            vocab_size=spec.shape.vocabulary,
            context_length=length,
            max_running_requests=slots,
            max_total_num_tokens=slots * length,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            eos_ids=spec.eos_ids | ({codec.eos_id} if codec.eos_id is not None else frozenset()),
        )
        super().__init__(facts, self.stepper)
        self._load = self.measure()
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._after_drain: list[Callable[[], None]] = []
        self._stopping = False
        self._dead: str | None = None
        self._deliver: Deliver = nowhere
        self._on_crash: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(target=self._work, name="embedded-engine", daemon=True)

    def start(self, deliver: Deliver, on_crash: Callable[[BaseException], None]) -> None:
        self._deliver, self._on_crash = deliver, on_crash
        self._thread.start()

    async def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def submit(self, completions: Sequence[Completion]) -> None:
        if not self._send(lambda: self.stepper.submit(completions)):
            for completion in completions:
                completion.refuse(self._dead or "engine stopped")
            self._deliver(completions)

    def cancel(self, completions: Sequence[Completion]) -> None:
        self._send(lambda: self.stepper.cancel(completions))

    async def pause(self, mode: PauseMode) -> None:
        await self._ask(lambda: self.stepper.pause(mode))

    async def resume(self) -> None:
        def go_on() -> None:
            self._memory.check_whole()
            self.stepper.resume()

        await self._ask(go_on)

    async def flush_cache(self) -> bool:
        return await self._ask(self.stepper.flush)

    async def update_weights(
        self, path: str, label: str | None, abort_all: bool, claim: SlotManifest | None = None
    ) -> None:
        def change() -> None:
            self._memory.check_load()
            prepared, self._prepared = self._prepared, None
            if prepared is not None and prepared[:2] == (path, label):
                self.stepper.swap(lambda: self._transformer.trade(prepared[2]), label)
                self._weights = self._transformer.weights
                self._spare = prepared[2] if self._weights.embed.device.type == "cpu" else None
            else:
                self.stepper.swap(lambda: self._weights.load(Path(path), claim), label)
            self._memory.unloaded = False

        await self._between_requests(change, abort_all)

    async def prepare_weights(self, path: str, label: str | None, claim: SlotManifest | None = None) -> bool:
        spare = self._spare or (self._prepared and self._prepared[2])
        self._prepared = self._spare = None  # the thread of a call that was cancelled may write to it still
        # A set, unless it is there, and as much again for all else.
        if self.paused or self._memory.away or not self._weights.has_room(2 if spare is None else 1):
            return False
        length = self.facts.context_length
        beside, verified = await asyncio.to_thread(self._transformer.beside, Path(path), claim, length, spare)
        self._prepared = path, label, beside
        return verified

    async def relabel(self, label: str) -> None:
        await self._ask(lambda: self.stepper.relabel(label))

    async def checksums(self) -> dict[str, str]:
        def compute() -> dict[str, str]:
            self._memory.check_weights()
            return self._weights.checksums()

        return await self._ask(compute)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._ask(lambda: self._release(tags))

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        def take() -> None:
            news = self._memory.resume(tags)
            if "weights" in news:
                self._weights.allocate()
            if "kv_cache" in news:
                self._cache.allocate()

        await self._ask(take)

    def load(self) -> Load:
        """As of the end of the last step; the stepper itself is the worker's alone."""
        return self._load

    def _release(self, tags: Sequence[MemoryTag]) -> None:
        self._prepared = self._spare = None
        news = self._memory.release(tags, paused=self.stepper.paused, running=self.stepper.running)
        if "kv_cache" in news:
            self.stepper.flush()  # retained prefixes are gone with the cache
            self._cache.free()
        if "weights" in news:
            self._weights.free()
        if self.facts.device.startswith("cuda"):
            torch.cuda.empty_cache()  # else the memory stays with this process
        self.stepper.totals.memory_releases += bool(news)

    def _send(self, command: Callable[[], None]) -> bool:
        """Queue a command for the worker; False if it will never run."""
        with self._wake:
            if self._stopping or self._dead is not None:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    async def _ask(self, question: Callable[[], T]) -> T:
        """Run `question` in the worker between two steps. Waits for its result; unblocked by it or by the engine's
        end."""
        answer: Future[T] = Future()
        if not self._send(lambda: _resolve(answer, question)):
            raise EngineServerError(self._dead or "the engine has stopped")
        return await asyncio.wrap_future(answer)

    async def _between_requests(self, change: Callable[[], None], abort_all: bool) -> None:
        """Run `change` when nothing is running, or at once if the engine is paused. Waits for the requests that are
        running; they are unblocked by their own end, or ended here with `abort_all`."""
        answer: Future[None] = Future()

        def arrange() -> None:
            if abort_all:
                self.stepper.cancel_all()
            self.stepper.holding = True
            self._after_drain.append(lambda: _resolve(answer, change))

        await self._ask(arrange)
        await asyncio.wrap_future(answer)

    def _work(self) -> None:
        """Body of the thread. Sleeps until there is a command, a step to make or the end."""
        try:
            while self._next():
                if self.stepper.has_work:
                    started = time.perf_counter()
                    self.stepper.step()
                    self.stepper.totals.busy_s += time.perf_counter() - started
                self._hand_out()
        except BaseException as error:
            logger.exception("the engine thread died")
            try:
                self._die(f"the engine died: {type(error).__name__}: {error}")
            finally:
                self._on_crash(error)
        else:
            self._die("the engine has stopped")

    def _next(self) -> bool:
        """Wait for work and run the commands; False at the end."""
        with self._wake:
            while not (self._commands or self._stopping or self.stepper.has_work or self._change_is_due):
                self._wake.wait()
            if self._stopping:
                return False  # the end answers commands that arrived meanwhile
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        if self._change_is_due:
            self._hand_out()  # what finished comes before the answer to the update
            changes, self._after_drain = self._after_drain, []
            for change in changes:
                change()
            self.stepper.holding = False
        return True

    @property
    def _change_is_due(self) -> bool:
        return bool(self._after_drain) and (self.stepper.paused or not self.stepper.running)

    def _hand_out(self) -> None:
        """Deliver what progressed, after the load that goes with it was noted."""
        self._load = self.measure()
        progressed = self.stepper.take_progressed()
        if progressed:
            self._deliver(progressed)

    def _die(self, reason: str) -> None:
        with self._wake:
            self._dead = reason
            commands, self._commands = self._commands, []
        for command in commands:
            command()  # submissions must reach the stepper to be ended; questions are answered as always
        for change in self._after_drain:  # those of the last commands, too
            change()
        self.stepper.cancel_all()
        self._hand_out()


def _resolve(answer: Future[T], question: Callable[[], T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(question())
    except Exception as error:
        answer.set_exception(error)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineStartError(f"engine_device={name!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineStartError(f"engine_device={name!r}, but torch finds no CUDA device; use auto or cpu")
    return device


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.engine_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.engine_dtype]


def _affordable_slots(wanted: int, length: int, bytes_per_token: int, device: torch.device, share: float) -> int:
    """Slots that fit into memory at full length: of a GPU, into a share of it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(min(_CUDA_SHARE * free, share * total))
    else:
        budget = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
    slot_bytes = (length + 1) * bytes_per_token
    slots = min(wanted, budget // slot_bytes)
    if slots < 1:
        raise EngineStartError(
            f"one slot of {length} tokens needs {slot_bytes / 2**30:.1f} GiB of KV cache and {budget / 2**30:.1f} GiB "
            "are to be had; set a smaller --rollout-max-context-len, or a larger --engine-memory-fraction"
        )
    if slots < wanted:
        logger.warning("engine_slots=%d reduced to %d: %d tokens each fill the memory", wanted, slots, length)
    return slots
