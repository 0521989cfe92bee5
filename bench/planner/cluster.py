"""A cluster in virtual time: the production stages decide, nothing is computed and no task sleeps.

Production code: `PromptStage` (gate, ledger, requeueing), `Ranking` and `Slots` (which engine, and when),
`GroupStage` (joins and filters), `HeldGroups` (order, refusals, batches), and the simulated engine's `Schedule` with
its continuous batching. Modelled here, because production uses HTTP, tensors and files for them: the
client that sends a turn, the trainer's seconds, and the order in which engines take weights.

Invariants: the clock moves only when every task waits, and then to the next event; every admitted group is trained,
filtered, stale, discarded or open at the end; the same cluster and seed give the same run.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from bench.planner import world
from bench.report import NoSpans
from configs.schema import Config
from configs.schema.rollout import SimulatedEngineConfig
from models.engines.core import Completion
from models.engines.launch.command import policy_of
from stages.base import StageContext
from stages.group.stage import GroupStage
from stages.messages import NO_IDS, PromptGroup, RolloutSlice, StepDone
from stages.ports import Lease, Ports
from stages.prompts.stage import PromptStage
from stages.sampling.engine_choice import Choice, Ranking, Slots
from stages.staleness_gate import StalenessGate
from stages.topic_values import ADDRESS, DIRECTORY, EngineAddress, EngineEntry
from stages.train.held_groups import HeldGroups


class Simulation:
    """One run of a cluster. `run` in a `VirtualLoop`."""

    def __init__(self, cluster: world.Cluster) -> None:
        self.cluster = cluster
        sections: Mapping[str, Any] = {
            "rollout": {
                "rollout_batch_size": cluster.groups, "n_samples_per_prompt": cluster.members,
                "num_rollout": cluster.batches + cluster.staleness + 1,  # so that the end of the run is not seen
            },
            "asynchrony": {"max_staleness": cluster.staleness, "update_weights_interval": cluster.interval},
            "filter": {"dynamic_sampling_filter": ["nonzero_std"] if cluster.filtered else [], "max_filter_rounds": 99},
            "observe": {"samples_interval": 0},
        }  # fmt: skip
        self.config = msgspec.convert(sections, Config)
        self.random, self.ranking = Random(cluster.seed), Ranking(policy_of(self.config), seed=0)
        self.board, self.record = world.Board(), world.NoRecord(cluster.batches)
        self.engines: dict[str, world.Engine] = {}
        self.tokens: dict[int, list[tuple[int, int]]] = {}  # group -> (version, tokens) of its rollouts
        self.trained: Counter[int] = Counter()
        self.trainer_s = 0.0
        self.graders = asyncio.Semaphore(cluster.graders)
        self.ends: list[float] = []
        self.marks: list[tuple[float, float, float, float]] = []  # of the counters, at the end of each batch
        self.useful = 0

    def context(self, replica: str) -> StageContext:
        return StageContext(self.config, Path(), replica, NoSpans())

    async def run(self) -> world.Result:
        c, board = self.cluster, self.board
        prompts, joined, settle = world.Pipe(), world.Pipe(), world.Pipe()
        groups = world.Pipe()
        gate, source = StalenessGate.of(self.config), world.OnePrompt(c.prompt)
        self.stage = PromptStage(self.context("prompts"), source, gate, self.record)  # type: ignore[arg-type]
        group = GroupStage(self.context("group"))
        await group.setup()
        model = SimulatedEngineConfig(
            a_ms=c.a_s * 1e3, c_ms=c.c_s * 1e3, prefill_ms_per_token=c.prefill_s * 1e3, kv_tokens=c.kv_tokens,
        )  # fmt: skip
        for i in range(c.engines):
            engine = world.Engine(model, c.slots, prefix_cache=False, label="0")
            engine.begin(Slots(c.slots))
            self.engines[f"engine-{i:05d}"] = engine
        train = Ports("train", {"in": joined}, {"settle": settle}, board)
        self.held = HeldGroups(self.config, train, group.activity, world.unrecorded)
        async with asyncio.TaskGroup() as tasks:
            works = [
                self.stage.run(Ports("prompts", {"settle": settle}, {"out": prompts}, board)),
                group.run(Ports("group", {"in": groups}, {"out": joined, "settle": settle}, board)),
                self._generate(prompts, groups),
                self.held.read(),
            ]
            running = [tasks.create_task(work) for work in works]
            running += await self._train(settle, tasks)
            for task in running:
                task.cancel()
        return self._result()

    # Generation.

    def _length(self) -> int:
        c = self.cluster
        drawn = math.exp(math.log(c.mean) - c.sigma**2 / 2 + c.sigma * self.random.gauss(0.0, 1.0))
        return min(max(round(drawn), 1), c.cap)

    async def _generate(self, prompts: world.Pipe, out: world.Pipe) -> None:
        async with asyncio.TaskGroup() as tasks:
            while (lease := await prompts.receive()) is not None:
                tasks.create_task(self._group(lease.message, out))
                lease.done()

    async def _group(self, group: PromptGroup, out: world.Pipe) -> None:
        """One group as the generate stage requests it: one request, whose members give their slots back as they end."""
        lengths = [self._length() for _ in range(group.n_samples)]
        equal = self.random.random() < self.cluster.filtered
        order = (0, group.group_id)
        engine = await self._slots(group.key, len(lengths), goes_on=False, order=order)
        turns = [world.turns_of(length, self.cluster.turns) for length in lengths]
        first = [world.completion_of(i, self.cluster.prompt, parts[0]) for i, parts in enumerate(turns)]
        engine.ask(first)
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(self._graded(f"{group.key}/{i}", parts, engine, one, order))
                for i, (parts, one) in enumerate(zip(turns, first, strict=True))
            ]
        rewards = [1.0 if equal else float(i % 2) for i in range(len(members))]
        samples = tuple(world.sample_of(i, m.result(), rewards[i]) for i, m in enumerate(members))
        self.tokens[group.group_id] = [run for m in members for run in m.result()]
        slice_ = RolloutSlice(msgspec.structs.replace(group, prompt_ids=NO_IDS), samples)
        await out.send(slice_, slice_.key)

    async def _slots(self, key: str, n: int, *, goes_on: bool, order: tuple[int, int]) -> world.Engine:
        loads = {name: engine.load for name, engine in self.engines.items()}
        engine = self.engines[self.ranking.rank(Choice(key, b"", n, loads))[0]]
        await engine.client.take(n, goes_on=goes_on, order=order)
        return engine

    async def _graded(
        self, key: str, turns: Sequence[int], engine: world.Engine, completion: Completion, order: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """A rollout, then its turn at a grader."""
        runs = await self._rollout(key, turns, engine, completion, order)
        if self.cluster.graders:
            async with self.graders:
                await asyncio.sleep(self.cluster.reward_s)
        return runs

    async def _rollout(
        self, key: str, turns: Sequence[int], engine: world.Engine, completion: Completion, order: tuple[int, int]
    ) -> list[tuple[int, int]]:
        """Versions of a rollout's tokens. Between two turns it waits for its tool and holds no slot."""
        runs: list[tuple[int, int]] = []
        context = self.cluster.prompt
        for number, tokens in enumerate(turns):
            if number:
                await asyncio.sleep(self.random.expovariate(1 / self.cluster.tool_s) if self.cluster.tool_s else 0.0)
                engine = await self._slots(key, 1, goes_on=True, order=order)
                completion = world.completion_of(number, context, tokens)
                engine.ask([completion])
            await engine.ended(completion)
            runs += [(int(span.version), span.end - span.start) for span in completion.spans_over(tokens)]
            context += tokens
        return runs

    # Training.

    async def _train(self, settle: world.Pipe, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """All batches. Returns the last publication, which may still be on its way to the engines."""
        c = self.cluster
        await settle.send(StepDone(0, 0, (), {}, 0, publishes=True), "step 0")
        await self._land(0)
        landing: list[asyncio.Task[None]] = []
        for step in range(c.batches):
            await self._collect(step)
            leases = self.batch
            ids = tuple(lease.message.group.group_id for lease in leases)
            for group_id in ids:
                runs = self.tokens.pop(group_id)
                self.useful += sum(n for _, n in runs)
                if step >= c.warm_up:
                    for version, n in runs:
                        self.trained[step - version] += n
            publishes = (step + 1) % c.interval == 0
            await settle.send(StepDone(step + 1, step + 1, ids, {}, 0, publishes=publishes), f"step {step + 1}")
            self.held.release(leases)
            self._mark()
            await self.held.clear(step + 1)
            if publishes:
                await asyncio.gather(*landing)  # one publication after the other, as the weights' slots are
                landing = [tasks.create_task(self._land(step + 1))]
        await self.record.whole.wait()
        return landing

    async def _collect(self, step: int) -> None:
        """A full batch, and the time that it takes to train it."""
        c, self.batch = self.cluster, list[Lease[RolloutSlice]]()
        owed = c.fixed_s
        while len(self.batch) < c.groups:
            lease = await self.held.next(step, c.groups - len(self.batch))
            if lease is None or await self.held.refused(lease, step):
                continue
            self.batch.append(lease)
            seconds = c.token_s * self._size(lease)
            if c.streams and not c.colocated:
                await self._compute(seconds)
            else:
                owed += seconds
        for engine in self.engines.values() if c.colocated else ():
            engine.stand(True)
        await self._compute(owed)
        for engine in self.engines.values() if c.colocated else ():
            engine.stand(False)

    def _size(self, lease: Lease[RolloutSlice]) -> int:
        """Tokens of a group, its prompts included."""
        group = lease.message.group
        return sum(n for _, n in self.tokens[group.group_id]) + group.n_samples * self.cluster.prompt

    async def _compute(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)
            self.trainer_s += seconds

    async def _land(self, version: int) -> None:
        """Engines take a version in the order of their names, so many at a time."""
        turns, names = asyncio.Semaphore(self.cluster.rolling), sorted(self.engines)

        async def take(name: str) -> None:
            async with turns:
                await self.engines[name].update(version, self.cluster.update_s if version else 0.0)
            self.board.put(ADDRESS + name, EngineAddress(name, "", 1))
            entry = EngineEntry(name, "", 1, state="serving", run_generation=0, version=version)
            self.board.put(DIRECTORY + name, entry)

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(take(name))

    # What came of it.

    def _mark(self) -> None:
        engines = self.engines.values()
        for engine in engines:
            engine.count()
        self.ends.append(asyncio.get_running_loop().time())
        loaded, slot_s = sum(e.loaded_s for e in engines), sum(e.slot_s for e in engines)
        self.marks.append((loaded, slot_s, self.trainer_s, sum(e.stalled_s for e in engines)))

    def _result(self) -> world.Result:
        c, ledger, first = self.cluster, self.stage.ledger, self.cluster.warm_up - 1
        seconds = self.ends[-1] - self.ends[first]
        loaded, slot_s, trainer, stalled = (b - a for a, b in zip(self.marks[first], self.marks[-1], strict=True))
        whole = max(seconds, 1e-12)
        generated = sum(e.totals.generated_tokens for e in self.engines.values())
        return world.Result(
            step_s=seconds / (c.batches - c.warm_up) * c.interval,
            staleness=dict(sorted(self.trained.items())),
            engine_busy=loaded / whole / c.engines,
            slots_busy=slot_s / whole / c.engines / c.slots,
            trainer_busy=trainer / whole,
            stalled=stalled / whole / c.engines,
            wasted=1 - self.useful / max(generated, 1),
            admitted=ledger.admitted,
            outcomes={str(k): v for k, v in ledger.counts.items()},
            open=ledger.open,
        )


def simulate(cluster: world.Cluster) -> world.Result:
    """Run a cluster from its first prompt to its last batch."""
    with asyncio.Runner(loop_factory=world.VirtualLoop) as runner:
        return runner.run(Simulation(cluster).run())
