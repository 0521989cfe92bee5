"""Records of a run: the journal with its audit, effective training time, the run directory, copies of `--save-hf`.

The journal's audit is the oracle of every fault test, so it has tests of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import pytest
from msgspec.structs import replace

from configs.schema import Config
from models.checkpoint import (
    CheckpointError,
    Manifest,
    commit_directory,
    draft_path,
    final_path,
    read_manifest,
    write_manifest,
)  # fmt: skip
from models.engines.access_token import read_token
from models.errors import DeltaError, UserFault
from models.families.source import read_hf_config
from models.fault_injection import injected
from models.weights.delta import read_header
from models.weights.layout import read_layout
from pipeline.control.client import _address
from pipeline.errors import ReplicaFailed, UsageError
from pipeline.facts.run_directory import RunDir, read_fleet
from pipeline.facts.run_log import log_line, run_log, show_line
from pipeline.facts.trace import read_records
from pipeline.observe.summary import read_summary
from pipeline.record.journal import (
    Admitted,
    Audit,
    Began,
    Committed,
    EffectiveTime,
    Ended,
    Event,
    Journal,
    JournalDamaged,
    RolledBack,
    Stepped,
    WentBack,
    audit,
    read_journal,
    resumed_time,
)
from pipeline.record.kept_files import read_lives, save_hf
from pipeline.record.metrics import JsonlMetrics, read_metrics
from pipeline.record.recorder import Recorder
from pipeline.supervise.external_servers import read_policy_config
from pipeline.supervise.lifecycle import Lifecycle
from stages.data.sources import open_source
from stages.errors import SavedBatchError
from stages.graders.grade import UnknownGraderError
from stages.messages import CheckpointReady, Settled, StepDone
from stages.prompts.ledger import Ledger
from stages.reward.judge import load_template
from stages.train.saved_groups import load_batch, read_groups, restorable
from transport import TopicServer


def audited(tmp_path: Path, *events: Event) -> Audit:
    with Journal(tmp_path / "ledger.jsonl") as journal:
        journal.write(*events)
    return audit(tmp_path / "ledger.jsonl")


def admitted(*groups: int) -> list[Event]:
    return [Admitted(group, group) for group in groups]


def trained(step: int, *groups: int) -> list[Event]:
    return [*(Ended(group, "trained", step) for group in groups), Stepped(step, f"hash {step}", oldest=step % 2)]


def test_the_first_terminal_state_counts_and_a_second_training_is_reported(tmp_path: Path) -> None:
    books = audited(tmp_path, *admitted(0, 1), *trained(1, 0), Ended(0, "discarded", 1), *trained(2, 0, 1))
    assert books.outcomes == {"trained": 2}
    assert books.trained == {0: 1, 1: 2}
    assert books.twice == (0,)


def test_a_drain_after_the_checkpoint_is_undone_by_a_resume(tmp_path: Path) -> None:
    """The stopped run discards its rest at the checkpoint's own step; the checkpoint knows it as open."""
    drained = [*admitted(0, 1, 2), Ended(2, "discarded", 1), *trained(1, 0), Committed(1), Ended(1, "discarded", 1)]
    assert audited(tmp_path, *drained).outcomes == {"discarded": 2, "trained": 1}
    books = audited(tmp_path, RolledBack(1, 2, next_group=3, reopened=(1,)), *trained(2, 1))
    assert books.outcomes == {"discarded": 1, "trained": 2}
    assert books.open == 0


def test_a_checkpoint_that_reopens_a_trained_group_does_not_hide_its_second_training(tmp_path: Path) -> None:
    books = audited(
        tmp_path, *admitted(0), *trained(1, 0), Committed(1), RolledBack(1, 2, 1, reopened=(0,)), *trained(2, 0)
    )
    assert books.twice == (0,)


COMMIT = b'{"type":"commit","step":3,"crc":"00000000"}\n'


@pytest.mark.parametrize("torn", [b"garbage\n", COMMIT, b"12", b"\0" * 40, b"x\ny\n\0"])
def test_reading_ends_at_what_a_crash_tore_which_does_not_hide_what_follows(tmp_path: Path, torn: bytes) -> None:
    books, path = audited(tmp_path, *admitted(0, 1), *trained(1, 0), Committed(1)), tmp_path / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert audit(path) == books
    assert len(list(read_journal(path))) == 5
    books = audited(tmp_path, RolledBack(1, 2, next_group=2, reopened=(1,), restored=(1,)), *trained(2, 1))
    assert (books.outcomes, books.open, books.twice) == ({"trained": 2}, 0, ())
    assert sum(isinstance(event, RolledBack) for event in read_journal(path)) == 1


def test_the_last_line_of_a_killed_run_may_lack_only_its_end(tmp_path: Path) -> None:
    audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert audited(tmp_path, Stepped(1, "hash 1", 1)).batches == {1: "hash 1"}


def test_each_line_is_json_and_no_flipped_bit_of_it_is_taken_for_what_was_written(tmp_path: Path) -> None:
    audited(tmp_path, Admitted(0, 7), Ended(0, "failed", 1, 'a "reason", "crc": in { words }'), Committed(1))
    path = tmp_path / "ledger.jsonl"
    content = path.read_bytes()
    written = list(read_journal(path))
    first, second, _ = map(json.loads, content.splitlines())
    assert first == {"type": "admit", "group": 0, "position": 7, "requeued": 0, "crc": first["crc"]}
    assert int(first["crc"], 16) == zlib.crc32(b'{"type":"admit","group":0,"position":7,"requeued":0}')
    assert second["detail"] == 'a "reason", "crc": in { words }'
    last = content.rindex(b"{")
    for place in range(last, len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        assert list(read_journal(path)) == written[:2], content[place:]


def test_a_journal_that_cannot_be_trusted_is_refused_and_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    old = b'5c2dbd5e {"type":"commit","step":3}\n'
    path.write_bytes(old)
    for reads in (Journal, audit):
        with pytest.raises(JournalDamaged, match=r"was written by an earlier version of Sluice.*; resume the run with"):
            reads(path)
    assert path.read_bytes() == old
    path.unlink()
    audited(tmp_path, *admitted(0, 1), *trained(1, 0))
    damaged = path.read_bytes().replace(b'"position":0', b'"position":7', 1)
    path.write_bytes(damaged)
    with pytest.raises(JournalDamaged, match=r"damaged before line 2, which is whole.*; restore the file, or move it"):
        Journal(path)
    assert path.read_bytes() == damaged, "nothing is cut away that may be evidence"


async def test_what_came_before_a_checkpoint_is_in_the_journal_when_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed just after the rename, the run is resumed from this checkpoint, and its books must balance."""
    on_disk: list[bytes] = []

    def killed(*_: object) -> None:
        on_disk.append((tmp_path / "run" / "ledger.jsonl").read_bytes())

    def commit(draft: Path, final: Path) -> None:
        commit_directory(draft, final)
        killed()

    monkeypatch.setattr("pipeline.record.recorder.commit_directory", commit)
    monkeypatch.setattr("pipeline.record.recorder.prune", killed)
    config = msgspec.convert({"observe": {"use_tensorboard": False, "trace": False}}, Config)
    ledger = Ledger()
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as recorder:
        for position in range(3):
            recorder.admitted(ledger.admit(position=position))
        recorder.settled([(0, Settled(0, "trained", step=1))])
        ledger.settle(0, "trained")
        await recorder.step(StepDone(1, 1, (0,), {}, tokens=4, token_hash="h"))
        recorder.admitted(ledger.admit(position=3))
        draft = draft_path(rundir.checkpoints, 1)
        draft.mkdir()
        await recorder.commit(CheckpointReady(1, 1, str(draft)), ledger.snapshot())
        assert final_path(rundir.checkpoints, 1).is_dir()
    assert len(on_disk) == 2
    (tmp_path / "ledger.jsonl").write_bytes(on_disk[1])
    assert [*read_journal(tmp_path / "ledger.jsonl")][-1:] == [Committed(1)], "killed while it prunes"
    (tmp_path / "ledger.jsonl").write_bytes(on_disk[0])
    open_ = tuple(group.group_id for group in ledger.open_groups())
    books = audited(tmp_path, RolledBack(1, 1, ledger.next_group, reopened=open_))
    assert (books.admitted, books.open, books.trained, books.batches) == (4, 3, {0: 1}, {1: "h"})


def step(number: int, took_s: float) -> Event:
    return Stepped(number, f"hash {number}", 0, took_s)


def test_what_a_roll_back_undoes_is_lost_and_what_lies_between_two_starts_belongs_to_no_start() -> None:
    first = [Began(1000.0), Admitted(0, 0), step(1, 10.0), Committed(1), step(2, 10.0)]
    second = [RolledBack(1, 1, 4), Began(5000.0, before_s=1030.0), step(2, 8.0), step(3, 8.0), Committed(3)]
    assert EffectiveTime(began_s=1000.0).share(1000.0) == 0.0
    once = resumed_time(first, Began(5000.0, before_s=1030.0), step=1)
    assert (once.former_s, once.steps) == (30.0, {1: 10.0})
    assert once.share(5010.0) == 10.0 / 40.0
    again = resumed_time([*first, *second], Began(9000.0, before_s=5020.0), step=3)
    assert (again.former_s, again.steps) == (50.0, {1: 10.0, 2: 8.0, 3: 8.0})
    back = resumed_time([*first, *second], Began(9000.0, before_s=5020.0), step=0)
    assert back.steps == {}


async def test_the_recorder_writes_it_down_and_a_resume_goes_on_with_it(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("pipeline.record.recorder.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("pipeline.record.recorder.time.time", lambda: 1000.0 + clock[0])
    with Recorder(Config(), rundir) as recorder:
        recorder.journal.begin_with(recorder.began)
        clock[0] += 5.0  # the processes start
        await recorder.step(StepDone(0, 0, (), {}, 0))
        for number in (1, 2):
            clock[0] += 10.0
            await recorder.step(StepDone(number, number, (number,), {}, 10))
        assert recorder.effective.share(1000.0 + clock[0]) == 20.0 / 25.0
    for file in (rundir.ledger, rundir.metrics):
        os.utime(file, (1127.0, 1127.0))  # it was killed two seconds later
    assert [e.took_s for e in read_journal(rundir.ledger) if isinstance(e, Stepped)] == [10.0, 10.0]
    assert '"perf/effective_training_time":0.8' in rundir.metrics.read_text()
    clock[0] = 900.0
    with Recorder(Config(), rundir, resume_step=1) as resumed:
        await resumed.step(StepDone(2, 2, (), {}, 0, rolled_back=True))
        resumed.journal.flush()
        assert list(read_journal(rundir.ledger))[-1] == WentBack(2)
        assert resumed.began == Began(1900.0, 1127.0, Config().asynchrony.max_staleness)
        assert (resumed.effective.former_s, resumed.effective.steps) == (27.0, {1: 10.0})


async def test_a_resume_removes_what_its_killed_predecessor_had_not_yet_removed(rundir: RunDir) -> None:
    """Once it trains, for a refused resume changes nothing; not what it was resumed from, or is to go back to."""
    for number in (1, 2, 3, 4, 5):
        draft = draft_path(rundir.checkpoints, number)
        draft.mkdir(parents=True)
        write_manifest(draft, Manifest(step=number, version=number, run_generation=0))
        commit_directory(draft, final_path(rundir.checkpoints, number))
    config = replace(Config(), checkpoint=replace(Config().checkpoint, keep_last_n=1))
    with Recorder(config, rundir, resume_step=2) as resumed:
        resumed.spared.add(3)
        assert len([*rundir.checkpoints.iterdir()]) == 5
        await resumed.step(StepDone(2, 2, (), {}, 0))
    assert {path.name for path in rundir.checkpoints.iterdir()} == {f"step-0000000{n}" for n in (2, 3, 5)}


def test_a_summary_names_the_largest_bound_of_all_starts(rundir: RunDir) -> None:
    """Tokens of all starts are in its histogram: with the bound of the last one they might look too old."""
    for number, (begins, later) in enumerate([(3, 8), (5, 2), (2, 4)]):
        config = replace(Config(), asynchrony=replace(Config().asynchrony, max_staleness=begins))
        with Recorder(config, rundir, resume_step=number or None) as recorder:
            assert recorder.staleness_bound == (8 if number else 3)
            recorder.journal.begin_with(recorder.began)
            recorder.changed("auto max_staleness", f"{later} from step 8 on")
            recorder.bound(later)
            assert recorder.staleness_bound == 8
            assert recorder.view.run.staleness_bound == later


# What lies where a file of a run belongs: nobody waits for it, and nobody reads it without end.


def rows(path: Path) -> int:
    return len(list(read_metrics(path)))


READERS: dict[str, Callable[[Path], object]] = {
    "ledger.jsonl": lambda path: list(read_journal(path)),
    "again/ledger.jsonl": Journal,
    "metrics.jsonl": rows,
    "again/metrics.jsonl": JsonlMetrics,
    "trace/engine-0.jsonl": lambda path: list(read_records(path.parent)),
    "replicas/fleet.json": lambda path: read_fleet(RunDir(path.parents[1])),
    "summary.json": read_summary,
    "faults.jsonl": lambda path: injected(path.parent),
    "lives.json": lambda path: read_lives(path.parent),
    "control.json": lambda path: _address(path.parent),
    "manifest.json": lambda path: read_manifest(path.parent),
    "buffer.msgpack": lambda path: restorable(path.parent, 2),
    "again/buffer.msgpack": lambda path: read_groups(path.parent, {1}),
    "batch-0": lambda path: load_batch(str(path.with_name("batch-{rollout_id}")), 0),
    "model.safetensors": read_layout,
    "step.delta": read_header,
    "token": read_token,
    "model/config.json": lambda path: read_hf_config(path.parent),
    "config.json": lambda path: read_policy_config(path.parent),
    "train.jsonl": lambda path: open_source(str(path), ("prompt",)),
    "judge.txt": lambda path: load_template(str(path)),
}
REFUSED = (UserFault, UsageError, OSError, UnknownGraderError, SavedBatchError, DeltaError)
NOTHING: tuple[object, ...] = (None, [], {}, frozenset())


def endless(*_: object) -> None:
    raise AssertionError("it waits")


def outcome(read: Callable[[Path], object], path: Path) -> object:
    try:
        return read(path)
    except REFUSED as error:
        return error


@pytest.mark.parametrize("name", READERS)
def test_nothing_that_lies_in_place_of_a_file_is_waited_for_or_read_without_end(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, endless)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
        for make in (path.mkdir, partial(os.mkfifo, path), partial(path.symlink_to, "/dev/zero")):
            make()
            signal.alarm(60)
            found = outcome(READERS[name], path)
            if isinstance(found, BaseException):
                assert str(path) in str(found)
                assert re.search("is a (directory|named pipe|device)|there is no file or directory", str(found))
            else:
                assert found in NOTHING
            signal.alarm(0)
            if make == path.mkdir:
                path.rmdir()
            else:
                path.unlink()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_file_of_a_terabyte_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"has 1099511627776 bytes and should have at most 268435456; put the"):
        read_manifest(tmp_path)


HOLD = "import sys; from pathlib import Path; from pipeline.facts.run_directory import RunDir; "
HOLD += "rundir = RunDir(Path(sys.argv[1])).open(resume=False); print(rundir.sockets, flush=True); sys.stdin.read()"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="home-") as home:  # its path is short, whatever tmp_path is
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


def test_what_a_killed_run_left_of_its_sockets_goes_with_the_next_start(tmp_path: Path, runtime: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        left = Path(process.stdout.readline().strip())
        with RunDir(tmp_path / "meanwhile").open(resume=False):
            assert left in runtime.iterdir(), "its run is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(runtime.iterdir()) == [left]
    with RunDir(tmp_path / "next").open(resume=False) as rundir:
        assert list(runtime.iterdir()) == [rundir.sockets]
        assert rundir.sockets.stat().st_mode & 0o777 == 0o700
    assert list(runtime.iterdir()) == []


def test_sockets_stay_young_and_their_loss_is_named(tmp_path: Path, runtime: Path) -> None:
    config = msgspec.convert({"observe": {"use_tensorboard": False, "trace": False}}, Config)
    with RunDir(tmp_path / "run").open(resume=False) as rundir, Recorder(config, rundir) as recorder:
        (rundir.sockets / "keys").mkdir()
        names = [rundir.sockets, rundir.sockets / "keys", rundir.sockets / "hub.sock", rundir.sockets / "owner.pid"]
        names[2].touch()
        for path in names:
            os.utime(path, (1, 1))
        assert rundir.keep_sockets() == ""
        assert [path for path in names if path.stat().st_mtime < 2] == []
        lifecycle = Lifecycle(cast("TopicServer", None), {}, recorder)
        shutil.rmtree(rundir.sockets)
        words = f"reward-0 ended with exit 1, and the directory of the run's sockets, {rundir.sockets}, was removed"
        with pytest.raises(ReplicaFailed, match=re.escape(words)) as ended:
            lifecycle.lost("reward", "reward-0", "exit 1")
        assert f"--resume {rundir.path}; set XDG_RUNTIME_DIR or TMPDIR" in str(ended.value)


def test_a_new_directory_is_for_its_owner_alone_and_one_that_anybody_can_put_links_into_is_refused(
    tmp_path: Path, runtime: Path
) -> None:
    with RunDir(tmp_path / "new" / "run").open(resume=False) as rundir:
        assert rundir.path.stat().st_mode & 0o777 == 0o700
    assert RunDir(tmp_path / "new" / ".." / "run").path == tmp_path / "run", "people read it"
    for name, mode in (("shared", 0o750), ("open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    with RunDir(tmp_path / "shared").open(resume=False) as rundir:
        assert rundir.path.stat().st_mode & 0o777 == 0o750, "whom its owner lets in is the owner's affair"
    (tmp_path / "open" / "logs").symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"can be written by every user of this machine \(mode 0777\); chmod o-w it"):
        RunDir(tmp_path / "open").open(resume=False)
    assert not (tmp_path / "engine-0.log").exists()
    assert [path.name for path in (tmp_path / "open").iterdir()] == ["logs"], "nothing was written there"


def test_sockets_go_where_their_paths_are_short_enough(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, short = tmp_path / ("d" * 60) / ("e" * 40), runtime
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with RunDir(tmp_path / "run").open(resume=False) as rundir:
        assert rundir.sockets.parent == short
        for name in ("ask.sock", "trainer-group-123456.sock"):
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(rundir.sockets / name))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UsageError, match="107 bytes that the kernel takes; set TMPDIR to a directory whose path has"):
        RunDir(tmp_path / "other").open(resume=False)


def checkpoint(path: Path, text: str) -> Path:
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text("{}")
    (path / "hf" / "model.safetensors").write_text(text)
    return path


def test_each_step_has_its_place_or_replaces_the_one_before(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", "one"), checkpoint(tmp_path / "b", "two")
    assert save_hf(first, str(tmp_path / "out" / "step-{step}"), 7) == tmp_path / "out" / "step-7"
    for made in (first, second):
        save_hf(made, str(tmp_path / "newest"), 8)
    assert save_hf(second, str(tmp_path / "out" / "{rollout_id}" / "hf"), 8) == tmp_path / "out" / "7" / "hf"
    assert (tmp_path / "newest" / "model.safetensors").read_text() == "two"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "newest", "out"]  # no drafts are left
    assert (tmp_path / "out" / "step-7" / "model.safetensors").read_text() == "one"


def test_what_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match=r"--save-hf .*work exists and is no model .*choose another place"):
        save_hf(checkpoint(tmp_path / "a", "one"), str(tmp_path / "work"), 1)
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


# ------------------------------------------------------------------ run.log


def test_the_log_of_a_run_goes_on_over_starts_and_keeps_warnings_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_log(tmp_path):
        show_line("one")
        logging.getLogger("some.library").warning("careful")
    with contextlib.suppress(ZeroDivisionError), run_log(tmp_path):
        log_line("two")
        raise ZeroDivisionError("of a defect")
    lines = [line.split(" controller: ") for line in (tmp_path / "run.log").read_text().splitlines()]
    assert [text for _, text in lines] == ["one", "careful", "two", "ends: ZeroDivisionError: of a defect"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", time) for time, _ in lines)
    assert capsys.readouterr().err.startswith("one\n"), "the log stands beside the terminal"
    monkeypatch.setattr("pipeline.facts.run_log.MOST_BYTES", 1000)
    with run_log(tmp_path):
        for number in range(100):
            log_line(f"line {number}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.log", "run.log.1"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert (tmp_path / "run.log").read_text().endswith("line 99\n")


LEVELS = {
    "debug": (["step", "fine", "notes", "careful"], ["careful"]),
    "info": (["step", "careful"], ["careful"]),
    "warning": (["step", "careful"], ["careful"]),
    "error": (["step"], []),
}


def test_the_level_decides_what_loggers_add_and_never_what_the_run_says(tmp_path: Path) -> None:
    """In a process of its own: pytest has handlers."""
    program = (
        "import logging, sys\nfrom pathlib import Path\nfrom pipeline.facts.run_log import run_log, log_line\n"
        "log = logging.getLogger('some.library')\n"
        "for level in sys.argv[2:]:\n    place = Path(sys.argv[1], level)\n    place.mkdir()\n"
        "    print(level, file=sys.stderr)\n    with run_log(place, level=level):\n"
        "        log_line('step'); log.debug('fine'); log.info('notes'); log.warning('careful')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *LEVELS]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    for level, (kept, _) in LEVELS.items():
        lines = (tmp_path / level / "run.log").read_text().splitlines()
        assert [line.split(": ")[1] for line in lines] == kept, level
    assert done.stderr.split() == [word for level, (_, shown) in LEVELS.items() for word in (level, *shown)]


@pytest.mark.parametrize("place", ["/dev/full", "/proc/none/run.log"])
def test_a_log_without_room_ends_nothing(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.log").symlink_to(place)
    with run_log(tmp_path):
        show_line("shown")
    assert capsys.readouterr().err == "shown\n"
