"""The run directory: one place for everything that a run leaves behind; and the servers that it names.

    config.toml          the resolved configuration
    metrics.jsonl        one line per rollout batch and per evaluation
    samples.jsonl        a few rollouts of every so many batches, as text
    ledger.jsonl         admissions, settlements, commits, with a checksum each
    replicas/fleet.json  a `ServerInfo` of each server as it last came up, for `status` and the metrics endpoint
    logs/<replica>.log   what each process printed
    trace/, trace.json   spans of each stage, merged for Perfetto
    tensorboard/         events
    trackers.json        the ids of the run at --report-to
    episodes/            responses, turns and calls of rollouts that have not ended; see pipeline/record/kept_files.py
    checkpoints/         step-NNNNNN, committed atomically; hf/ inside is a Hugging Face model
    summary.json, learning_curve.png
    bias.json            lengths and pass rates of groups by outcome: what filters and staleness select

Invariants: a new directory is for its owner alone; it is locked and belongs to one live run; a finished run is never
overwritten; the directory of its sockets is locked as well, so that the next run can remove what a killed run left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec
from msgspec import Struct

from configs.schema import EngineConfig
from models.disk import read_file, write_whole
from models.engines.access_token import TokenFile
from models.fault_injection import FaultPlan
from models.weights.slot_directory import OWNER_FILE, PREFIX, DirectoryLease, remove_stale
from pipeline.errors import UsageError, too_many_files, user_error
from stages.records.once import EPISODES_DIR
from transport.security import IPC_PATH_LIMIT

MIN_FREE_BYTES = 64 << 20
LOCK_FILE = ".lock"
TOUCH_S = 3600.0
SEAL_PREFIX = ".seal-"
# "/sluice-01234567/trainer-group-123456.sock", the longest name of a socket, and some room.
SOCKET_PATH_BYTES = 48


def disk_error(path: Path, error: OSError) -> UsageError:
    """One sentence for an OSError under the run directory."""
    if too_many_files(error):
        return UsageError(str(user_error(error)))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(f"the disk of the run directory {path} is full; free some space or choose another --run-dir")
    file = "" if error.filename is None else f"{error.filename}: "
    return UsageError(
        f"the run directory {path} cannot be used: {file}{error.strerror or error}; mend that, or choose another "
        "--run-dir"
    )


def _home_of_sockets(homes: Sequence[Path]) -> Path:
    """The first directory in which the path of a socket is short enough for the kernel."""
    for home in homes:
        if len(os.fsencode(home)) + SOCKET_PATH_BYTES <= IPC_PATH_LIMIT:
            return home
    raise UsageError(
        f"the paths of sockets in {' and '.join(map(str, homes))} would be longer than the {IPC_PATH_LIMIT} bytes that "
        f"the kernel takes; set TMPDIR to a directory whose path has at most {IPC_PATH_LIMIT - SOCKET_PATH_BYTES} bytes"
    )


def in_use(path: Path) -> bool:
    """Whether a live run holds the directory."""
    try:
        with (path / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


class RunDir(contextlib.AbstractContextManager["RunDir"]):
    """Paths of one run, its lock, and a private directory for its sockets. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve() if ".." in path.parts else path.absolute()  # as people read it
        self.logs = self.path / "logs"
        self.trace = self.path / "trace"
        self.checkpoints = self.path / "checkpoints"
        self.specs = self.path / "replicas"
        self.fleet = self.specs / "fleet.json"
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.jsonl"
        self.episodes = self.path / EPISODES_DIR
        self.summary = self.path / "summary.json"
        self.tensorboard = self.path / "tensorboard"
        self.sockets = self.servers = Path()  # `servers`: shared files of the servers, with their lifetime
        self.seal = self.path / f"{SEAL_PREFIX}{secrets.token_hex(16)}"  # a process that sees it sees this directory
        self._sockets: DirectoryLease | None = None
        self._lock: IO[str] | None = None

    @property
    def run_id(self) -> str:
        """Of this start; as unique as the name of the directory of its sockets."""
        return self.sockets.name.removeprefix(PREFIX)

    def open(self, *, resume: bool) -> RunDir:
        """Create and lock. Raises UsageError if the directory holds another run, is in use, or cannot be written."""
        if not resume and self.config.exists():
            raise UsageError(
                f"--run-dir {self.path} already holds a run; choose another directory, or continue it with "
                f"--resume {self.path}"
            )
        if resume and not self.config.exists():
            raise UsageError(
                f"--resume {self.path} holds no run (no config.toml); give the directory of an earlier run"
            )
        try:
            self._make_private()
            for directory in (self.logs, self.trace, self.checkpoints, self.specs):
                directory.mkdir(exist_ok=True)
            self._lock = (self.path / LOCK_FILE).open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)  # it may be no run, but a `status` that looks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_space()
            for old in self.path.glob(f"{SEAL_PREFIX}*"):  # of a run that was killed
                old.unlink()
            self.seal.touch(0o600)
            runtime = os.environ.get("XDG_RUNTIME_DIR")
            homes = [Path(home) for home in (runtime, tempfile.gettempdir()) if home and Path(home).is_dir()]
            for home in homes:
                remove_stale(home)  # of killed runs; a live run holds the lock of its directory
            self._sockets = DirectoryLease(_home_of_sockets(homes) / f"{PREFIX}{secrets.token_hex(4)}")
            self.sockets = self.servers = self._sockets.directory
        except (OSError, UsageError) as error:
            if self._lock is not None:
                self._lock.close()  # the program may go on, and try again
            if isinstance(error, UsageError):
                raise
            if isinstance(error, BlockingIOError):
                raise UsageError(f"--run-dir {self.path} is in use by another run; choose another directory") from None
            raise disk_error(self.path, error) from error
        return self

    def _make_private(self) -> None:
        """Make the directory for its owner alone: it holds prompts, results of tools, and the settings. An existing
        directory keeps its mode; other users who may write there could put links in place of files."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        status = self.path.stat()
        if status.st_mode & stat.S_IWOTH:
            raise UsageError(
                f"--run-dir {self.path} can be written by every user of this machine (mode "
                f"{stat.S_IMODE(status.st_mode):04o}); chmod o-w it, or choose a new directory"
            )
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise UsageError(
                f"--run-dir {self.path} is owned by another user ({status.st_uid}), who could replace what is written "
                "there; choose a directory of your own"
            )

    @property
    def gone(self) -> bool:
        """Whether the directory was removed or replaced since it was opened."""
        if self._lock is None:
            return False
        try:
            return not os.path.samestat((self.path / LOCK_FILE).stat(), os.fstat(self._lock.fileno()))
        except OSError:
            return True

    def keep_sockets(self) -> str:
        """Keep the directory of the sockets young, since programs that clean /tmp go by age. Empty while it is there,
        else what it means that it is gone."""
        owner = self.sockets / OWNER_FILE
        with contextlib.suppress(FileNotFoundError):  # another file may go at any time
            if self._sockets is None or time.time() - owner.stat().st_mtime < TOUCH_S:
                return ""
            for path in (self.sockets, *self.sockets.rglob("*")):
                os.utime(path, follow_symlinks=False)
        if owner.exists():
            return ""
        return (
            f"the directory of the run's sockets, {self.sockets}, was removed, perhaps by a program that cleans "
            "temporary files: no process can be started again and no command is answered. Stop the run with Ctrl-C and "
            f"continue it with --resume {self.path}; set XDG_RUNTIME_DIR or TMPDIR to a directory that nothing cleans"
        )

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration. Called after all checks: a resume reads it before its own flags."""
        write_whole(self.config, text.encode())

    def write_pid(self, name: str, pid: int) -> None:
        """Write the process id, on its own host, into `replicas/<name>.pid`."""
        write_whole(self.specs / f"{name}.pid", str(pid).encode())

    def _check_space(self) -> None:
        probe = self.path / ".space"
        try:
            with probe.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(self.path).free >> 20
            raise UsageError(
                f"the disk of the run directory {self.path} has {free} MiB free, and a run needs "
                f"{MIN_FREE_BYTES >> 20} to begin; free some space or choose another --run-dir"
            ) from error
        finally:
            probe.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is None:
            return
        with contextlib.suppress(OSError):  # the directory may be removed or replaced
            self.seal.unlink(missing_ok=True)
        if self._sockets is not None:
            self._sockets.release()
        self._lock.close()
        self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()


Kind = Literal["engine", "evaluation", "frozen", "router"]


class EngineSpec(Struct, frozen=True):
    """One engine. `frozen`: the name of its policy, for an engine that gets no new weights. `evaluates`: it serves
    evaluations alone.

    `external`: the address of a running engine, which is watched and never started or ended. `gpus`: the GPUs that it
    may see, as CUDA_VISIBLE_DEVICES names them; empty = as in the environment. `faults`: of `--fault-inject`. `token`:
    requests must carry it. `fetcher`: brings weights to the engine's node. `taken_over`: an earlier start of the run
    left the engine, with its weights.
    """

    name: str
    config: EngineConfig
    model_path: str
    max_context: int | None
    port: int
    seed: int
    frozen: str = ""
    evaluates: bool = False
    external: str = ""
    gpus: tuple[str, ...] = ()
    faults: FaultPlan | None = None
    token: TokenFile | None = None
    fetcher: str = ""
    taken_over: bool = False
    log_level: str = "info"

    @property
    def kind(self) -> Kind:
        return "frozen" if self.frozen else "evaluation" if self.evaluates else "engine"

    @property
    def ours(self) -> bool:
        """Whether a server of this project serves it."""
        return not self.external and self.config.engine != "sglang"


class ServerInfo(Struct, frozen=True):
    """One server of the run as it last came up."""

    kind: str  # embedded, simulated, sglang, smg
    url: str
    incarnation: int
    version: str
    role: str  # engine, evaluation, frozen, router
    metrics: str = ""  # address of its /metrics, if not under `url`
    token_file: str = ""  # of its token, while it runs; the run's router has the same token


def read_fleet(rundir: RunDir) -> dict[str, ServerInfo]:
    """The servers of a run by name; empty if none came up."""
    path = rundir.fleet
    return msgspec.json.decode(read_file(path), type=dict[str, ServerInfo]) if path.exists() else {}
