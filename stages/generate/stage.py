"""The generate stage: lets engines continue rollouts, and passes each rollout on at the end of its turn.

It is an ordinary client of the engines (stages/sampling/sampler.py): a replica owns nothing, and may start, move and
die at any time. A rollout that a loop stage wants leaves by itself through that loop's edge (stages/generate/turns.py).
It comes back to any replica through the inlet `return`, which prompts cannot fill. All other rollouts leave through
`out`.

Invariants:
- token ids, log-probs and versions are the engine's; nothing is tokenised again, and no version is set here;
- rollouts of a group that end together leave as one slice, and a slow rollout delays them only for a moment;
- the leases of a replica bound its groups; slots at the engines bound the samples in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

import msgspec

from stages.base import GenerateOptions, Stage, StageContext, beside, send_slice, side_by_side
from stages.generate.generate_functions import GenerateFunctions, function_of
from stages.generate.rollout_functions import RolloutFunction
from stages.generate.turns import Loops, Turns
from stages.messages import PromptGroup, RolloutSlice, Sample, without_prompt
from stages.ports import Inlet, Lease, Outlet, Ports, wait_at_most
from stages.records.once import EPISODES_DIR
from stages.records.unfinished import AnswerJournal, ResponseJournal
from stages.rollouts import new_sample, rollouts
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler
from stages.topic_values import LENGTH, length_place

# How long a finished rollout waits for others of its group. A slice is one message, and its cost for each later stage
# hardly depends on the number of rollouts in it; a quarter of a second is little beside the time of a rollout.
MEMBER_LINGER_S: Final = 0.25


class GenerateStage(Stage):
    """One replica."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self.rollout = context.config.rollout
        self.options = context.given(GenerateOptions)

    async def setup(self) -> None:
        context = self.context
        self.loops = Loops(self.config, context.loops)
        self.sampler = Sampler(context, stage="generate", extra=self.activity.extra)
        requests = Requests(self.config, self.options.max_context)
        self.journal = ResponseJournal(context.run_dir / EPISODES_DIR, self.config, self.options.lives)
        self.turns = Turns(requests, self.sampler, self.activity, self.journal)
        answers = AnswerJournal(context.run_dir / EPISODES_DIR, self.config, self.options.lives)
        self.functions = GenerateFunctions(self.sampler, requests, self.activity, answers)
        path = self.rollout.rollout_function_path
        self.batches = None if path is None else RolloutFunction(self.config, self.functions, path)

    async def close(self) -> None:
        if hasattr(self, "functions"):  # unset after a failed setup
            await self.functions.close()
        if hasattr(self, "sampler"):
            await self.sampler.close()

    async def run(self, ports: Ports) -> None:
        batches = () if self.batches is None else (self.batches.run(),)
        follows = self.sampler.follow(ports.topic), self.functions.follow(ports.topic)
        async with beside(*follows, self.journal.run(), *batches):
            await self.sampler.ready()
            inlets = [ports.inlets[name] for name in ("in", "eval", "return") if name in ports.inlets]
            await side_by_side(self._pump(inlet, ports) for inlet in inlets)

    async def _pump(self, inlet: Inlet[PromptGroup | RolloutSlice], ports: Ports) -> None:
        """Take leases until the inlet ends; returns after the started work has ended."""
        async with asyncio.TaskGroup() as tasks:
            while (lease := await inlet.receive()) is not None:
                tasks.create_task(self._serve(lease, ports))

    async def _serve(self, lease: Lease[PromptGroup | RolloutSlice], ports: Ports) -> None:
        """One turn of the samples of a lease, which is released when the next hub holds all of them."""
        message = lease.message
        path = self.config.eval.eval_function_path
        if isinstance(message, PromptGroup) and message.purpose == "eval" and path is not None:
            await self._evaluate(path, message, ports.outlets["out"])
            lease.done()
            return
        if isinstance(message, PromptGroup) and (beginning := self.loops.beginning) is not None:
            await self._begin(message, ports.outlets[beginning])
            lease.done()
            return
        if isinstance(message, RolloutSlice):
            group, samples = message.group, message.samples
        else:
            group = without_prompt(message)
            first = new_sample(message.prompt_ids, 0)  # its arrays are never written to, so all samples can share them
            samples = tuple(msgspec.structs.replace(first, index=index) for index in range(message.n_samples))
        self.activity.items_in += 1
        with self.span("generate", group=group.group_id, detail=f"turn {samples[0].turns + 1}") as details:
            async with asyncio.TaskGroup() as tasks:
                leaving = _Leaving(self, RolloutSlice(group, samples), ports, tasks)
                with self.activity.working():
                    unfinished = tuple(filter(self.loops.takes_turn, samples))
                    for sample in samples:  # a loop stage has ended or failed the others
                        if not self.loops.takes_turn(sample):
                            leaving.put(sample)
                    function = function_of(self.config, group)
                    if unfinished and self.batches is not None and group.purpose == "train":
                        await self.batches.take(group, unfinished, leaving.put)
                    elif unfinished and function is not None:
                        await self.functions.take(function, group, unfinished, leaving.put)
                    elif unfinished:
                        await self.turns.take(group, unfinished, leaving.put)
                leaving.all_here.set()
            tokens = max(0, leaving.tokens - sum(s.length for s in samples))  # the result of a tool may have been cut
            self.activity.tokens += tokens
            details.append(f"{tokens} tokens")
            if leaving.versions:
                versions = sorted({min(leaving.versions), max(leaving.versions)})
                details.append(f"version {' to '.join(map(str, versions))}")
        lease.done()

    async def _evaluate(self, path: str, prompt: PromptGroup, outlet: Outlet[RolloutSlice]) -> None:
        """A whole evaluation in one call of `--eval-function-path`."""
        self.activity.items_in += 1
        group = without_prompt(prompt)
        with self.span("evaluate", group=group.group_id):
            sample = await self.functions.evaluate(path, group, new_sample(prompt.prompt_ids, 0))
        self.activity.failures += sample.status == "failed"
        await self.emit(outlet, RolloutSlice(group, (sample,)))

    async def _begin(self, prompt: PromptGroup, outlet: Outlet[RolloutSlice]) -> None:
        """Send each rollout of a group to the loop stage that makes its prompt."""
        self.activity.items_in += 1
        group, fresh = without_prompt(prompt), new_sample((), 0)
        samples = (msgspec.structs.replace(fresh, index=index) for index in range(prompt.n_samples))
        await side_by_side(self.emit(outlet, RolloutSlice(group, (sample,))) for sample in samples)

    async def emit(self, outlet: Outlet[RolloutSlice], slice_: RolloutSlice) -> None:
        with self.activity.working(), self.activity.sending():
            await send_slice(outlet, slice_)


class _Leaving:
    """The finished rollouts of one lease: into a loop one by one, out together with others that end now."""

    def __init__(self, stage: GenerateStage, taken: RolloutSlice, ports: Ports, tasks: asyncio.TaskGroup) -> None:
        self.stage, self.group, self.ports, self._tasks = stage, taken.group, ports, tasks
        self.all_here = asyncio.Event()
        self.tokens = 0
        self.versions: set[int] = set()  # of the weights of the last tokens
        self._missing = Counter(sample.index for sample in taken.samples)  # sequences by rollout
        self._here: dict[int, list[Sample]] = {}
        self._ended: list[RolloutSlice] = []

    def put(self, *parts: Sample) -> None:
        """A sequence has ended its turn, or was split. The sequences of a rollout leave together."""
        index = parts[0].index
        for sample in parts:
            self.tokens += sample.length
            self.versions.update(run.version for run in sample.version_runs[-1:] if run.version >= 0)
            self._here.setdefault(index, []).append(sample)
        self._missing[index] -= 1
        if self._missing[index]:
            return
        [parts] = rollouts(self._here.pop(index))
        port, slice_ = self.stage.loops.next(self.group, parts)
        if port != "out":
            self._tasks.create_task(self.stage.emit(self.ports.outlets[port], slice_))
            return
        if self.group.purpose == "train":
            figure = f"{LENGTH}{length_place(sum(sample.new_tokens for sample in parts))}"
            self.stage.activity.count(figure)
            if self.group.admitted_s:  # not what an earlier version saved
                slice_ = _timed(slice_)
        if not self._ended:
            self._tasks.create_task(self._flush())
        self._ended.append(slice_)

    async def _flush(self) -> None:
        """Send the finished rollouts. Waits for the last rollout, or until the first has waited long enough."""
        await wait_at_most(MEMBER_LINGER_S, self.all_here.wait())
        ended = sorted(self._ended, key=lambda slice_: slice_.samples[0].index)
        self._ended.clear()
        rest = RolloutSlice(ended[0].group, tuple(sample for slice_ in ended for sample in slice_.samples))
        await self.stage.emit(self.ports.outlets["out"], rest)
        self.stage.activity.items_out += 1


def _timed(slice_: RolloutSlice) -> RolloutSlice:
    """The rollout with the time since its admission."""
    *others, last = slice_.samples
    took_s = time.time() - slice_.group.admitted_s
    last = msgspec.structs.replace(last, metrics={**last.metrics, "rollout/e2e_time": took_s})
    return RolloutSlice(slice_.group, (*others, last))
