"""Episodes as rollouts: of an environment that answers the model, and of an agent that calls the gateway.

In an environment's episode its messages become tokens and the model's text becomes a turn. An agent's episode is one
session of the gateway and one call of a worker process.

Invariants: a rollout of an agent holds the requests of its last attempt only, those included that the record of earlier
attempts answered (stages/records/unfinished.py); a request that the engines could not answer is never counted against
the agent and never becomes a reward; all sequences of a rollout leave together, done.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from configs.schema import Config
from models.engines.noise import sample_seed
from models.families.source import context_limit
from stages.agents.environment import Endpoint, InfrastructureError, Outcome, Step, Task, Turn
from stages.agents.hosting import Ask, Hosting, Record, digest
from stages.agents.worker import EnvironmentFailed
from stages.base import LoopStage
from stages.chat.messages import ChatFormat, Message, ToolSchema
from stages.chat.tokenizer import Tokenizer
from stages.gateway.answers import OpenSession
from stages.gateway.server import Gateway
from stages.gateway.sessions import Session
from stages.messages import PromptGroup, Sample, TurnReward
from stages.records.unfinished import AnswerJournal
from stages.rollouts import append_untrained, new_sample

Messages = tuple[Message, ...]


class Episode(Struct, frozen=True):
    """The loop state of a rollout."""

    end: int  # tokens of the sequence when the model's turn began
    tools: tuple[ToolSchema, ...] = ()  # offered to the model
    turns: tuple[tuple[int, int], ...] = ()  # token range of each answered turn, [start, end)
    answers: tuple[str, ...] = ()  # digests of the start and of each answer
    snapshot: bytes = b""
    metrics: dict[str, float] = {}
    spent_s: float = 0.0  # in the environment


class Episodes:
    """The episodes of one environment in one replica."""

    def __init__(self, config: Config, hosting: Hosting, chat: ChatFormat, tokenizer: Tokenizer) -> None:
        self.config, self.hosting, self.chat, self.tokenizer = config, hosting, chat, tokenizer
        self._name, self._context = hosting.table.name, context_limit(config)

    async def advance(self, group: PromptGroup, sample: Sample) -> Sample:
        """The sample with its first prompt or with the answer to its last turn. Raises EnvironmentFailed."""
        episode = LoopStage.read_state(sample, Episode)
        if episode is None:
            return await self._begun(group, sample)
        turn = self._turn(sample, episode, (episode.end, sample.length), len(episode.turns))
        turn = msgspec.structs.replace(
            turn,
            truncated=sample.status == "truncated",
            last=sample.status == "truncated" or sample.turns >= self.config.rollout.max_turns,
        )
        record = Record(
            task_of(group, sample),
            episode.answers,
            episode.snapshot,
            turns=lambda: [self._turn(sample, episode, span, number) for number, span in enumerate(episode.turns)],
            spent_s=episode.spent_s,
        )
        taken = await self.hosting.step(record, turn)
        after_turn = msgspec.structs.replace(episode, snapshot=taken.state, spent_s=record.spent_s)
        after = self._answered(group, sample, after_turn, turn, taken.step)
        if after.done:
            self.hosting.workers.end(record.task.episode)
        return after

    async def _begun(self, group: PromptGroup, sample: Sample) -> Sample:
        """The rollout with the first prompt of its environment."""
        record = Record(task_of(group, sample))
        begun = await self.hosting.reset(record)
        start, spent_s = begun.start, record.spent_s
        ids = self.chat.start(start.messages, start.tools)
        if not ids or (self._context is not None and len(ids) >= self._context):
            raise EnvironmentFailed(
                f"environment {self._name}: the first prompt has {len(ids)} tokens, but must have some and leave room "
                f"in a context of {self._context}; shorten it, or raise --rollout-max-context-len"
            )
        episode = Episode(len(ids), start.tools, answers=(digest(start),), snapshot=begun.state, spent_s=spent_s)
        return LoopStage.write_state(new_sample(ids, sample.index), episode)

    def _turn(self, sample: Sample, episode: Episode, span: tuple[int, int], number: int) -> Turn:
        ids = sample.token_ids[span[0] : span[1]].tolist()
        reply = self.chat.reply(ids, episode.tools)
        return Turn(number, reply.message, self.tokenizer.decode(ids), malformed=reply.malformed)

    def _answered(self, group: PromptGroup, sample: Sample, episode: Episode, turn: Turn, step: Step) -> Sample:
        """Apply the answer to the rollout. Afterwards the turn is final, and its result is in the message.

        Without a reward from the environment or a grader, the episode's reward is 0, plus the rewards of its turns.
        """
        replace = msgspec.structs.replace
        if step.reward is not None and not step.done and sample.model_versions:
            sample = replace(sample, turn_rewards=(*sample.turn_rewards, TurnReward(sample.length, step.reward)))
        metrics = {**episode.metrics, **step.metrics}
        if step.done or turn.last:
            if step.answer is not None:
                sample = replace(sample, response=step.answer)
            outcome = Outcome(step.reward if step.done else None, {**metrics, "turns": turn.number + 1})
            return ended(self.config, group, self._name, sample, outcome, cut=not step.done)
        ids = self.chat.append(sample.token_ids.tolist(), step.messages, episode.tools)
        after = append_untrained(sample, ids, self.tokenizer.decode(ids))
        episode = replace(
            episode,
            end=after.length,
            turns=(*episode.turns, (min(episode.end, sample.length), sample.length)),
            answers=(*episode.answers, digest(step)),
            metrics=metrics,
        )
        return LoopStage.write_state(after, episode)


def ended(
    config: Config, group: PromptGroup, environment: str, sample: Sample, outcome: Outcome, *, cut: bool
) -> Sample:
    """The last sample of an episode. Without a reward and a grader its reward is 0. `cut`: a limit ended it."""
    reward = config.reward
    named = reward.custom_rm_path is not None or bool(reward.reward_component) or reward.rm_type != "auto"
    graded = named or group.label is not None or "rm_type" in group.row_metadata
    return msgspec.structs.replace(
        sample,
        done=True,
        status="truncated" if cut else sample.status,
        reward=0.0 if outcome.reward is None and not graded else outcome.reward,
        metrics={f"env/{environment}/{name}": float(value) for name, value in outcome.metrics.items()},
    )


def task_of(group: PromptGroup, sample: Sample) -> Task:
    """The task of a rollout."""
    return Task(
        messages=msgspec.json.decode(group.prompt, type=Messages),
        label=group.label,
        metadata=group.row_metadata,
        tools=msgspec.json.decode(group.tools, type=tuple[ToolSchema, ...]),
        seed=group.seed,
        sample_seed=sample_seed(group.seed, sample.index) & 0x7FFFFFFFFFFFFFFF,
        episode=f"{group.key}/{sample.index}",
        evaluation=group.purpose == "eval",
    )


class AgentEpisodes:
    """The episodes of one agent in one replica."""

    def __init__(
        self, config: Config, hosting: Hosting, chat: ChatFormat, gateway: Gateway, answers: AnswerJournal
    ) -> None:
        self.config, self.hosting, self.chat, self.gateway, self._answers = config, hosting, chat, gateway, answers

    async def play(self, group: PromptGroup, sample: Sample) -> tuple[Sample, ...]:
        """The rollout that an agent makes, in one or several sequences. Waits for its end. Raises EnvironmentFailed."""
        return await self.hosting.run(task_of(group, sample), lambda ask: self._attempt(group, sample, ask))

    async def _attempt(self, group: PromptGroup, sample: Sample, ask: Ask) -> tuple[Sample, ...]:
        table = self.hosting.table
        session = Session(self.chat, sample.index, ignore_reasoning=table.ignore_reasoning)
        record = await self._answers.open(group, sample.index)
        place = OpenSession(group, sample, session, record)
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
        metrics = {**outcome.metrics, "turns": session.turns, "sequences": len(parts)}
        if record.answers:
            metrics["uncertain"] = metrics.get("uncertain", 0.0) + 1
        last = ended(self.config, group, table.name, parts[-1], Outcome(outcome.reward, metrics), cut=cut)
        return (*(msgspec.structs.replace(part, done=True) for part in parts[:-1]), last)
