"""A trainer group: calls on the wire, and a stage's backend on ranks that end and start again."""

from __future__ import annotations

import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from trainer_group_rig import Ranks, Slots, by_group, small_config, small_sequences, train_batch, until

from configs.schema import Config, TrainConfig
from configs.schema.train import ParallelConfig
from models import errors
from models.errors import BackendMisuse, CheckpointUnavailable, InvalidSequence, LayoutMismatch, TrainStateUnreadable
from models.train.build import build_backend
from models.train.interface import TrainSequence
from models.train.trainer import Trainer
from models.train.trainer_group import calls
from models.train.trainer_group.rank_spec import PeerGone, Rendezvous, TrainerGroupClosed, needs_trainer_group
from tests.models.train.rig import differing, same_metrics
from tests.models.weights.made_up import checkpoint


def test_every_field_of_a_sequence_arrives() -> None:
    rng = np.random.default_rng(0)
    sent = small_sequences(1)
    sent[1] = replace(
        sent[1],
        reward=2.5,
        truncated=True,
        teacher_log_probs=rng.normal(size=len(sent[1].tokens)).astype(np.float32),
        prefix=(0, 3),
    )
    for one, other in zip(arrived(sent), sent, strict=True):
        for field in fields(TrainSequence):
            found, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, np.ndarray):
                assert found.dtype == wanted.dtype
                assert found.tolist() == wanted.tolist()
                found[:1] = 0  # writable, as it was before
            else:
                assert found == wanted, field.name
                assert type(found) is type(wanted)

    # Arrays of another type are cast, and numbers of numpy are numbers.
    wide = {"tokens": sent[0].tokens.astype(np.int64), "reward": np.float32(0.5), "group_id": np.int64(3)}
    (found,) = arrived([replace(sent[0], **wide)])
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == sent[0].tokens.tolist()
    assert (found.reward, found.group_id) == (0.5, 3)


def arrived(sent: list[TrainSequence]) -> list[TrainSequence]:
    call = calls.decode_call(calls.encode(calls.WithSequences("Accumulate", sent)))
    assert isinstance(call, calls.WithSequences)
    return call.sequences


def test_log_probs_arrive_as_they_were() -> None:
    sent = [np.array([-0.5, -1.25], dtype=np.float32), np.zeros(0, dtype=np.float32), np.arange(6.0)[::2]]
    reply = calls.decode_reply(calls.encode(calls.Reply(arrays=sent)))
    assert [one.tolist() for one in reply.arrays] == [one.tolist() for one in sent]
    assert {one.dtype for one in reply.arrays} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TrainError | errors.AlgorithmError | errors.WeightsError)
    ],
)
def test_errors_arrive_as_themselves(kind: type[Exception]) -> None:
    reply = calls.decode_reply(calls.encode(calls.raised(kind("rollout 7: no such token"))))
    assert reply.raised is not None
    error = calls.error_of(reply.raised)
    assert type(error) is kind
    assert str(error) == "rollout 7: no such token"


def test_an_error_of_an_unknown_class_keeps_its_name() -> None:
    assert str(calls.error_of(calls.Raised("Odd", "it broke"))) == "Odd: it broke"
    assert isinstance(calls.error_of(calls.Raised("Odd", "it broke")), errors.TrainError)


def test_a_reply_is_not_taken_for_a_call() -> None:
    assert calls.decode_call(calls.encode(calls.Plain("Flush"))) == calls.Plain("Flush")
    with pytest.raises(msgspec.ValidationError):
        calls.decode_call(calls.encode(calls.Reply(metrics={"train/loss": 1.0})))


def test_messages_larger_than_the_socket_holds_arrive_whole() -> None:
    one, other = (calls.Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    data = np.random.default_rng(0).bytes(5 << 20)
    sender = threading.Thread(target=lambda: (one.send(data), one.send(b"")))
    sender.start()
    assert other.receive() == data
    assert other.receive() == b""
    sender.join()
    assert not other.readable(0.01)
    one.close()
    assert other.readable(1.0)
    with pytest.raises(calls.LinkLost):
        other.receive()
    with pytest.raises(calls.LinkLost):
        other.send(b"x" * (1 << 20))


def test_a_connection_broken_off_here_wakes_the_waiting_task() -> None:
    one, other = (calls.Link(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    threading.Timer(0.05, one.break_off).start()
    with pytest.raises(calls.LinkLost):
        one.receive()
    other.close()


@pytest.mark.parametrize(("backend", "processes", "expected"), [
    ("torch", 1, False),
    ("torch", 2, True),
    ("fsdp", 1, True),
    ("megatron", 1, True),
    ("megatron", 4, True),
    ("simulated", 4, False),
])  # fmt: skip
def test_which_runs_need_a_trainer_group(backend: str, processes: int, expected: bool) -> None:
    config = Config(
        train=TrainConfig(train_backend=backend),  # type: ignore[arg-type]
        parallel=ParallelConfig(actor_num_gpus_per_node=processes),
    )
    assert needs_trainer_group(config) is expected


pytestmark = pytest.mark.slow


@pytest.fixture
def ranks(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Of the backend that is the test's parameter."""
    with Ranks(tmp_path, small_config(tiny, train_backend=request.param)) as running:
        yield running


@pytest.fixture
def slots(tiny: Path, tmp_path: Path) -> Iterator[Slots]:
    made = Slots(tmp_path / "slots", tiny)
    yield made
    made.close()


@pytest.mark.parametrize("ranks", ["torch"], indirect=True)
def test_two_ranks_train_as_one_process(ranks: Ranks, slots: Slots, tiny: Path, tmp_path: Path) -> None:
    alone, trainer_group = build_backend(small_config(tiny), 4), ranks.backend()
    assert isinstance(alone, Trainer)
    alone.setup()
    trainer_group.setup()
    for number, steps in ((0, 1), (1, 2)):
        wanted, found = train_batch(alone, number, steps=steps), train_batch(trainer_group, number, steps=steps)
        same_metrics(found, wanted)
    sequences = small_sequences(5)
    for one, other in zip(trainer_group.logprobs(sequences), alone.logprobs(sequences), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

    with pytest.raises(InvalidSequence, match="999"):
        trainer_group.accumulate([replace(sequences[0], tokens=np.full_like(sequences[0].tokens, 999))])
    trainer_group.accumulate(by_group(sequences)[0])
    with pytest.raises(BackendMisuse, match="save while 3 rollouts are being trained"):
        trainer_group.save(tmp_path / "refused")
    trainer_group.discard()
    with pytest.raises(TrainStateUnreadable, match="nowhere"):
        trainer_group.load(tmp_path / "nowhere")
    assert ranks.incarnation == 0, "an error that all ranks raise alike leaves them alive"

    check_what_is_touched(ranks, trainer_group, slots)
    before = slots.weights(trainer_group)
    trainer_group.save(tmp_path / "saved")
    train_batch(trainer_group, 2)
    trainer_group.load(tmp_path / "saved")
    assert differing(slots.weights(trainer_group), before) == []
    for name, tensor in alone.export_weights():
        if name in before:  # all but what is tied
            torch.testing.assert_close(before[name], tensor, atol=1e-5, rtol=1e-4)
    trainer_group.close()
    trainer_group.close()
    until(lambda: ranks.incarnation == 1)  # they ended because they were told to
    with pytest.raises(TrainerGroupClosed):
        trainer_group.flush()

    # A slot that does not fit is an error of the call alone: of rank 0, the other has run the same export to its end.
    again, fresh = ranks.backend(), Slots(tmp_path / "fresh", tiny)
    again.setup()
    with pytest.raises(LayoutMismatch, match="is not in the slot's layout"):
        again.write_slot(fresh.directory, checkpoint(tmp_path / "other"), 0, 0)
    fresh.close()
    train_batch(again, 0)
    assert ranks.incarnation == 1
    again.close()


def check_what_is_touched(ranks: Ranks, trainer_group: calls.TrainerGroupBackend, slots: Slots) -> None:
    """A version is copied once and digested once, by one rank, however the weights are spread: what is gathered goes
    into the slot without a stop."""
    for _ in range(2):
        for file in ranks.touched.iterdir():
            file.unlink()
        slots.weights(trainer_group)
        [counted] = ranks.touched.iterdir()  # of rank 0 alone
        found: Counter[str] = Counter()
        for line in counted.read_text().splitlines():
            what, count = line.split()
            found[what] += int(count)
        assert found == {"copied": slots.nbytes, "digested": slots.nbytes}


@pytest.mark.parametrize("ranks", ["megatron"], indirect=True)
def test_a_version_is_copied_once_and_digested_once_by_one_rank(ranks: Ranks, slots: Slots) -> None:
    """As of the other backends, in their tests."""
    trainer_group = ranks.backend()
    trainer_group.setup()
    check_what_is_touched(ranks, trainer_group, slots)
    trainer_group.close()


@pytest.mark.parametrize(
    ("ranks", "rank"), [("torch", 0), pytest.param("torch", 1, marks=pytest.mark.full), ("fsdp", 1)], indirect=["ranks"]
)
def test_a_lost_rank_ends_the_call_and_the_next_incarnation_trains_the_same(
    ranks: Ranks, slots: Slots, tmp_path: Path, rank: int
) -> None:
    lost = ranks.backend()
    lost.setup()
    check_what_is_touched(ranks, lost, slots)
    train_batch(lost, 0)
    lost.save(tmp_path / "saved")
    train_batch(lost, 1, steps=2)
    unbroken = slots.weights(lost)
    with ranks.killed_within(rank), pytest.raises(PeerGone, match="BeginBatch: the trainer group was lost"):
        train_batch(lost, 2)
    lost.close()
    slots.close()
    again, fresh = ranks.backend(), Slots(slots.directory, slots.source)
    again.setup()
    again.load(tmp_path / "saved")
    train_batch(again, 1, steps=2)
    assert differing(fresh.weights(again), unbroken) == []
    again.close()
    fresh.close()


def test_a_rank_that_hangs_ends_the_trainer_group_within_the_timeout(tiny: Path, tmp_path: Path) -> None:
    with Ranks(tmp_path, small_config(tiny, timeout_s=6.0)) as ranks:
        for rank in (1, 0):
            trainer_group, incarnation = ranks.backend(), ranks.incarnation
            trainer_group.setup()
            ranks.signal(rank, signal.SIGSTOP)
            if rank == 1:
                with pytest.raises(PeerGone):
                    train_batch(trainer_group, 0)
            until(lambda before=incarnation: ranks.incarnation > before)  # without a call: heartbeats are missed
            trainer_group.close()


def test_a_model_that_cannot_be_loaded_is_the_users_error(tmp_path: Path) -> None:
    with Ranks(tmp_path, small_config(tmp_path / "no-model")) as ranks:
        trainer_group = ranks.backend()
        with pytest.raises(CheckpointUnavailable, match="no-model"):
            trainer_group.setup()
        ended = ranks.processes
        trainer_group.close()
        until(lambda: all(one.poll() is not None for one in ended))
        assert [one.returncode for one in ended] == [0] * len(ended)


@pytest.mark.parametrize("announced", [False, True])
def test_closing_wakes_a_caller_that_waits(tmp_path: Path, announced: bool) -> None:
    """For a trainer group that never comes, or for the answer of one that is silent."""
    address, raised = str(tmp_path / "s"), list[BaseException]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(address)
        silent.listen(1)
        backend = calls.TrainerGroupBackend(lambda: Rendezvous(0, address) if announced else None)

        def wait() -> None:
            try:
                backend.setup()
            except TrainerGroupClosed as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        until((lambda: backend._link is not None) if announced else backend._calling.locked)
        backend.close()
        waiting.join(10)
        assert len(raised) == 1
