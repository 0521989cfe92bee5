"""What must be on the disk when a function returns. No torch."""

from __future__ import annotations

import os
from pathlib import Path


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
