"""What a run left on disk, judged by somebody who knows only the formats.

Reads `ledger.jsonl`, `metrics.jsonl` and `checkpoints/` of a run that ended, with parsers of its own: nothing of the
program is imported, so that a fault of its readers cannot hide a fault of the run. Formats: docs/checkpoints.md.

A history is the journal with roll-backs applied: at a `rollback` line everything after the state that its checkpoint
holds is dropped. That state is looked for among all that the history went through; where none agrees, journal and
checkpoint disagree. In a history without fault each group is admitted once and ends once, each step is there once and
trained a whole batch, and no token was older than the bound.

Where the user had a run go back to a checkpoint, a `back` line has the version that the checkpoint's weights got: it
takes the number of a step, for which no batch is trained. What was trained before stays so; nothing older is trained.
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
    def expect(self, holds: bool, kind: str, text: str) -> None:
        if not holds:
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
    asked: str = ""  # by the user, to go back to a checkpoint, which has not happened yet
    backs: tuple[int, ...] = ()  # steps without a batch: versions that have the weights of an earlier checkpoint

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
        faults.expect(False, LOST, f"group {group} has no end")
    faults.expect(not last.asked, LOST, f"the run was to go back {last.asked}, and did not")
    faults.expect(last.step == expected.steps, LOST, f"last step of the journal is {last.step} of {expected.steps}")
    judge_metrics(run_dir / "metrics.jsonl", history, expected, faults)
    judge_checkpoints(run_dir / "checkpoints", history, expected, faults)
    return faults


# ---------------------------------------------------------------------- the journal


def journal(path: Path, faults: Faults) -> Iterator[dict[str, Any]]:
    """Its lines; one that cannot be read is a fault, wherever it stands."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        before, mark, after = line.rpartition(b',"crc":')
        whole = bool(mark) and after == b'"%08x"}\n' % zlib.crc32(before + b"}")
        faults.expect(whole, DISAGREE, f"line {number} of the journal is damaged")
        if whole:
            yield json.loads(line)


def replay(events: Iterable[dict[str, Any]], expected: Expected, faults: Faults) -> list[State]:
    """The states that the surviving history went through, from the empty one on."""
    history = [State()]
    for event in events:
        if event["type"] == "rollback":
            history = rolled_back(history, event, faults)
        else:
            history.append(history[-1].copy())
            _apply(event, history[-1], expected, faults)
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
            words = f"a checkpoint of step {event['step']} is written down in step {state.step}"
            faults.expect(event["step"] == state.step, DISAGREE, words)
        case "back":
            _back(event["step"], state, faults)
        case "change" if event["what"] == "rollback":
            state.asked = event["value"]
        case "begin" | "change":  # of a start of the program, and by the user: neither touches the books
            pass
        case other:
            faults.expect(False, DISAGREE, f"the journal knows no line of type {other}")


def _admit(event: dict[str, Any], state: State, faults: Faults) -> None:
    group, position = event["group"], event["position"]
    next_, cursor = state.next_group, state.cursor
    faults.expect(group == next_, LOST, f"group {group} is admitted where group {next_} was next")
    in_turn = position == cursor or event["requeued"]
    faults.expect(in_turn, LOST, f"group {group} asks position {position} where {cursor} was next")
    state.next_group = max(state.next_group, group + 1)
    state.cursor = max(state.cursor, position + 1)
    state.open[group] = (position, event["requeued"])


def _settle(event: dict[str, Any], state: State, faults: Faults) -> None:
    group, outcome, step = event["group"], event["outcome"], event["step"]
    if outcome == "trained":
        before = state.ended.get(group)
        faults.expect(before is None, TWICE, f"group {group} is trained in step {step} and was {before} before")
        in_turn = step == state.step + 1
        faults.expect(in_turn, DISAGREE, f"group {group} is trained for step {step} after step {state.step}")
        state.batch.append(group)
    if group in state.ended:  # the first end counts; a second one is only told of again
        state.duplicates += 1
    elif group in state.open:
        del state.open[group]
        state.ended[group] = outcome
    else:
        faults.expect(False, DISAGREE, f"group {group} ends as {outcome} and was never admitted")


def _step(event: dict[str, Any], state: State, expected: Expected, faults: Faults) -> None:
    step, token_hash, oldest, size = event["step"], event["token_hash"], event["oldest"], len(state.batch)
    faults.expect(step > state.step, TWICE, f"step {step} is there again after step {state.step}")
    faults.expect(step <= state.step + 1, LOST, f"step {step} follows step {state.step}")
    whole = expected.groups_per_step
    faults.expect(size == whole, LOST, f"step {step} trained {size} groups of {whole}")
    same = state.hashes.get(token_hash)
    faults.expect(same is None, TWICE, f"steps {same} and {step} trained the same tokens")
    bound, version = expected.bound, step - 1 - oldest
    faults.expect(oldest <= bound, STALE, f"step {step} trained tokens {oldest} versions old, over {bound}")
    for back in state.backs[-1:]:
        faults.expect(version >= back, STALE, f"step {step} trained version {version}, left behind by version {back}")
    state.step, state.batch, state.committed = step, [], False
    state.hashes[token_hash] = step
    state.oldest[step] = oldest


def _back(step: int, state: State, faults: Faults) -> None:
    if step in state.backs[-1:] and step == state.step:  # the trainer was lost before it went on
        return
    faults.expect(bool(state.asked), DISAGREE, f"the run went back in step {step}, and nobody had asked for it")
    next_ = step == state.step + 1 and not state.batch
    faults.expect(next_, DISAGREE, f"the weights that the run went back to became version {step} after {state.step}")
    state.step, state.asked, state.committed, state.backs = step, "", False, (*state.backs, step)


def rolled_back(history: list[State], event: dict[str, Any], faults: Faults) -> list[State]:
    """The history up to the state from which a run was resumed."""
    step, next_group, reopened = event["step"], event["next_group"], set(event["reopened"])
    for place in reversed(range(len(history))):
        state = history[place]
        if (state.step, state.next_group, set(state.open), state.batch) == (step, next_group, reopened, []):
            break
    else:
        flying = sorted(reopened)
        faults.expect(
            False, DISAGREE, f"a run went on from step {step} with other groups in flight than there were: {flying}"
        )
        place = max((i for i, state in enumerate(history) if state.step <= step), default=0)
        state = history[place]
    newest = max((later.step for later in history[place:] if later.committed), default=0)
    faults.expect(newest <= step, LOST, f"a run went on from step {step} although step {newest} was in a checkpoint")
    restored = event["restored"]
    faults.expect(set(restored) <= reopened, DISAGREE, f"groups restored in step {step} were not open: {restored}")
    resumed = state.copy()
    resumed.asked = ""  # a run that was killed before it went back resumes from its newest checkpoint
    resumed.run_generation = now = event["run_generation"]
    newer = not step or now > state.run_generation
    words = f"run generation {now} follows run generation {state.run_generation}: labels of weights repeat"
    faults.expect(newer, DISAGREE, words)
    return [*history[: place + 1], resumed]


# ---------------------------------------------------------------------- metrics


def judge_metrics(path: Path, history: list[State], expected: Expected, faults: Faults) -> None:
    """One row of training per step, in order, with the books of the journal after that step."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        faults.expect(False, DISAGREE, f"the last line of {path.name} is torn")
        lines.pop()
    rows = [json.loads(line) for line in lines]
    trained = [row for row in rows if "ledger/trained" in row]
    steps = [row["step"] for row in trained]
    for step in range(1, expected.steps + 1):
        times, wanted = steps.count(step), 0 if step in history[-1].backs else 1
        faults.expect(times == wanted, TWICE if times > wanted else LOST, f"{times} rows of step {step}")
    faults.expect(steps == sorted(steps), DISAGREE, f"rows are out of order: {steps}")
    after: dict[int, State] = {}
    for state in history:
        after.setdefault(state.step, state)  # the first state of a step is the one that its line made
    for row in trained:
        step, oldest = row["step"], row["staleness/max"]
        if step not in after or step == 0:
            faults.expect(False, DISAGREE, f"a row of step {step}, which the journal does not know")
            continue
        state = after[step]
        messages = {name: row[f"ledger/{name}"] for name in ("trained", "stale", "failed", "filtered", "discarded")}
        messages |= {"open": row["ledger/open"], "duplicates": row["ledger/duplicates"]}
        known = dict.fromkeys(messages, 0) | state.counts | {"open": len(state.open), "duplicates": state.duplicates}
        faults.expect(messages == known, DISAGREE, f"row of step {step} has {messages}, the journal {known}")
        bound = expected.bound
        faults.expect(oldest <= bound, STALE, f"row of step {step}: {oldest:g} versions, over {bound}")
        same = oldest == state.oldest.get(step)
        faults.expect(same, DISAGREE, f"row of step {step}: staleness {oldest:g}, the journal says another")


# ---------------------------------------------------------------------- checkpoints


def judge_checkpoints(root: Path, history: list[State], expected: Expected, faults: Faults) -> None:
    """Each is whole, and holds a state that the journal knows; the newest one is that of the last step."""
    newest, count = 0, 0
    for directory in sorted(root.iterdir()):
        if directory.name.startswith("."):
            faults.expect(False, DISAGREE, f"{directory.name} was left behind")
        elif (manifest := _manifest(directory, faults)) is not None:
            newest, count = max(newest, manifest["step"]), count + 1
            _judge_ledger(directory, manifest, history, faults)
    steps, keeps = expected.steps, expected.keep_last_n
    faults.expect(newest == steps, LOST, f"the newest checkpoint is of step {newest}, the run ended with {steps}")
    faults.expect(count <= keeps, DISAGREE, f"{count} checkpoints were kept, {keeps} asked for")


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
        faults.expect(False, DISAGREE, f"{directory.name} cannot be read: {error!r}")
        return None
    faults.expect(not wrong, DISAGREE, f"{directory.name} is damaged: {', '.join(wrong)}")
    return None if wrong else sealed["manifest"]


def _judge_ledger(directory: Path, manifest: dict[str, Any], history: list[State], faults: Faults) -> None:
    ledger = json.loads(manifest["ledger"])
    open_ = {group: (position, requeued) for group, position, requeued in ledger["open"]}
    counts = {outcome: n for outcome, n in ledger["counts"].items() if n}
    held = (manifest["step"], manifest["run_generation"], ledger["next_group"], ledger["cursor"], open_, counts)
    held += (tuple(ledger.get("rollbacks", ())),)
    known = [
        (state.step, state.run_generation, state.next_group, state.cursor, state.open, state.counts, state.backs)
        for state in history
        if (state.duplicates, state.batch) == (ledger["duplicates"], [])
    ]
    faults.expect(held in known, DISAGREE, f"{directory.name} holds books that the journal never had: {held}")
    version, waiting = manifest["version"], _groups_kept(directory / "buffer.msgpack")
    faults.expect(version == manifest["step"], DISAGREE, f"{directory.name} holds version {version}")
    each_open = len(waiting) == len(set(waiting)) and set(waiting) <= set(open_)
    words = f"{directory.name} keeps groups {waiting} for the trainer, open are {sorted(open_)}"
    faults.expect(each_open, DISAGREE, words)


def _groups_kept(path: Path) -> list[int]:
    """Group ids: 16 bytes of format, records of id, rollouts, length and that many bytes, 16 bytes of checksum."""
    data, place, found = path.read_bytes(), 16, []
    while place < len(data) - 16:
        group, _, size = struct.unpack_from("<qqQ", data, place)
        found.append(group)
        place += 24 + size
    return found
