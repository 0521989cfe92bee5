"""What the gateway's dialects have in common: a request, the answer to it, a refusal.

A dialect reads its own JSON into an `Ask` and writes an `Answer` as its own JSON; nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from stages.agents.gateway.sessions import Conversation
from stages.agents.messages import Message
from stages.messages import VersionRun

Finish = Literal["stop", "length", "calls", "stop_text"]
Reason = Literal["invalid", "too_long", "no_session", "not_found", "too_large", "busy", "unavailable", "internal"]
Json = Mapping[str, object]
T = TypeVar("T")

STATUS: Mapping[Reason, int] = {
    "invalid": 400,
    "too_long": 400,
    "no_session": 401,
    "not_found": 404,
    "too_large": 413,
    "busy": 429,
    "unavailable": 503,
    "internal": 500,
}


class Refused(Exception):
    """A request that is not answered; clients repeat those that are `busy` and `unavailable`."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class Sampling(Struct, frozen=True):
    """How the client wants tokens to be drawn; None: as the policy does."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class Ask(Struct, frozen=True):
    """A request, whatever dialect it came in. It has a conversation, or tokens, or a text."""

    model: str
    conversation: Conversation | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False  # of a text to be continued: the stop that was found stays in what is shown
    sampling: Sampling = Sampling()
    stream: bool = False
    stream_usage: bool = False
    log_probs: bool = False
    token_ids: bool = False  # the client wants to see the tokens of prompt and answer
    object_arguments: bool = False  # the dialect can only write calls whose arguments are objects


class Answer(Struct, frozen=True):
    """What the engine made, for the client. The message is what the client is expected to send back."""

    id: str
    created: int  # unix time
    message: Message
    finish: Finish
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    runs: tuple[VersionRun, ...]
    text: str = ""  # as the engine wrote it, up to where the client wanted it to stop
    stop: str = ""  # which of the client's stop texts ended it
    cached_tokens: int = 0

    @property
    def token_log_probs(self) -> list[dict[str, object]]:
        """Log-probs by token, as the OpenAI dialects list them; tokens are named by their ids, as vLLM can."""
        return [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(self.token_ids, self.log_probs, strict=True)
        ]


class Dialect(Protocol):
    """One way to ask. Stateless."""

    def read(self, body: bytes) -> Ask:
        """Raises Refused, or msgspec's errors, whose words say what is wrong where."""

    def answer(self, ask: Ask, answer: Answer) -> Json: ...

    def events(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        """The answer as a stream of server-sent events."""

    def error(self, refused: Refused) -> Json: ...

    def error_event(self, refused: Refused) -> bytes:
        """The same in the middle of a stream."""


def event(data: Json, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def decode(body: bytes, kind: type[T]) -> T:
    """The body of a request. Raises Refused."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # validation errors are decode errors
        raise Refused("invalid", f"the request cannot be read: {error}") from error
    except RecursionError:
        raise Refused("invalid", "the request is nested too deeply; send plain messages") from None
