"""Bodies, extras and headers: what goes in comes out, what is damaged ends in one kind of error."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.transport.memory_link import Extra
from transport import wire
from transport.codec import Buffer, Codec, checksum, total
from transport.errors import DecodeError, MessageInvalid, UsageError


class Floats(np.ndarray[Any, np.dtype[Any]]):
    wire_dtype: ClassVar[str] = "<f4"


class Ints(np.ndarray[Any, np.dtype[Any]]):
    wire_dtype: ClassVar[str] = "<i4"


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    ids: Ints
    values: Floats
    name: str = "x"
    numbers: dict[str, float] = {}
    extras: dict[str, Extra] = {}


class Tree(msgspec.Struct, frozen=True, array_like=True):
    leaves: tuple[Leaf, ...]
    note: str | None = None
    alone: Extra | None = None


def ints(values: list[int]) -> Ints:
    return np.array(values, dtype="<i4").view(Ints)


def floats(values: list[float]) -> Floats:
    return np.array(values, dtype="<f4").view(Floats)


def tree(**extras: np.ndarray[Any, Any]) -> Tree:
    leaf = Leaf(ints([1, 2]), floats([0.5]), extras={name: array.view(Extra) for name, array in extras.items()})
    return Tree((leaf,))


CODEC = Codec(Tree)
kinds = st.sampled_from("?bBhHiIqQefd")
extra_values = kinds.flatmap(lambda code: arrays.arrays(np.dtype(code), arrays.array_shapes(min_dims=0, min_side=0)))
extras = extra_values.map(lambda array: array.view(Extra))
leaves = st.builds(
    Leaf,
    ids=st.lists(st.integers(-(2**31), 2**31 - 1)).map(ints),
    values=st.lists(st.floats(width=32)).map(floats),
    name=st.text(max_size=20),
    numbers=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    extras=st.dictionaries(st.text(max_size=5), extras, max_size=2),
)
trees = st.builds(Tree, st.lists(leaves, max_size=2).map(tuple), st.none() | st.text(), st.none() | extras)


def decode(*frames: Buffer) -> Tree:
    return CODEC.decode(frames, total(frames), checksum(*frames))


def same(got: Any, sent: Any) -> bool:
    if got is None or sent is None:
        return got is sent
    facts = [(type(one), one.dtype, one.shape, one.tobytes()) for one in (got, sent)]
    return facts[0] == facts[1] and not got.flags.writeable


@settings(max_examples=200, deadline=None)
@given(trees)
def test_round_trip_is_bit_exact(sent: Tree) -> None:
    frames = CODEC.encode(sent)
    assert len(frames) == 1 + sum(len(leaf.extras) for leaf in sent.leaves) + (sent.alone is not None)
    # Frames may lie anywhere in what a socket received: here all of them at an odd address.
    for got in (decode(*frames), decode(*(memoryview(b"." + frame)[1:] for frame in frames))):
        assert got.note == sent.note
        assert same(got.alone, sent.alone)
        for one, other in zip(got.leaves, sent.leaves, strict=True):
            assert (one.name, one.numbers, list(one.extras)) == (other.name, other.numbers, list(other.extras))
            assert same(one.ids, other.ids)
            assert same(one.values, other.values)
            assert all(same(one.extras[name], extra) for name, extra in other.extras.items())
            assert all(extra.flags.aligned for extra in one.extras.values())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\x92\x91\x94\xc4\x03abc\xc4\x00\xa1x\x80\xc0", "3 bytes are no whole number of 4-byte items of Ints"),
        (b"\x92\x91\x94\x01\xc4\x00\xa1x\x80\xc0", "expected the bytes of Ints, got int"),
        (b"\x92\x90\xa2\xff\xfe", "UnicodeDecodeError"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated|Expected"),
        pytest.param(b"\x92\x90" + b"\x91" * 200_000, "not a Tree", id="deep"),
    ],
)
def test_what_is_wrong_is_reported(body: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(body)


def test_wrong_arrays_are_refused_before_sending() -> None:
    with pytest.raises(MessageInvalid, match=r"must be one-dimensional of dtype <i4, .* 1-dimensional of float64"):
        CODEC.encode(Tree((Leaf(np.zeros(3).view(Ints), floats([])),)))
    with pytest.raises(MessageInvalid, match="2-dimensional"):
        CODEC.encode(Tree((Leaf(np.zeros((2, 2), "<i4").view(Ints), floats([])),)))
    strided = np.arange(10, dtype="<i4")[::2].view(Ints)
    assert decode(*CODEC.encode(Tree((Leaf(strided, floats([])),)))).leaves[0].ids.tolist() == [0, 2, 4, 6, 8]
    for array in (np.array(["a"]), np.arange(3, dtype=">i4"), np.array([None]), np.zeros(1, "M8[s]")):
        with pytest.raises(MessageInvalid, match=r"an extra holds little-endian numbers, this one .*; convert it"):
            CODEC.encode(Tree((), alone=array.view(Extra)))


class Other(msgspec.Struct, frozen=True, array_like=True, tag=True):
    text: str


class Another(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


def test_tagged_unions_are_schemas() -> None:
    codec: Codec[Any] = Codec(Other | Another)  # type: ignore[arg-type]
    for sent in (Other("x"), Another(3)):
        (body,) = codec.encode(sent)
        assert codec.decode((body,), len(body), checksum(body)) == sent
    with pytest.raises(MessageInvalid, match="a Tree was sent where"):
        codec.encode(tree())


def test_untyped_schemas_are_refused() -> None:
    class Loose(msgspec.Struct):
        anything: Any

    class Unnamed(msgspec.Struct):
        array: np.ndarray[Any, Any]

    with pytest.raises(UsageError, match="contains Any, but only typed data may travel"):
        Codec(Loose)
    with pytest.raises(UsageError, match="no wire form"):
        Codec(Unnamed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_hostile_headers_raise_only_what_links_catch(header: bytes) -> None:
    for decode in (wire.decode_to_hub, wire.decode_from_hub, wire.decode_to_topic, wire.decode_from_topic):
        try:
            decode(header)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError):
            continue


def test_without_the_checksum_damage_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that skips the digest: content changes and nobody notices."""
    body = bytearray(*CODEC.encode(tree()))
    digest = checksum(bytes(body))
    body[body.index(b"\x01\x00\x00\x00")] = 9
    with pytest.raises(DecodeError):
        CODEC.decode((bytes(body),), len(body), digest)
    monkeypatch.setattr("transport.codec.checksum", lambda *frames: digest)
    assert CODEC.decode((bytes(body),), len(body), digest).leaves[0].ids.tolist() == [9, 2]


def test_catching_msgspec_errors_alone_would_let_a_stage_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.codec.DECODE_FAILURES", (msgspec.MsgspecError,))
    with pytest.raises(UnicodeDecodeError):
        decode(b"\x92\x90\xa2\xff\xfe")


def test_an_extra_is_copied_neither_into_the_body_nor_out_of_it() -> None:
    image = np.arange(1 << 20, dtype="<f4").reshape(4, -1).view(Extra)
    frames = CODEC.encode(tree(image=image))
    assert len(frames[0]) < 100
    assert np.shares_memory(np.frombuffer(frames[1], "u1"), image)
    assert np.shares_memory(decode(*frames).leaves[0].extras["image"], image)


def test_the_digest_covers_every_frame() -> None:
    body, one, two = CODEC.encode(tree(a=np.arange(4), b=np.ones(2)))
    digest = checksum(body, one, two)
    flipped = bytearray(two)
    flipped[3] ^= 1
    for frames in ((body, one, bytes(flipped)), (body, two, one), (body, bytes(len(one)), two)):
        with pytest.raises(DecodeError, match="checksum of"):
            CODEC.decode(frames, total(frames), digest)
    with pytest.raises(
        DecodeError, match=f"body has {total((body, one))} bytes, its header says {total((body, one, two))}"
    ):
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
        decode(msgspec.msgpack.encode(((), None, place)), bytes(8))


@settings(max_examples=200, deadline=None)
@given(st.integers(-1, 2), st.text(max_size=4) | kinds, st.lists(st.integers(-2, 2**62), max_size=40), st.binary())
def test_any_place_decodes_or_raises_one_error(frame: int, dtype: str, shape: list[int], data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(msgspec.msgpack.encode(((), None, (frame, dtype, shape))), data)
