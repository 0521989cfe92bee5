"""One export of the weights, seen from the stage: tensors bucket by bucket, to the end or until it is given up.

Invariants: every bucket is answered once; however the export ends here, the ranks are told to run it to its end, so
that none of them waits in its collectives for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from models.errors import BackendMisuse
from models.train.trainer_group.buckets import WeightReader
from models.train.trainer_group.calls import Bucket, Done, Export, GoOn, Raised, Stop, decode_reply, encode
from models.train.trainer_group.faults import error_of
from models.train.trainer_group.link import Link, LinkLost


class WeightStream:
    """A started export. `calling`: the lock of whoever uses the link."""

    def __init__(self, link: Link, reader: WeightReader, calling: threading.Lock) -> None:
        """Start it; the lock is held by the caller. Raises LinkLost."""
        self._link, self._reader, self._calling = link, reader, calling
        self._finished = False
        self._caller = threading.get_ident()
        self.complete = False
        link.send(encode(Export()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of memory that is written again. Raises LinkLost, BackendMisuse, and what the ranks raised.

        Not `complete` after its last: the ranks waited too long for an answer, and sent no more.
        """
        try:
            while (bucket := self._next()) is not None:
                for name, tensor in self._reader.tensors(bucket):
                    yield name, tensor
                    if self._finished:
                        raise BackendMisuse(
                            "the export of the weights was ended by another call of the backend; take all its tensors "
                            "before the next call"
                        )
                self._link.send(encode(GoOn()))
        finally:
            # Left in the middle. Who collects what was left behind, in another thread or during a call, may not use
            # the link; the next call gives up the export then.
            if threading.get_ident() == self._caller and self._calling.acquire(blocking=False):
                try:
                    self.give_up()
                except LinkLost:
                    self._link.break_off()  # the next call meets the trainer group's next incarnation
                finally:
                    self._calling.release()

    def _next(self) -> Bucket | None:
        with self._calling:
            try:
                reply = decode_reply(self._link.receive())
            except LinkLost:
                self._finished = True
                raise
        if isinstance(reply, Bucket):
            return reply
        self._finished = True
        if isinstance(reply, Raised):
            raise error_of(reply)
        self.complete = isinstance(reply, Done) and reply.complete
        return None

    def forget(self) -> None:
        """The connection is gone."""
        self._finished = True

    def give_up(self) -> None:
        """Have the ranks run it to its end without their tensors; nothing if it has ended. Raises LinkLost."""
        if self._finished:
            return
        self._finished = True
        self._link.send(encode(Stop()))
        while isinstance(decode_reply(self._link.receive()), Bucket):
            self._link.send(encode(Stop()))
