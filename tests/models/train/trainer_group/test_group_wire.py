"""What crosses between the stage and its ranks arrives as it was."""

from __future__ import annotations

import dataclasses
import socket
import threading

import msgspec
import numpy as np
import pytest
from trainer_group_rig import small_sequences

import models.errors as algorithm_errors
import models.errors as train_errors
import models.errors as weights_errors
from configs.schema import Config
from models.train.interface import TrainSequence
from models.train.trainer_group.calls import (
    Accumulate,
    Arrays,
    Flush,
    Link,
    LinkLost,
    Metrics,
    Raised,
    decode_call,
    decode_reply,
    encode,
    error_of,
    raised,
)
from models.train.trainer_group.rank_spec import needs_trainer_group


def test_every_field_of_a_sequence_arrives() -> None:
    rng = np.random.default_rng(0)
    sent = small_sequences(1)
    sent[1] = dataclasses.replace(
        sent[1],
        reward=2.5,
        truncated=True,
        teacher_log_probs=rng.normal(size=len(sent[1].tokens)).astype(np.float32),
        prefix=(0, 3),
    )
    for one, other in zip(arrived(sent), sent, strict=True):
        for field in dataclasses.fields(TrainSequence):
            found, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, np.ndarray):
                assert found.dtype == wanted.dtype
                assert found.tolist() == wanted.tolist()
                found[:1] = 0  # writable, as it was before
            else:
                assert found == wanted, field.name
                assert type(found) is type(wanted)


def arrived(sent: list[TrainSequence]) -> list[TrainSequence]:
    call = decode_call(encode(Accumulate(sent)))
    assert isinstance(call, Accumulate)
    return call.sequences


def test_arrays_of_another_type_are_cast_and_numbers_of_numpy_are_numbers() -> None:
    (sequence,) = small_sequences(1, groups=1, per_group=1)
    wide = dataclasses.replace(
        sequence, tokens=sequence.tokens.astype(np.int64), reward=np.float32(0.5), group_id=np.int64(3)
    )
    (found,) = arrived([wide])
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == sequence.tokens.tolist()
    assert (found.reward, found.group_id) == (0.5, 3)


def test_log_probs_arrive_as_they_were() -> None:
    sent = [np.array([-0.5, -1.25], dtype=np.float32), np.zeros(0, dtype=np.float32), np.arange(6.0)[::2]]
    reply = decode_reply(encode(Arrays(sent)))
    assert isinstance(reply, Arrays)
    assert [one.tolist() for one in reply.float32] == [one.tolist() for one in sent]
    assert {one.dtype for one in reply.float32} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for module in (train_errors, algorithm_errors, weights_errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ],
)
def test_errors_arrive_as_themselves(kind: type[Exception]) -> None:
    reply = decode_reply(encode(raised(kind("rollout 7: no such token"))))
    assert isinstance(reply, Raised)
    error = error_of(reply)
    assert type(error) is kind
    assert str(error) == "rollout 7: no such token"


def test_an_error_of_an_unknown_class_keeps_its_name() -> None:
    assert str(error_of(Raised("Odd", "it broke"))) == "Odd: it broke"
    assert isinstance(error_of(Raised("Odd", "it broke")), train_errors.TrainError)


def test_a_reply_is_not_taken_for_a_call() -> None:
    assert isinstance(decode_call(encode(Flush())), Flush)
    with pytest.raises(msgspec.ValidationError):
        decode_call(encode(Metrics({"train/loss": 1.0})))


def test_messages_larger_than_the_socket_holds_arrive_whole() -> None:
    one, other = (Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    data = np.random.default_rng(0).bytes(5 << 20)
    sender = threading.Thread(target=lambda: (one.send(data), one.send(b"")))
    sender.start()
    assert other.receive() == data
    assert other.receive() == b""
    sender.join()
    assert not other.readable(0.01)
    one.close()
    assert other.readable(1.0)
    with pytest.raises(LinkLost):
        other.receive()
    with pytest.raises(LinkLost):
        other.send(b"x" * (1 << 20))


def test_a_connection_broken_off_here_wakes_who_waits_here() -> None:
    one, other = (Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    threading.Timer(0.05, one.break_off).start()
    with pytest.raises(LinkLost):
        one.receive()
    other.close()


@pytest.mark.parametrize(
    ("backend", "processes", "expected"),
    [
        ("torch", 1, False),
        ("torch", 2, True),
        ("fsdp", 1, True),
        ("megatron", 1, True),
        ("megatron", 4, True),
        ("simulated", 4, False),
    ],
)
def test_who_needs_a_trainer_group(backend: str, processes: int, expected: bool) -> None:
    replace, config = msgspec.structs.replace, Config()
    config = replace(
        config,
        train=replace(config.train, train_backend=backend),
        parallel=replace(config.parallel, actor_num_gpus_per_node=processes),
    )
    assert needs_trainer_group(config) is expected
