"""From a request to an answer: the context out of the session, the sampler's result into it.

Invariants: engines are asked through the sampler only; what an engine made is recorded before the client sees any of
it, and nothing is recorded of a request that failed or whose client has gone; what the policy does not draw as in
training is recorded as not trained.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from models.engines.text import find_stop
from stages.agents.chat import ChatFormat
from stages.agents.gateway.exchange import Answer, Ask, Finish, Refused, Sampling
from stages.agents.gateway.sessions import Session, Turn
from stages.agents.messages import Message
from stages.generate.requests import Requests
from stages.messages import PromptGroup, Sample
from stages.sampling.requests import OUT_OF_TIME, SampleRequest, SampleResult
from stages.sampling.sampler import Sampler


@dataclass(eq=False)
class OpenSession:
    """One rollout while its agent works."""

    group: PromptGroup
    sample: Sample  # as it came: which rollout this is
    session: Session
    truncated: bool = False  # it met a limit: of its context, its turns, or its time
    drained: bool = False
    whole_batch: bool = False  # of many rollouts: no limit of turns, and what begins alike goes to one engine
    unanswered: dict[bytes, str] = field(default_factory=dict)  # requests that engines failed, and why
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)


class Answers:
    """Answers the requests of all sessions of a replica."""

    def __init__(
        self,
        sampler: Sampler,
        requests: Requests,
        chat: ChatFormat,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        vocab_size: int | None = None,
        client_sampling: bool = False,
    ) -> None:
        """
        Args:
            encode: for clients that send a text to be continued; refused without.
            vocab_size: token ids from this on are refused.
            client_sampling: draw tokens as clients ask for it; such turns are not trained.
        """
        self._sampler, self._requests, self._chat = sampler, requests, chat
        self._encode, self._vocab_size, self._client_sampling = encode, vocab_size, client_sampling
        self.max_context = requests.max_context

    def count(self, place: OpenSession, ask: Ask) -> int:
        """Tokens that an engine would be given."""
        assert ask.conversation is not None
        return place.session.count(ask.conversation)

    async def answer(self, place: OpenSession, ask: Ask) -> Answer:
        """Waits for the engines. Raises Refused."""
        if place.session.started >= self._requests.rollout.max_turns and not place.whole_batch:
            place.truncated = True
            raise Refused("invalid", f"this episode has had its {place.session.started} turns (--max-turns)")
        if self._sampler.draining:
            place.drained = True
            raise Refused("unavailable", "the run is ending")
        turn = self._open(place.session, ask)
        request, trained = self._request(place, turn, ask)
        key = turn.ids.tobytes()
        [result] = await self._sampler.sample(request)
        if result.finish == "aborted" and result.reason == OUT_OF_TIME:
            place.truncated = True
            result = msgspec.structs.replace(result, finish="length")
        if result.finish in ("aborted", "failed"):
            place.drained = place.drained or result.finish == "aborted"
            place.unanswered[key] = str(result.error or result.reason)
            raise Refused("unavailable", f"the engines did not answer: {place.unanswered[key]}")
        place.unanswered.pop(key, None)
        return self._recorded(place.session, turn, ask, result, trained)

    # ------------------------------------------------------------------ what is asked

    def _open(self, session: Session, ask: Ask) -> Turn:
        if ask.conversation is not None:
            messages = ask.conversation.messages
            if not messages:
                raise Refused("invalid", "messages is empty; send at least one")
            if messages[-1].role == "assistant":
                raise Refused("invalid", "the last message is the assistant's; the gateway cannot go on with a message")
            return session.open(ask.conversation)
        ids = ask.ids
        if ask.text:
            if self._encode is None:
                raise Refused("invalid", "texts are not tokenised here; send input_ids")
            ids = tuple(self._encode(ask.text))
        highest = self._vocab_size or 1 << 31
        if not ids or not 0 <= min(ids) <= max(ids) < highest:
            raise Refused("invalid", f"token ids must be at least one, from 0 to {highest - 1}")
        return session.open_ids(ids)

    def _request(self, place: OpenSession, turn: Turn, ask: Ask) -> tuple[SampleRequest, bool]:
        """What the engines are asked, and whether that is how the policy samples in training."""
        draft = msgspec.structs.replace(turn.draft, replaced=place.sample.replaced)
        budget = self._requests.budget(place.group, draft)
        if budget <= 0:
            place.truncated = True
            n = draft.length
            raise Refused("too_long", f"the conversation has {n} tokens, and the policy may write none behind them")
        deadline = self._requests.deadline(place.group, draft)
        # A number of its own for the noise: requests that share tokens must not be answered alike.
        numbered = msgspec.structs.replace(draft, sequence=turn.number)
        request = self._requests.of(place.group, (numbered,), budget, deadline)
        if ask.max_tokens is not None:
            if ask.max_tokens < 1:
                raise Refused("invalid", f"at most {ask.max_tokens} tokens are asked for; ask for at least 1")
            budget = min(budget, ask.max_tokens)
        params = request.params
        stop_ids = {*(params.stop_token_ids or ()), *self._chat.stop_token_ids, *ask.stop_token_ids}
        asked = msgspec.structs.replace(
            params,
            max_new_tokens=budget,
            stop=[*_texts(params.stop), *self._chat.stop, *ask.stop] or None,
            stop_token_ids=sorted(stop_ids) or None,
            **(_drawn(ask.sampling) if self._client_sampling else {}),
        )
        trained = all(getattr(asked, name) == getattr(params, name) for name in Sampling.__struct_fields__)
        own = hash(draft.token_ids[: draft.prompt_length].tobytes()) if place.whole_batch else place.sample.index
        session = f"{place.group.key}/{own}"
        return SampleRequest(
            asked,
            token_ids=request.token_ids,
            prompt_length=request.prompt_length,
            session=session,
            returning=turn.number > 0,
            order=self._requests.order(place.group, turn.draft),
            pinned_version=request.pinned_version,
            engine_s=request.engine_s,
        ), trained

    # ------------------------------------------------------------------ what came of it

    def _recorded(self, session: Session, turn: Turn, ask: Ask, result: SampleResult, trained: bool) -> Answer:
        ended = result.finish == "stop"
        message, stop = Message("assistant", result.text), ""
        if turn.conversation is not None:
            message = self._chat.reply(result.token_ids, turn.conversation.tools).message
            calls = tuple(
                msgspec.structs.replace(
                    call,
                    id=call.id or f"call_{turn.number}_{number}",
                    arguments={"arguments": call.arguments}
                    if ask.object_arguments and isinstance(call.arguments, str)
                    else call.arguments,
                )
                for number, call in enumerate(message.tool_calls)
            )
            message = msgspec.structs.replace(message, tool_calls=calls)
        found = find_stop(message.content, ask.stop) if ended else None
        if found is not None and not message.tool_calls:
            stop = found
            message = msgspec.structs.replace(message, content=message.content[: message.content.find(found)])
        finish: Finish = "length" if not ended else "calls" if message.tool_calls else "stop_text" if stop else "stop"
        session.land(turn, result, message if turn.conversation is not None else None, trained=trained)
        return Answer(
            id=uuid.uuid4().hex[:24],
            created=int(time.time()),
            message=message,
            finish=finish,
            prompt_ids=tuple(turn.ids.tolist()),
            token_ids=result.token_ids,
            log_probs=result.log_probs,
            runs=result.runs,
            text=result.text if turn.conversation is not None or ask.keep_stop else message.content,
            stop=stop,
            cached_tokens=min(result.cached_tokens, len(turn.ids)),
        )


def _texts(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _drawn(sampling: Sampling) -> dict[str, float | int]:
    """The parameters that a client names. A temperature of 0 is SGLang's for the likeliest token."""
    return {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
