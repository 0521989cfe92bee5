"""Episodes of agents: each is one session of the gateway and one call of a worker process.

Invariants: a rollout holds the requests of its last attempt only, none of attempts that an infrastructure failure
ended; a request that the engines could not answer is never counted against the agent and never becomes a reward; all
sequences of a rollout leave together, done.
"""

from __future__ import annotations

import contextlib

import msgspec

from configs.schema import Config
from stages.agents.calls import EnvironmentFailed
from stages.agents.environment import Endpoint, InfrastructureError, Outcome
from stages.agents.episodes import graded, task_of
from stages.agents.hosting import Ask, Hosting
from stages.base import GenerateOptions, StageContext
from stages.chat.messages import ChatFormat
from stages.chat.tokenizer import Tokenizer
from stages.gateway.answers import Answers, OpenSession
from stages.gateway.server import Gateway
from stages.gateway.sessions import Session
from stages.messages import PromptGroup, Sample
from stages.ports import Topic
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler


class GatewayDoor:
    """The gateway of a replica and its engine client. Both exist only if the run has agents."""

    def __init__(self, context: StageContext, extra: dict[str, float]) -> None:
        self._context, self._extra = context, extra
        self._sampler: Sampler | None = None
        self._gateway: Gateway | None = None
        self._stack = contextlib.AsyncExitStack()

    async def open(self, chat: ChatFormat, tokenizer: Tokenizer) -> Gateway:
        """The gateway. The first call starts it."""
        if self._gateway is None:
            context, options = self._context, self._context.given(GenerateOptions)
            self._sampler = Sampler(
                context.config,
                replica=context.replica,
                index=context.index,
                replicas=context.replicas,
                stage="agents",
                vocab_size=options.vocab_size,
                extra=self._extra,
            )
            self._stack.push_async_callback(self._sampler.close)
            requests = Requests(context.config, options.max_context)
            vocab_size = options.vocab_size or tokenizer.vocab_size
            answers = Answers(self._sampler, requests, chat, encode=tokenizer.encode, vocab_size=vocab_size)
            self._gateway = await self._stack.enter_async_context(Gateway(answers))
        return self._gateway

    async def follow(self, topic: Topic) -> None:
        """Follows the engines on the topic; runs until cancelled."""
        if self._sampler is not None:
            await self._sampler.follow(topic)

    async def close(self) -> None:
        await self._stack.aclose()


class AgentEpisodes:
    """The episodes of one agent in one replica."""

    def __init__(self, config: Config, hosting: Hosting, chat: ChatFormat, gateway: Gateway) -> None:
        self.config, self.hosting, self.chat, self.gateway = config, hosting, chat, gateway

    async def play(self, group: PromptGroup, sample: Sample) -> tuple[Sample, ...]:
        """The rollout that an agent makes, in one or several sequences. Waits for its end. Raises EnvironmentFailed."""
        return await self.hosting.run(task_of(group, sample), lambda ask: self._attempt(group, sample, ask))

    async def _attempt(self, group: PromptGroup, sample: Sample, ask: Ask) -> tuple[Sample, ...]:
        table = self.hosting.table
        session = Session(self.chat, sample.index, ignore_reasoning=table.ignore_reasoning)
        place = OpenSession(group, sample, session)
        outcome, cut = Outcome(), False
        try:
            with self.gateway.session(place) as key:
                outcome = await ask(Endpoint(self.gateway.url, key, self.gateway.model))
        except TimeoutError:
            cut = True
        except EnvironmentFailed:  # agents end like this after a refused request, and some after a truncated answer
            if not (place.truncated or place.drained or place.unanswered or session.cut):
                raise
            cut = True
        if place.drained:
            return (msgspec.structs.replace(sample, status="aborted", done=True),)
        if place.unanswered:
            raise InfrastructureError(f"engines did not answer: {next(iter(place.unanswered.values()))}")
        parts = session.samples()
        if not parts:
            raise EnvironmentFailed(f"environment {table.name}: the agent sent no request to the policy")
        return self._ended(group, session, parts, outcome, cut)

    def _ended(
        self, group: PromptGroup, session: Session, parts: tuple[Sample, ...], outcome: Outcome, cut: bool
    ) -> tuple[Sample, ...]:
        reward = outcome.reward
        reported = {**outcome.metrics, "turns": session.turns, "sequences": len(parts)}
        last = msgspec.structs.replace(
            parts[-1],
            status="truncated" if cut else parts[-1].status,
            reward=0.0 if reward is None and not graded(self.config, group) else reward,
            metrics={f"env/{self.hosting.table.name}/{name}": float(value) for name, value in reported.items()},
        )
        return tuple(msgspec.structs.replace(part, done=True) for part in (*parts[:-1], last))
