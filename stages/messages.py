"""The messages between stages: frozen structs, arrays as typed raw bytes.

Glossary, used in all folders:

    group       one admitted prompt with its `n_samples` rollouts (`PromptGroup`); the unit of the ledger
    rollout     one attempt at the prompt; it has one sequence or several, which share `Sample.index`
    sample      one sequence of a rollout as it travels between stages (`Sample`)
    turn        one request to an engine inside a rollout, and what follows it until the next request
    slice       some or all rollouts of one group in one message (`RolloutSlice`)
    lease       a slice that a stage holds and has not acknowledged yet
    settle      to give a group its one outcome: trained, filtered, stale, failed or discarded
    batch       the groups that one step of the trainer consumes; `step` counts batches, the first is 1
    version     how many batches the weights were trained on; an engine stamps it on every token that it generates
    staleness   batches between the version of a token and the batch that trains it
    generation  how often the run was started (`run_generation`); a label of weights is `generation.version`
    incarnation how often a process was started; facts about an earlier incarnation do not count

A single-turn group travels whole in one slice. Samples of several turns travel by themselves, to the group stage.

Invariants: field order is the wire format (append only, with defaults); an array of a message is never written to, and
its byte order is little-endian (transport/codec.py); arrays of one sample have equal length, that of its tokens; every
token lies in exactly one version run; a failed sample carries its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from models.weights.shared_memory_reader import SlotManifest

Status = Literal["pending", "completed", "truncated", "aborted", "failed"]
Outcome = Literal["trained", "filtered", "stale", "failed", "discarded"]


class WireArray(np.ndarray[Any, np.dtype[Any]]):
    """One-dimensional array that travels as raw little-endian bytes of `wire_dtype`. Read-only after decoding."""

    wire_dtype: ClassVar[str]


class Int32Array(WireArray):
    wire_dtype: ClassVar[str] = "<i4"


class Float32Array(WireArray):
    wire_dtype: ClassVar[str] = "<f4"


class UInt8Array(WireArray):
    wire_dtype: ClassVar[str] = "|u1"


class Extra(np.ndarray[Any, np.dtype[Any]]):
    """An array of any number type and shape beside the tokens: an image, the choices of experts.

    It travels as a separate frame, uncopied: do not write to it once its sample is sent. Read-only after decoding.
    """

    wire_frame: ClassVar[bool] = True


A = TypeVar("A", bound=WireArray)

NO_FLOATS = np.empty(0, dtype="<f4").view(Float32Array)
NO_IDS = np.empty(0, dtype="<i4").view(Int32Array)


def wire(values: Any, kind: type[A]) -> A:
    """Copy any sequence of numbers into a contiguous wire array of the kind."""
    return np.ascontiguousarray(values, dtype=kind.wire_dtype).view(kind)


def joined(first: A, second: Sequence[float] | npt.NDArray[Any]) -> A:
    """[m + n] a wire array with further numbers behind it, in one copy."""
    kind, m = type(first), len(first)
    both = np.empty(m + len(second), dtype=kind.wire_dtype)
    both[:m], both[m:] = first, second
    return both.view(kind)


class VersionRun(Struct, frozen=True, array_like=True):
    """`n_tokens` consecutive tokens made by weights `version`; -1: by none of this run (prompts, observations)."""

    version: int
    n_tokens: int


class PromptGroup(Struct, frozen=True, array_like=True):
    """One admitted prompt: its text, its row in the data, and how many rollouts it gets."""

    group_id: int
    prompt_index: int  # row in the data after filtering
    epoch: int
    prompt: str
    prompt_ids: Int32Array  # [P] on the way to generate; empty afterwards, for the samples hold them
    label: str | None
    n_samples: int
    seed: int  # of sampling; sample i uses f(seed, i)
    metadata: str = "{}"  # JSON object of the row
    tools: str = "[]"  # JSON list of the row
    purpose: Literal["train", "eval"] = "train"
    dataset: str = "train"
    pinned_version: int = -1  # evaluation: the only version whose answer counts
    requeued: int = 0
    temperature: float | None = None  # at which its rollouts are drawn, all their turns; None: as configured
    top_p: float | None = None
    admitted_s: float = 0.0  # unix time

    @property
    def key(self) -> str:
        """Names the group among those of the run and of all evaluations."""
        place = f"{self.dataset}@{self.pinned_version}:" if self.purpose == "eval" else ""
        return f"{place}{self.group_id}"

    @property
    def row_metadata(self) -> Any:
        return msgspec.json.decode(self.metadata)


def group_of(key: str) -> tuple[str, int | None]:
    """Of the key of a group or of a slice: its group's key, and the group's id unless it is one of an evaluation."""
    group, _, _ = key.partition("/")
    return group, int(group) if group.isdigit() else None


def without_prompt(group: PromptGroup) -> PromptGroup:
    """The group once its samples hold the prompt's tokens."""
    return msgspec.structs.replace(group, prompt_ids=NO_IDS)


class Prefix(Struct, frozen=True, array_like=True):
    """The first `length` tokens of a sequence are those of an earlier one of its rollout."""

    sequence: int
    length: int


class TurnReward(Struct, frozen=True, array_like=True):
    """What a turn earned: counted at the last token that the model made before position `end`."""

    end: int
    reward: float


class Sample(Struct, frozen=True, array_like=True):
    """One sequence of a rollout: T tokens in the order in which the engine saw them, the prompt included. A rollout has
    one, or several (branches, sub-agents, a compacted context), which share `index` and the reward."""

    index: int  # of the rollout: 0 .. n_samples - 1 inside its group
    status: Status
    response: str  # text after the prompt
    token_ids: Int32Array  # [T]
    prompt_length: int  # tokens that were there before the first model turn
    loss_mask: UInt8Array  # [T], 1 = made by the policy and trained
    log_probs: Float32Array  # [T], of the policy that made the token; 0.0 where the version is -1
    version_runs: tuple[VersionRun, ...]  # over all T
    turns: int = 0
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    is_correct: bool | None = None
    error: str | None = None
    cached_tokens: int = 0
    retractions: int = 0
    resumed: int = 0  # times continued from partial output
    generate_s: float = 0.0
    sequence: int = 0  # which of its rollout's sequences
    sequences: int = 1  # how many its rollout has
    raw_reward: float | None = None  # before shaping (length penalties); None: `reward` is raw
    remove_sample: bool = False  # counts in its group's baseline, is not trained
    teacher_log_probs: Float32Array = msgspec.field(default_factory=lambda: NO_FLOATS)  # [T] or empty
    reused_tokens: int = 0  # tokens saved from an engine that was lost while it made them
    replaced: int = 0  # times restarted because its group's deadline passed
    spec_proposed: int = 0  # speculative decoding: draft tokens proposed, and accepted
    spec_accepted: int = 0
    policy: str = "policy"  # whose weights made the model tokens
    prefix: Prefix | None = None  # shared with an earlier sequence of its rollout
    turn_rewards: tuple[TurnReward, ...] = ()  # beside the reward at the end
    done: bool = False  # a loop stage has ended it: it gets no further turn
    loop_state: bytes = b""  # state of a loop stage for its next turn; dropped when the rollout leaves the loop
    extras: dict[str, Extra] = {}  # by name; kept as they are from stage to stage
    metrics: dict[str, float] = {}  # of environment and engines, by their full name; averaged over rollouts
    answer_start: int = 0  # characters of `response` before what may be the answer: calls of tools, and their results
    left: str = ""  # JSON {"metadata": {...}, "attributes": {...}}: what a function of the user's has left on it
    answer: str | None = None  # the final answer in it, as its grader read it

    @property
    def length(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, observations included."""
        return len(self.token_ids) - self.prompt_length

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt that no earlier sequence of its rollout has."""
        shared = 0 if self.prefix is None else self.prefix.length
        return len(self.token_ids) - max(self.prompt_length, shared)

    @property
    def versions(self) -> npt.NDArray[np.int32]:
        """[T] version of each token, -1 where no weights of this run made it."""
        versions = np.empty(sum(run.n_tokens for run in self.version_runs), dtype=np.int32)
        for version, start, end in self.spans():
            versions[start:end] = version
        return versions

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(version, start, end) of each version run."""
        start = 0
        for run in self.version_runs:
            yield run.version, start, start + run.n_tokens
            start += run.n_tokens

    @property
    def model_versions(self) -> tuple[int, ...]:
        """Versions of the runs that the policy made, in their order; the same one again after an observation."""
        return tuple(run.version for run in self.version_runs if run.version >= 0)

    def fault(self) -> str | None:
        """What is inconsistent in this sample, in one sentence, or None."""
        n = self.length
        lengths = {"mask": len(self.loss_mask), "log-probs": len(self.log_probs)}
        if len(self.teacher_log_probs):
            lengths["teacher log-probs"] = len(self.teacher_log_probs)
        if any(length != n for length in lengths.values()):
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            return f"arrays differ in length: ids {n}, {found}"
        if not 0 <= self.prompt_length <= n:
            return f"the prompt has {self.prompt_length} of {n} tokens"
        covered = sum(run.n_tokens for run in self.version_runs)
        if covered != n or any(run.n_tokens < 0 for run in self.version_runs):
            return f"version runs cover {covered} of {n} tokens"
        if not np.isfinite(self.log_probs).all():
            return "a log-prob is not finite"
        first_made = n
        for version, start, end in self.spans():  # not by tokens, because this runs for every trained sample
            if version >= 0:
                if start < self.prompt_length and end > start:
                    return "a token of the prompt carries a version of the weights; give it version -1"
                first_made = min(first_made, start if end > start else n)
            elif np.count_nonzero(self.loss_mask[start:end]):
                return "a token that no weights made (version -1) has loss mask 1"
            elif np.count_nonzero(self.log_probs[start:end]):
                return "a token that no weights made (version -1) has a log-prob; give it 0.0"
        for turn in self.turn_rewards:
            if not (math.isfinite(turn.reward) and first_made < turn.end <= n):
                return (
                    f"the turn that ends at {turn.end} of {n} tokens has reward {turn.reward}; it must be finite and "
                    "stand behind a token that the model made"
                )
        return None


class RolloutSlice(Struct, frozen=True, array_like=True):
    """Some or all rollouts of one group, on their way from generation to training."""

    group: PromptGroup
    samples: tuple[Sample, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens after the prompts; tokens shared by several sequences count once."""
        return sum(s.new_tokens for s in self.samples)

    @property
    def key(self) -> str:
        """Names this slice in its stream: the same rollouts at the same turn have the same key."""
        turns = sum(sample.turns for sample in self.samples)
        members = ",".join(f"{s.index}.{s.sequence}" if s.sequences > 1 else str(s.index) for s in self.samples)
        return f"{self.group.key}/{members}/{turns}"


class Settled(Struct, frozen=True, array_like=True, tag=True):
    """A group reached its terminal state."""

    group_id: int
    outcome: Outcome
    detail: str = ""
    step: int = -1
    tokens: int = 0  # generated for it
    reward: float | None = None  # mean over its graded rollouts
    pass_rate: float | None = None  # share of correct rollouts, if the grader judges correctness


class StepDone(Struct, frozen=True, array_like=True, tag=True):
    """The trainer finished a rollout batch; all its groups are settled by this one message."""

    step: int  # batches trained, this one included
    version: int  # published version that engines will carry
    groups: tuple[int, ...]
    metrics: dict[str, float]
    tokens: int
    token_hash: str = ""  # of all trained token ids in group order, for comparing runs
    staleness: dict[int, int] = {}  # trained tokens by staleness
    pinned: bool = False  # an evaluation of `version` follows
    last: bool = False  # the trainer stops here, though fewer batches were trained than planned
    pass_rates: dict[int, float] = {}  # group -> share of correct rollouts, where known
    publishes: bool = False  # `version` is announced to the engines
    rolled_back: bool = False  # `version` has the weights of a checkpoint, and no batch was trained for it


class CheckpointReady(Struct, frozen=True, array_like=True, tag=True):
    """The trainer wrote model, optimizer and RNG of `step` into `path`; the controller adds the ledger and commits."""

    step: int
    version: int
    path: str


EVAL_BASE = 1 << 40  # evaluation groups are numbered from here, apart from the ledger's dense ids


class EvalDone(Struct, frozen=True, array_like=True, tag=True):
    """Result of one evaluation over all held-out data sets."""

    version: int
    metrics: dict[str, float]  # "eval/<dataset>" and its companions
    complete: bool  # every sample came back, all from the pinned version
    detail: str = ""


Report = Settled | StepDone | CheckpointReady | EvalDone


class PolicyProof(Struct, frozen=True):
    """S canary sequences of T tokens, and the trainer's log-probs of them under the announced weights."""

    tokens: tuple[tuple[int, ...], ...]  # [S][T]
    log_probs: tuple[tuple[float, ...], ...]  # [S][T - 1], of all tokens but the first, at temperature 1
    seconds: float = 0.0  # that the trainer needed for them


class WeightsAnnouncement(SlotManifest, frozen=True):
    """Topic value `weights`: the newest weights and where they lie."""

    pinned: bool = False  # an evaluation needs this version: apply no other until it is released
    floor: int = 0  # the oldest version that may be trained, of the newest rollback
    transport: str = "disk"  # route to the engines: disk, distributed, tensor, delta
    delta: str = ""  # delta route: manifest of this version's difference
    proof: PolicyProof | None = None  # None: not proven
