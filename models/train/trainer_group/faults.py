"""Errors that cross from the ranks to the stage as themselves: those of the drawn trees, by class name and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from models.errors import AlgorithmError, TrainError
from models.train.trainer_group.calls import Raised

DRAWN: Final = (TrainError, AlgorithmError)


def _family(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _by_name() -> Mapping[str, type[Exception]]:
    return {kind.__name__: kind for root in DRAWN for kind in _family(root)}


def raised(error: Exception) -> Raised:
    return Raised(type(error).__name__, str(error))


def error_of(reply: Raised) -> Exception:
    """The error itself; one of a class that is not known here becomes its nearest root."""
    kind = _by_name().get(reply.name)
    return TrainError(f"{reply.name}: {reply.text}") if kind is None else kind(reply.text)
