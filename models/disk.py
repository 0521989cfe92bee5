"""Files that appear whole or not at all, bytes that must be on the disk when a function returns, and files that are
read although anything may lie in their place. No torch."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import BufferedReader
from pathlib import Path
from typing import Final

import msgspec

from models.errors import UserFault

MOST_BYTES: Final = 256 << 20  # of a file that is read at once: manifests, tables, configurations
_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnreadableFile(OSError, UserFault):
    """Something else lies where a file of bounded size belongs. `str(error)` names the path, the fault and the cure."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(errno.EINVAL, f"it {fault}; put the right file there, or move it away", str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_file(path: Path) -> BufferedReader:
    """A regular file, open for reading; a link is followed. Never waits, as opening a named pipe would.

    Raises UnreadableFile for a directory, a named pipe or a device, and OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UnreadableFile(path, f"is {_KINDS.get(kind, 'something else')} and should be a regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, at_most: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file. Raises as `open_file`, and UnreadableFile for one of more than `at_most` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise UnreadableFile(path, f"has {size} bytes and should have at most {at_most}")
        return file.read(at_most)


def remove(path: Path) -> None:
    """Remove a file, a link or all of a directory; nothing need lie there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync of a file or of a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """fsync of everything below, files before the directories that name them."""
    for root, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file atomically: a killed process, or a full disk, leaves the old content or the new content.

    `durable`: after the return, also if the machine fails.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # per process: another process may write the same file
    try:
        draft.write_bytes(content)
        if durable:
            sync(draft)
        draft.replace(path)
    except OSError:  # a full disk gets back what the draft has of it
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """A struct as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
