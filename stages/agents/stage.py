"""The agents stage: hosts the environments of rollouts, from the first prompt to the reward.

    generate -> agents (reset: the first prompt) -> generate (a turn) -> agents (step) -> generate -> ... -> reward

A rollout passes this stage before the model's first turn and after each turn. The metadata key `environment` of a row
selects the environment; the default is the first table.

With `--tools` in place of an environment (`PlainTools`), a rollout passes only after a call. A call stands between two
marks in plain text, and a template appends its result, without the markup of a chat format.

A rollout of an agent passes once: the agent sends its requests to the gateway of this replica (stages/gateway), and the
rollout leaves when the agent has ended.

Invariants: a rollout waits only for its own environment; an episode that cannot continue fails its rollout with the
reason, and never becomes a reward; the processes of environments end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from configs.schema import Config, EnvironmentConfig, ToolsConfig
from configs.schema.notation import cure
from stages.agents.environment import Turn
from stages.agents.episodes import AgentEpisodes, Episodes
from stages.agents.hosting import Hosting, OutageNotice
from stages.agents.tool_episode import ToolEpisode
from stages.agents.worker import EnvironmentFailed
from stages.base import GenerateOptions, LoopStage, StageContext, beside, failed
from stages.chat.formats import chat_format
from stages.chat.messages import ChatFormat, Message, ToolCall
from stages.chat.tokenizer import Tokenizer, load_tokenizer
from stages.chat.tool_calls import Marked, Offered
from stages.gateway.answers import Answers
from stages.gateway.server import Gateway
from stages.messages import PromptGroup, RolloutSlice, Sample
from stages.ports import Ports, Topic, wait_value
from stages.records.once import EPISODES_DIR
from stages.records.unfinished import AnswerJournal, TurnJournal
from stages.rollouts import append_untrained
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler
from stages.tools.registry import close_tools, resolve_tools
from stages.tools.tool import RESULT_CHARS, Tool


class PlainTools(ToolEpisode):
    """One object serves all rollouts of a replica, because it has no state. Only `--max-turns` bounds the calls."""

    def __init__(self, tools: Mapping[str, Tool], settings: ToolsConfig) -> None:
        super().__init__(max_calls=sys.maxsize, result_chars=2 * RESULT_CHARS)
        self._tools = dict(tools)
        self._marked = Marked(settings.tool_call_open, settings.tool_call_close)
        self._offered = Offered([tool.schema for tool in tools.values()])

    async def answer(self, response: str) -> str:
        """The result of the call that ends a response. Errors are results of the form `error: ...`."""
        call = self._marked.last(response, self._offered)
        calls, malformed = ((call,), "") if isinstance(call, ToolCall) else ((), call)
        turn = Turn(0, Message("assistant", response, tool_calls=calls), response, malformed=malformed)
        [message] = (await self.step(turn)).messages
        return message.content


def ends_in_call(settings: ToolsConfig, sample: Sample) -> bool:
    """Whether the last turn of a sample ended in a call."""
    return (
        bool(settings.tools)
        and sample.status == "completed"
        and not sample.done
        and sample.response.rstrip().endswith(settings.tool_call_close)
    )


class AgentsStage(LoopStage):
    """Feedback edge: generate -> agents -> generate."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._hosts: dict[str, Episodes | AgentEpisodes] = {}
        self._sampler: Sampler | None = None  # of the gateway, which only agents need
        self._stack = contextlib.AsyncExitStack()
        self._hostings: list[Hosting] = []
        self._episodes = context.run_dir / EPISODES_DIR
        lives = context.given(GenerateOptions).lives
        self._journal = TurnJournal(self._episodes, context.config, lives)
        self._answers = AnswerJournal(self._episodes, context.config, lives)
        self._tasks: asyncio.TaskGroup | None = None
        self._ports: Ports | None = None
        self._running: set[asyncio.Timeout] = set()
        self._drained = False

    @classmethod
    def begins(cls, config: Config) -> bool:
        return bool(config.environment)

    @classmethod
    def wants(cls, config: Config, options: Mapping[str, Any], message: RolloutSlice) -> bool:
        if not config.environment:
            return any(ends_in_call(config.tools, sample) for sample in message.samples)
        return all(sample.status in ("completed", "truncated") for sample in message.samples)

    async def setup(self) -> None:
        data = self.config.data
        tokenizer = self._tokenizer = load_tokenizer(self.config.train.hf_checkpoint, data.chat_template_path)
        if not self.config.environment:
            named = self.config.tools
            tools = resolve_tools(named.tools, named.tool_memory_gb, named.tool_deadline_s)
            self._stack.push_async_callback(close_tools, tools)
            self._plain = PlainTools(tools, named)
            return
        chat = chat_format(self.config)
        for table in self.config.environment:
            self._hostings.append(Hosting(table, self._background, self._notify, self._episodes))
            self._stack.push_async_callback(self._hostings[-1].workers.close)
        async with asyncio.TaskGroup() as tasks:
            opening = [tasks.create_task(hosting.workers.open()) for hosting in self._hostings]
        gateway: Gateway | None = None
        for hosting, opened in zip(self._hostings, opening, strict=True):
            if opened.result().kind == "agent":
                gateway = gateway or await self._open_gateway(chat, tokenizer)
                self._hosts[hosting.table.name] = AgentEpisodes(self.config, hosting, chat, gateway, self._answers)
            else:
                self._hosts[hosting.table.name] = Episodes(self.config, hosting, chat, tokenizer)

    async def _open_gateway(self, chat: ChatFormat, tokenizer: Tokenizer) -> Gateway:
        options = self.context.given(GenerateOptions)
        sampler = self._sampler = Sampler(self.context, stage="agents", extra=self.activity.extra)
        self._stack.push_async_callback(sampler.close)
        requests = Requests(self.config, options.max_context)
        vocab_size = options.vocab_size or tokenizer.vocab_size
        answers = Answers(sampler, requests, chat, encode=tokenizer.encode, vocab_size=vocab_size)
        return await self._stack.enter_async_context(Gateway(answers))

    async def close(self) -> None:
        await self._stack.aclose()

    async def run(self, ports: Ports) -> None:
        """Takes every rollout at once: the gate bounds their number, and most of them wait."""
        inlet, outlet, self._ports = ports.inlets["in"], ports.outlets["out"], ports
        engines = () if self._sampler is None else (self._sampler.follow(ports.topic),)
        async with beside(self._follow_drain(ports.topic), *engines), asyncio.TaskGroup() as self._tasks:
            while (lease := await inlet.receive()) is not None:
                self._tasks.create_task(self._work(lease, outlet))

    async def _follow_drain(self, topic: Topic) -> None:
        """Waits for a drain, which does not wait for environments; cancelled at the end of the inlet."""
        await wait_value(topic, "drain")
        self._drained = True
        for running in self._running:
            running.reschedule(0.0)

    async def process(self, message: RolloutSlice) -> RolloutSlice:
        try:
            async with asyncio.timeout(0.0 if self._drained else None) as running:
                self._running.add(running)
                try:
                    samples = await self._advanced(message.group, message.samples)
                finally:
                    self._running.discard(running)
        except TimeoutError:
            if not running.expired():
                raise
            drained = {"status": "aborted", "done": True, "error": "drained"}
            samples = tuple(msgspec.structs.replace(sample, **drained) for sample in message.samples)
        except EnvironmentFailed as error:
            self.activity.failures += 1
            return failed(message, str(error))
        finally:
            self._count()
        return msgspec.structs.replace(message, samples=samples)

    async def _advanced(self, group: PromptGroup, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        if not self.config.environment:
            return tuple([await self._called(group, sample) for sample in samples])
        (sample,) = samples
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

    async def _called(self, group: PromptGroup, sample: Sample) -> Sample:
        """The sample with the result of its call appended. One of several sequences without a call has ended.

        Tokens of the result are not trained. Built-in graders read only the text after it (`answer_start`)."""
        if not ends_in_call(self.config.tools, sample):
            return msgspec.structs.replace(sample, done=True)
        with self.span("tool", group=group.group_id, sample=sample.index):
            result = await self._plain.answer(sample.response)
        self.activity.failures += result.startswith("error: ")
        text = self.config.tools.tool_result_template.replace("{result}", result)
        after = append_untrained(sample, self._tokenizer.encode(text), text)
        return msgspec.structs.replace(after, answer_start=len(after.response))

    def _count(self) -> None:
        """Metrics of this replica."""
        self.activity.extra["restored"] = float(self._journal.restored + self._answers.restored)
        for name in ("retried", "replayed"):
            self.activity.extra[name] = float(sum(getattr(hosting, name) for hosting in self._hostings))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            if self._tasks is not None:
                self._tasks.create_task(work)
                return
        except RuntimeError:  # the stage ends, and so do its processes
            pass
        work.close()

    def _notify(self, notice: OutageNotice) -> None:
        """Publish a notice for the user on the topic."""
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
