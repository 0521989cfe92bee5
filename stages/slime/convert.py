"""Converts between the run's samples and those of user code written for slime. No I/O, no clock.

The function's result is a claim; the engines' requests and answers are recorded. Ids come from the function, log-probs
and versions from the record, as far as both agree from the first token on. `PrefixTree` finds that record.

Invariants: a token is trained only if weights of this run generated it after exactly the tokens before it; prompt and
observation tokens have loss mask 0, log-prob 0.0 and version -1; a token that several returned sequences share and
train is declared shared, so it is trained once. A search in the tree compares each token of a sequence at most twice,
however many sequences are in it; of equally long common prefixes it returns the first that was added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stages.messages import Float32Array, Int32Array, Prefix, PromptGroup, Sample, UInt8Array, VersionRun, wire
from stages.rollouts import alike, as_rollout, runs_of
from stages.slime import types as slime

Rows = npt.NDArray[np.int64]  # [T, columns]: two places are alike if all columns are


@dataclass
class _Node:
    edge: Rows  # what leads here from the node above
    name: int  # the first sequence that came by
    children: dict[bytes, _Node] = field(default_factory=dict)  # by the first row of their edge


class PrefixTree:
    """Sequences by number, each an array [T] or [T, columns] of integers; all of one tree have equally many columns."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros((0, 1), np.int64), -1)

    def longest(self, sequence: npt.NDArray[np.integer]) -> tuple[int, int]:
        """(number of the sequence with the longest common beginning, its length); (-1, 0) if none begins alike."""
        node, at, _ = self._walk(_rows(sequence))
        return node.name, at

    def add(self, sequence: npt.NDArray[np.integer], number: int) -> None:
        rows = _rows(sequence)
        node, at, on_edge = self._walk(rows)
        if on_edge < len(node.edge):
            rest = _Node(node.edge[on_edge:], node.name, node.children)
            node.edge, node.children = node.edge[:on_edge], {rest.edge[0].tobytes(): rest}
        if at < len(rows):
            node.children[rows[at].tobytes()] = _Node(rows[at:], number)

    def _walk(self, rows: Rows) -> tuple[_Node, int, int]:
        """(the node that the rows lead to or towards, how many of them, how many of those are on its edge)."""
        node, at, on_edge = self._root, 0, 0
        while at < len(rows) and on_edge == len(node.edge):
            child = node.children.get(rows[at].tobytes())
            if child is None:
                break
            node, on_edge = child, alike(child.edge, rows[at:])
            at += on_edge
        return node, at, on_edge


def _rows(sequence: npt.NDArray[np.integer]) -> Rows:
    rows = np.ascontiguousarray(sequence, np.int64)
    return rows[:, None] if rows.ndim == 1 else rows


class ReturnedError(ValueError):
    """A user's function returned something that is no rollout. The text has the rule and the cure."""


def given_sample(group: PromptGroup, sample: Sample) -> slime.Sample:
    """The sample of a new rollout for a function, which tokenises the prompt itself, as in slime."""
    number, metadata = group.group_id * group.n_samples + sample.index, group.row_metadata
    return slime.Sample(
        group_index=group.group_id,
        index=number,
        rollout_id=number,
        prompt=group.prompt,
        label=slime.label_of(group.label),
        metadata=metadata,
        generate_function_path=metadata.get("generate_function_path"),
        session_id=f"{group.key}/{sample.index}",
    )


def returned_rollout(
    returned: object, recorded: Sequence[Sample], first: Sample, reward_key: str | None, metadata: Mapping[str, Any]
) -> tuple[Sample, ...]:
    """The sequences of a rollout, from the function's result.

    Args:
        recorded: sequences with the engines' tokens, see stages/gateway/sessions.py.
        first: the rollout as the function got it.
        metadata: of the row; only what differs is kept.

    Raises ReturnedError.
    """
    given: list[Any] = returned if isinstance(returned, list) else [returned]
    # The class may come from another package.
    fields = ("tokens", "response_length", "status", "loss_mask", "reward")
    if not given or not all(hasattr(sample, name) for sample in given for name in fields):
        names = ", ".join(sorted({type(sample).__name__ for sample in given})) or "an empty list"
        raise ReturnedError(f"it returned {names}; return the sample, or a list of samples")
    known = PrefixTree()
    for number, one in enumerate(recorded):
        known.add(one.token_ids, number)
    parts = [_sequence(sample, recorded, known, first) for sample in given]
    reward, reward_parts = _reward([sample.reward for sample in given], reward_key)
    left = _left(given[-1], metadata)
    parts[-1] = msgspec.structs.replace(parts[-1], reward=reward, reward_parts=reward_parts, left=left)
    return _with_prefixes(as_rollout(*parts))


class Evaluated(msgspec.Struct, frozen=True):
    """What `--eval-function-path` found; it travels as `left` of a sample."""

    data: Mapping[str, Mapping[str, list[float]]] = {}  # data set -> "rewards", "truncated"
    metrics: Mapping[str, float] = {}
    versions: tuple[int, ...] = ()  # of the weights that made the tokens of its requests


def returned_evaluation(returned: object) -> Evaluated:
    """The numbers of a `RolloutFnEvalOutput`, or of its `data` alone. Raises ReturnedError."""
    data = getattr(returned, "data", returned)
    rule = 'return RolloutFnEvalOutput(data={NAME: {"rewards": [...], "truncated": [...]}})'
    if not isinstance(data, Mapping) or not data:
        raise ReturnedError(f"it returned {type(returned).__name__}; {rule}")
    found: dict[str, dict[str, list[float]]] = {}
    for name, one in data.items():
        try:
            found[str(name)] = {key: [float(value) for value in one.get(key) or ()] for key in ("rewards", "truncated")}
        except (AttributeError, TypeError, ValueError) as error:
            raise ReturnedError(f"its data set {name!r} has no list of numbers ({error}); {rule}") from error
        if not found[str(name)]["rewards"] or not all(map(math.isfinite, found[str(name)]["rewards"])):
            raise ReturnedError(f"its data set {name!r} needs rewards, all of them finite; {rule}")
    return Evaluated(found, finite_numbers(getattr(returned, "metrics", None)))


def finite_numbers(metrics: object, prefix: str = "") -> dict[str, float]:
    """What of a function's metrics can be logged."""
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    numbers = {f"{prefix}{name}": float(value) for name, value in items if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _sequence(given: Any, recorded: Sequence[Sample], known: PrefixTree, first: Sample) -> Sample:
    """`known`: the recorded sequences by their tokens."""
    status = str(getattr(given.status, "value", given.status))
    if status not in ("completed", "truncated", "aborted", "failed"):
        raise ReturnedError(
            f"it returned a sample with the status {status}; set sample.status to Sample.Status.COMPLETED, or TRUNCATED"
        )
    if status in ("aborted", "failed"):
        reason = (given.metadata or {}).get("error") if isinstance(given.metadata, Mapping) else None
        return msgspec.structs.replace(first, status=status, error=str(reason or f"the function's status is {status}"))
    ids, prompt_length = _ids(given)
    number, made = known.longest(ids)
    versions, log_probs, trained = np.full(len(ids), -1, np.int32), np.zeros(len(ids)), np.zeros(len(ids), np.uint8)
    if made:
        versions[:made], log_probs[:made] = recorded[number].versions[:made], recorded[number].log_probs[:made]
        trained[:made] = recorded[number].loss_mask[:made]  # tokens of other sampling parameters may not be trained
    versions[:prompt_length], log_probs[:prompt_length] = -1, 0.0
    mask = _mask(given, prompt_length, versions, made) & trained
    source = recorded[-1] if recorded else first
    return Sample(
        index=first.index,
        status="completed" if status == "completed" else "truncated",
        response=str(given.response),
        token_ids=wire(ids, Int32Array),
        prompt_length=prompt_length,
        loss_mask=wire(mask, UInt8Array),
        log_probs=wire(log_probs, Float32Array),
        version_runs=tuple(VersionRun(*run) for run in runs_of(versions)),
        turns=int(np.count_nonzero(np.diff(versions >= 0, prepend=False) & (versions >= 0))),
        remove_sample=bool(given.remove_sample),
        teacher_log_probs=_teacher(given, prompt_length, len(ids)),
        cached_tokens=source.cached_tokens,
        resumed=source.resumed,
        generate_s=source.generate_s,
        reused_tokens=source.reused_tokens,
        replaced=first.replaced,
    )


def _left(given: Any, row: Mapping[str, Any]) -> str:
    """What the function has put into `metadata` or set as attributes of its own, as far as JSON can hold it."""
    fields = {item.name for item in dataclasses.fields(slime.Sample)}
    own = given.metadata if isinstance(given.metadata, Mapping) else {}
    metadata = {name: value for name, value in own.items() if name not in row or row[name] != value}
    attributes = {name: value for name, value in vars(given).items() if name not in fields}
    kept = {"metadata": _plain(metadata), "attributes": _plain(attributes)}
    return msgspec.json.encode(kept).decode() if any(kept.values()) else ""


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found[str(name)] = msgspec.Raw(msgspec.json.encode(value))
    return found


def put_back(sample: slime.Sample, left: str | Mapping[str, Any]) -> None:
    """Set on a sample what `_left` found."""
    found = msgspec.json.decode(left) if isinstance(left, str) and left else left or {}
    sample.metadata = {**sample.metadata, **found.get("metadata", {})}
    for name, value in found.get("attributes", {}).items():
        setattr(sample, name, value)


def _ids(given: Any) -> tuple[npt.NDArray[np.int64], int]:
    try:
        ids = np.array(given.tokens, dtype=np.int64).reshape(-1)
        length = int(given.response_length)
    except (TypeError, ValueError) as error:
        raise ReturnedError(f"sample.tokens or sample.response_length is no list of ids or number ({error})") from error
    if not 0 <= length < len(ids):
        raise ReturnedError(
            f"sample.response_length is {length} of {len(ids)} tokens; sample.tokens must be the prompt's tokens and "
            "then the response's, and response_length the number of the latter"
        )
    return ids, len(ids) - length


def _mask(given: Any, prompt_length: int, versions: npt.NDArray[np.int32], made: int) -> npt.NDArray[np.uint8]:
    """[T] the function's loss mask; by default 1 for generated tokens."""
    mask = np.zeros(len(versions), np.uint8)
    response = len(versions) - prompt_length
    if given.loss_mask is None:
        if made < len(versions):
            raise ReturnedError(_drift(made, len(versions)))
        mask[prompt_length:] = versions[prompt_length:] >= 0
        return mask
    values = np.array(given.loss_mask).reshape(-1)
    if len(values) != response or not np.isin(values, (0, 1)).all():
        raise ReturnedError(
            f"sample.loss_mask has {len(values)} entries for {response} tokens of the response; give 0 or 1 for each"
        )
    mask[prompt_length:] = values
    wrong = np.flatnonzero((mask > 0) & (versions < 0))
    if len(wrong):
        place = int(wrong[0])
        if place >= made:
            raise ReturnedError(_drift(made, len(versions)))
        raise ReturnedError(
            f"sample.loss_mask is 1 for token {place}, which no weights made: it was sent to the engine; give 0 for "
            "observations"
        )
    return mask


def _drift(made: int, length: int) -> str:
    return (
        f"sample.tokens has {length} tokens, and from token {made} on they are not what the engine was sent and "
        "answered, so that their log-probs are not known; send input_ids=sample.tokens instead of a text, put the ids "
        'of output["meta_info"]["output_token_logprobs"] behind them, and give loss_mask 0 to what you add yourself'
    )


def _teacher(given: Any, prompt_length: int, length: int) -> Float32Array:
    values = getattr(given, "teacher_log_probs", None)
    if values is None:
        return wire([], Float32Array)
    if len(values) != length - prompt_length:
        raise ReturnedError(
            f"sample.teacher_log_probs has {len(values)} entries for {length - prompt_length} tokens of the response"
        )
    return wire([*([0.0] * prompt_length), *values], Float32Array)


def _reward(rewards: Sequence[Any], key: str | None) -> tuple[float | None, dict[str, float]]:
    """(reward of the rollout: the last that is set; its parts). None: a grader scores it."""
    reward = next((reward for reward in reversed(rewards) if reward is not None), None)
    parts: dict[str, float] = {}
    if isinstance(reward, Mapping):
        if key is None or key not in reward:
            raise ReturnedError(
                f"sample.reward is a dict with {', '.join(map(str, reward))}, but --reward-key is {key}; name the part "
                "that is trained"
            )
        parts = {str(name): float(one) for name, one in reward.items() if isinstance(one, int | float)}
        reward = reward[key]
    if reward is None:
        return None, parts
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ReturnedError(f"sample.reward is {reward!r:.100}; it must be a finite number")
    return value, parts


def _with_prefixes(parts: Sequence[Sample]) -> tuple[Sample, ...]:
    """The sequences, with shared prefixes declared if they contain trained tokens."""
    tree, parts_with = PrefixTree(), list[Sample]()
    for place, part in enumerate(parts):
        shown = np.stack([part.token_ids, part.loss_mask, part.versions], axis=1)
        earlier, n = tree.longest(shown)
        prefix = Prefix(earlier, n) if part.loss_mask[:n].any() else None
        parts_with.append(msgspec.structs.replace(part, prefix=prefix))
        tree.add(shown, place)
    return tuple(parts_with)
