"""From a request to the gateway to its answer: context from the session, result from the sampler.

A dialect reads its JSON into an `Ask`, and writes an `Answer` as its JSON; only the dialect knows that JSON.

Invariants:
- Engines are reached through the sampler only.
- An engine's result is recorded, also on the disk, before the client sees any of it. Nothing is recorded of a request
  that failed or whose client disconnected.
- A request that the record of its rollout has (stages/records/unfinished.py) is answered from there, without an engine.
- Tokens sampled with other parameters than in training are recorded as not trained.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from models.engines.text import find_stop
from stages.chat.messages import ChatFormat, Message
from stages.gateway.sessions import Conversation, Session, Turn
from stages.messages import PromptGroup, Sample, VersionRun
from stages.records.unfinished import SessionRecord
from stages.sampling.requests import OUT_OF_TIME, SampleRequest, SampleResult
from stages.sampling.rollout_requests import Requests
from stages.sampling.sampler import Sampler

Finish = Literal["stop", "length", "calls", "stop_text"]
Reason = Literal[
    "invalid", "too_long", "no_session", "not_found", "slow", "too_large", "busy", "unavailable", "internal"
]
Json = Mapping[str, object]
T = TypeVar("T")

STATUS: Mapping[Reason, int] = {
    "invalid": 400,
    "too_long": 400,
    "no_session": 401,
    "not_found": 404,
    "slow": 408,
    "too_large": 413,
    "busy": 429,
    "unavailable": 503,
    "internal": 500,
}


class Refused(Exception):
    """A refused request; clients retry the kinds `busy` and `unavailable`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Constraint(Struct, frozen=True):
    """The JSON schema that an answer must have, and the field of the request that wants it."""

    field: str
    json_schema: str


class Sampling(Struct, frozen=True):
    """The client's sampling parameters; None: as in training."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class Ask(Struct, frozen=True):
    """A request of any dialect, with a conversation, tokens or a text."""

    model: str
    conversation: Conversation | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False  # for a text to continue: the answer keeps the stop text that ended it
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    one_call: bool = False  # the client sees the first call alone
    stream: bool = False
    stream_usage: bool = False
    log_probs: bool = False
    token_ids: bool = False  # the answer lists the tokens of prompt and answer
    object_arguments: bool = False  # the dialect writes only calls whose arguments are objects


class Answer(Struct, frozen=True):
    """An answer for the client, which is expected to send its message back."""

    id: str
    created: int  # unix time
    message: Message
    finish: Finish
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    runs: tuple[VersionRun, ...]
    text: str = ""  # the engine's text, up to the client's stop text
    stop: str = ""  # the client's stop text that ended it
    cached_tokens: int = 0

    @property
    def token_log_probs(self) -> list[dict[str, object]]:
        """Log-probs by token as the OpenAI dialects list them, tokens by id as in vLLM."""
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(self.token_ids, self.log_probs, strict=True)
        ]


class Dialect(Protocol):
    """Reads and writes the JSON of one API. Stateless."""

    def read(self, body: bytes) -> Ask:
        """Parse a request. Raises Refused, or msgspec's errors, which name the wrong field."""

    def answer(self, ask: Ask, answer: Answer) -> Json: ...

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """The answer as a stream of server-sent events."""

    def error(self, refused: Refused) -> Json: ...

    def error_event(self, refused: Refused) -> bytes:
        """The error in the middle of a stream."""
        return event(self.error(refused))


def event(data: Json, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


@dataclass(eq=False)
class OpenSession:
    """A rollout while its agent runs."""

    group: PromptGroup
    sample: Sample  # the sample as it came; identifies the rollout
    session: Session
    record: SessionRecord = field(default_factory=SessionRecord)
    truncated: bool = False  # it reached a limit of context, turns or time
    drained: bool = False
    whole_batch: bool = False  # session of many rollouts: no limit of turns; equal prompts go to one engine
    unanswered: dict[bytes, str] = field(default_factory=dict)  # reasons of requests that engines failed
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    body_bytes: int = 0  # of its bodies that are being read or made tokens of


@dataclass
class Answers:
    """Answers the requests of all sessions of a replica."""

    sampler: Sampler
    requests: Requests
    chat: ChatFormat
    encode: Callable[..., Sequence[int]] | None = None  # of texts to continue, up to `most` tokens; None: refused
    vocab_size: int | None = None  # token ids from this value on are refused
    client_sampling: bool = False  # obey the client's sampling parameters; such turns are not trained

    def context(self, session: Session, ask: Ask, *, answered: bool = True) -> Sequence[int]:
        """The context of a request in tokens. `answered`: an answer is wanted. Changes nothing: a thread may call it.

        Raises Refused, ChatFormatError, and TooLong for a context that surely has no room for an answer.
        """
        if ask.conversation is not None:
            messages = ask.conversation.messages
            if answered and not messages:
                raise Refused("invalid", "messages is empty; send at least one")
            if answered and messages[-1].role == "assistant":
                raise Refused("invalid", "the last message is the assistant's; the gateway cannot continue a message")
            return session.context(ask.conversation, self.requests.max_context)
        if not ask.text:
            return ask.ids
        if self.encode is None:
            raise Refused("invalid", "texts are not tokenised here; send input_ids")
        before, rest = session.continued(ask.text)
        return [*before, *self.encode(rest, most=self.requests.max_context - len(before))]

    async def answer(self, place: OpenSession, ask: Ask, context: Sequence[int]) -> Answer:
        """The answer to a request with this context. Waits for the engines. Raises Refused."""
        if place.session.started >= self.requests.rollout.max_turns and not place.whole_batch:
            place.truncated = True
            raise Refused("invalid", f"this episode has had its {place.session.started} turns (--max-turns)")
        if self.sampler.draining:
            place.drained = True
            raise Refused("unavailable", "the run is ending")
        highest = self.vocab_size or 1 << 31
        if ask.conversation is None and (not context or not 0 <= min(context) <= max(context) < highest):
            raise Refused("invalid", f"token ids must be at least one, from 0 to {highest - 1}")
        turn = place.session.open(context, ask.conversation)
        with place.record.named(turn.ids.tobytes() + _content(ask)) as name:
            return await self._answered(place, turn, ask, name)

    async def _answered(self, place: OpenSession, turn: Turn, ask: Ask, name: int) -> Answer:
        request, trained = self._request(place, turn, ask, name)
        key = turn.ids.tobytes()
        made = known = place.record.find(name, self.sampler.oldest)
        if made is None:
            [made] = await self.sampler.sample(request)
        result = made
        if result.finish == "aborted" and result.reason == OUT_OF_TIME:
            place.truncated = True
            result = msgspec.structs.replace(result, finish="length")
        if result.finish in ("aborted", "failed"):
            place.drained = place.drained or result.finish == "aborted"
            place.unanswered[key] = str(result.error or result.reason)
            raise Refused("unavailable", f"the engines did not answer: {place.unanswered[key]}")
        place.unanswered.pop(key, None)
        if known is None:
            await place.record.keep(name, made)
        return self._recorded(place.session, turn, ask, name, result, trained)

    # ------------------------------------------------------------------ requests

    def _request(self, place: OpenSession, turn: Turn, ask: Ask, name: int) -> tuple[SampleRequest, bool]:
        """The request to the engines, and whether its sampling parameters are those of training."""
        draft = msgspec.structs.replace(turn.draft, replaced=place.sample.replaced)
        budget = self.requests.budget(place.group, draft, each_turn=self.client_sampling)
        if budget <= 0:
            place.truncated = True
            n = draft.length
            raise Refused("too_long", f"the conversation has {n} tokens, which leaves no room for an answer")
        deadline = self.requests.deadline(place.group, draft)
        # A separate number for the noise: requests that share tokens must get different samples, in whatever order
        # they arrive.
        numbered = msgspec.structs.replace(draft, sequence=name)
        request = self.requests.of(place.group, (numbered,), budget, deadline)
        if ask.max_tokens is not None:
            if ask.max_tokens < 1:
                raise Refused("invalid", f"max_tokens is {ask.max_tokens}; it must be at least 1")
            budget = min(budget, ask.max_tokens)
        if ask.constraint is not None and (engine := self.requests.config.engine.engine) != "sglang":
            why = f"an answer is constrained only with --engine sglang, and this run has {engine}; leave it out"
            raise Refused("invalid", f"{ask.constraint.field}: {why}")
        # A temperature of 0 means greedy decoding in SGLang.
        given = {name: value for name, value in msgspec.structs.asdict(ask.sampling).items() if value is not None}
        params = request.params
        stop_ids = {*(params.stop_token_ids or ()), *self.chat.stop_token_ids, *ask.stop_token_ids}
        drawn = msgspec.structs.replace(
            params,
            max_new_tokens=budget,
            stop=[*texts(params.stop), *self.chat.stop, *ask.stop] or None,
            stop_token_ids=sorted(stop_ids) or None,
            **(given if self.client_sampling else {}),
            json_schema=None if ask.constraint is None else ask.constraint.json_schema,
        )
        names = ("json_schema", *Sampling.__struct_fields__)
        trained = all(getattr(drawn, name) == getattr(params, name) for name in names)
        own = hash(draft.token_ids[: draft.prompt_length].tobytes()) if place.whole_batch else place.sample.index
        session, returning = f"{place.group.key}/{own}", turn.number > 0
        return dataclasses.replace(request, params=drawn, session=session, returning=returning), trained

    # ------------------------------------------------------------------ answers

    def _recorded(
        self, session: Session, turn: Turn, ask: Ask, name: int, result: SampleResult, trained: bool
    ) -> Answer:
        ended = result.finish == "stop"
        message, stop = Message("assistant", result.text), ""
        if turn.conversation is not None:
            message = self.chat.reply(result.token_ids, turn.conversation.tools).message
            calls = tuple(
                msgspec.structs.replace(
                    call,
                    id=call.id or f"call_{name:016x}_{number}",
                    arguments={"arguments": call.arguments}
                    if ask.object_arguments and isinstance(call.arguments, str)
                    else call.arguments,
                )
                for number, call in enumerate(message.tool_calls[: 1 if ask.one_call else None])
            )
            message = msgspec.structs.replace(message, tool_calls=calls)
        stop_found = find_stop(message.content, ask.stop) if ended else None
        if stop_found is not None and not message.tool_calls:
            stop = stop_found
            message = msgspec.structs.replace(message, content=message.content[: message.content.find(stop_found)])
        finish: Finish = "length" if not ended else "calls" if message.tool_calls else "stop_text" if stop else "stop"
        text = result.text if turn.conversation is not None or ask.keep_stop else message.content
        reply = message if turn.conversation is not None else None
        session.land(turn, result, reply, trained=trained, text=ask.text and ask.text + text)
        return Answer(
            id=f"{name:024x}",
            created=int(time.time()),
            message=message,
            finish=finish,
            prompt_ids=tuple(turn.ids.tolist()),
            token_ids=result.token_ids,
            log_probs=result.log_probs,
            runs=result.runs,
            text=text,
            stop=stop,
            cached_tokens=min(result.cached_tokens, len(turn.ids)),
        )


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts, without empty ones."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text)


def _content(ask: Ask) -> bytes:
    """What decides the answer to a request, apart from its context."""
    form = {"model": "", "conversation": None, "ids": (), "text": "", "stream": False, "stream_usage": False}
    return msgspec.json.encode(msgspec.structs.replace(ask, log_probs=False, token_ids=False, **form), order="sorted")
