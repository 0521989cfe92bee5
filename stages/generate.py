"""The generate stage: asks engines for rollouts, continues what was aborted, hands tool calls to the loop stages.

A single-turn group is one request with n samples and leaves as one slice. A sample that a loop stage wants leaves alone
through that loop's edge and comes back through the inlet `return`, which no prompt can fill.

Invariants:
- Token ids, log-probs and versions are the engine's; nothing is tokenised twice, no version is stamped here.
- An engine's partial output is never thrown away while `partial_rollout` is on: the next request continues from it.
- The leases of a replica are its concurrency: an inlet's window bounds the requests in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from models.engines.errors import EngineError, EngineUnreachable
from models.engines.noise import sample_seed
from models.engines.protocol import GenerateOutput, GenerateRequest, SamplingParams
from stages.base import LoopStage, Stage, StageContext, failed
from stages.engine_link import EngineLink
from stages.filters import import_path
from stages.messages import Float32Array, Int32Array, PromptGroup, RolloutSlice, Sample, UInt8Array, VersionRun, wire
from stages.ports import Inlet, Lease, Outlet, Ports
from stages.tools import join_runs

LOADS_INTERVAL_S = 2.0
ENGINE_WAIT_S = 120.0  # how long a request waits for any engine to come (back) up


class VersionLabelError(Exception):
    """An engine named weights that this run did not publish."""


def label_version(label: str) -> int:
    """`epoch.version` -> version."""
    _, separator, version = label.partition(".")
    if not separator or not version.isdigit():
        raise VersionLabelError(
            f"weights label {label!r} is not of the form epoch.version; was the engine updated by someone else?"
        )
    return int(version)


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def new_sample(index: int) -> Sample:
    return Sample(index, "pending", "", wire([], Int32Array), wire([], UInt8Array), wire([], Float32Array), ())


def cut(sample: Sample, n: int) -> Sample:
    """The first `n` tokens: for a sample whose last tokens, which the policy did not make, exceed its budget."""
    runs: list[VersionRun] = []
    left = n = max(n, 0)
    for run in sample.version_runs:
        runs.append(VersionRun(run.version, min(run.n_tokens, left)))
        left -= runs[-1].n_tokens
    return msgspec.structs.replace(
        sample,
        response_ids=wire(sample.response_ids[:n], Int32Array),
        loss_mask=wire(sample.loss_mask[:n], UInt8Array),
        rollout_log_probs=wire(sample.rollout_log_probs[:n], Float32Array),
        version_runs=join_runs(tuple(runs), ()),
    )


def append_output(sample: Sample, output: GenerateOutput, generate_s: float) -> Sample:
    """The sample with one engine answer after it. Status: stop -> completed, length -> truncated, abort -> aborted."""
    meta = output.meta_info
    ids = output.output_ids
    log_probs = output.output_log_probs
    n = len(ids)
    runs = tuple(VersionRun(label_version(s.version), s.end - s.start) for s in output.version_spans)
    reason = meta.finish_reason
    status = {"stop": "completed", "length": "truncated", "abort": "aborted"}.get(
        reason.type if reason else "", "failed"
    )
    return msgspec.structs.replace(
        sample,
        status=status,
        error=f"engine finished with {reason.type if reason else 'no reason'}" if status == "failed" else None,
        response=sample.response + output.text,
        response_ids=wire(np.concatenate([sample.response_ids, ids]), Int32Array),
        loss_mask=wire(np.concatenate([sample.loss_mask, np.ones(n)]), UInt8Array),
        rollout_log_probs=wire(np.concatenate([sample.rollout_log_probs, log_probs]), Float32Array),
        version_runs=join_runs(sample.version_runs, runs),
        cached_tokens=sample.cached_tokens + (meta.cached_tokens or 0),
        retractions=sample.retractions + (meta.num_retractions or 0),
        generate_s=sample.generate_s + generate_s,
    )


class GenerateStage(Stage):
    """One replica: a client of its share of the engines."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.rollout = context.config.rollout
        self.max_context = int(context.options.get("max_context", 1 << 30))
        self._drain = False
        self._changed = asyncio.Event()  # a link came up, or the run drains

    async def setup(self) -> None:
        self._loops: list[tuple[str, type[LoopStage]]] = []
        for entry in self.context.loops:
            name, _, path = entry.partition("=")
            self._loops.append((name, import_path(path)))
        engines = int(self.context.options.get("engines", 1))
        mine = [e for e in range(engines) if e % self.context.replicas == self.context.index]
        owner = bool(mine)
        self.links = [
            EngineLink(
                f"engine-{e}",
                owner=owner,
                pause_mode=self.config.engine.pause_generation_mode,
                timeout_s=self.rollout.request_timeout_secs,
                activity=self.activity,
                spans=self.context.spans,
                changed=self._changed,
            )
            for e in (mine or [self.context.index % engines])
        ]

    async def close(self) -> None:
        for link in self.links:
            if link.client is not None:
                await link.client.close()

    async def run(self, ports: Ports) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(link.follow(ports.topic)) for link in self.links]
            background.append(tasks.create_task(self._watch_drain(ports)))
            background.append(tasks.create_task(self._watch_loads()))
            await self._any_ready()
            async with asyncio.TaskGroup() as pumps:
                for name in ("in", "eval", "return"):
                    if name in ports.inlets:
                        pumps.create_task(self._pump(ports.inlets[name], ports))
            for task in background:
                task.cancel()

    async def _any_ready(self) -> None:
        """Waits for the first engine that carries published weights, or for a drain."""
        while not self._drain and not any(link.ready.is_set() for link in self.links):
            self._changed.clear()
            await self._changed.wait()

    async def _watch_drain(self, ports: Ports) -> None:
        """Waits for the topic `drain`, then has the engines give back what they hold."""
        revision = 0
        while not self._drain:
            revision = await ports.topic.wait(revision)
            self._drain = ports.topic.get("drain") is not None
        self._changed.set()
        for link in self.links:
            if link.client is not None:
                try:
                    await link.client.abort()
                except EngineError:
                    continue  # an engine that is down holds nothing

    async def _watch_loads(self) -> None:
        """Waits for the clock; asks the engines how long they have computed. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOADS_INTERVAL_S)
            busy_s = 0.0
            for link in self.links:
                if link.owner and link.client is not None:
                    with contextlib.suppress(EngineError):  # an engine that is down says nothing
                        busy_s += sum(load.busy_s for load in await link.client.loads())
            self.activity.extra["engine_busy_s"] = max(busy_s, self.activity.extra.get("engine_busy_s", 0.0))

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
            try:
                if any(s.status != "failed" for s in samples):  # a loop stage may have failed it
                    samples = await self._turn(group, samples)
            except* (EngineError, VersionLabelError, ValueError) as errors:
                error = first_leaf(errors)
                self.activity.failures += 1
                samples = failed(RolloutSlice(group, samples), f"{type(error).__name__}: {error}").samples
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

    async def _turn(self, group: PromptGroup, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """One turn of all samples: a joint request for fresh ones, single ones for those that continue."""
        before = {s.index: s for s in samples}
        if samples[0].turns == 0 and samples[0].n_tokens == 0:
            samples = await self._ask(group, samples)
        else:
            samples = await self._each(group, samples)
        while not self._drain and any(s.status == "aborted" for s in samples):
            again = [self._again(before[s.index], s) for s in samples if s.status == "aborted"]
            resumed = {s.index: s for s in await self._each(group, again)}
            samples = tuple(resumed.get(s.index, s) for s in samples)
        return tuple(msgspec.structs.replace(s, turns=s.turns + 1) for s in samples)

    def _again(self, before: Sample, aborted: Sample) -> Sample:
        """What an aborted turn goes on from: its partial output, or the beginning of the turn."""
        kept = aborted if self.rollout.partial_rollout else before
        return msgspec.structs.replace(kept, resumed=aborted.resumed + 1)

    async def _each(self, group: PromptGroup, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """One request per sample, all at once."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(group, (s,))) for s in samples]
        return tuple(task.result()[0] for task in asked)

    def _budget(self, group: PromptGroup, sample: Sample) -> int:
        longest = self.rollout.rollout_max_response_len
        if group.purpose == "eval" and self.config.eval.eval_max_response_len is not None:
            longest = self.config.eval.eval_max_response_len
        return min(longest, self.max_context - len(group.prompt_ids)) - sample.n_tokens

    def _params(self, group: PromptGroup, sample: Sample, budget: int, n: int) -> SamplingParams:
        evaluating = group.purpose == "eval"
        stop = list(self.rollout.rollout_stop)
        seed = group.seed & 0x7FFFFFFF
        if self.config.tools.tools:
            stop.append(self.config.tools.tool_call_close)
        return SamplingParams(
            temperature=self.config.eval.eval_temperature if evaluating else self.rollout.rollout_temperature,
            top_p=1.0 if evaluating else self.rollout.rollout_top_p,
            top_k=-1 if evaluating else self.rollout.rollout_top_k,
            max_new_tokens=budget,
            stop=stop or None,
            stop_token_ids=list(self.rollout.rollout_stop_token_ids) or None,
            skip_special_tokens=self.rollout.rollout_skip_special_tokens,
            no_stop_trim=True,
            n=n,
            # sample i of a joint request draws from sample_seed(seed, i), and so it does when it continues alone
            sampling_seed=sample_seed(seed, sample.index if n == 1 else 0),
        )

    async def _ask(self, group: PromptGroup, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """One engine request for samples that share their tokens so far."""
        if self._drain:
            return tuple(msgspec.structs.replace(s, status="aborted") for s in samples)
        first = samples[0]
        budget = self._budget(group, first)
        if budget <= 0:
            return tuple(msgspec.structs.replace(cut(s, s.n_tokens + budget), status="truncated") for s in samples)
        ids = [*group.prompt_ids.tolist(), *first.response_ids.tolist()]
        params = self._params(group, first, budget, len(samples))
        started = time.perf_counter()
        outputs = await self._request(ids, params, group, samples)
        spent = time.perf_counter() - started
        return tuple(append_output(s, o, spent) for s, o in zip(samples, outputs, strict=True))

    async def _request(
        self, ids: list[int], params: SamplingParams, group: PromptGroup, samples: Sequence[Sample]
    ) -> list[GenerateOutput]:
        """Send to the least loaded engine that is up.

        A lost connection is tried again elsewhere, a bounded number of times.
        """
        tries = 0
        lost: EngineLink | None = None
        while True:
            link = await self._choose(lost)
            client, current = link.client, link.current
            if client is None or current is None:
                continue
            request = GenerateRequest(
                rid=f"{self.context.replica}-{group.group_id:012d}-{samples[0].index:04d}-{samples[0].turns:03d}-{tries:02d}",
                input_ids=[*ids],
                sampling_params=params,
                return_logprob=True,
                extra_key=current.label,
            )
            link.in_flight += len(samples)
            try:
                return await client.generate(request)
            except EngineUnreachable:
                tries, lost = tries + 1, link
                if tries > self.rollout.max_retries:
                    raise
                self.activity.extra["engine_retries"] = self.activity.extra.get("engine_retries", 0.0) + 1
                await asyncio.sleep(min(0.1 * 2**tries, 5.0))
            finally:
                link.in_flight -= len(samples)

    async def _choose(self, lost: EngineLink | None) -> EngineLink:
        """Waits for an engine that is ready, rather not the `lost` one; unblocked by the first, or by a time limit."""
        deadline = time.monotonic() + ENGINE_WAIT_S
        while True:
            up = [link for link in self.links if link.ready.is_set() and link.client is not None]
            if up:
                return min(up, key=lambda link: (link is lost, link.in_flight))
            left = deadline - time.monotonic()
            if left <= 0 or self._drain:
                names = ", ".join(link.name for link in self.links)
                why = "the run drains" if self._drain else f"not up within {ENGINE_WAIT_S:g} s; see logs/engine-*.log"
                raise EngineUnreachable(names, why)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # the loop looks again
                async with asyncio.timeout(left):
                    await self._changed.wait()
