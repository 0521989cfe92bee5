"""Checkpoints that appear whole or not at all: one directory, one manifest, one rename. No torch.

Every part writes its files into `draft_path(root, step)`; `write_manifest` lists them with sizes and checksums and adds
the state that must agree with them (ledger, cursor, version); `commit_directory` makes all of it durable and renames.

Invariants:
- the manifest is written last and carries its own checksum; a directory without a valid manifest is no checkpoint;
- one rename commits model state and the ids of consumed groups;
- order of durability: files and manifest, directory, rename, parent directory;
- whatever fails, earlier complete checkpoints stay complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec
import xxhash
from msgspec import Struct

from models.disk import open_file, read_file, sync, sync_tree
from models.errors import UserFault

MANIFEST_FILE: Final = "manifest.json"
FORMAT_VERSION: Final = 2
_REPLACED: Final = ".replaced"


class CheckpointError(RuntimeError, UserFault):
    """A checkpoint cannot be written or read; the message names the path and the cure."""


class FileEntry(Struct, frozen=True):
    """One file of a checkpoint."""

    size: int  # bytes
    xxh3: str  # xxh3_128, 32 hexadecimal digits


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run needs to continue, beside the files that it lists. `write_manifest` fills in `files`."""

    step: int  # rollout batches trained
    version: int  # weights version
    run_generation: int  # of the weights; rises by one at each resume
    ledger: str = "{}"  # JSON
    cursor: str = "{}"  # JSON: position in the data, shuffle seed, id counters
    config_hash: str = ""
    format_version: int = FORMAT_VERSION
    files: dict[str, FileEntry] = {}  # by path relative to the directory


class _Sealed(Struct, frozen=True):
    """What `manifest.json` holds: the manifest's exact bytes and their checksum."""

    xxh3: str
    manifest: msgspec.Raw


class _Format(Struct):
    format_version: int


def final_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies once it is complete."""
    return root / f"step-{step:08d}"


def draft_path(root: Path, step: int) -> Path:
    """Where its files are collected before. Readers ignore names that begin with a dot."""
    return root / f".step-{step:08d}.draft"


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """List all files of `directory` in the manifest, store it there as `manifest.json`, and return it complete.

    Raises CheckpointError, also when the disk is full (the draft is removed then, to give its room back).
    """
    with explain_disk_errors(directory, remove=directory):
        entries = {
            str(path.relative_to(directory)): FileEntry(path.stat().st_size, file_xxh3(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path != directory / MANIFEST_FILE
        }
        full = msgspec.structs.replace(manifest, files=entries)
        body = msgspec.json.encode(full)
        sealed = _Sealed(xxh3=xxhash.xxh3_128(body).hexdigest(), manifest=msgspec.Raw(body))
        (directory / MANIFEST_FILE).write_bytes(msgspec.json.encode(sealed))
        return full


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a committed checkpoint (its own checksum, and the sizes of the files it lists).

    Raises CheckpointError if it is missing, damaged, of another format, or if a listed file is missing or of another
    size. `verify_files` checks the contents too.
    """
    path = directory / MANIFEST_FILE
    try:
        sealed = msgspec.json.decode(read_file(path), type=_Sealed)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{directory} has no {MANIFEST_FILE}: it is no complete checkpoint; use another one of this run"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint of this run") from error
    found = xxhash.xxh3_128(sealed.manifest).hexdigest()
    if found != sealed.xxh3:
        raise CheckpointError(
            f"{path} is damaged: checksum {found}, expected {sealed.xxh3}; use another checkpoint of this run"
        )
    version = msgspec.json.decode(sealed.manifest, type=_Format).format_version
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}, this program reads {FORMAT_VERSION}; continue with the version that "
            f"wrote it, or begin a new run from its model with --hf-checkpoint {directory / 'hf'}"
        )
    manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    for name, entry in manifest.files.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.size:
            state = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{file} {state}, expected {entry.size}; use another checkpoint of this run")
    return manifest


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Read every listed file and compare its checksum. Raises CheckpointError naming the first that differs."""
    for name, entry in manifest.files.items():
        try:
            found = file_xxh3(directory / name)
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read ({error}); use another checkpoint") from error
        if found != entry.xxh3:
            raise CheckpointError(
                f"{directory / name} is damaged: checksum {found}, expected {entry.xxh3}; use another checkpoint"
            )


def commit_directory(draft: Path, final: Path) -> None:
    """Make a draft durable and give it its final name, in one step for every reader.

    A complete checkpoint already at `final` is replaced; leftovers without a manifest are removed. Raises
    CheckpointError if the draft has no valid manifest or if the disk fails; `final` is then as it was.
    """
    read_manifest(draft)
    with explain_disk_errors(final, remove=draft):
        sync_tree(draft)
        _swap(draft, final)
        sync(final.parent)


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under `root` by (run generation, step), or None. A damaged one is passed over."""
    return next((path for path, _ in reversed(_complete(root))), None)


def manifests(root: Path) -> list[Manifest]:
    """Of all complete checkpoints under `root`."""
    return [manifest for _, manifest in _complete(root)]


def resumable_checkpoint(root: Path, report: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose files are as they were written; None if none was ever completed.

    `report` gets a sentence for each damaged checkpoint that is skipped. Raises CheckpointError if all are damaged,
    since a new start would prune what can perhaps still be saved.
    """
    damaged: list[str] = []
    for path, manifest in reversed(_complete(root, damaged)):
        try:
            verify_files(path, manifest)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        for sentence in damaged:
            report(f"skipped: {sentence}")
        return path, manifest
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {root} can be resumed: {'; '.join(damaged)}; restore one of them from a copy, or start "
            "a new run in another directory"
        )
    return None


def remove_leftovers(root: Path) -> None:
    """Remove half-written and half-removed directories of killed runs under `root`. Only while no process writes
    there."""
    for path in root.glob(".step-*"):
        if path.is_dir() and not _orphaned(path):
            shutil.rmtree(path, ignore_errors=True)


def prune(root: Path, keep: int, spare: Collection[int] = ()) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints (at least one stays), and those of the steps `spare`;
    return the removed directories."""
    if keep < 1:
        raise ValueError(f"keep={keep}: at least the newest checkpoint must stay; use 1 or more")
    removed = [path for path, manifest in _complete(root)[:-keep] if manifest.step not in spare]
    for path in removed:
        trash = path.with_name(f".{path.name}.removed")
        path.rename(trash)  # first out of sight: a half-removed directory must not be taken for a checkpoint
        shutil.rmtree(trash)
    return removed


@contextlib.contextmanager
def explain_disk_errors(path: Path, *, remove: Path | None = None) -> Iterator[None]:
    """Turn an OSError met while writing a checkpoint into a CheckpointError with path and cure.

    With `remove`, a draft that met a full disk is deleted, so that the run can continue and try again later.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"checkpoint {path} cannot be written ({reason}); earlier checkpoints are untouched: check that the "
                "directory exists and is writable"
            ) from error
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {path} cannot be written: {reason}; earlier checkpoints are untouched: free space on that "
            "disk, lower --keep-last-n or choose another --run-dir"
        ) from error


def file_xxh3(path: Path) -> str:
    """xxh3_128 of a file, as 32 hexadecimal digits."""
    with open_file(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _complete(root: Path, damaged: list[str] | None = None) -> list[tuple[Path, Manifest]]:
    """Complete checkpoints under root, oldest first; the faults of the damaged ones are added to `damaged`."""
    found: list[tuple[Path, Manifest]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.is_dir() and (not path.name.startswith(".") or _orphaned(path)):
            try:
                found.append((path, read_manifest(path)))
            except CheckpointError as error:
                if damaged is not None:
                    damaged.append(str(error))
    return sorted(found, key=lambda one: (one[1].run_generation, one[1].step, one[0]))


def _orphaned(path: Path) -> bool:
    """Whether a process was killed between the two renames of a replacement: this is then the only copy."""
    name = path.name
    return name.endswith(_REPLACED) and not path.with_name(name[1:].removesuffix(_REPLACED)).exists()


def _swap(draft: Path, final: Path) -> None:
    """Rename draft to final. What lay there before is put back if that fails, and removed if it succeeds."""
    aside = final.with_name(f".{final.name}{_REPLACED}")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(draft, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
