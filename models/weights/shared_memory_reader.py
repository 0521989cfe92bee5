"""Reading end of the weight slots: verify an announcement, read its tensors. No torch.

Invariants:
- `verify` returns only if the slot holds exactly the announced bytes and was not touched meanwhile;
- what was copied out of a `SlotReader` may be used only after its `check()`: the counter tells whether a writer was
  there between the verification and the end of the copy.

Slots are memory that changes later: an engine must copy the tensors out. A loader that maps the file (safetensors on
a CPU does) and keeps the mapping would see the next version appear inside the current one.

The counter detects (Python has no memory fences), the digest judges. An engine that loads the directory by itself
should call `verify` before it begins and `SlotReader.check` or `verify` again when it has finished.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from models.weights.errors import DigestMismatch, TornWeights
from models.weights.layout import WEIGHTS_FILE, Layout, TensorSpec, read_layout

STATE_FILE: Final = "slot.state"
STATE_WORDS: Final = 8  # uint64: generation, epoch, version, data bytes, digest high, digest low, 2 spare


class SlotClaim(Protocol):
    """What an announcement says about a slot. `SlotManifest` and the announcement on the topic both fit."""

    @property
    def path(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def generation(self) -> int: ...


class SlotManifest(Struct, frozen=True):
    """One published version: where it lies and how to tell that it still lies there."""

    path: str  # Hugging Face directory
    version: int
    epoch: int
    digest: str  # xxh3_128 of the tensor bytes in file order, 32 hexadecimal digits
    generation: int  # even
    nbytes: int  # of the tensors


class SlotReader:
    """A verified slot, open for copying.

    with SlotReader(claim) as slot:          # raises TornWeights or DigestMismatch
        for spec, data in slot.tensors():    # views: copy them
            ...
        slot.check()                         # raises TornWeights: discard what was copied
    """

    def __init__(self, claim: SlotClaim) -> None:
        self._claim = claim
        self._directory = Path(claim.path)
        self._layout: Layout | None = None
        self._state: npt.NDArray[np.uint64] | None = None
        self._data: npt.NDArray[np.uint8] | None = None

    def __enter__(self) -> SlotReader:
        try:
            self._state = _map(self._directory / STATE_FILE).view(np.uint64)
            self._layout = read_layout(self._directory / WEIGHTS_FILE)
            self._data = _map(self._directory / WEIGHTS_FILE)
        except FileNotFoundError as error:
            raise TornWeights(
                f"{self._directory}: {error.filename} is gone, the run that published version {self._claim.version} "
                "has ended or cleaned up; wait for its next announcement"
            ) from error
        self.check()
        self._check_digest()
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The mappings end with the last view of them; a view that the caller kept stays valid memory.
        self._state = self._data = self._layout = None

    def tensors(self) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
        """Every tensor in file order with its raw little-endian bytes, a read-only view of the mapping."""
        layout, data = self._opened()
        for item in layout.tensors:
            yield item.spec, data[item.start : item.end]

    @property
    def layout(self) -> Layout:
        """Names, shapes and byte ranges of the tensors, in file order."""
        return self._opened()[0]

    def between(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """The file's bytes [start, end), a read-only view of the mapping: copy them, then `check`."""
        return self._opened()[1][start:end]

    def check(self) -> None:
        """Raise TornWeights unless the slot still holds the claimed generation, complete."""
        assert self._state is not None, "SlotReader is used inside its with statement"
        found = int(self._state[0])
        if found == self._claim.generation and found % 2 == 0:
            return
        state = "is being written" if found % 2 else f"holds generation {found}"
        raise TornWeights(
            f"{self._directory}: version {self._claim.version} was published as generation {self._claim.generation}, "
            f"the slot {state}; discard what was read and fetch the newest announcement"
        )

    def _opened(self) -> tuple[Layout, npt.NDArray[np.uint8]]:
        assert self._layout is not None, "SlotReader is used inside its with statement"
        assert self._data is not None, "SlotReader is used inside its with statement"
        return self._layout, self._data

    def _check_digest(self) -> None:
        layout, data = self._opened()
        found = digest_of(data[layout.data_start :])
        if found != self._claim.digest:
            self.check()  # a writer at work explains the difference; that is no corruption
            raise DigestMismatch(
                f"{self._directory}: the bytes of version {self._claim.version} have digest {found}, announced was "
                f"{self._claim.digest}; keep the weights in use and fetch again"
            )


def verify(claim: SlotClaim) -> None:
    """Check that a slot holds exactly what was announced. Reads all bytes once (about half the time of a copy).

    Raises TornWeights if the slot was or is being overwritten, DigestMismatch if its bytes are not the announced ones.
    """
    with SlotReader(claim):
        pass


def digest_of(data: npt.NDArray[np.uint8]) -> str:
    """xxh3_128 of raw bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128(data.data).hexdigest()


def _map(path: Path) -> npt.NDArray[np.uint8]:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
