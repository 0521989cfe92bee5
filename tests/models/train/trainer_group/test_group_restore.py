"""What a new trainer group is asked to do after a loss, call by call; the trainer group is a thread that writes down
what it is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_group_rig import until

from models.checkpoint import Manifest, commit_directory, draft_path, final_path, write_manifest
from models.errors import TrainStateUnreadable
from models.train.trainer_group.backend import TrainerGroupBackend
from models.train.trainer_group.calls import (
    Answer,
    BeginBatch,
    Call,
    Done,
    Load,
    Metrics,
    Raised,
    Save,
    Step,
    decode_message,
    encode,
)
from models.train.trainer_group.errors import TrainerGroupClosed, TrainerGroupDiverged
from models.train.trainer_group.journal import committed
from models.train.trainer_group.link import Link, LinkLost
from models.train.trainer_group.rank_spec import Rendezvous


class ToldGang:
    """Replies to all calls. `die_at`: the call by whose name it dies, as often as it is named; then the next is up."""

    def __init__(self, home: Path) -> None:
        self.home, self.met, self.incarnation = home, list[Rendezvous](), -1
        self.lives: list[list[str]] = []  # the calls of each incarnation
        self.die_at: list[str] = []
        self.refuse: dict[str, Raised] = {}  # by the call as it is written down
        self.stopped = False
        self._listening: socket.socket
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.up()
        self._thread.start()

    def meeting(self) -> Rendezvous | None:
        return self.met[-1] if self.met else None

    def up(self) -> None:
        self.incarnation += 1
        address = str(self.home / f"s{self.incarnation}")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(address)
        self._listening.listen(1)
        self._listening.settimeout(0.05)
        self.met.append(Rendezvous(self.incarnation, address))

    def _live(self) -> None:
        while not self.stopped:
            try:
                connected, _ = self._listening.accept()
            except TimeoutError:
                continue
            connected.settimeout(None)
            link, calls = Link(connected), list[str]()
            self.lives.append(calls)
            try:
                while self._serve(link, calls):
                    pass
            except LinkLost:
                return
            self.up()
            link.close()

    def _serve(self, link: Link, calls: list[str]) -> bool:
        call = decode_message(link.receive())
        calls.append(written(call))
        if self.die_at and calls[-1] == self.die_at[0]:
            self.die_at.pop(0)
            return False
        if isinstance(call, Save):
            Path(call.directory).mkdir(parents=True)
            (Path(call.directory) / "state").write_text("whole")
        link.send(encode(self.refuse.get(calls[-1]) or (Metrics({}) if isinstance(call, Step) else Done())))
        return True


def written(call: Call | Answer) -> str:
    match call:
        case BeginBatch(version=version):
            return f"batch {version}"
        case Save(directory) | Load(directory):
            return f"{type(call).__name__} {Path(directory).name}"
    return type(call).__name__


@pytest.fixture
def trainer_group(tmp_path: Path) -> Iterator[ToldGang]:
    made = ToldGang(tmp_path)
    yield made
    made.stopped = True


def batch(backend: TrainerGroupBackend, number: int) -> None:
    backend.begin_batch(rollouts=1, steps=1, version=number)
    backend.step()


def commit(root: Path, step: int) -> Path:
    write_manifest(draft_path(root, step), Manifest(step=step, version=step, run_generation=0))
    commit_directory(draft_path(root, step), final_path(root, step))
    return final_path(root, step)


def made(trainer_group: ToldGang, **options: float) -> TrainerGroupBackend:
    backend = TrainerGroupBackend(trainer_group.meeting, trainer_group.home / "journal", **options)  # type: ignore[arg-type]
    backend.setup()
    return backend


def test_without_a_save_all_is_repeated(trainer_group: ToldGang) -> None:
    backend = made(trainer_group)
    batch(backend, 0)
    trainer_group.die_at = ["batch 1"]
    batch(backend, 1)
    assert trainer_group.lives == [
        ["Setup", "batch 0", "Step", "batch 1"],
        ["Setup", "batch 0", "Step", "batch 1", "Step"],
    ]
    backend.close()
    assert trainer_group.lives[-1][-1] == "End"
    assert not (trainer_group.home / "journal").exists()


def test_a_save_is_restored_where_it_lies_now(trainer_group: ToldGang, tmp_path: Path) -> None:
    backend, root = made(trainer_group, commit_wait_s=0.0), tmp_path / "checkpoints"
    backend.save(draft_path(root, 1))
    batch(backend, 1)
    trainer_group.die_at = ["Flush"]
    backend.flush()
    assert trainer_group.lives[1] == ["Setup", "Load .step-00000001.draft", "batch 1", "Step", "Flush"]
    commit(root, 1)
    trainer_group.die_at = ["Flush"]
    backend.flush()
    assert trainer_group.lives[2] == ["Setup", "Load step-00000001", "batch 1", "Step", "Flush", "Flush"]


def test_a_checkpoint_that_was_damaged_since_is_not_loaded(trainer_group: ToldGang, tmp_path: Path) -> None:
    """What a resume verifies, a new trainer group verifies too."""
    backend, root = made(trainer_group), tmp_path / "checkpoints"
    backend.save(draft_path(root, 1))
    saved = commit(root, 1) / "state"
    saved.write_bytes(b"W" + saved.read_bytes()[1:])
    batch(backend, 1)
    trainer_group.die_at = ["batch 2"]
    with pytest.raises(TrainStateUnreadable, match=r"state is damaged: checksum.*--resume"):
        batch(backend, 2)
    assert trainer_group.lives[1] == ["Setup"]


def test_a_save_on_its_way_to_its_commit_is_waited_for(trainer_group: ToldGang, tmp_path: Path) -> None:
    backend, root = made(trainer_group), tmp_path / "checkpoints"
    backend.save(draft_path(root, 1))
    committing = threading.Timer(0.2, commit, (root, 1))
    trainer_group.die_at = ["batch 1"]
    committing.start()
    batch(backend, 1)
    assert trainer_group.lives[1][:2] == ["Setup", "Load step-00000001"]


def test_a_save_that_is_committed_between_two_looks_is_found(
    trainer_group: ToldGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for one that is gone, and everything was repeated from the initial weights."""
    backend, root = made(trainer_group), tmp_path / "checkpoints"
    backend.save(draft_path(root, 1))
    looked: list[Path | None] = []

    def look(directory: Path) -> Path | None:
        looked.append(committed(directory))
        if len(looked) == 1:
            commit(root, 1)
        return looked[-1]

    monkeypatch.setattr("models.train.trainer_group.restoration.committed", look)
    trainer_group.die_at = ["batch 1"]
    batch(backend, 1)
    assert looked[:2] == [None, final_path(root, 1)]
    assert trainer_group.lives[1][:2] == ["Setup", "Load step-00000001"]


def test_a_save_in_the_background_is_not_waited_for_and_made_again(trainer_group: ToldGang, tmp_path: Path) -> None:
    backend, root = made(trainer_group, saves_in_background=True), tmp_path / "checkpoints"
    batch(backend, 0)
    backend.save(draft_path(root, 1))
    batch(backend, 1)
    trainer_group.refuse["Load .step-00000001.draft"] = Raised("TrainStateUnreadable", "not whole")
    trainer_group.die_at = ["FinishSave"]
    backend.finish_save()
    assert trainer_group.lives[1] == [
        *("Setup", "Load .step-00000001.draft", "batch 0", "Step"),
        *("Save .step-00000001.draft", "FinishSave", "batch 1", "Step", "FinishSave"),
    ]
    assert (draft_path(root, 1) / "state").read_text() == "whole"


def test_an_interrupted_save_is_made_again_from_nothing(trainer_group: ToldGang, tmp_path: Path) -> None:
    backend, draft = made(trainer_group), draft_path(tmp_path / "checkpoints", 1)
    batch(backend, 0)
    draft.mkdir(parents=True)
    (draft / "half of a file").touch()
    trainer_group.die_at = ["Save .step-00000001.draft"]
    backend.save(draft)
    assert [file.name for file in draft.iterdir()] == ["state"]
    assert trainer_group.lives[1] == ["Setup", "batch 0", "Step", "Save .step-00000001.draft"]


def test_a_loss_while_restoring_is_one_more_loss(trainer_group: ToldGang) -> None:
    backend = made(trainer_group)
    batch(backend, 0)
    trainer_group.die_at = ["Flush", "Step", "Setup"]
    backend.flush()
    assert trainer_group.lives == [
        ["Setup", "batch 0", "Step", "Flush"],
        ["Setup", "batch 0", "Step"],
        ["Setup"],
        ["Setup", "batch 0", "Step", "Flush"],
    ]


def test_a_resumed_run_goes_back_to_what_it_loaded(trainer_group: ToldGang, tmp_path: Path) -> None:
    saved = tmp_path / "step-00000007"
    saved.mkdir()
    backend = made(trainer_group)
    backend.load(saved)
    batch(backend, 7)
    trainer_group.die_at = ["Flush"]
    backend.flush()
    assert trainer_group.lives[1] == ["Setup", "Load step-00000007", "batch 7", "Step", "Flush"]
    trainer_group.refuse["Load step-00000007"] = Raised("TrainStateUnreadable", "its files are gone")
    trainer_group.die_at = ["Flush"]
    with pytest.raises(TrainStateUnreadable, match=r"its files are gone.*--resume"):
        backend.flush()


def test_a_call_that_raises_is_not_repeated(trainer_group: ToldGang) -> None:
    backend = made(trainer_group)
    trainer_group.refuse["batch 3"] = Raised("BackendMisuse", "not now")
    with pytest.raises(RuntimeError, match="not now"):
        backend.begin_batch(rollouts=1, steps=1, version=3)
    trainer_group.die_at = ["Flush"]
    backend.flush()
    assert trainer_group.lives[1] == ["Setup", "Flush"]


def test_a_repeated_call_that_now_raises_is_not_passed_over(trainer_group: ToldGang) -> None:
    backend = made(trainer_group)
    batch(backend, 0)
    trainer_group.refuse["batch 0"] = Raised("InvalidSequence", "token 7 does not exist")
    trainer_group.die_at = ["Flush"]
    with pytest.raises(TrainerGroupDiverged, match="InvalidSequence: token 7"):
        backend.flush()


def test_closing_wakes_who_waits_for_a_trainer_group(tmp_path: Path) -> None:
    backend, raised = TrainerGroupBackend(lambda: None, tmp_path / "journal"), list[BaseException]()

    def wait() -> None:
        try:
            backend.setup()
        except TrainerGroupClosed as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(backend._calling.locked)
    backend.close()
    waiting.join(10)
    assert len(raised) == 1


def test_closing_breaks_off_a_call_that_lasts(tmp_path: Path) -> None:
    address, raised = str(tmp_path / "s"), list[BaseException]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(address)
        silent.listen(1)
        backend = TrainerGroupBackend(lambda: Rendezvous(0, address), tmp_path / "journal")

        def wait() -> None:
            try:
                backend.setup()
            except TrainerGroupClosed as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until(lambda: backend._newest is not None)
        backend.close()
        waiting.join(10)
        assert len(raised) == 1
