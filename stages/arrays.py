"""The arrays that messages carry: of one number type and dimension, or, as extras, of any.

Invariants: an array of a message is never written to; byte order is little-endian. The transport recognises these
types by `wire_dtype` and `wire_frame` (transport/codec.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt


class WireArray(np.ndarray[Any, np.dtype[Any]]):
    """One-dimensional array that travels as raw little-endian bytes of `wire_dtype`. Read-only after decoding."""

    wire_dtype: ClassVar[str]


class Int32Array(WireArray):
    wire_dtype: ClassVar[str] = "<i4"


class Float32Array(WireArray):
    wire_dtype: ClassVar[str] = "<f4"


class UInt8Array(WireArray):
    wire_dtype: ClassVar[str] = "|u1"


class Extra(np.ndarray[Any, np.dtype[Any]]):
    """An array of any number type and shape beside the tokens: an image, the choices of experts.

    It travels as a separate frame, uncopied: do not write to it once its sample is sent. Read-only after decoding.
    """

    wire_frame: ClassVar[bool] = True


A = TypeVar("A", bound=WireArray)

NO_FLOATS = np.empty(0, dtype="<f4").view(Float32Array)
NO_IDS = np.empty(0, dtype="<i4").view(Int32Array)


def wire(values: Any, kind: type[A]) -> A:
    """Copy any sequence of numbers into a contiguous wire array of the kind."""
    return np.ascontiguousarray(values, dtype=kind.wire_dtype).view(kind)


def joined(first: A, second: Sequence[float] | npt.NDArray[Any]) -> A:
    """[m + n] a wire array with further numbers behind it, in one copy."""
    kind, m = type(first), len(first)
    both = np.empty(m + len(second), dtype=kind.wire_dtype)
    both[:m], both[m:] = first, second
    return both.view(kind)
