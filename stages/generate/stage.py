"""The generate stage: asks engines for rollouts, continues what was aborted, hands tool calls to the loop stages.

A single-turn group is one request with n samples and leaves as one slice. A sample that a loop stage wants leaves alone
through that loop's edge and comes back through the inlet `return`, which no prompt can fill. Where a request goes is
told in stages/sampling/dispatch.py, what becomes of one that is lost or late in stages/generate/turn.py.

Invariants:
- Token ids, log-probs and versions are the engine's; nothing is tokenised twice, no version is stamped here.
- An engine's partial output is never thrown away while `partial_rollout` is on: the next request continues from it.
- The leases of a replica are its concurrency: an inlet's window bounds the requests in flight.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import msgspec

from models.engines.errors import EngineError
from models.weights.delta_mirror import DeltaMirror
from stages.base import LoopStage, Stage, StageContext
from stages.engines.engine_link import EngineLink
from stages.generate.turn import Turns
from stages.group.filters import import_path
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.options import GenerateOptions
from stages.ports import Inlet, Lease, Outlet, Ports
from stages.sampling.append_output import VersionLabelError, append_output, label_version, new_sample
from stages.sampling.dispatch import Dispatcher
from stages.sampling.requests import Requests

__all__ = ["GenerateStage", "VersionLabelError", "append_output", "label_version", "new_sample"]


class _Shape(msgspec.Struct):
    vocab_size: int | None = None


def vocabulary(checkpoint: str | None) -> int | None:
    """Tokens that the model knows, from the checkpoint's config.json; None if that does not say.

    A real SGLang server ends with all its requests when it is sent another token id.
    """
    path = Path(checkpoint or "") / "config.json"
    return msgspec.json.decode(path.read_bytes(), type=_Shape).vocab_size if path.is_file() else None


class GenerateStage(Stage):
    """One replica: a client of its share of the engines, or of all behind the router."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.rollout = context.config.rollout
        self.options = context.given(GenerateOptions)
        self._drain = False
        self._changed = asyncio.Event()  # an engine or the router came or went, or the run drains

    async def setup(self) -> None:
        self._loops: list[tuple[str, type[LoopStage]]] = []
        for entry in self.context.loops:
            name, _, path = entry.partition("=")
            self._loops.append((name, import_path(path)))
        context = self.context
        engines = self.options.engines
        mine = [e for e in range(engines) if e % context.replicas == context.index]
        owner = bool(mine)
        # Made when it is first needed, by the delta route alone.
        self._mirror = DeltaMirror(f"mirror-{context.replica}-{uuid.uuid4().hex[:12]}", context.run_dir)
        self.links = [
            EngineLink(
                f"engine-{e}",
                owner=owner,
                pause_mode=self.config.engine.pause_generation_mode,
                timeout_s=self.rollout.request_timeout_secs,
                activity=self.activity,
                spans=context.spans,
                changed=self._changed,
                update=self.config.update,
                mirror=self._mirror,
            )
            for e in (mine or [context.index % engines])
        ]
        vocab_size = self.options.vocab_size
        if vocab_size is None and self.config.engine.engine == "sglang":
            vocab_size = vocabulary(self.config.train.hf_checkpoint)
        self.dispatcher = Dispatcher(
            self.config,
            self.links,
            self.activity,
            self._changed,
            index=context.index,
            replicas=context.replicas,
            engines=engines,
            vocab_size=vocab_size,
        )
        requests = Requests(self.config, self.options.max_context)
        self.turns = Turns(self.config, requests, self.dispatcher, self.activity, context.replica)

    async def close(self) -> None:
        for link in self.links:
            if link.client is not None:
                await link.client.close()
        await self.dispatcher.close()
        self._mirror.close()

    async def run(self, ports: Ports) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(link.follow(ports.topic)) for link in self.links]
            background.append(tasks.create_task(self.dispatcher.directory.follow(ports.topic)))
            background.append(tasks.create_task(self.dispatcher.watch.run()))
            if self.dispatcher.members is not None:
                background.append(tasks.create_task(self.dispatcher.members.run()))
            background.append(tasks.create_task(self._watch_drain(ports)))
            await self._any_ready()
            async with asyncio.TaskGroup() as pumps:
                for name in ("in", "eval", "return"):
                    if name in ports.inlets:
                        pumps.create_task(self._pump(ports.inlets[name], ports))
            for task in background:
                task.cancel()

    async def _any_ready(self) -> None:
        """Waits for the first engine that carries published weights and can be sent to, or for a drain."""
        while not self._drain and not self.dispatcher.ready():
            self._changed.clear()
            await self._changed.wait()

    async def _watch_drain(self, ports: Ports) -> None:
        """Waits for the topic `drain`, then has the engines give back what they hold."""
        revision = 0
        while not self._drain:
            revision = await ports.topic.wait(revision)
            self._drain = ports.topic.get("drain") is not None
        self.dispatcher.drain()
        for link in self.links:
            if link.client is not None:
                try:
                    await link.client.abort()
                except EngineError:
                    continue  # an engine that is down holds nothing

    async def _pump(self, inlet: Inlet[PromptGroup | RolloutSlice], ports: Ports) -> None:
        """Waits for work; ends with the inlet, after what it started."""
        async with asyncio.TaskGroup() as tasks:
            while (lease := await inlet.receive()) is not None:
                tasks.create_task(self._serve(lease, ports))

    async def _serve(self, lease: Lease[PromptGroup | RolloutSlice], ports: Ports) -> None:
        message = lease.message
        group = message.group if isinstance(message, RolloutSlice) else message
        samples = (
            message.samples if isinstance(message, RolloutSlice) else tuple(map(new_sample, range(group.n_samples)))
        )
        self.activity.items_in += 1
        before = sum(s.n_tokens for s in samples)
        with (
            self.activity.working(),
            self.span("generate", group=group.group_id, detail=f"turn {samples[0].turns + 1}"),
        ):
            if any(s.status != "failed" for s in samples):  # a loop stage may have failed it
                samples = await self.turns.take(group, samples)
            self.activity.tokens += sum(s.n_tokens for s in samples) - before
            with self.activity.sending():
                await self._emit(RolloutSlice(group, samples), ports)
        lease.done()

    async def _emit(self, slice_: RolloutSlice, ports: Ports) -> None:
        """Finished samples together to `out`; each one that a loop stage wants alone to that loop."""
        finished: list[Sample] = []
        for sample in slice_.samples:
            single = RolloutSlice(slice_.group, (sample,))
            continues = sample.status != "failed" and sample.turns < self.rollout.max_turns
            loop = self._wanted(single) if continues else None
            if loop is None:
                finished.append(sample)
            else:
                outlet: Outlet[RolloutSlice] = ports.outlets[f"loop.{loop}"]
                await outlet.send(single, single.key)
        if finished:
            rest = RolloutSlice(slice_.group, tuple(finished))
            await ports.outlets["out"].send(rest, rest.key)
            self.activity.items_out += 1

    def _wanted(self, single: RolloutSlice) -> str | None:
        for name, stage in self._loops:
            if stage.wants(self.config, single):
                return name
        return None
