"""The requests of one agent, as the sequences of one rollout. No I/O: it knows neither HTTP nor engines.

An agent sends whole conversations, again and again. What continues a recorded one takes the recorded tokens, with only
the new messages tokenised behind them; what does not (an edited history, a compacted one, a sub-agent) begins at the
longest recorded conversation that it repeats, or anew. Where the tokens then go is decided by tokens alone: a context
that begins with the tokens of a sequence extends it, or branches off it where they part.

Invariants:
- what the engine was given and what it answered stand in one sequence, token by token, with its log-probs and versions;
- each token that an engine made is recorded once; a branch that repeats it names the sequence that has it (`prefix`);
- what the model wrote is never tokenised: a reply that comes back as it was sent stands for its tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.algorithms.aggregation import IntArray, token_numbers
from stages.chat.errors import ChatFormatError
from stages.chat.messages import ChatFormat, Message, ToolCall, ToolSchema
from stages.messages import Int32Array, Prefix, Sample, UInt8Array, joined, wire
from stages.rollouts import append_untrained, as_rollout, branch, new_sample, prefixes
from stages.sampling.requests import SampleResult
from stages.sampling.rollout_requests import append_result


class Conversation(Struct, frozen=True):
    """What a client sends: the whole of it, each time."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()


class Turn(Struct, frozen=True):
    """A request on its way to an engine and back."""

    number: int  # of the request in its session, from 0 on
    draft: Sample  # the sequence that it goes on with, up to what the engine is given; not recorded yet
    conversation: Conversation | None = None  # None: the client sent tokens

    @property
    def ids(self) -> Int32Array:
        """What the engine is given."""
        return self.draft.token_ids


class _Reply(Struct, frozen=True):
    """Where the model's reply to a conversation ends."""

    sequence: int
    length: int


class Session:
    """The requests of one rollout."""

    def __init__(self, chat: ChatFormat, index: int = 0, *, ignore_reasoning: bool = False) -> None:
        """`ignore_reasoning`: a reply that comes back without its reasoning still stands for all of its tokens."""
        self.started = self.turns = 0  # requests that were opened, and that were answered
        self._chat, self._index, self._ignore_reasoning = chat, index, ignore_reasoning
        self._sequences: list[Sample] = []
        self._last = 0  # the sequence of the newest turn
        self._replies: dict[bytes, _Reply] = {}  # by the conversation up to and with the reply

    def open(self, conversation: Conversation) -> Turn:
        """The turn that a conversation asks for. Raises what the chat format does where it cannot be written down."""
        return self._turn(self._context(conversation), conversation)

    def open_ids(self, ids: Sequence[int]) -> Turn:
        """The turn that a client asks for who sends tokens."""
        return self._turn(ids, None)

    def count(self, conversation: Conversation) -> int:
        """Tokens of the context that an engine would be given; nothing is recorded."""
        return len(self._context(conversation))

    def land(self, turn: Turn, result: SampleResult, reply: Message | None = None, *, trained: bool = True) -> None:
        """Record what the engine made.

        Args:
            reply: the message as it is sent to the client, who will send it back; None for tokens.
            trained: whether the policy made it as it samples in training.
        """
        before = self._drafted(turn.ids)  # others may have landed since the request was opened
        after = append_result(before, result)
        if not trained:
            mask = joined(before.loss_mask, np.zeros(len(result.token_ids)))
            after = msgspec.structs.replace(after, loss_mask=wire(mask, UInt8Array))
        after = msgspec.structs.replace(after, response=result.text, turns=_turns(after))
        place = before.sequence
        self._sequences[place : place + 1] = [after]
        self._last = place
        self.turns += 1
        if turn.conversation is not None and reply is not None:
            answered = msgspec.structs.replace(turn.conversation, messages=(*turn.conversation.messages, reply))
            self._replies[self._digests(answered)[-1]] = _Reply(place, after.length)

    @property
    def cut(self) -> bool:
        """Whether the newest answer ended at a limit of its length."""
        return bool(self._sequences) and self._sequences[self._last].status == "truncated"

    @property
    def recorded(self) -> tuple[Sample, ...]:
        """All sequences, each whole, without what they share."""
        return tuple(self._sequences)

    def samples(self) -> tuple[Sample, ...]:
        """The rollout: the sequence with the newest turn comes last, for it is the one that is graded."""
        order = [place for place in range(len(self._sequences)) if place != self._last]
        order = [*order, self._last] if self._sequences else []
        parts = [self._sequences[place] for place in order]
        if not any(part.prefix is not None and part.prefix.sequence == self._last for part in parts[:-1]):
            where = {place: new for new, place in enumerate(order)}
            parts = [
                _behind(part, part.prefix and Prefix(where[part.prefix.sequence], part.prefix.length)) for part in parts
            ]
        else:
            numbers = token_numbers([s.length for s in self._sequences], prefixes(self._sequences))
            parts = [_behind(part, _shared([numbers[p] for p in order], new)) for new, part in enumerate(parts)]
        return as_rollout(*parts) if parts else ()

    # ------------------------------------------------------------------ contexts

    def _context(self, conversation: Conversation) -> Sequence[int]:
        messages, tools = conversation.messages, conversation.tools
        digests = self._digests(conversation)
        for n in range(len(messages) - 1, 0, -1):
            reply = self._replies.get(digests[n])
            if reply is None:
                continue
            ids = self._sequences[reply.sequence].token_ids[: reply.length].tolist()
            with contextlib.suppress(ChatFormatError):  # messages that are written only with what stands before them
                return [*ids, *self._chat.append(ids, messages[n:], tools)]
        return self._chat.start(messages, tools)

    def _digests(self, conversation: Conversation) -> list[bytes]:
        """Of the conversation after each number of its messages, from 0 on."""
        state = hashlib.blake2b(msgspec.json.encode(conversation.tools, order="sorted"), digest_size=16)
        digests = [state.digest()]
        for message in conversation.messages:
            encoded = msgspec.json.encode(self._comparable(message), order="sorted")
            state.update(b"%d:" % len(encoded))
            state.update(encoded)
            digests.append(state.digest())
        return digests

    def _comparable(self, message: Message) -> Message:
        """The message without what clients change when they send a reply back: space around it, the writing of JSON."""
        if message.role != "assistant":
            return message
        return msgspec.structs.replace(
            message,
            content=message.content.strip(),
            reasoning_content="" if self._ignore_reasoning else message.reasoning_content.strip(),
            tool_calls=tuple(map(_parsed, message.tool_calls)),
        )

    # ------------------------------------------------------------------ sequences

    def _turn(self, ids: Sequence[int], conversation: Conversation | None) -> Turn:
        turn = Turn(self.started, self._drafted(wire(ids, Int32Array)), conversation)
        self.started += 1
        return turn

    def _drafted(self, ids: Int32Array) -> Sample:
        """The sequence that a context belongs to, up to the end of the context; `sequence` is its place."""
        shares = [(place, _common(sample.token_ids, ids)) for place, sample in enumerate(self._sequences)]
        shares = [(place, n) for place, n in shares if n >= self._sequences[place].prompt_length]
        if not shares:  # what comes before the first turn of the model belongs to it: nothing branches off in there
            return msgspec.structs.replace(new_sample(ids, self._index), sequence=len(self._sequences))
        place, shared = max(shares, key=lambda share: share[1])
        known = self._sequences[place]
        if shared < known.length:
            known = msgspec.structs.replace(branch(known, shared), sequence=len(self._sequences))
        return append_untrained(known, ids[shared:].tolist(), "")


def _common(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Tokens that two sequences have in common at their beginning."""
    n = min(len(first), len(second))
    differ = np.flatnonzero(first[:n] != second[:n])
    return int(differ[0]) if len(differ) else n


def _turns(sample: Sample) -> int:
    """Turns of the model in a sequence: what it made without anything else between."""
    made = [run.version >= 0 for run in sample.version_runs]
    return sum(here and not before for before, here in zip([False, *made], made, strict=False))


def _behind(part: Sample, prefix: Prefix | None) -> Sample:
    return msgspec.structs.replace(part, prefix=prefix)


def _shared(numbers: Sequence[IntArray], place: int) -> Prefix | None:
    """What a sequence shares with an earlier one, by the numbers of their tokens: tokens that are the same by accident,
    because two branches sampled alike, have numbers of their own."""
    shares = [
        (_common(numbers[place], earlier), earlier_place) for earlier_place, earlier in enumerate(numbers[:place])
    ]
    length, earlier_place = max(shares, key=lambda share: share[0], default=(0, 0))
    return Prefix(earlier_place, length) if length else None


def _parsed(call: ToolCall) -> ToolCall:
    """The call with its arguments as an object, where their text is one."""
    if not isinstance(call.arguments, str):
        return call
    try:
        value: object = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return call
    return msgspec.structs.replace(call, arguments=value) if isinstance(value, dict) else call
