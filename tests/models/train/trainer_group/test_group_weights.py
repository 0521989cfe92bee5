"""Weights from rank 0 to the stage through two pieces of memory: all of them, in order, each as it was."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from models.errors import BackendMisuse
from models.train.trainer_group.buckets import WeightReader, WeightSender
from models.train.trainer_group.calls import Done, Export, decode_message, encode
from models.train.trainer_group.link import Link
from models.train.trainer_group.stream import WeightStream

LIMIT = 256

WEIGHTS = {
    "small": torch.arange(10, dtype=torch.float32),
    "half": torch.arange(40, dtype=torch.bfloat16).view(5, 8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "larger than a piece": torch.randn(50, 7, generator=torch.manual_seed(0)),
    "transposed": torch.arange(12, dtype=torch.float32).view(3, 4).T,
    "ids": torch.arange(30, dtype=torch.int64),
    "last": torch.ones(3, dtype=torch.float16),
}


@dataclass
class Ends:
    """Rank 0 in a thread, the stage here."""

    patience_s: float = 20.0
    exported: list[str] = field(default_factory=list)
    sent: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link, self._far = Link(one), Link(other)
        self.reader, self.calling = WeightReader(), threading.Lock()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in WEIGHTS.items():
            self.exported.append(name)
            yield name, tensor

    def _serve(self) -> None:
        sender = WeightSender(LIMIT, self.patience_s)
        while data := self._far.receive():
            if isinstance(decode_message(data), Export):
                self.exported.clear()
                self.sent.append(sender.send(self._far, self._weights()))
                self._far.send(encode(Done(self.sent[-1])))

    def start(self) -> WeightStream:
        return WeightStream(self.link, self.reader, self.calling)

    def end(self) -> None:
        self.link.send(b"")
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.link.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.end()


def test_all_arrive_in_order(ends: Ends) -> None:
    for _ in range(2):
        stream = ends.start()
        found = {name: tensor.clone() for name, tensor in stream.tensors()}
        assert list(found) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        assert stream.complete
    assert ends.sent == [True, True]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_whoever_stops_early_lets_the_ranks_finish(ends: Ends, taken: int) -> None:
    stream = ends.start()
    tensors = stream.tensors()
    for _ in range(taken):
        next(tensors)
    if taken:
        tensors.close()
    else:
        stream.give_up()  # what the next call does
    assert list({name: None for name, _ in ends.start().tensors()}) == list(WEIGHTS)
    assert ends.exported == list(WEIGHTS)
    assert ends.sent[0] is (taken > 5)


def test_who_goes_on_after_another_call_is_told_so(ends: Ends) -> None:
    stream = ends.start()
    tensors = stream.tensors()
    next(tensors)
    stream.give_up()
    with pytest.raises(BackendMisuse, match="ended by another call"):
        next(tensors)


def test_what_is_collected_during_a_call_waits_for_the_next(ends: Ends) -> None:
    stream = ends.start()
    tensors = stream.tensors()
    next(tensors)
    with ends.calling:
        del tensors
        gc.collect()
    assert not stream._finished
    stream.give_up()


def test_a_stage_that_takes_nothing_does_not_hold_the_ranks_up() -> None:
    ends = Ends(patience_s=0.05)
    stream = ends.start()
    tensors = stream.tensors()
    first, _ = next(tensors)
    while not ends.sent:  # the ranks lose patience
        pass
    assert ends.exported == list(WEIGHTS)
    rest = [name for name, _ in tensors]
    assert [first, *rest] == list(WEIGHTS)[: len(rest) + 1]
    assert len(rest) + 1 < len(WEIGHTS)
    assert not stream.complete
    ends.end()
