"""Weights from rank 0 to the stage: two pieces of shared memory that are filled in turns.

The memory has no name in the file system: the stage opens it through /proc while rank 0 lives, and it is gone when
nobody has it any more, however they ended.

Invariants: a piece is written again only after the stage has answered for what it held; the tensors that the stage
sees are views of a piece, valid until it answers.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch

from models.train.trainer_group.calls import Bucket, GoOn, TensorPlace, decode_message, encode
from models.train.trainer_group.link import Link, LinkLost
from models.weights.tensors import tensor_view

PIECES: Final = 2
_ALIGNMENT: Final = 64


class _Piece:
    """Anonymous shared memory that grows."""

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.nbytes = 0
        self._map: mmap.mmap | None = None

    def grow(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            os.ftruncate(self._descriptor, nbytes)
            self._map, self.nbytes = mmap.mmap(self._descriptor, nbytes), nbytes

    def view(self, place: TensorPlace) -> torch.Tensor:
        assert self._map is not None
        return _view(self._map, place)


class WeightSender:
    """Rank 0's end. `limit`: bytes of one piece, unless one tensor alone is larger.

    `patience_s`: how long it waits for an answer; then the tensors are no longer sent, so that the other ranks, which
    wait inside the export's collectives, go on.
    """

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit, self._patience_s = limit, patience_s
        self._pieces = [_Piece(f"sluice-weights-{index}") for index in range(PIECES)]

    def send(self, link: Link, tensors: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Run the export to its end, and send what it yields for as long as the stage wants it; whether all was sent.

        Waits for the stage's answers.
        """
        sending = _Sending(link, self._pieces, self._patience_s)
        places: list[TensorPlace] = []
        with torch.no_grad():
            for name, tensor in tensors:
                if sending.stopped:
                    continue
                start = _aligned(places[-1].start + _nbytes(places[-1])) if places else 0
                place = TensorPlace(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
                if places and start + _nbytes(place) > self._limit:
                    sending.hand_over(places)
                    places, place = [], TensorPlace(name, place.dtype, place.shape, 0)
                piece = sending.free_piece(max(self._limit, _nbytes(place)))
                if piece is None:
                    continue
                piece.view(place).copy_(tensor)
                places.append(place)
        if places:
            sending.hand_over(places)
        sending.finish()
        return not sending.stopped


class _Sending:
    """One export: which piece is filled, and what the stage has still to answer for."""

    def __init__(self, link: Link, pieces: list[_Piece], patience_s: float) -> None:
        self._link, self._free, self._patience_s = link, deque(pieces), patience_s
        self._lent: deque[_Piece] = deque()
        self.stopped = False

    def free_piece(self, nbytes: int) -> _Piece | None:
        """The piece that is being filled; None if no more is wanted. Waits for an answer if all are lent."""
        while not self._free and not self.stopped:
            self._answer()
        if self.stopped:
            return None
        self._free[0].grow(nbytes)
        return self._free[0]

    def hand_over(self, places: list[TensorPlace]) -> None:
        if self.stopped:
            return
        piece = self._free.popleft()
        self._lent.append(piece)
        try:
            self._link.send(encode(Bucket(piece.path, piece.nbytes, places)))
        except LinkLost:
            self.stopped = True

    def finish(self) -> None:
        """Waits for the answers that are still to come."""
        while self._lent and not self.stopped:
            self._answer()

    def _answer(self) -> None:
        try:
            if not self._link.readable(self._patience_s):
                self.stopped = True
                return
            answer = decode_message(self._link.receive())
        except LinkLost:
            self.stopped = True
            return
        self._free.append(self._lent.popleft())
        self.stopped = not isinstance(answer, GoOn)


class WeightReader:
    """The stage's end, for one incarnation."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the memory. Raises LinkLost if rank 0 has ended."""
        memory = self._memory(bucket)
        for place in bucket.tensors:
            yield place.name, _view(memory, place)

    def _memory(self, bucket: Bucket) -> mmap.mmap:
        memory = self._maps.get(bucket.path)
        if memory is None or len(memory) != bucket.nbytes:
            try:
                with open(bucket.path, "r+b") as file:
                    memory = self._maps[bucket.path] = mmap.mmap(file.fileno(), bucket.nbytes)
            except OSError as error:
                raise LinkLost(f"the memory of rank 0 cannot be opened ({error})") from error
        return memory

    def close(self) -> None:
        for memory in self._maps.values():
            with contextlib.suppress(BufferError):  # a tensor still views it; it is unmapped with that
                memory.close()
        self._maps.clear()


def _view(memory: mmap.mmap, place: TensorPlace) -> torch.Tensor:
    return tensor_view(memory, place.dtype, place.shape, place.start)


def _nbytes(place: TensorPlace) -> int:
    dtype: Any = getattr(torch, place.dtype)
    return int(dtype.itemsize) * math.prod(place.shape)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
