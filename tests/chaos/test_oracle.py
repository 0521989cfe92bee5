"""What judges a killed run sees each fault and reports nothing for a run without one; and the plan of kills.

The runs here are written by hand, in the formats of the program but without its code: ledgers, batches and weights of
two runs, calls that change the world.
"""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.chaos import compared, kills, oracle
from tests.chaos.calls import UNSURE, judge_calls
from tests.chaos.compared import OTHERWISE, Rollbacks, Trained, judge_same
from tests.chaos.kills import MARK, RUNNING, SHARED, WARM, Kill, Seen, Watch
from tests.chaos.oracle import DISAGREE, LOST, STALE, TWICE, Expected, judge
from tests.chaos.suite import cases

EXPECTED = Expected(steps=3, groups_per_step=2, bound=2)
Event = dict[str, Any]
Change = Callable[["Run"], object]


def admit(group: int) -> Event:
    return {"type": "admit", "group": group, "position": group, "requeued": 0}


def settle(group: int, outcome: str, step: int) -> Event:
    return {"type": "settle", "group": group, "outcome": outcome, "step": step, "detail": ""}


def step(number: int, oldest: int = 0, token_hash: str = "") -> Event:
    return {"type": "step", "step": number, "token_hash": token_hash or f"tokens {number}", "oldest": oldest}


def commit(number: int) -> Event:
    return {"type": "commit", "step": number}


def batch(number: int, *groups: int, oldest: int = 0) -> list[Event]:
    return [*(settle(group, "trained", number) for group in groups), step(number, oldest)]


class Run:
    """Three steps; killed after the second, whose checkpoint was not yet written, and resumed from the first."""

    def __init__(self) -> None:
        self.journal = [
            *map(admit, range(4)), *batch(1, 0, 2), commit(1), admit(4), settle(1, "filtered", 1),
            *batch(2, 3, 4, oldest=1), admit(5),
            {"type": "rollback", "step": 1, "run_generation": 1, "next_group": 4, "reopened": [1, 3], "restored": [3]},
            admit(4), *batch(2, 3, 1, oldest=2), commit(2), *map(admit, (5, 6)), *batch(3, 4, 6, oldest=1), commit(3),
            settle(5, "discarded", 3),
        ]  # fmt: skip
        self.rows = [self.row(1, 0, open_=2), self.row(2, 2, open_=1), self.row(3, 1, open_=1)]
        self.checkpoints: dict[str, Event] = {
            "step-00000002": self.manifest(2, next_group=5, open_=[[4, 4, 0]], trained=4),
            "step-00000003": self.manifest(3, next_group=7, open_=[[5, 5, 0]], trained=6),
        }
        self.kept = {"step-00000002": [4], "step-00000003": [5]}

    def row(self, number: int, oldest: float, open_: int) -> Event:
        ledger = {"trained": 2.0 * number, "open": float(open_)} | dict.fromkeys(
            ("filtered", "stale", "failed", "discarded", "duplicates"), 0.0
        )
        return {"step": number, "staleness/max": oldest} | {f"ledger/{name}": value for name, value in ledger.items()}

    def manifest(self, number: int, next_group: int, open_: list[list[int]], trained: int) -> Event:
        ledger = {
            "next_group": next_group, "cursor": next_group, "counts": {"trained": trained, "stale": 0},
            "open": open_, "duplicates": 0,
        }  # fmt: skip
        return {"step": number, "version": number, "run_generation": 1, "ledger": ledger}

    def write(self, home: Path) -> Path:
        lines = []
        for event in self.journal:
            body = json.dumps(event, separators=(",", ":")).encode()
            lines.append(body[:-1] + b',"crc":"%08x"}\n' % zlib.crc32(body))
        home.mkdir(exist_ok=True)
        (home / "ledger.jsonl").write_bytes(b"".join(lines))
        (home / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in self.rows))
        for name, manifest in self.checkpoints.items():
            directory = home / "checkpoints" / name
            directory.mkdir(parents=True)
            records = b"".join(struct.pack("<qqQ", group, 4, 3) + b"abc" for group in self.kept[name])
            (directory / "buffer.msgpack").write_bytes(b"f" * 16 + records)
            (directory / "weights").write_bytes(b"w" * 100)
            files = {
                file.name: {"size": file.stat().st_size, "xxh3": xxhash.xxh3_128(file.read_bytes()).hexdigest()}
                for file in directory.iterdir()
            }
            body = json.dumps(manifest | {"ledger": json.dumps(manifest["ledger"]), "files": files}).encode()
            seal = f'{{"xxh3":"{xxhash.xxh3_128(body).hexdigest()}","manifest":'.encode()
            (directory / "manifest.json").write_bytes(seal + body + b"}")
        return home


def found(home: Path, change: Change) -> list[tuple[str, str]]:
    run = Run()
    change(run)
    return [(fault.kind, fault.text) for fault in judge(run.write(home), EXPECTED)]


def replaced(old: Event, *new: Event) -> Change:
    def change(run: Run) -> None:
        place = len(run.journal) - 1 - run.journal[::-1].index(old)
        run.journal[place : place + 1] = new

    return change


def edit(row: int, **values: float) -> Change:
    return lambda run: run.rows[row].update({name.replace("_", "/", 1): value for name, value in values.items()})


def ledger(name: str, **values: Any) -> Change:
    return lambda run: run.checkpoints[name]["ledger"].update(values)


def one_more(run: Run) -> None:
    run.kept["step-again"], run.checkpoints["step-again"] = run.kept[NEWEST], run.checkpoints[NEWEST]


NEWEST = "step-00000003"
ROLLBACK = next(event for event in Run().journal if event["type"] == "rollback")
MUTANTS: dict[str, tuple[Change, str, str]] = {
    "a group without an end": (replaced(settle(5, "discarded", 3)), LOST, "group 5 has no end"),
    "a group that was never admitted": (replaced(admit(6)), DISAGREE, "group 6 ends as trained and was never admitted"),
    "a group id left out": (replaced(admit(5), admit(6)), LOST, "group 6 is admitted where group 5 was next"),
    "a prompt left out": (replaced(admit(6), admit(6) | {"position": 7}), LOST, "group 6 asks position 7 where 6"),
    "a batch that is not whole": (replaced(settle(6, "trained", 3)), LOST, "step 3 trained 1 groups of 2"),
    "a step left out": (replaced(step(3, 1), step(4, 1)), LOST, "step 4 follows step 2"),
    "a run that stopped early": (lambda run: run.journal.__delitem__(slice(-6, None)), LOST, "last step .* is 2 of 3"),
    "a group trained in two steps": (replaced(settle(6, "trained", 3), settle(3, "trained", 3)), TWICE,
                                     "group 3 is trained in step 3 and was trained before"),
    "a group trained though it failed": (replaced(admit(5), admit(5), settle(4, "failed", 2)), TWICE,
                                         "group 4 is trained in step 3 and was failed before"),
    "a step trained twice": (replaced(commit(3), *batch(3, 5, 5)), TWICE, "step 3 is there again after step 3"),
    "a batch trained twice": (replaced(step(3, 1), step(3, 1, "tokens 2")), TWICE, "steps 2 and 3 trained the same"),
    "a step that was rolled back and counts": (
        replaced(ROLLBACK, ROLLBACK | {"step": 2, "reopened": [1], "next_group": 5}),
        DISAGREE, "a run went on from step 2 with other groups in flight than there were"),
    "an over-stale step": (replaced(step(3, 1), step(3, 3)), STALE, "step 3 trained tokens 3 versions old, over 2"),
    "an over-stale row": (edit(2, staleness_max=3.0), STALE, "row of step 3: 3 versions, over 2"),
    "a resume that passed over a checkpoint": (replaced(step(2, 1), step(2, 1), commit(2)), LOST,
                                               "went on from step 1 although step 2 was in a checkpoint"),
    "a run generation that repeats": (replaced(ROLLBACK, ROLLBACK | {"run_generation": 0}), DISAGREE,
                                      "run generation 0 follow"),
    "a commit of another step": (replaced(commit(3), commit(2)), DISAGREE, "of step 2 is written down in step 3"),
    "a row left out": (lambda run: run.rows.pop(1), LOST, "0 rows of step 2"),
    "a row written twice": (lambda run: run.rows.append(run.rows[2]), TWICE, "2 rows of step 3"),
    "a row with other books": (edit(1, ledger_trained=6.0), DISAGREE, "row of step 2 has .*'trained': 6.0.* the jour"),
    "a checkpoint with other open groups": (ledger(NEWEST, open=[]), DISAGREE, "books that the journal never had"),
    "a checkpoint with other counts": (ledger(NEWEST, counts={"trained": 5}), DISAGREE, "books that the journal never"),
    "a checkpoint that knows more groups": (ledger(NEWEST, next_group=8), DISAGREE, "books that the journal never had"),
    "no checkpoint of the end": (lambda run: run.checkpoints.pop(NEWEST), LOST, "newest checkpoint is of step 2"),
    "a group kept that is not open": (lambda run: run.kept.update({NEWEST: [6]}), DISAGREE, r"keeps groups \[6\]"),
    "a checkpoint too many": (one_more, DISAGREE, "3 checkpoints were kept, 2 asked for"),
}  # fmt: skip


NONE: dict[str, Change] = {
    "as it is": lambda run: None,
    # By a replica that was killed after its report: the first end counts, and the ledger counts both.
    "a group that is reported twice": replaced(
        settle(5, "discarded", 3), settle(5, "discarded", 3), settle(5, "failed", 3)
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_a_run_without_fault_has_none(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, NONE[name]) == []


@pytest.mark.parametrize("name", list(MUTANTS))
def test_each_fault_is_seen(tmp_path: Path, name: str) -> None:
    change, kind, words = MUTANTS[name]
    faults = found(tmp_path, change)
    assert [text for of, text in faults if of == kind and re.search(words, text)], faults


ASKED = {"type": "change", "step": 2, "what": "rollback", "value": "to step 1"}
BACK = {"type": "back", "step": 3}
LIFE = {"type": "rollback", "step": 2, "run_generation": 1, "next_group": 4, "reopened": [], "restored": []}


def goes_back(run: Run) -> None:
    """The user has the run go back from step 2 to step 1, whose weights become version 3; step 4 follows."""
    run.journal = [
        *map(admit, range(4)), *batch(1, 0, 1), commit(1), *batch(2, 2, 3, oldest=1), ASKED, *map(admit, range(4, 7)),
        BACK, settle(4, "stale", 3), BACK, commit(3), *batch(4, 5, 6), commit(4),
    ]  # fmt: skip
    run.rows = [run.row(1, 0, open_=2), run.row(2, 1, open_=0), run.row(4, 0, open_=0)]
    run.rows[2] |= {"ledger/trained": 6.0, "ledger/stale": 1.0}
    run.kept = {"step-00000003": [5], "step-00000004": []}
    run.checkpoints = {
        "step-00000003": run.manifest(3, next_group=7, open_=[[5, 5, 0], [6, 6, 0]], trained=4),
        "step-00000004": run.manifest(4, next_group=7, open_=[], trained=6),
    }
    for manifest in run.checkpoints.values():
        manifest["run_generation"], manifest["ledger"]["rollbacks"] = 0, [3]
        manifest["ledger"]["counts"]["stale"] = 1


def killed_before(run: Run) -> None:
    """The first time it was killed before it went back, and so resumed from its newest checkpoint."""
    replaced(ASKED, commit(2), ASKED, LIFE, ASKED)(run)
    for manifest in run.checkpoints.values():
        manifest["run_generation"] = 1


WENT_BACK: dict[str, tuple[Change, str, str]] = {
    "as it is": (lambda run: None, "", ""),
    "killed before it went back": (killed_before, "", ""),
    "killed, and went back then": (
        lambda run: [killed_before(run), replaced(ASKED)(run)], DISAGREE, "nobody had asked"),
    "a token of before": (replaced(step(4), step(4, 1)), STALE, "step 4 trained version 2, left behind by version 3"),
    "nobody asked": (replaced(ASKED), DISAGREE, "went back in step 3, and nobody had asked for it"),
    "it did not happen": (lambda run: [run.journal.remove(BACK) for _ in "12"], LOST, "was to go back to step 1, and"),
    "the version of a step": (
        replaced(BACK, BACK | {"step": 2}), DISAGREE, "the run went back to became version 2 after 3"),
    "a version left out": (lambda run: run.journal.insert(-5, BACK | {"step": 5}), DISAGREE, "became version 5 after"),
    "a row of no batch": (lambda run: run.rows.insert(2, run.row(3, 0, open_=2)), TWICE, "1 rows of step 3"),
    "a checkpoint that forgot": (ledger("step-00000004", rollbacks=[]), DISAGREE, "books that the journal never had"),
    "trained before and after": (
        replaced(settle(6, "trained", 4), settle(2, "trained", 4)), TWICE, "group 2 .* was trained before"),
}  # fmt: skip


@pytest.mark.parametrize("name", WENT_BACK)
def test_a_run_that_went_back_is_judged_by_what_that_may_do(tmp_path: Path, name: str) -> None:
    change, kind, words = WENT_BACK[name]
    run = Run()
    goes_back(run)
    change(run)
    faults = judge(run.write(tmp_path), Expected(steps=4, groups_per_step=2, bound=2))
    assert bool(faults) == bool(kind), faults
    assert not kind or [one for one in faults if one.kind == kind and re.search(words, one.text)], faults


def test_the_weights_that_a_run_went_back_to_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(compared, "told", lambda run_dir, **command: told.append(command) or True)
    backs = Rollbacks(tmp_path)
    kill = Kill("rollback", RUNNING, 2, 0.001)

    def save(step: int, weights: str, *rollbacks: int) -> None:
        directory = tmp_path / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        files = {"hf/model.safetensors": {"xxh3": weights}, "buffer.msgpack": {"xxh3": f"buffer {step}"}}
        manifest = {"files": files, "ledger": json.dumps({"rollbacks": rollbacks})}
        (directory / "manifest.json").write_text(json.dumps({"manifest": manifest}))

    assert not backs.ask(kill), "there is no checkpoint yet"
    for step, weights in ((1, "one"), (2, "two")):
        save(step, weights)
    assert backs.ask(kill)
    assert told == [{"type": "rollback", "step": 2}]
    save(3, "three")  # was on its way
    assert (backs.look(), backs.compared) == ([], 0)
    save(4, "two", 4)
    assert (backs.look(), backs.compared) == ([], 1)
    assert backs.ask(Kill("rollback", RUNNING, 2, 0.002))
    save(5, "one", 4, 5)
    assert [fault.text for fault in backs.look()] == [
        "step-00000005, to which the run went back, has not the weights of step-00000003"
    ]


def test_what_is_wrong_with_files_is_seen(tmp_path: Path) -> None:
    for name in ("ledger.jsonl", f"checkpoints/{NEWEST}/manifest.json", f"checkpoints/{NEWEST}/weights"):
        home = Run().write(tmp_path / name.replace("/", "-"))
        data = bytearray((home / name).read_bytes())
        data[len(data) // 2] ^= 1
        (home / name).write_bytes(data)
        assert DISAGREE in {fault.kind for fault in judge(home, EXPECTED)}, name
    home = Run().write(tmp_path / "home")
    (home / "checkpoints/.step-00000002.draft").mkdir()
    assert [fault.text for fault in judge(home, EXPECTED)] == [".step-00000002.draft was left behind"]


def test_what_is_left_running_or_in_shared_memory_is_seen(tmp_path: Path) -> None:
    watch = Watch("mark of this test", tmp_path)
    name = f"sluice-oracle-{os.getpid()}"
    command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, MARK: watch.mark}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (tmp_path / name).mkdir()
        (SHARED / name).mkdir()
        try:
            watch.look()
            left = watch.left(grace_s=0)
            assert [line.split()[0] for line in left] == ["process", str(SHARED / name), str(tmp_path / name)]
            assert f"process {process.pid}: {sys.executable}" in left[0]
        finally:
            (SHARED / name).rmdir()
            (tmp_path / name).rmdir()
            process.kill()
    assert watch.left() == []


@pytest.mark.parametrize("module", [oracle, kills, compared])
def test_the_oracle_shares_no_code_with_the_run(module: Any) -> None:
    allowed = {*sys.stdlib_module_names, "xxhash"}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names if not name.startswith("tests.chaos.")} <= allowed


ALONE = Trained(("a", "b", "c"), (("hf/model.safetensors", "1"), ("trainer/optimizer.safetensors", "2")))


OTHER_WEIGHTS = (ALONE.weights[0], ("trainer/optimizer.safetensors", "3"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, []),
        ({"batches": ("a", "x", "c")}, ["step 2 "]),
        ({"batches": ("b", "a", "c")}, ["step 1 "]),
        ({"batches": ("a", "b")}, ["step 3 "]),
        ({"batches": ("a", "b", "c", "d")}, ["step 4 "]),
        ({"weights": OTHER_WEIGHTS}, ["weights"]),
    ],
    ids=str,
)
def test_what_a_run_trained_otherwise_is_named(other: dict[str, Any], words: list[str]) -> None:
    faults = judge_same(replace(ALONE, **other), ALONE)
    assert [fault.kind for fault in faults] == [OTHERWISE] * len(words)
    assert all(word in fault.text for word, fault in zip(words, faults, strict=True))


def test_what_is_wrong_with_calls_is_seen(tmp_path: Path) -> None:
    calls = [[f"{group}/0", group, 0, "1"] for group in range(5)]
    run, files = tmp_path / "run", tmp_path / "run" / "episodes" / "0"
    files.mkdir(parents=True)

    def write(name: str, *lines: object) -> None:
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def told(count: int) -> None:
        (run / "summary.json").write_text(json.dumps({"uncertain_calls": count}))

    (files / "0a").write_text(json.dumps({"key": {"arguments": [calls[0]]}}))
    (files / "0b").write_text("00000000 {}")
    write("counter", [calls[0], 1], [calls[1], 2], [calls[2], 3])
    write("answered", [calls[0], UNSURE], [calls[1], 2], [calls[1], 2])
    told(1)
    assert judge_calls(run, tmp_path) == []
    write("counter", [calls[1], 2], [calls[2], 3], [calls[2], 4])
    write("answered", [calls[1], 5], [calls[3], 6], [calls[4], UNSURE])
    told(2)
    assert [fault.kind for fault in judge_calls(run, tmp_path)] == ["twice", "lost", "lost", "unreported", "unreported"]


def test_the_same_seed_draws_the_same_plan() -> None:
    def plans(seed: int) -> list[object]:
        return list(zip(range(20), cases(seed, 100), strict=False))

    assert plans(7) == plans(7)
    assert plans(7) != plans(8)


def test_a_moment_is_recognised_by_the_files_of_the_run(tmp_path: Path) -> None:
    seen = Seen(tmp_path, keep_last_n=1)
    running, warm = (seen.reached(Kill("train-0", moment, 2, 0.0)) for moment in (RUNNING, WARM))
    pruned, saved = (seen.reached(Kill("train-0", moment, 2, 0.0)) for moment in ("prune", "save"))
    (tmp_path / "checkpoints/.step-00000002.draft").mkdir(parents=True)
    (tmp_path / "warm_start/logs").mkdir(parents=True)
    assert not any(reached() for reached in (running, warm, pruned, saved))
    for name in ("ledger.jsonl", "warm_start/ledger.jsonl"):
        (tmp_path / name).write_text('{"type":"step","step":1,"crc":"00000000"}\n' * 2)
    assert [reached() for reached in (running, warm, saved, pruned)] == [True, True, True, False]
    for step in (1, 2):
        (tmp_path / f"checkpoints/step-0000000{step}").mkdir()
    assert pruned()
