"""The requests of one agent, as the sequences of one rollout. No I/O: no HTTP, no engines.

An agent sends whole conversations, again and again. If a conversation continues a recorded one, it keeps the recorded
tokens, and only the new messages are tokenised. Otherwise (an edited or compacted history, a sub-agent) it continues
the longest recorded conversation with which it begins, or starts fresh. The tokens alone then decide the sequence: a
context that begins with all tokens of a sequence extends it; a context that differs later branches off there.

Invariants:
- the engine's input and output stand in one sequence, token by token, with log-probs and versions;
- each generated token is recorded once; a branch that repeats it names the sequence that has it (`prefix`);
- generated text is never tokenised: a reply that the client sends back unchanged keeps its recorded tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from models.algorithms.aggregation import IntArray, token_numbers
from stages.chat.messages import ChatFormat, ChatFormatError, Message, ToolSchema
from stages.chat.tool_calls import decoded
from stages.messages import Int32Array, Prefix, Sample, UInt8Array, joined, wire
from stages.rollouts import alike, append_untrained, as_rollout, branch, new_sample, prefixes
from stages.sampling.requests import SampleResult
from stages.sampling.rollout_requests import append_result


class Conversation(Struct, frozen=True):
    """A whole conversation, as clients send it with every request."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()


class Turn(Struct, frozen=True):
    """A request on its way to an engine and back."""

    number: int  # of the request in its session, from 0 on
    draft: Sample  # the sequence with the context appended; not recorded yet
    conversation: Conversation | None = None  # None: the client sent tokens

    @property
    def ids(self) -> Int32Array:
        """The context: the engine's input."""
        return self.draft.token_ids


class Session:
    """The requests of one rollout."""

    def __init__(self, chat: ChatFormat, index: int = 0, *, ignore_reasoning: bool = False) -> None:
        """`ignore_reasoning`: a reply that comes back without its reasoning still matches."""
        self.started = self.turns = 0  # opened requests, answered requests
        self._chat, self._index, self._ignore_reasoning = chat, index, ignore_reasoning
        self._sequences: list[Sample] = []
        self._last = 0  # the sequence of the newest turn
        # (place of the sequence, tokens up to the reply's end), by digest of the conversation up to it, inclusive
        self._replies: dict[bytes, tuple[int, int]] = {}
        self._texts: dict[str, tuple[int, int]] = {}  # by text up to the reply's end, of clients that send texts

    def open(self, ids: Sequence[int], conversation: Conversation | None = None) -> Turn:
        """The turn for a client that sends tokens, or for a conversation with this context."""
        turn = Turn(self.started, self._drafted(wire(ids, Int32Array)), conversation)
        self.started += 1
        return turn

    def continued(self, text: str) -> tuple[list[int], str]:
        """The tokens of the longest recorded text with which this one begins, and what follows it. Encoded again they
        could be others. Any thread may call it."""
        known = max(filter(text.startswith, list(self._texts)), key=len, default="")
        place, length = self._texts.get(known, (0, 0))
        return self._sequences[place].token_ids[:length].tolist() if known else [], text[len(known) :]

    def land(
        self, turn: Turn, result: SampleResult, reply: Message | None = None, *, trained: bool = True, text: str = ""
    ) -> None:
        """Record the engine's result.

        Args:
            reply: the message for the client, which will send it back; None for tokens.
            trained: whether the sampling parameters were those of training.
            text: what the client sent and was answered, of a client that sends texts.
        """
        before = self._drafted(turn.ids)  # concurrent requests may have been recorded since
        after = append_result(before, result)
        if not trained:
            mask = joined(before.loss_mask, np.zeros(len(result.token_ids)))
            after = replace(after, loss_mask=wire(mask, UInt8Array))
        generated = [run.version >= 0 for run in after.version_runs]  # a turn is contiguous runs of generated tokens
        turns = sum(now and not past for past, now in zip([False, *generated], generated, strict=False))
        after = replace(after, response=result.text, turns=turns)
        place = before.sequence
        self._sequences[place : place + 1] = [after]
        self._last = place
        self.turns += 1
        if text:
            self._texts[text] = place, after.length
        if turn.conversation is not None and reply is not None:
            answered = replace(turn.conversation, messages=(*turn.conversation.messages, reply))
            self._replies[self._digests(answered)[-1]] = place, after.length

    @property
    def cut(self) -> bool:
        """Whether a length limit cut the newest answer."""
        return bool(self._sequences) and self._sequences[self._last].status == "truncated"

    @property
    def recorded(self) -> tuple[Sample, ...]:
        """All sequences, whole, without shared prefixes."""
        return tuple(self._sequences)

    def samples(self) -> tuple[Sample, ...]:
        """The rollout. The sequence with the newest turn comes last, because graders read the last sequence."""
        order = sorted(range(len(self._sequences)), key=lambda place: place == self._last)
        numbers = token_numbers([s.length for s in self._sequences], prefixes(self._sequences))
        shown = [numbers[place] for place in order]
        parts = [replace(self._sequences[place], prefix=_shared(shown, new)) for new, place in enumerate(order)]
        return as_rollout(*parts) if parts else ()

    # ------------------------------------------------------------------ contexts

    def context(self, conversation: Conversation, most: int | None = None) -> Sequence[int]:
        """The context of a conversation in tokens.

        Any thread may call it while the session goes on: recorded sequences only grow, and replies are only added.
        Raises ChatFormatError if the chat format cannot write it, TooLong if it surely has more than `most` tokens.
        """
        messages, tools = conversation.messages, conversation.tools
        digests = self._digests(conversation)
        for n in range(len(messages) - 1, 0, -1):
            if digests[n] not in self._replies:
                continue
            sequence, length = self._replies[digests[n]]
            ids = self._sequences[sequence].token_ids[:length].tolist()
            with contextlib.suppress(ChatFormatError):  # some messages can be written only after their predecessors
                return [*ids, *self._chat.append(ids, messages[n:], tools, most)]
        return self._chat.start(messages, tools, most)

    def _digests(self, conversation: Conversation) -> list[bytes]:
        """Digests of the conversation's first 0, 1, 2, ... messages."""
        state = hashlib.blake2b(msgspec.json.encode(conversation.tools, order="sorted"), digest_size=16)
        digests = [state.digest()]
        for message in conversation.messages:
            encoded = msgspec.json.encode(self._comparable(message), order="sorted")
            state.update(b"%d:" % len(encoded))
            state.update(encoded)
            digests.append(state.digest())
        return digests

    def _comparable(self, message: Message) -> Message:
        """The message normalised: clients change surrounding space and JSON notation when they send a reply back."""
        if message.role != "assistant":
            return message
        return replace(
            message,
            content=message.content.strip(),
            reasoning_content="" if self._ignore_reasoning else message.reasoning_content.strip(),
            tool_calls=tuple(
                replace(call, arguments=decoded(call.arguments)) if isinstance(call.arguments, str) else call
                for call in message.tool_calls
            ),
        )

    # ------------------------------------------------------------------ sequences

    def _drafted(self, ids: Int32Array) -> Sample:
        """The sequence to which a context belongs, with the context appended; `sequence` is its place."""
        shares = [(place, alike(sample.token_ids, ids)) for place, sample in enumerate(self._sequences)]
        shares = [(place, n) for place, n in shares if n >= self._sequences[place].prompt_length]
        if not shares:  # a branch inside the prompt is a new sequence
            return replace(new_sample(ids, self._index), sequence=len(self._sequences))
        place, shared = max(shares, key=lambda share: share[1])
        known = self._sequences[place]
        if shared < known.length:
            known = replace(branch(known, shared), sequence=len(self._sequences))
        return append_untrained(known, ids[shared:].tolist(), "")


def _shared(numbers: Sequence[IntArray], place: int) -> Prefix | None:
    """The longest prefix that a sequence shares with an earlier one, by token numbers.

    Tokens that are equal by chance, because two branches sampled alike, have different numbers.
    """
    shares = [(alike(numbers[place], other), at) for at, other in enumerate(numbers[:place])]
    length, earlier = max(shares, key=lambda share: share[0], default=(0, 0))
    return Prefix(earlier, length) if length else None
