"""What a run left on disk, judged by somebody who knows only the formats.

Reads `ledger.jsonl`, `metrics.jsonl` and `checkpoints/` of a run that ended, with parsers of its own: nothing of the
program is imported, so that a fault of its readers cannot hide a fault of the run. Formats: docs/checkpoints.md.

A history is the journal with roll-backs applied: at a `rollback` line everything after the state that its checkpoint
holds is dropped. That state is looked for among all that the history went through; where none agrees, journal and
checkpoint disagree. In a history without fault each group is admitted once and ends once, each step is there once and
trained a whole batch, and no token was older than the bound.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

LOST, TWICE, STALE, DISAGREE = "lost", "trained twice", "over-stale", "disagreement"
KINDS = (LOST, TWICE, STALE, DISAGREE)


@dataclass(frozen=True)
class Expected:
    """What the run was asked for."""

    steps: int
    groups_per_step: int
    bound: int  # of staleness, versions
    keep_last_n: int = 2


@dataclass(frozen=True)
class Fault:
    kind: str
    text: str


class Faults(list[Fault]):
    def add(self, kind: str, text: str) -> None:
        self.append(Fault(kind, text))


@dataclass
class State:
    """The books after some lines of the journal."""

    run_generation: int = 0
    step: int = 0
    next_group: int = 0
    cursor: int = 0
    open: dict[int, tuple[int, int]] = field(default_factory=dict)  # group -> position, times it was asked again
    ended: dict[int, str] = field(default_factory=dict)  # group -> outcome
    batch: list[int] = field(default_factory=list)  # trained, their step not yet written
    hashes: dict[str, int] = field(default_factory=dict)  # token hash -> step
    oldest: dict[int, int] = field(default_factory=dict)  # step -> staleness
    duplicates: int = 0
    committed: bool = False  # a checkpoint of this step was written down

    def copy(self) -> State:
        parts = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(self).items()}
        return State(**parts)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.ended.values()))


def judge(run_dir: Path, expected: Expected) -> list[Fault]:
    """All faults of a run that is said to be complete."""
    faults = Faults()
    history = replay(list(journal(run_dir / "ledger.jsonl", faults)), expected, faults)
    last = history[-1]
    for group in sorted(last.open):
        faults.add(LOST, f"group {group} has no end")
    if last.step != expected.steps:
        faults.add(LOST, f"the last step of the journal is {last.step} of {expected.steps}")
    judge_metrics(run_dir / "metrics.jsonl", history, expected, faults)
    judge_checkpoints(run_dir / "checkpoints", history, expected, faults)
    return faults


# ---------------------------------------------------------------------- the journal


def journal(path: Path, faults: Faults) -> Iterator[dict[str, Any]]:
    """Its lines; one that cannot be read is a fault, wherever it stands."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        before, mark, after = line.rpartition(b',"crc":')
        if not mark or after != b'"%08x"}\n' % zlib.crc32(before + b"}"):
            faults.add(DISAGREE, f"line {number} of the journal is damaged")
            continue
        yield json.loads(line)


def replay(events: Iterable[dict[str, Any]], expected: Expected, faults: Faults) -> list[State]:
    """The states that the surviving history went through, from the empty one on."""
    history = [State()]
    for event in events:
        if event["type"] == "rollback":
            history = rolled_back(history, event, faults)
            continue
        state = history[-1].copy()
        _apply(event, state, expected, faults)
        history.append(state)
    return history


def _apply(event: dict[str, Any], state: State, expected: Expected, faults: Faults) -> None:
    match event["type"]:
        case "admit":
            _admit(event, state, faults)
        case "settle":
            _settle(event, state, faults)
        case "step":
            _step(event, state, expected, faults)
        case "commit":
            state.committed = True
            if event["step"] != state.step:
                faults.add(DISAGREE, f"a checkpoint of step {event['step']} is written down in step {state.step}")
        case "begin" | "change":  # of a start of the program, and by the user: neither touches the books
            pass
        case other:
            faults.add(DISAGREE, f"the journal knows no line of type {other}")


def _admit(event: dict[str, Any], state: State, faults: Faults) -> None:
    group, position = event["group"], event["position"]
    if group != state.next_group:
        faults.add(LOST, f"group {group} is admitted where group {state.next_group} was next")
    if position != state.cursor and not event["requeued"]:
        faults.add(LOST, f"group {group} asks position {position} where {state.cursor} was next")
    state.next_group = max(state.next_group, group + 1)
    state.cursor = max(state.cursor, position + 1)
    state.open[group] = (position, event["requeued"])


def _settle(event: dict[str, Any], state: State, faults: Faults) -> None:
    group, outcome = event["group"], event["outcome"]
    if outcome == "trained":
        if group in state.ended:
            faults.add(TWICE, f"group {group} is trained in step {event['step']} and was {state.ended[group]} before")
        if event["step"] != state.step + 1:
            faults.add(DISAGREE, f"group {group} is trained for step {event['step']} after step {state.step}")
        state.batch.append(group)
    if group in state.ended:  # the first end counts; a second one is only told of again
        state.duplicates += 1
    elif group in state.open:
        del state.open[group]
        state.ended[group] = outcome
    else:
        faults.add(DISAGREE, f"group {group} ends as {outcome} and was never admitted")


def _step(event: dict[str, Any], state: State, expected: Expected, faults: Faults) -> None:
    step, token_hash = event["step"], event["token_hash"]
    if step <= state.step:
        faults.add(TWICE, f"step {step} is there again after step {state.step}")
    elif step > state.step + 1:
        faults.add(LOST, f"step {step} follows step {state.step}")
    if len(state.batch) != expected.groups_per_step:
        faults.add(LOST, f"step {step} trained {len(state.batch)} groups of {expected.groups_per_step}")
    if token_hash in state.hashes:
        faults.add(TWICE, f"steps {state.hashes[token_hash]} and {step} trained the same tokens")
    if event["oldest"] > expected.bound:
        faults.add(STALE, f"step {step} trained tokens {event['oldest']} versions old, over {expected.bound}")
    state.step, state.batch, state.committed = step, [], False
    state.hashes[token_hash] = step
    state.oldest[step] = event["oldest"]


def rolled_back(history: list[State], event: dict[str, Any], faults: Faults) -> list[State]:
    """The history up to the state from which a run was resumed."""
    step, next_group, reopened = event["step"], event["next_group"], set(event["reopened"])
    for place in reversed(range(len(history))):
        state = history[place]
        if (state.step, state.next_group, set(state.open), state.batch) == (step, next_group, reopened, []):
            break
    else:
        faults.add(
            DISAGREE, f"a run went on from step {step} with other groups in flight than there were: {sorted(reopened)}"
        )
        place = max((i for i, state in enumerate(history) if state.step <= step), default=0)
        state = history[place]
    if any(later.committed for later in history[place:] if later.step > step):
        newest = max(later.step for later in history[place:] if later.committed)
        faults.add(LOST, f"a run went on from step {step} although step {newest} was in a checkpoint")
    if not set(event["restored"]) <= reopened:
        faults.add(DISAGREE, f"groups restored in step {step} were not open: {event['restored']}")
    resumed = state.copy()
    resumed.run_generation = event["run_generation"]
    if step and resumed.run_generation <= state.run_generation:
        now, before = resumed.run_generation, state.run_generation
        faults.add(DISAGREE, f"run generation {now} follows run generation {before}: labels of weights repeat")
    return [*history[: place + 1], resumed]


# ---------------------------------------------------------------------- metrics


def judge_metrics(path: Path, history: list[State], expected: Expected, faults: Faults) -> None:
    """One row of training per step, in order, with the books of the journal after that step."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        faults.add(DISAGREE, f"the last line of {path.name} is torn")
        lines.pop()
    rows = [json.loads(line) for line in lines]
    trained = [row for row in rows if "ledger/trained" in row]
    steps = [row["step"] for row in trained]
    for step in range(1, expected.steps + 1):
        if steps.count(step) != 1:
            faults.add(LOST if step not in steps else TWICE, f"{steps.count(step)} rows of step {step}")
    if steps != sorted(steps):
        faults.add(DISAGREE, f"rows are out of order: {steps}")
    after: dict[int, State] = {}
    for state in history:
        after.setdefault(state.step, state)  # the first state of a step is the one that its line made
    for row in trained:
        if row["step"] not in after or row["step"] == 0:
            faults.add(DISAGREE, f"a row of step {row['step']}, which the journal does not know")
            continue
        state = after[row["step"]]
        messages = {name: row[f"ledger/{name}"] for name in ("trained", "stale", "failed", "filtered", "discarded")}
        messages |= {"open": row["ledger/open"], "duplicates": row["ledger/duplicates"]}
        known = dict.fromkeys(messages, 0) | state.counts | {"open": len(state.open), "duplicates": state.duplicates}
        if messages != known:
            faults.add(DISAGREE, f"row of step {row['step']} has {messages}, the journal {known}")
        oldest = row["staleness/max"]
        if oldest > expected.bound:
            faults.add(STALE, f"row of step {row['step']}: {oldest:g} versions, over {expected.bound}")
        if oldest != state.oldest.get(row["step"]):
            faults.add(DISAGREE, f"row of step {row['step']}: staleness {oldest:g}, the journal says another")


# ---------------------------------------------------------------------- checkpoints


def judge_checkpoints(root: Path, history: list[State], expected: Expected, faults: Faults) -> None:
    """Each is whole, and holds a state that the journal knows; the newest one is that of the last step."""
    newest, count = 0, 0
    for directory in sorted(root.iterdir()):
        if directory.name.startswith("."):
            faults.add(DISAGREE, f"{directory.name} was left behind")
            continue
        manifest = _manifest(directory, faults)
        if manifest is not None:
            newest, count = max(newest, manifest["step"]), count + 1
            _judge_ledger(directory, manifest, history, faults)
    if newest != expected.steps:
        faults.add(LOST, f"the newest checkpoint is of step {newest}, the run ended with {expected.steps}")
    if count > expected.keep_last_n:
        faults.add(DISAGREE, f"{count} checkpoints were kept, {expected.keep_last_n} asked for")


def _manifest(directory: Path, faults: Faults) -> dict[str, Any] | None:
    """The manifest, if it and the files that it lists are as they were written."""
    try:
        data = (directory / "manifest.json").read_bytes()
        sealed = json.loads(data)
        body = data[data.index(b'"manifest":') + len(b'"manifest":') : -1]
        wrong = [] if xxhash.xxh3_128(body).hexdigest() == sealed["xxh3"] else ["manifest.json"]
        files: dict[str, Any] = sealed["manifest"]["files"]
        there = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}
        wrong += sorted(there.symmetric_difference({*files, "manifest.json"}))
        for name in there & set(files):
            content = (directory / name).read_bytes()
            if (len(content), xxhash.xxh3_128(content).hexdigest()) != (files[name]["size"], files[name]["xxh3"]):
                wrong.append(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        faults.add(DISAGREE, f"{directory.name} cannot be read: {error!r}")
        return None
    if wrong:
        faults.add(DISAGREE, f"{directory.name} is damaged: {', '.join(wrong)}")
        return None
    manifest: dict[str, Any] = sealed["manifest"]
    return manifest


def _judge_ledger(directory: Path, manifest: dict[str, Any], history: list[State], faults: Faults) -> None:
    ledger = json.loads(manifest["ledger"])
    open_ = {group: (position, requeued) for group, position, requeued in ledger["open"]}
    counts = {outcome: n for outcome, n in ledger["counts"].items() if n}
    held = (manifest["step"], manifest["run_generation"], ledger["next_group"], ledger["cursor"], open_, counts)
    for state in history:
        known = (state.step, state.run_generation, state.next_group, state.cursor, state.open, state.counts)
        if (known, state.duplicates, state.batch) == (held, ledger["duplicates"], []):
            break
    else:
        faults.add(DISAGREE, f"{directory.name} holds books that the journal never had: {held}")
    if manifest["version"] != manifest["step"]:
        faults.add(DISAGREE, f"{directory.name} holds version {manifest['version']}")
    waiting = _groups_kept(directory / "buffer.msgpack")
    if len(waiting) != len(set(waiting)) or not set(waiting) <= set(open_):
        faults.add(DISAGREE, f"{directory.name} keeps groups {waiting} for the trainer, open are {sorted(open_)}")


def _groups_kept(path: Path) -> list[int]:
    """Group ids: 16 bytes of format, records of id, rollouts, length and that many bytes, 16 bytes of checksum."""
    data, place, found = path.read_bytes(), 16, []
    while place < len(data) - 16:
        group, _, size = struct.unpack_from("<qqQ", data, place)
        found.append(group)
        place += 24 + size
    return found


# What a run trained, for comparing runs: a sync run trains the same whatever died in it, bit for bit. The hash of a
# batch is over its group ids, token ids and masks; rewards and all else are in the weights that come of them.

OTHERWISE = "trained otherwise"


@dataclass(frozen=True)
class Trained:
    """Of a complete run."""

    batches: tuple[str, ...]  # the hash of each, in the order of steps
    weights: tuple[tuple[str, str], ...]  # files of the last checkpoint's model and optimizer, and their checksums


def trained_by(run_dir: Path, expected: Expected) -> Trained:
    """By the history that survived."""
    faults = Faults()
    last = replay(list(journal(run_dir / "ledger.jsonl", faults)), expected, faults)[-1]
    if faults:
        raise ValueError(f"the journal of {run_dir} is not one to compare with: {faults[0].text}")
    batches = tuple(name for name, _ in sorted(last.hashes.items(), key=lambda one: one[1]))
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    files = json.loads((newest / "manifest.json").read_bytes())["manifest"]["files"]
    weights = tuple(sorted((name, files[name]["xxh3"]) for name in files if name.endswith(".safetensors")))
    if not batches or not weights:
        raise ValueError(f"{run_dir}: {len(batches)} steps and {len(weights)} files of weights are nothing to compare")
    return Trained(batches, weights)


def judge_same(found: Trained, undisturbed: Trained) -> list[Fault]:
    """Where a run differs from the undisturbed one: its first batch that does, and its weights."""
    faults: list[Fault] = []
    if found.batches != undisturbed.batches:
        both = zip(found.batches, undisturbed.batches, strict=False)
        behind = min(len(found.batches), len(undisturbed.batches)) + 1
        step = next((at for at, (one, other) in enumerate(both, 1) if one != other), behind)
        faults.append(Fault(OTHERWISE, f"step {step} trained other tokens than in the undisturbed run"))
    if found.weights != undisturbed.weights:
        faults.append(Fault(OTHERWISE, "the weights differ from those of the undisturbed run"))
    return faults
