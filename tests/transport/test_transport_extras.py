"""Extras: arrays of any number type and shape that travel as frames of their own."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.transport.conformance_net import Extra
from transport import DecodeError, MessageInvalid
from transport.codec import Codec, Frames, checksum, total


class Part(msgspec.Struct, frozen=True, array_like=True):
    name: str
    extras: dict[str, Extra] = {}


class Whole(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[Part, ...]
    alone: Extra | None = None


CODEC = Codec(Whole)
kinds = st.sampled_from("?bBhHiIqQefd")
values = kinds.flatmap(lambda code: arrays.arrays(np.dtype(code), arrays.array_shapes(min_dims=0, min_side=0)))
extras = values.map(lambda array: array.view(Extra))
parts = st.builds(Part, name=st.text(max_size=5), extras=st.dictionaries(st.text(max_size=5), extras, max_size=3))
wholes = st.builds(Whole, parts=st.lists(parts, max_size=3).map(tuple), alone=st.none() | extras)


def decode(frames: Frames) -> Whole:
    return CODEC.decode(frames, total(frames), checksum(*frames))


def same(got: Extra | None, sent: Extra | None) -> bool:
    if got is None or sent is None:
        return got is sent
    facts = (type(got), got.dtype, got.shape, got.tobytes()) == (Extra, sent.dtype, sent.shape, sent.tobytes())
    return facts and not got.flags.writeable and got.flags.aligned


@settings(max_examples=200, deadline=None)
@given(wholes)
def test_round_trip_is_bit_exact(sent: Whole) -> None:
    frames = CODEC.encode(sent)
    assert len(frames) == 1 + sum(len(part.extras) for part in sent.parts) + (sent.alone is not None)
    # Frames may lie anywhere in what a socket received: here all of them at an odd address.
    got = decode(tuple(memoryview(b"." + frame)[1:] for frame in frames))
    assert same(got.alone, sent.alone)
    for one, other in zip(got.parts, sent.parts, strict=True):
        assert (one.name, list(one.extras)) == (other.name, list(other.extras))
        assert all(same(one.extras[name], extra) for name, extra in other.extras.items())


def test_an_extra_is_copied_neither_into_the_body_nor_out_of_it() -> None:
    image = np.arange(1 << 20, dtype="<f4").reshape(4, -1).view(Extra)
    frames = CODEC.encode(Whole((Part("x", {"image": image}),)))
    assert len(frames[0]) < 100
    assert np.shares_memory(np.frombuffer(frames[1], "u1"), image)
    assert np.shares_memory(decode(frames).parts[0].extras["image"], image)


def test_the_digest_covers_every_frame() -> None:
    body, one, two = CODEC.encode(Whole((Part("x", {"a": np.arange(4).view(Extra), "b": np.ones(2).view(Extra)}),)))
    digest = checksum(body, one, two)
    flipped = bytearray(two)
    flipped[3] ^= 1
    for frames in ((body, one, bytes(flipped)), (body, two, one), (body, bytes(len(one)), two)):
        with pytest.raises(DecodeError, match="checksum of"):
            CODEC.decode(frames, total(frames), digest)
    with pytest.raises(DecodeError, match="its header says"):
        CODEC.decode((body, one), total((body, one, two)), digest)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ((1, "<f4", (3,)), "frame of 8 bytes is no Extra of <f4 and shape"),
        ((1, "<f4", (-1, -2)), "frame of 8 bytes is no Extra"),
        ((1, "<f4", (2, 1 << 62, 0)), "frame of 8 bytes is no Extra"),
        ((0, "<f4", (2,)), "lies in frame 0 of a body of 2"),
        ((2, "<f4", (2,)), "lies in frame 2 of a body of 2"),
        ((1, "O", (1,)), "'O', which is no number type"),
        ((1, ">f4", (2,)), "which is no number type"),
        ((1, "i4,i4", (1,)), "which is no number type"),
        ((1, "<f4", 2), "Expected `array`"),
        (7, "Expected `array`"),
    ],
)
def test_a_lying_body_is_quarantined(place: Any, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode((msgspec.msgpack.encode(((), place)), bytes(8)))


@settings(max_examples=200, deadline=None)
@given(st.integers(-1, 2), st.text(max_size=4) | kinds, st.lists(st.integers(-2, 2**62), max_size=40), st.binary())
def test_any_place_decodes_or_raises_one_error(frame: int, dtype: str, shape: list[int], data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode((msgspec.msgpack.encode(((), (frame, dtype, shape))), data))


def test_what_is_no_number_is_refused_before_sending() -> None:
    for array in (np.array(["a"]), np.arange(3, dtype=">i4"), np.array([None]), np.zeros(1, "M8[s]")):
        with pytest.raises(MessageInvalid, match=r"an extra holds little-endian numbers, this one .*; convert it"):
            CODEC.encode(Whole((), array.view(Extra)))


def test_both_ends_agree_on_what_is_an_extra() -> None:
    class Other(np.ndarray[Any, np.dtype[Any]]):
        wire_dtype = "<i4"

    assert len({Codec(dict[str, kind]).hash for kind in (Extra, Other, bytes)}) == 3  # type: ignore[valid-type]
