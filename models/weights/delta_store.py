"""Writing end of the delta route: a directory of differences, with the full weights now and then.

What lies there, by label `run_generation.version`:
    full-0.8/          a Hugging Face checkpoint: where a reader without a base begins
    0.9-from-0.8.delta the difference of 0.9 to the version published before it

Invariants:
- everything appears whole, by renaming;
- from every full version on, each later one is reached by the differences that lie there, and who has the version
  before the newest needs one difference only; the two newest full versions and what leads on from them are kept, all
  else is removed, so the directory is bounded: two full versions and 2 * `full_every` differences;
- only entries of these names are ever removed; a directory serves one run.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Final

from models.errors import WeightsError
from models.weights.delta import Published, write_delta
from models.weights.shared_memory_reader import SlotManifest, SlotReader

log = logging.getLogger("sluice.weights")

FULL_EVERY: Final = 8  # publications from one full version to the next
_FULL: Final = re.compile(r"full-(\d+)\.(\d+)$")
_DELTA: Final = re.compile(r"(\d+)\.(\d+)-from-(\d+)\.(\d+)\.delta$")
_STATE_FILES: Final = ("slot.state", "owner.pid")

Label = tuple[int, int]  # run generation, version


def text_of(label: Label) -> str:
    return f"{label[0]}.{label[1]}"


def full_versions(directory: Path) -> dict[Label, Path]:
    """The complete checkpoints in a delta directory."""
    found = ((_FULL.match(path.name), path) for path in _entries(directory))
    return {(int(match[1]), int(match[2])): path for match, path in found if match}


def differences(directory: Path) -> dict[Label, tuple[Label, Path]]:
    """By label of the result: the label of the base, and the file."""
    found = ((_DELTA.match(path.name), path) for path in _entries(directory))
    return {(int(match[1]), int(match[2])): ((int(match[3]), int(match[4])), path) for match, path in found if match}


class DeltaStore:
    """Publishes versions that already lie in a slot. Use from one thread."""

    def __init__(self, directory: Path, *, full_every: int = FULL_EVERY) -> None:
        """Take a directory over; what an earlier process of the run left goes with the next full version."""
        self.directory, self.full_every = directory, full_every
        directory.mkdir(parents=True, exist_ok=True)
        for draft in directory.glob(".*"):
            if _is_ours(draft.name.lstrip(".")):
                _remove(draft)
        self._last: SlotManifest | None = None
        self._since_full = 0

    def publish(self, manifest: SlotManifest) -> Published:
        """Write the version in this slot: as a difference to the one published before, which must still lie in its
        slot, else in full. Raises OSError if the directory has no room."""
        last, written = self._last, None
        if last is not None:
            written = self._difference(last, manifest)
        if written is None or self._since_full >= self.full_every or not full_versions(self.directory):
            full = self._full(manifest)
            self._since_full = 0
        self._since_full += 1
        self._last = manifest
        self._retain()
        return written or Published(str(full), 1.0)

    def _difference(self, base: SlotManifest, new: SlotManifest) -> Published | None:
        labels = base.label, new.label
        path = self.directory / f"{labels[1]}-from-{labels[0]}.delta"
        try:
            digests = base.digest, new.digest
            written = write_delta(path, SlotReader(base), SlotReader(new), labels=labels, digests=digests)
        except WeightsError as error:
            log.warning("no difference from %s to %s, the full weights are written: %s", *labels, error)
            return None
        if written.ratio <= 1.0:  # nothing in common: the full weights cost less to read
            path.unlink()
            return None
        return written

    def _full(self, manifest: SlotManifest) -> Path:
        path = self.directory / f"full-{manifest.label}"
        draft = path.with_name(f".{path.name}")
        _remove(draft)
        _remove(path)
        shutil.copytree(manifest.path, draft, ignore=shutil.ignore_patterns(*_STATE_FILES))
        draft.rename(path)
        return path

    def _retain(self) -> None:
        full = sorted(full_versions(self.directory))
        oldest = full[-2] if len(full) > 1 else full[0]
        for label, path in full_versions(self.directory).items():
            if label < oldest:
                _remove(path)
        for label, (_, path) in differences(self.directory).items():
            if label <= oldest:
                _remove(path)


def _is_ours(name: str) -> bool:
    return bool(_FULL.match(name) or re.match(r"\d+\.\d+-from-\d+\.\d+\.delta", name))


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _remove(path: Path) -> None:
    """Readers that have it open keep what they read; others find the newer full version."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
