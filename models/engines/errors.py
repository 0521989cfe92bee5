"""All errors of the engines, on both sides of the HTTP seam and before a server is started.

    EngineError
    ├── EngineUnreachable     transport failed, or a 5xx answer: the request may be sent again, elsewhere too
    ├── EngineAborted         a request was ended whose parts are of no use: it may be sent again
    ├── EngineTimeout         no answer in time: the engine may still be at work on it
    ├── EngineRefused         4xx with the server's words: sending it again cannot help
    │   ├── EngineUnauthorized    401 or 403: the token is missing or wrong
    │   └── RequestNotSent        our own client's refusal, with the words of `RequestLimits`; a ValueError too
    ├── EngineProtocolError   the answer is not what the protocol promises
    └── EngineServerError     raised inside a server process
        ├── EngineStartError      checkpoint, device or port cannot be used
        │   └── LaunchError           base of what `launch` raises before it starts a server
        │       ├── EnvironmentMissing    no interpreter there, or SGLang or the router is not installed in it
        │       ├── EnvironmentBroken     it is installed, but does not import
        │       └── LaunchRefused         the configuration asks for a server that this environment cannot run
        ├── RequestRefused        becomes a 400 answer
        └── WeightsRefused        an update does not fit the running model; nothing was changed

Invariant: every error survives pickling (they cross process and actor borders), so arguments are plain values.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of all errors of the engines."""


class _AboutEngine(EngineError):
    """Of one engine, for a reason; `words` stand between the two."""

    words: ClassVar[str]

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"engine {self.url} {self.words}: {self.reason}"


class EngineUnreachable(_AboutEngine):
    """The engine cannot be talked to, or failed on its side."""

    words = "cannot be reached"


class EngineAborted(_AboutEngine):
    """A request was ended before its time by somebody else, with nothing of use in its answer."""

    words = "aborted the request"


class EngineProtocolError(_AboutEngine):
    """The engine answered something that is not of the protocol."""

    words = "broke the protocol"


class EngineTimeout(EngineError):
    """No answer within `timeout_s` seconds."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self.url = url
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return (
            f"engine {self.url} gave no answer within timeout_s={self.timeout_s:g}; raise it or send shorter requests"
        )


class EngineRefused(EngineError):
    """A 4xx answer: `status` and `reason`, the server's own words."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(url, status, reason)
        self.url = url
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return f"engine {self.url} refused the call with {self.status}: {self.reason}"


class EngineUnauthorized(EngineRefused):
    """The server wants another token than the one that was sent, or wants one and none was sent."""

    def __init__(self, url: str, status: int, reason: str, sent: bool) -> None:
        super().__init__(url, status, reason)
        self.args, self.sent = (url, status, reason, sent), sent

    def __str__(self) -> str:
        what = "the token that was sent is not the one that it was started with" if self.sent else "no token was sent"
        return (
            f"engine {self.url} refused the call with {self.status} ({self.reason}): {what}; give the token of servers "
            "that run already in a file, with --rollout-external-engine-token-file"
        )


class RequestNotSent(EngineRefused, ValueError):
    """The client did not send a request that no engine could serve, or that would end one."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, 400, reason)
        self.args = (url, reason)

    def __str__(self) -> str:
        return f"the request is not sent to engine {self.url}: {self.reason}"


class EngineServerError(EngineError):
    """Base of the errors raised inside an engine server."""


class EngineStartError(EngineServerError):
    """The engine cannot serve with what it was given."""


class RequestRefused(EngineServerError):
    """A request that the server answers with `status`. `shaped` tells which of SGLang's two error bodies is used:
    `{"error": {"message": ...}}` (True) or `{"error": ...}` (False, refusals of the body's form)."""

    def __init__(self, message: str, status: int = 400, shaped: bool = True) -> None:
        super().__init__(message, status, shaped)
        self.message = message
        self.status = status
        self.shaped = shaped

    def __str__(self) -> str:
        return self.message


class WeightsRefused(EngineServerError):
    """New weights do not fit the running model. The old ones are untouched."""


class LaunchError(EngineStartError):
    """A server or router cannot be started with this environment or these options."""


class EnvironmentMissing(LaunchError):
    """There is no environment to start it in."""


class EnvironmentBroken(LaunchError):
    """What is installed in the environment cannot be imported."""


class LaunchRefused(LaunchError):
    """The options contradict each other or the machine."""
