"""Errors of training, algorithms, weights and engines. Each message names the key, the value, the rule and the cure.

UserFault                   mixed into each class, of all folders, whose sentence is for the user

TrainError
├── CheckpointUnavailable   the initial model cannot be loaded
├── TrainStateUnreadable    a saved training state is missing, incomplete or of another model
├── UnsupportedModel        the model's output cannot be reproduced from its parts
├── InvalidSequence         a sequence contradicts itself or the model
├── BackendMisuse           calls in an order that has no meaning
└── TrainConfigInvalid      options that do not fit together

AlgorithmError
├── InsufficientMembers     a group too small for its estimator
├── InconsistentGroup       rewards of one group that contradict each other
├── MissingColumn           a term of the loss is on, its input is missing
└── UnknownAlgorithm        a name or import path that leads nowhere

WeightsError
├── TornWeights             the slot was being written, or holds another version by now
├── DigestMismatch          the bytes differ from the announced ones
├── LayoutMismatch          tensors offered for writing do not match the layout of the slot
├── SourceError             the checkpoint that defines the slots cannot serve
├── GroupError              a process group with an engine could not be made, or broke
├── DeltaError              a difference cannot be applied, or the chain to a version is broken
├── RouteUnfit              an engine cannot be reached by the announced route
├── NotVerified             an engine reports another label or checksum than the published one
├── NotBrought              the fetcher of an engine's node could not bring the weights
└── SlotDirectoryError      the slot directory cannot be made, or belongs to a live run
    └── SlotSpaceError      no room for two slots

EngineError
├── EngineUnreachable       transport failed, or a 5xx answer: any engine may get the request again
├── EngineAborted           a request ended early and its parts are of no use: it may be sent again
├── EngineTimeout           no answer in time: the engine may still be at work on the request
├── EngineRefused           4xx with the server's words: sending the request again cannot help
│   ├── EngineUnauthorized      401 or 403: the token is missing or wrong
│   └── RequestNotSent          refused by our own client, with the words of `check_request`; a ValueError too
├── EngineProtocolError     the answer breaks the protocol
└── EngineServerError       raised inside a server process
    ├── EngineStartError        checkpoint, device or port cannot be used
    │   └── LaunchError             base of what `launch` raises before it starts a server
    │       ├── EnvironmentMissing      no interpreter, no GPU, or SGLang or the router is not installed
    │       ├── EnvironmentBroken       it is installed, but does not import
    │       └── LaunchRefused           the configuration asks for a server that this environment cannot run
    ├── RequestRefused          becomes a 400 answer
    └── WeightsRefused          an update does not fit the running model; nothing was changed

Invariant: engine errors survive pickling (they cross process and actor borders), so their arguments are plain values.
"""

from __future__ import annotations

from typing import ClassVar


class UserFault(Exception):
    """An error whose sentence is written for the user, who can mend it: it names the value, the rule and the cure. A
    run ends with this sentence; what is no such error is a defect, and shows itself."""


class TrainError(RuntimeError):
    """Base of all errors of `models.train`."""


class CheckpointUnavailable(TrainError, UserFault):
    """No Hugging Face checkpoint could be loaded from the given path or hub id."""


class TrainStateUnreadable(TrainError, UserFault):
    """A directory does not hold a training state of this model."""


class UnsupportedModel(TrainError, UserFault):
    """The model needs something that this backend does not do."""


class InvalidSequence(TrainError):
    """A sequence handed over for training is inconsistent."""


class BackendMisuse(TrainError):
    """The backend's methods were called in an order that has no meaning."""


class TrainConfigInvalid(TrainError, UserFault):
    """Options of the trainer contradict one another."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text: later lines are often advice for another caller."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class AlgorithmError(ValueError, UserFault):
    """Base of all errors of `models.algorithms`."""


class InsufficientMembers(AlgorithmError):
    """A group-relative estimator was given fewer than two rollouts: there is nothing to compare."""


class InconsistentGroup(AlgorithmError):
    """Lengths or rewards of one group contradict one another, or a reward is not finite."""


class MissingColumn(AlgorithmError):
    """A term of the loss is on, and the log-probs or entropies that it reads were not given."""


class UnknownAlgorithm(AlgorithmError):
    """A name is in no table and in no file, or an import path does not lead to a function."""


class WeightsError(RuntimeError):
    """Base of all errors of this package."""


class TornWeights(WeightsError):
    """The slot was being written, or holds another version by now. Fetch the newest announcement."""


class DigestMismatch(WeightsError):
    """The bytes differ from the announced ones. Keep the old weights and fetch again."""


class LayoutMismatch(WeightsError):
    """The offered tensors do not match the layout of the slot."""


class SourceError(WeightsError, UserFault):
    """The checkpoint that the slots are modelled on cannot serve."""


class SlotDirectoryError(WeightsError, UserFault):
    """The slot directory cannot be made, or belongs to a live run."""


class SlotSpaceError(SlotDirectoryError):
    """No room for two slots."""


class GroupError(WeightsError):
    """A process group with the ranks of an engine could not be made, or broke. Make a new one."""


class DeltaError(WeightsError):
    """A difference cannot be applied, or the chain of differences to a version is broken. Take the full weights."""


class RouteUnfit(WeightsError):
    """An engine cannot be reached by the announced route. Choose another."""


class NotVerified(WeightsError):
    """An engine reports another label or checksum than the published one. It gets no request until they agree."""


class NotBrought(WeightsError):
    """The fetcher of an engine's node could not bring the weights, or not put them in. Order them again."""


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
    """A server or another client ended a request early, with nothing of use in its answer."""

    words = "aborted the request"


class EngineProtocolError(_AboutEngine):
    """The engine answered something that is not of the protocol."""

    words = "broke the protocol"


class EngineTimeout(EngineError):
    """No answer within `timeout_s` seconds."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self.url, self.timeout_s = url, timeout_s

    def __str__(self) -> str:
        return (
            f"engine {self.url} gave no answer within timeout_s={self.timeout_s:g}; raise it or send shorter requests"
        )


# With these a request may have been lost on its way: it is sent again.
LOSSES = (EngineUnreachable, EngineTimeout, EngineAborted, EngineProtocolError)


class EngineRefused(EngineError):
    """A 4xx answer: `status` and `reason`, the server's own words."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(url, status, reason)
        self.url, self.status, self.reason = url, status, reason

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


class EngineStartError(EngineServerError, UserFault):
    """Checkpoint, device or port cannot be used."""


class RequestRefused(EngineServerError):
    """A request that the server answers with `status`. `shaped` selects one of SGLang's two error bodies:
    `{"error": {"message": ...}}` (True) or `{"error": ...}` (False, refusals of the body's form)."""

    def __init__(self, message: str, status: int = 400, shaped: bool = True) -> None:
        super().__init__(message, status, shaped)
        self.message, self.status, self.shaped = message, status, shaped

    def __str__(self) -> str:
        return self.message


class WeightsRefused(EngineServerError):
    """New weights do not fit the running model. The old ones are untouched."""


class LaunchError(EngineStartError):
    """A server or router cannot be started with this environment or these options."""


class EnvironmentMissing(LaunchError):
    """There is no environment to start it in, or no GPU."""


class EnvironmentBroken(LaunchError):
    """What is installed in the environment cannot be imported."""


class LaunchRefused(LaunchError):
    """The options contradict each other or the machine."""
