"""The agents stage: hosts the environments in which rollouts live, from their first prompt to their reward.

    generate -> agents (reset: the first prompt) -> generate (a turn) -> agents (step) -> generate -> ... -> reward

A rollout comes here before the model's first turn and after each one. Rows choose an environment by their metadata's
`environment`; the first table is the default.

A rollout that an agent makes comes here once: the agent asks the policy by itself, through the gateway of this replica
(stages/agents/gateway), and the rollout leaves when it has ended.

Invariants: rollouts wait for their own worlds only; an episode that cannot go on fails its rollout, with the reason,
and is never rewarded for it; processes of environments end with this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from configs.schema import Config, EnvironmentConfig
from configs.schema.did_you_mean import cure
from stages.agents.episodes import Episodes
from stages.agents.errors import EnvironmentFailed
from stages.agents.formats import chat_format
from stages.agents.gateway.agent_episodes import AgentEpisodes, GatewayDoor
from stages.agents.hosting import Hosting
from stages.agents.once import EPISODES_DIR
from stages.agents.outage import OutageNotice
from stages.agents.turn_journal import TurnJournal
from stages.base import GenerateOptions, LoopStage, StageContext, beside, failed
from stages.data.tokenizer import load_tokenizer
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.ports import Ports, Topic


class AgentsStage(LoopStage):
    """Feedback edge: generate -> agents -> generate."""

    begins = True

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._hosts: dict[str, Episodes | AgentEpisodes] = {}
        self._door = GatewayDoor(context, self.activity.extra)
        self._hostings: list[Hosting] = []
        self._episodes = context.run_dir / EPISODES_DIR
        self._journal = TurnJournal(self._episodes, context.config, context.given(GenerateOptions).lives)
        self._tasks: asyncio.TaskGroup | None = None
        self._ports: Ports | None = None
        self._running: set[asyncio.Timeout] = set()
        self._drained = False

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        return all(sample.status in ("completed", "truncated") for sample in message.samples)

    async def setup(self) -> None:
        data = self.config.data
        tokenizer = load_tokenizer(self.config.train.hf_checkpoint, data.chat_template_path)
        chat = chat_format(self.config)
        hostings = [Hosting(table, self._background, self._tell, self._episodes) for table in self.config.environment]
        self._hostings += hostings
        async with asyncio.TaskGroup() as tasks:
            opening = [tasks.create_task(hosting.workers.open()) for hosting in hostings]
        for hosting, opened in zip(hostings, opening, strict=True):
            if opened.result().kind == "agent":
                gateway = await self._door.open(chat, tokenizer)
                self._hosts[hosting.table.name] = AgentEpisodes(self.config, hosting, chat, gateway)
            else:
                self._hosts[hosting.table.name] = Episodes(self.config, hosting, chat, tokenizer)

    async def close(self) -> None:
        await self._door.close()
        for hosting in self._hostings:
            await hosting.workers.close()

    async def run(self, ports: Ports) -> None:
        """As many rollouts at a time as come: what bounds them is the gate, and most of them wait."""
        inlet, outlet, self._ports = ports.inlets[self.inlet], ports.outlets[self.outlet], ports
        async with (
            beside(self._follow_drain(ports.topic)),
            beside(self._door.follow(ports.topic)),
            asyncio.TaskGroup() as self._tasks,
        ):
            while (lease := await inlet.receive()) is not None:
                self._tasks.create_task(self._work(lease, outlet))

    async def _follow_drain(self, topic: Topic) -> None:
        """Waits for a drain, which waits for no environment; cancelled at the end of the inlet."""
        revision = 0
        while topic.get("drain") is None:
            revision = await topic.wait(revision, "drain")
        self._drained = True
        for running in self._running:
            running.reschedule(0.0)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        group, (sample,) = message.group, message.samples
        try:
            async with asyncio.timeout(0.0 if self._drained else None) as running:
                self._running.add(running)
                try:
                    samples = await self._advanced(group, sample)
                finally:
                    self._running.discard(running)
        except TimeoutError:
            if not running.expired():
                raise
            samples = (msgspec.structs.replace(sample, status="aborted", done=True, error="drained"),)
        except EnvironmentFailed as error:
            self.activity.failures += 1
            return failed(message, str(error))
        finally:
            self._count()
        return msgspec.structs.replace(message, samples=samples)

    async def _advanced(self, group: PromptGroup, sample: Sample) -> tuple[Sample, ...]:
        host = self._hosts[environment_of(self.config, group).name]
        if isinstance(host, Episodes):
            if sample.turns:
                await self._journal.keep(group, sample)
            else:
                sample = await self._journal.restore(group, sample)
            return (await host.advance(group, sample),)
        samples = await host.play(group, sample)
        self.activity.tokens += sum(part.new_tokens for part in samples)
        return samples

    def _count(self) -> None:
        """Figures of this replica."""
        self.activity.extra["restored"] = float(self._journal.restored)
        for name in ("retried", "replayed"):
            self.activity.extra[name] = float(sum(getattr(hosting, name) for hosting in self._hostings))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            if self._tasks is not None:
                self._tasks.create_task(work)
                return
        except RuntimeError:  # the stage is ending, and all processes with it
            pass
        work.close()

    def _tell(self, notice: OutageNotice) -> None:
        """Let the user know, through the topic."""
        if self._ports is not None:
            key = f"environment/{notice.environment}/{self.context.replica}"
            self._background(self._ports.topic.publish(key, msgspec.msgpack.encode(notice)))


def environment_of(config: Config, group: PromptGroup) -> EnvironmentConfig:
    """The environment of a row. Raises EnvironmentFailed."""
    tables = {table.name: table for table in config.environment}
    name = group.row_metadata.get("environment")
    if name is None:
        return config.environment[0]
    if name not in tables:
        raise EnvironmentFailed(f"metadata.environment is {name!r}, but there is none; {cure(str(name), tables)}")
    return tables[name]
