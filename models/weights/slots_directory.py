"""Where the slots lie: a private directory in shared memory that lives as long as its run.

Invariants:
- the directory is 0700 and appears with its owner's lock already held;
- a directory is removed by its owner, or by anybody once the owner is dead: the lock on `owner.pid` is the proof (the
  kernel releases it with the process, however it ends), the number inside is for people;
- files elsewhere in shared memory that processes of the run would leave behind are listed in `left_behind`, and are
  removed with a directory whose owner is dead;
- nothing that another user owns is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from models.errors import SlotDirectoryError

PREFIX: Final = "sluice-"
OWNER_FILE: Final = "owner.pid"
LEFT_BEHIND_FILE: Final = "left_behind"
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


def slots_directory(run_id: str, run_dir: Path, checkpoint: str) -> Path:
    """Where the weights are published: shared memory if it has room for two versions, else the run directory."""
    nbytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    return choose_directory(run_id, run_dir, 2 * nbytes)  # twice: the trainer may publish fp32 of a bf16 checkpoint


class DirectoryLease:
    """Ownership of a slot directory, from construction to `release`."""

    def __init__(self, directory: Path) -> None:
        """Create `directory` (0700) and hold its lock. Removes a dead run's leftover of the same name.

        Raises SlotDirectoryError if a live process owns it or if something else is in the way.
        """
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        if directory.exists() and not remove_if_stale(directory):
            raise SlotDirectoryError(
                f"{directory} is in use by {_owner(directory)}; two runs cannot share weight slots: end the other run "
                "or give this one another name"
            )
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))  # mkdtemp makes it 0700
        self._lock = os.open(draft / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, f"{os.getpid()}\n".encode())
            draft.rename(directory)
        except OSError as error:
            os.close(self._lock)
            shutil.rmtree(draft, ignore_errors=True)
            raise SlotDirectoryError(
                f"{directory} cannot be made ({error.strerror}); choose a directory that this user may write"
            ) from error

    def release(self) -> None:
        """Remove the directory and give up the lock. May be called twice."""
        if self._lock < 0:
            return
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def remove_if_stale(directory: Path) -> bool:
    """Remove a slot directory whose owner is dead. False if it is alive, foreign or no slot directory."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return False
        lock = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # not a slot directory, or removed by another process just now
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_listed(directory)
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def remove_stale(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the slot directories that dead runs left in `root`; return what was removed."""
    if not root.is_dir():
        return []
    found = sorted([*root.glob(f"{PREFIX}*"), *_abandoned_drafts(root)])
    return [directory for directory in found if remove_if_stale(directory)]


def list_left_behind(directory: Path, files: Iterable[Path]) -> None:
    """Add files of shared memory that are to go with the directory, should its owner be killed."""
    with (directory / LEFT_BEHIND_FILE).open("a") as file:
        file.writelines(f"{path}\n" for path in files)


def remove_listed(directory: Path) -> None:
    """Remove the files of shared memory that were listed in a directory: those who held them have ended."""
    with contextlib.suppress(OSError):  # none was listed
        for path in map(Path, (directory / LEFT_BEHIND_FILE).read_text().splitlines()):
            if path.parent == SHARED_MEMORY:
                with contextlib.suppress(OSError):  # it is gone already
                    path.unlink()


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
    with contextlib.suppress(OSError):  # the number is only for the message
        return f"process {(directory / OWNER_FILE).read_text().strip()}"
    return "another program"
