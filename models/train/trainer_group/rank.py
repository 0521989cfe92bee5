"""A rank: find the others, receive each call, make it on its own trainer, agree on how it ended. Rank 0 also talks to
the stage.

Invariants:
- all ranks make the same calls in the same order, but for calls that are not collective (files and weights of plain
  copies), which rank 0 makes alone; rank 0 passes a call on before it makes it, and replies after all have made it;
- an expected error that all ranks raise alike is a reply, and the trainer group lives; any other error ends the
  process, and with it the trainer group;
- every exchange between ranks is collective, in a gloo group of its own: a rank that is dead or hangs shows in the
  others as an error within the group's timeout, also while nothing is trained, for rank 0 sends heartbeats;
- when the stage is gone, all ranks end as after `End`, and rank 0 raises PeerGone.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import distributed

from configs.schema import Config
from models.errors import WeightsError
from models.fault_injection import FaultPlan
from models.train.build import build_member, set_cuda_defaults
from models.train.dp_group import DistributedDpGroup, DpGroup, gather_bytes
from models.train.trainer import Trainer
from models.train.trainer_group import calls
from models.train.trainer_group.rank_spec import PeerGone, RanksDisagree, RankSpec, Rendezvous


class Member:
    """The trainer of one rank. `dp_group`: of plain copies; sharded frameworks make their own. `faults`: of
    `--fault-inject`."""

    def __init__(
        self, config: Config, dp_group: DpGroup, *, leads: bool, faults: FaultPlan | None = None, run_dir: str = ""
    ) -> None:
        self._faults, self._calls = faults, itertools.count(1)
        self._config = _for_this_rank(config)
        self._dp_group, self._leads, self._run_dir = dp_group, leads, Path(run_dir)
        self._copies = config.train.train_backend == "torch"
        self._trainer: Trainer | None = None

    def takes_part(self, call: calls.Call) -> bool:
        """Whether this rank makes the call."""
        return self._leads or not (self._copies and call.name in ("Save", "WriteSlot"))

    def make(self, call: calls.Call) -> calls.Reply:
        """Make the call. What the trainer raises propagates, and so does InjectedError, which ends the rank."""
        if self._faults is not None and call != calls.END:
            self._faults.meet_blocking(f"{self._faults.replica}/{next(self._calls)} {call.name}")
        if call.name == "Setup":
            made = build_member(self._config, self._config.rollout.num_rollout or 0, self._dp_group, self._run_dir)
            made.setup()
            self._trainer = made
            return calls.Reply()
        trainer = self._trainer
        if trainer is None:
            if call == calls.END:
                return calls.Reply()
            raise RuntimeError(f"{call.name} before Setup")
        match call:
            case calls.BeginBatch(rollouts, steps, version, lr_scale):
                trainer.begin_batch(rollouts=rollouts, steps=steps, version=version, lr_scale=lr_scale)
            case calls.WithSequences("Accumulate", sequences):
                trainer.accumulate(sequences)
            case calls.WithSequences("LogProbs", sequences):
                return calls.Reply(arrays=trainer.logprobs(sequences))
            case calls.WithDirectory("Save", directory):
                trainer.save(Path(directory))
            case calls.WithDirectory("Load", directory):
                trainer.load(Path(directory))
            case calls.WriteSlot():
                return self._write_slot(trainer, call)
            case calls.Plain("Step"):
                return calls.Reply(metrics=trainer.step())
            case calls.Plain(name):
                methods = {"Flush": trainer.flush, "Discard": trainer.discard, "Offload": trainer.offload,
                           "Onload": trainer.onload}  # fmt: skip
                methods.get(name, trainer.finish_save)()  # which the end of the run waits for too
        return calls.Reply()

    def _write_slot(self, trainer: Trainer, call: calls.WriteSlot) -> calls.Reply:
        """Rank 0 writes; the remaining ranks take part in the collectives of the export. What is wrong with the slot is
        a reply: it is rank 0's alone, and no trainer has changed."""
        if not self._leads:
            for _ in trainer.export_weights():
                pass
            return calls.Reply()
        directory, source = Path(call.directory), Path(call.source)
        try:
            return calls.Reply(trainer.write_slot(directory, source, call.version, call.run_generation))
        except WeightsError as error:
            return calls.raised(error)


def _for_this_rank(config: Config) -> Config:
    """`--train-device cuda:2` names the first GPU of the trainer group; a rank has one, which is its current device."""
    if not config.train.train_device.startswith("cuda"):
        return config
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, train_device="cuda"))


log = logging.getLogger("sluice.train")

HEARTBEATS_PER_TIMEOUT: Final = 4
LONGEST_SILENCE_S: Final = 30.0
NOTHING_RAISED: Final = "nothing"
NOT_CALLED: Final = ""  # this rank did not take part in the call


class ControlGroup:
    """What the ranks exchange beside their training: the next call, heartbeats, how a call ended. Seen from one rank.

    `gloo`: a group of all ranks.
    """

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo
        self.leads: bool = distributed.get_rank() == 0

    def send(self, data: bytes = b"") -> None:
        """Rank 0: give the bytes to all others. No bytes are a heartbeat, while there is nothing to send."""
        self._broadcast(torch.tensor([len(data)]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> bytes:
        """The others: the next bytes of rank 0. Waits through any number of heartbeats."""
        length = torch.zeros(1, dtype=torch.int64)
        while length.item() == 0:
            self._broadcast(length)
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        self._broadcast(data)
        received: bytes = data.numpy().tobytes()
        return received

    def endings(self, own: str) -> set[str]:
        """How the call ended in the ranks that took part: `NOTHING_RAISED`, or an error's class. Waits for all."""
        return {ending.decode() for ending in gather_bytes(own.encode(), self.gloo)} - {NOT_CALLED}

    def _broadcast(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, src=0, group=self.gloo)


def run_rank(spec: RankSpec, config: Config, announce: Callable[[Rendezvous], None]) -> None:
    """Find the others, then serve the stage until its last call. An error that ends the trainer group propagates.

    `announce`: called by rank 0 when it listens for the stage.
    """
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    set_cuda_defaults(config)
    with ExitStack() as stack:
        control_group = _find_others(spec, config, timeout_s)
        stack.callback(distributed.destroy_process_group)
        gloo = control_group.gloo
        dp_group = DistributedDpGroup(dp_rank=spec.rank, dp_size=spec.processes, is_mp_src_rank=True, gloo=gloo)
        leads = control_group.leads
        member = Member(config, dp_group, leads=leads, faults=spec.faults, run_dir=spec.run_dir)
        if not leads:
            _follow(control_group, member)
            return
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(spec.address)
        server.listen(1)
        announce(Rendezvous(spec.incarnation, spec.address))
        silence_s = min(LONGEST_SILENCE_S, timeout_s / HEARTBEATS_PER_TIMEOUT)
        link = _meet(control_group, server, silence_s)
        _lead(control_group, member, link, silence_s)


def _find_others(spec: RankSpec, config: Config, timeout_s: float) -> ControlGroup:
    """Waits for all ranks, at most the timeout."""
    on_gpu = config.train.train_device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(spec.local_rank % torch.cuda.device_count())
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=_store(spec, timeout_s),
        rank=spec.rank,
        world_size=spec.processes,
        timeout=timedelta(seconds=timeout_s),
    )
    control_group = ControlGroup(distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
    control_group.endings(NOTHING_RAISED)  # all have come this far
    return control_group


def _store(spec: RankSpec, timeout_s: float) -> distributed.TCPStore:
    """Where the ranks exchange their addresses. Rank 0 listens on its host's address only: by default a store
    listens on all networks."""
    host, port = spec.store
    listener = socket.create_server((host, port)).detach() if spec.rank == 0 else None  # the store owns it from now on
    return distributed.TCPStore(
        host,
        port,
        spec.processes,
        is_master=spec.rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _make(control_group: ControlGroup, member: Member, call: calls.Call) -> calls.Reply:
    """Make a call together with all ranks; the reply of rank 0. Raises RanksDisagree and every unexpected error."""
    reply, own = calls.Reply(), NOT_CALLED
    if member.takes_part(call):
        try:
            reply, own = member.make(call), NOTHING_RAISED
        except calls.DRAWN as error:
            reply, own = calls.raised(error), type(error).__name__
    if len(control_group.endings(own)) != 1:
        ending = f"{reply.raised.name}: {reply.raised.text}" if reply.raised else "nothing"
        raise RanksDisagree(f"{call.name}: this rank raised {ending}, and others did not")
    return reply


def _follow(control_group: ControlGroup, member: Member) -> None:
    """A rank other than rank 0. Waits for calls; ends with the last."""
    while True:
        call = calls.decode_call(control_group.receive())
        _make(control_group, member, call)
        if call == calls.END:
            return


def _lead(control_group: ControlGroup, member: Member, link: calls.Link, silence_s: float) -> None:
    """Rank 0. Waits for the stage's calls; ends with its last. Raises PeerGone if the stage ends without one."""
    while True:
        data = _next_call(control_group, link, silence_s)
        call = calls.END if data is None else calls.decode_call(data)
        control_group.send(calls.encode(call) if data is None else data)
        reply = _make(control_group, member, call)
        if data is None:
            raise PeerGone("the train stage ended without ending its trainer group")
        try:
            link.send(calls.encode(reply))
        except calls.LinkLost:
            log.warning("the train stage is gone; its last reply was not sent")
        if call == calls.END:
            return


def _meet(control_group: ControlGroup, server: socket.socket, silence_s: float) -> calls.Link:
    """Waits for the stage. Sends heartbeats meanwhile."""
    server.settimeout(silence_s)
    while True:
        try:
            connected, _ = server.accept()
        except TimeoutError:
            control_group.send()
            continue
        connected.settimeout(None)
        return calls.Link(connected)


def _next_call(control_group: ControlGroup, link: calls.Link, silence_s: float) -> bytes | None:
    """The stage's next call; None if the stage is gone. Sends heartbeats meanwhile."""
    while not link.readable(silence_s):
        control_group.send()
    try:
        return link.receive()
    except calls.LinkLost:
        return None
