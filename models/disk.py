"""Files that appear whole or not at all, and bytes that must be on the disk when a function returns. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


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
    """Write a file atomically: a killed process leaves the old content or the new content.

    `durable`: after the return, also if the machine fails.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # per process: another process may write the same file
    draft.write_bytes(content)
    if durable:
        sync(draft)
    draft.replace(path)
    if durable:
        sync(path.parent)


def write_json(path: Path, value: object) -> None:
    """A struct as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
