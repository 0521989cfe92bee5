"""Where weight slots lie: a private directory in shared memory that lives as long as its owner, and its lock.

Invariants:
- the directory is 0700 and appears with its owner's lock already held;
- only its owner removes a directory, or any process once the owner is dead: the lock on `owner.pid` is the proof (the
  kernel releases it with the process, however it ends), the number inside is for people;
- a directory is emptied before its lock goes, so a restarted owner that waits for it meets no half-removed content;
- `left_behind` lists files elsewhere in shared memory that the run's processes would leave; they go with the
  directory of a dead owner;
- nothing that another user owns is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from models.disk import read_file, remove
from models.errors import SlotDirectoryError

PREFIX: Final = "sluice-"
OWNER_FILE: Final = "owner.pid"
LEFT_BEHIND_FILE: Final = "left_behind"
TORCH: Final = "torch_"  # begins the names that torch gives to shared memory; the number of its process follows
SWEPT_S: Final = 10.0  # wait at most so long for another process that removes the directory
DRAFT_S: Final = 60.0  # a younger draft may be about to be locked
SHARED_MEMORY: Final = Path("/dev/shm")


def choose_directory(name: str, fallback: Path, nbytes: int, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Where to put two slots of `nbytes` each: shared memory if it has the room, else `fallback` (the run directory).

    Room means two slots plus a tenth. Nothing is created yet.
    """
    needed = int(2 * nbytes * 1.1)
    if os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free >= needed:
        return shared_memory / f"{PREFIX}{name}"
    return fallback / f"{PREFIX}{name}"


def slots_directory(run_id: str, run_dir: Path, checkpoint: str, *, evaluated: bool) -> Path:
    """Where the weights are published: shared memory if it has room for two versions, else the run directory.
    `evaluated`: and for two copies that evaluations may need (stages/train/weights.py)."""
    nbytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    times = 4 if evaluated else 2  # the trainer may publish fp32 of a bf16 checkpoint
    return choose_directory(run_id, run_dir, times * nbytes)


class DirectoryLease:
    """Ownership of a slot directory, from construction to `release`."""

    def __init__(self, directory: Path, *, kept: str = OWNER_FILE) -> None:
        """Create `directory` (0700) and hold its lock. Takes over a dead owner's directory of the same name, emptied.

        `kept` begins the names that stay: files that readers have mapped, which would lie in memory beside new ones.

        Waits for another process that is just removing it, at most SWEPT_S. Raises SlotDirectoryError if a live process
        owns it or if something else is in the way.
        """
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + SWEPT_S
        while True:
            lock = _lock_of_dead_owner(directory) if directory.exists() else self._make()
            if lock is not None:
                self._lock = lock
                break
            if _foreign(directory) or time.monotonic() > deadline:
                raise SlotDirectoryError(
                    f"{directory} is in use by {_owner(directory)}; two runs cannot share weight slots: end the other "
                    "run or give this one another name"
                )
            time.sleep(0.01)
        _empty(directory, kept)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _make(self) -> int | None:
        """Create the directory with its lock held; None if another process was faster."""
        draft = Path(tempfile.mkdtemp(prefix=f".{self.directory.name}.", dir=self.directory.parent))  # 0700
        lock = os.open(draft / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            draft.rename(self.directory)
        except OSError as error:
            os.close(lock)
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None
            raise SlotDirectoryError(
                f"{self.directory} cannot be made ({error.strerror}); choose a directory that this user may write"
            ) from error
        return lock

    def release(self) -> None:
        """Remove the directory and give up the lock. May be called twice."""
        if self._lock < 0:
            return
        remove_listed(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def _lock_of_dead_owner(directory: Path) -> int | None:
    """The lock of a slot directory of this user whose owner is dead, now held; None if there is no such directory."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return None
        lock = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None  # not a slot directory, or removed by another process just now
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else its last holder removed the directory
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _foreign(directory: Path) -> bool:
    """Whether a directory certainly stays: a live owner's, another user's, or none for slots."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return True
        os.kill(int(read_file(directory / OWNER_FILE)), 0)
        return True
    except ProcessLookupError:
        return False
    except (OSError, ValueError):  # being removed, or no slot directory
        try:  # listed once: between two questions the directory can go, or come anew
            names = os.listdir(directory)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        return bool(names) and OWNER_FILE not in names


def _empty(directory: Path, kept: str = OWNER_FILE) -> None:
    """Remove what a dead owner left, but the lock and names that begin with `kept`."""
    remove_listed(directory)
    for path in directory.iterdir():
        if not path.name.startswith((OWNER_FILE, kept)):
            remove(path)


def remove_if_stale(directory: Path) -> bool:
    """Remove a slot directory whose owner is dead. False if it is alive, foreign or no slot directory."""
    lock = _lock_of_dead_owner(directory)
    if lock is None:
        return False
    try:
        _empty(directory)
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()
    finally:
        os.close(lock)


def remove_stale(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the slot directories that dead runs left in `root`; return the removed ones."""
    found = sorted([*root.glob(f"{PREFIX}*"), *_abandoned_drafts(root)])
    return [directory for directory in found if remove_if_stale(directory)]


def list_left_behind(directory: Path, files: Iterable[Path]) -> None:
    """Add files of shared memory that are to go with the directory, if its owner is killed."""
    with (directory / LEFT_BEHIND_FILE).open("a") as file:
        file.writelines(f"{path}\n" for path in files)


def remove_listed(directory: Path) -> None:
    """Remove the files of shared memory that were listed in a directory: their processes have ended."""
    with contextlib.suppress(OSError):  # none was listed
        for path in map(Path, read_file(directory / LEFT_BEHIND_FILE).decode().splitlines()):
            if path.parent == SHARED_MEMORY:
                remove_left_behind(path)


def torch_files(pid: int) -> Path:
    """Pattern of the files in shared memory that torch makes in a process, and that stay when it is killed: buckets of
    the route `tensor`."""
    return SHARED_MEMORY / f"{TORCH}{pid}_*"


def remove_left_behind(path: Path) -> None:
    """Remove a file of shared memory, or those of a `torch_files` whose process has ended."""
    found = [path]
    if path.name.startswith(TORCH):
        number = path.name.removeprefix(TORCH).partition("_")[0]
        found = [] if Path("/proc", number).exists() else list(SHARED_MEMORY.glob(path.name))
    for file in found:
        with contextlib.suppress(OSError):  # it is gone already, or another user's
            file.unlink()


def _abandoned_drafts(root: Path) -> list[Path]:
    """Drafts of directories whose maker was killed. An empty one was never locked: it is removed here."""
    found = []
    for draft in root.glob(f".{PREFIX}*"):
        with contextlib.suppress(OSError):  # renamed just now, or another user's
            if time.time() - draft.stat().st_mtime > DRAFT_S:
                found.append(draft)
                draft.rmdir()
    return found


def _owner(directory: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # the number is only for the message
        return f"process {int(read_file(directory / OWNER_FILE))}"
    return "another program"
