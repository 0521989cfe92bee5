"""Small files that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

from pathlib import Path

import msgspec


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def write_json(path: Path, value: object) -> None:
    """A struct as indented JSON, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
