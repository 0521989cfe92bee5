"""Bodies: one typed msgpack message each, arrays as raw little-endian bytes, checked by an xxh3 digest.

A body is one frame, the msgpack, followed by a frame for each extra in it.

Invariants:
- Only typed decoders exist here; nothing on a wire chooses its own type. A schema containing `Any` is refused.
- An array type is any numpy.ndarray subclass with a class attribute `wire_dtype`, such as "<i4". It travels as its
  bytes and comes back as a read-only, aligned view of that subclass: dtype and byte order belong to the schema.
- An extra type is any numpy.ndarray subclass with `wire_frame = True`: for what is large, rare, or of a shape that the
  schema does not know (images, choices of experts). Each value travels as a frame of its own, of any number type and
  shape, and is copied neither into the msgpack nor out of it; so it must not be written to once it is sent.
- Whatever is wrong with a body surfaces as DecodeError from `Codec.decode`, and nowhere else.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from transport.errors import DecodeError, MessageInvalid, UsageError

T = TypeVar("T")
Buffer = bytes | memoryview
Frames = tuple[Buffer, ...]  # of one body: the msgpack, then its extras
COPY_BELOW = 4096  # bytes; a copy of a short array costs less than a view of it
NUMBERS = frozenset(np.dtype(code).newbyteorder("<").str for code in "?bBhHiIqQefd")  # of extras

# All that a hostile or damaged body can raise. UnicodeDecodeError is a ValueError and no MsgspecError.
DECODE_FAILURES = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, TypeError, OverflowError)


@functools.cache  # called for every array of every message
def is_wire_array(kind: object) -> bool:
    """Whether values of the type travel as raw bytes."""
    return (
        isinstance(kind, type) and issubclass(kind, np.ndarray) and isinstance(getattr(kind, "wire_dtype", None), str)
    )


@functools.cache
def is_extra(kind: object) -> bool:
    """Whether values of the type travel as frames of their own."""
    return isinstance(kind, type) and issubclass(kind, np.ndarray) and getattr(kind, "wire_frame", False) is True


@functools.cache
def _wire_dtype(kind: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(kind.wire_dtype)
    return dtype


def _raw(array: Any) -> Buffer:
    if array.nbytes < COPY_BELOW:
        return cast(bytes, array.tobytes())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _encode_array(value: Any) -> Buffer:
    kind = value.__class__
    if not is_wire_array(kind):
        raise TypeError(f"{kind.__name__} has no wire form; use builtins, structs or arrays with a wire_dtype")
    if value.ndim != 1 or value.dtype != _wire_dtype(kind):
        raise TypeError(
            f"{kind.__name__} must be one-dimensional of dtype {kind.wire_dtype}, this one is {value.ndim}-dimensional "
            f"of {value.dtype}; convert it before sending"
        )
    return _raw(value)


def _decode_extra(kind: type, value: Any, frames: Sequence[Buffer]) -> Any:
    """The extra whose place in the msgpack is `[frame, dtype, shape]`: a view of its frame."""
    place, name, shape = msgspec.convert(value, tuple[int, str, tuple[int, ...]])
    if not 0 < place < len(frames):
        raise ValueError(f"an extra lies in frame {place} of a body of {len(frames)}")
    if name not in NUMBERS:
        raise ValueError(f"an extra is of {name[:40]!r}, which is no number type")
    dtype, frame = np.dtype(name), frames[place]
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(frame):
        raise ValueError(f"a frame of {len(frame)} bytes is no {kind.__name__} of {name} and shape {shape}")
    array = np.frombuffer(frame, dtype)
    array = array if array.flags.aligned else array.copy()  # small frames may lie anywhere in what was received
    array.flags.writeable = False
    return array.reshape(shape).view(kind)


def _decode_array(kind: type, value: Any) -> Any:
    if not is_wire_array(kind):
        raise TypeError(f"{kind.__name__} has no wire form")
    if not isinstance(value, bytes):
        raise ValueError(f"expected the bytes of {kind.__name__}, got {type(value).__name__}")
    dtype = _wire_dtype(kind)
    if len(value) % dtype.itemsize:
        raise ValueError(f"{len(value)} bytes are no whole number of {dtype.itemsize}-byte items of {kind.__name__}")
    return kind(len(value) // dtype.itemsize, dtype, value)  # a view, as quick as numpy has it


def checksum(*frames: Buffer) -> int:
    """xxh3 of the frames one after the other, 63 bits so that it fits a signed msgpack integer."""
    if len(frames) == 1:
        return xxhash.xxh3_64_intdigest(frames[0]) >> 1
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest() >> 1


def total(frames: Frames) -> int:
    """Bytes of a body."""
    return len(frames[0]) if len(frames) == 1 else sum(map(len, frames))


def _describe(info: msgspec.inspect.Type, seen: list[type]) -> str:
    """Structure of a schema as text: names, order and types of fields, tags; not defaults or docstrings."""
    kinds = msgspec.inspect
    if isinstance(info, kinds.AnyType | kinds.RawType):
        raise UsageError("a schema contains Any, but only typed data may travel; name the type")
    if isinstance(info, kinds.StructType):
        name = info.cls.__name__
        if info.cls in seen:
            return name
        seen.append(info.cls)
        fields = ",".join(f"{field.encode_name}:{_describe(field.type, seen)}" for field in info.fields)
        return f"{name}[{info.tag!r},{info.array_like}]({fields})"
    if isinstance(info, kinds.UnionType):
        return "|".join(sorted(_describe(part, seen) for part in info.types))
    if isinstance(info, kinds.CustomType):
        if is_extra(info.cls):
            return f"{info.cls.__name__}<frame>"
        if not is_wire_array(info.cls):
            raise UsageError(f"a schema contains {info.cls.__name__}, which has no wire form; give it a wire_dtype")
        return f"{info.cls.__name__}<{cast(Any, info.cls).wire_dtype}>"
    if isinstance(info, kinds.LiteralType):
        return f"literal{sorted(map(repr, info.values))}"
    parts = [type(info).__name__]
    for name in ("item_type", "key_type", "value_type"):
        inner = getattr(info, name, None)
        if isinstance(inner, kinds.Type):
            parts.append(_describe(inner, seen))
    if isinstance(info, kinds.TupleType):
        parts.extend(_describe(part, seen) for part in info.item_types)
    if isinstance(info, kinds.EnumType):
        parts.append(",".join(f"{member.name}={member.value!r}" for member in info.cls))
    return "<".join(parts)


class Codec(Generic[T]):
    """Encoder and decoder of one schema: a struct, a tagged union of structs, or builtins."""

    def __init__(self, schema: type[T]) -> None:
        self._frames: list[Buffer] = []  # extras of the message that is being encoded, or all frames of one decoded
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_custom)
        try:
            self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(schema, dec_hook=self._decode_custom)
            info = msgspec.inspect.type_info(schema)
        except TypeError as error:
            raise UsageError(
                f"schema {schema!r} cannot travel: {error}; use structs, tagged unions or builtins"
            ) from error
        parts = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
        structs = tuple(part.cls for part in parts if isinstance(part, msgspec.inspect.StructType))
        self._accepts = structs if len(structs) == len(parts) else ()  # classes that a sent message must be one of
        self.name = "|".join(sorted(_short_name(part) for part in parts))
        self.hash = hashlib.sha256(_describe(info, []).encode()).hexdigest()[:16]

    def encode(self, message: T) -> Frames:
        """Encode, or raise MessageInvalid. The outer type is checked, so that a stranger fails here and not afar."""
        if self._accepts and not isinstance(message, self._accepts):
            raise MessageInvalid(
                f"a {type(message).__name__} was sent where {self.name} is declared; send the declared type"
            )
        self._frames = []
        try:
            body = self._encoder.encode(message)
            return (body, *self._frames)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise MessageInvalid(f"a {type(message).__name__} does not encode: {error}") from error
        finally:
            self._frames = []

    def decode(self, frames: Frames, size: int, digest: int) -> T:
        """Check size and digest, then decode; raise DecodeError for everything that is wrong with a body."""
        if total(frames) != size:
            raise DecodeError(f"body has {total(frames)} bytes, its header says {size}")
        if checksum(*frames) != digest:
            raise DecodeError(f"checksum of {size} bytes differs from the header's: the body was damaged on its way")
        self._frames = list(frames)
        try:
            return self._decoder.decode(frames[0])
        except DECODE_FAILURES as error:
            raise DecodeError(f"not a {self.name}: {type(error).__name__}: {error}") from error
        finally:
            self._frames = []

    def copy(self, message: T) -> T:
        """The message as its receiver would have it. Raises MessageInvalid or DecodeError."""
        frames = self.encode(message)
        return self.decode(frames, total(frames), checksum(*frames))

    def _encode_custom(self, value: Any) -> Any:
        if not is_extra(value.__class__):
            return _encode_array(value)
        if value.dtype.str not in NUMBERS:
            raise TypeError(
                f"an extra holds little-endian numbers, this one {value.dtype.str}; convert it before sending"
            )
        self._frames.append(_raw(value))
        return len(self._frames), value.dtype.str, value.shape

    def _decode_custom(self, kind: type, value: Any) -> Any:
        return _decode_extra(kind, value, self._frames) if is_extra(kind) else _decode_array(kind, value)


def _short_name(info: msgspec.inspect.Type) -> str:
    cls = getattr(info, "cls", None)
    return cls.__name__ if isinstance(cls, type) else type(info).__name__.removesuffix("Type").lower()
