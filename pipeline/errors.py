"""The errors that end a run. `str(error)` is the one sentence that the user sees."""

from __future__ import annotations

import errno
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from models.errors import UserFault
from models.train.trainer_group.rank_spec import EXIT_PEER_GONE, PeerGone
from stages.errors import Starved

EXIT_USER_ERROR = 2  # of a started process, for a mistake of the user
OURS = ("launch", "pipeline", "stages", "models", "transport", "configs")  # what cannot be imported there is a defect
EXIT_DISK_FULL = 28  # of a started process whose log may have no room for the reason


# The exit codes of `launch.py`, by kind of end, for programs that start it; docs/errors.md has the table. A
# defect, which shows a traceback, ends with 1 too. Another start may mend 1, 6, 7 and 8; auto_resume.py reads that.


class RunError(Exception):
    """A run ended before its time, by the loss of a replica if no other class says why."""

    exit_code = 1


class UsageError(RunError):
    """The run cannot start or continue, for a reason that the user can mend."""

    exit_code = 2


class NotHere(UsageError):
    """This machine lacks something that a run needs; a plan (`--dry-run`), which may be for another one, says so."""


class Refused(UsageError):
    """Several mistakes at once, one sentence each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class NotRunning(UsageError):
    """A command to a run that has ended, or to a path that holds none."""

    exit_code = 3


class CommandRefused(Refused):
    """A running run refuses a command."""

    exit_code = 4


class NothingTrained(UsageError):
    """Group after group was not trained."""

    exit_code = 5


class ReplicaFailed(RunError):
    """A stage replica ended and will not be restarted."""


class TrainerDied(ReplicaFailed):
    """The trainer ended, and cannot be started again within this run."""

    exit_code = 6


class Stalled(RunError):
    """Nothing moved any more; the message names what waited for what."""

    exit_code = 7


class DrainTimeout(RunError):
    """The drain took longer than its deadline; the message lists the remaining work."""

    exit_code = 8


class Interrupted(RunError):
    """The user or a deadline ended the run before it had a summary."""

    exit_code = 130


def leaf(error: BaseException) -> BaseException:
    """The first real error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def disk_full(error: BaseException) -> bool:
    """Whether there was no room to write. The last two forms are those of safetensors and shutil.copytree."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "os error 28" in str(error) or (isinstance(error, shutil.Error) and "[Errno 28]" in str(error))


def too_many_files(error: BaseException) -> bool:
    """Whether no further file or socket could be opened; zmq's errors carry the same numbers."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def file_limit(needed: int = 0) -> str:
    """The sentence for a limit of open files that is too low; `needed`: how many there must be, if that is known."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = f", which needs {needed}" if needed else ""
    return (
        f"the limit of open files ({soft}, at most {hard}) is too low for this run{least}: raise it, such as with "
        "`ulimit -n 4096`, or start fewer replicas with --scale"
    )


def user_error(error: BaseException) -> str | None:
    """The sentence for the user, or None if the error is a defect that should show itself."""
    if disk_full(error):
        return f"there is no space left on the disk ({error}); free some, or choose another --run-dir"
    if too_many_files(error):
        return file_limit()
    missing = next((one for one in (error, error.__cause__) if isinstance(one, ImportError)), None)
    if missing is not None and str(missing.name).partition(".")[0] not in OURS:
        return f"a package cannot be imported ({error}); install it for {sys.executable}, or do without what needs it"
    from transport.errors import AddressError, SecurityError  # loads zmq, which readers of a run's files do without

    return str(error) if isinstance(error, UserFault | AddressError | SecurityError) else None


def for_user(error: BaseException) -> RunError | None:
    """The error with which a run ends for this one, or None if that is a defect."""
    if isinstance(error, RunError):
        return error
    kind = NothingTrained if isinstance(error, Starved) else UsageError
    return None if (sentence := user_error(error)) is None else kind(sentence)


def exit_code(error: BaseException) -> int:
    """Exit code of a started process that ends with an error, for its supervisor."""
    if disk_full(error):
        return EXIT_DISK_FULL
    if isinstance(error, PeerGone):
        return EXIT_PEER_GONE
    return EXIT_USER_ERROR if user_error(error) is not None else 1


def keep_exit_code() -> None:
    """Let go of output for which the disk has no room: Python would write it again at its end, and exit with 120."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError):  # it was closed already, or has no room
            setattr(sys, name, None)


def check_repeatable(name: str, code: int, words: str, run_dir: Path) -> None:
    """Raise UsageError for an error that another start would repeat."""
    if code == EXIT_DISK_FULL:
        raise UsageError(f"there is no space left for {run_dir}; free some, or choose another --run-dir")
    if code == EXIT_USER_ERROR:
        raise UsageError(f"{name}: {words}")
