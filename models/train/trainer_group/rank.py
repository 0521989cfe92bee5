"""The loop of a rank: hear the call, make it, agree with the others on how it ended; rank 0 also talks to the stage.

Invariants:
- all ranks make the same calls in the same order; rank 0 hands a call on before it makes it, and replies only after all
  have made it;
- a drawn error that all ranks raise alike is a reply, and the trainer group lives; any other error ends the process,
  and with it the trainer group;
- when the stage is gone, all ranks end as if it had said so, and rank 0 tells the difference by its exit status.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Final

import torch
from torch import distributed

from configs.schema import Config
from models.train.dp_group import DistributedDpGroup
from models.train.trainer_group.buckets import WeightSender
from models.train.trainer_group.calls import Call, Done, End, GoOn, Raised, Reply, Stop, decode_message, encode
from models.train.trainer_group.control_group import NO_SAY, NOTHING_RAISED, ControlGroup, ending_of
from models.train.trainer_group.errors import RanksDisagree, StageGone
from models.train.trainer_group.faults import DRAWN, raised
from models.train.trainer_group.link import Link, LinkLost
from models.train.trainer_group.member import Member
from models.train.trainer_group.rank_spec import RankSpec, Rendezvous

log = logging.getLogger("sluice.train")

SIGNS_PER_TIMEOUT: Final = 4
LONGEST_SILENCE_S: Final = 30.0


def run_rank(spec: RankSpec, config: Config, announce: Callable[[Rendezvous], None]) -> None:
    """Find the others, then serve the stage until it is done. An error that the stage cannot be told propagates.

    `announce`: called by rank 0 when the stage can be met.
    """
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ExitStack() as stack:
        control_group = _find_others(spec, config, timeout_s)
        stack.callback(distributed.destroy_process_group)
        dp_group = DistributedDpGroup(
            dp_rank=spec.rank, dp_size=spec.processes, is_mp_src_rank=True, gloo=control_group.gloo
        )
        if not control_group.leads:
            _follow(control_group, Member(config, dp_group, leads=False, faults=spec.faults))
            return
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(spec.address)
        server.listen(1)
        announce(Rendezvous(spec.incarnation, spec.address))
        silence_s = min(LONGEST_SILENCE_S, timeout_s / SIGNS_PER_TIMEOUT)
        link = _meet(control_group, server, silence_s)
        sender = WeightSender(config.update.update_weight_buffer_size, silence_s)
        send = partial(sender.send, link)
        member = Member(config, dp_group, leads=True, send_weights=send, faults=spec.faults)
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
    gloo = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    control_group = ControlGroup(gloo)
    control_group.endings(NOTHING_RAISED)  # all have come this far
    return control_group


def _store(spec: RankSpec, timeout_s: float) -> distributed.TCPStore:
    """Where the ranks tell each other their addresses. Rank 0 listens, at that host alone: a store left to itself
    would listen to all networks."""
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


def _make(control_group: ControlGroup, member: Member, call: Call) -> Reply:
    """Make a call with all others; what rank 0 replies. Raises RanksDisagree, and what is no drawn error."""
    reply: Reply = Done()
    own = NO_SAY
    if member.takes_part(call):
        try:
            reply, own = member.make(call), NOTHING_RAISED
        except DRAWN as error:
            reply, own = raised(error), ending_of(error)
    endings = [ending for ending in control_group.endings(own) if ending != NO_SAY]
    if len(set(endings)) != 1:
        said = f"{reply.name}: {reply.text}" if isinstance(reply, Raised) else "nothing"
        raise RanksDisagree(f"{type(call).__name__}: this rank raised {said}, and others did not")
    return reply


def _follow(control_group: ControlGroup, member: Member) -> None:
    """A rank beside the first. Waits for calls; ends with the last."""
    while True:
        call = decode_message(control_group.hear())
        assert not isinstance(call, GoOn | Stop)
        _make(control_group, member, call)
        if isinstance(call, End):
            return


def _lead(control_group: ControlGroup, member: Member, link: Link, silence_s: float) -> None:
    """Rank 0. Waits for the stage's calls; ends with its last. Raises StageGone if it goes without one."""
    while True:
        received = _next_call(control_group, link, silence_s)
        data, call = received or (encode(End()), End())
        control_group.tell(data)
        reply = _make(control_group, member, call)
        if received is None:
            raise StageGone("the train stage ended without ending its trainer group")
        try:
            link.send(encode(reply))
        except LinkLost:
            log.warning("the train stage is gone; its last reply is left unsaid")
        if isinstance(call, End):
            return


def _meet(control_group: ControlGroup, server: socket.socket, silence_s: float) -> Link:
    """Waits for the stage. Signs of life go out meanwhile."""
    server.settimeout(silence_s)
    while True:
        try:
            connected, _ = server.accept()
        except TimeoutError:
            control_group.sign_of_life()
            continue
        connected.settimeout(None)
        return Link(connected)


def _next_call(control_group: ControlGroup, link: Link, silence_s: float) -> tuple[bytes, Call] | None:
    """The stage's next call, as it came and decoded; None if it is gone. Signs of life go out meanwhile."""
    while True:
        while not link.readable(silence_s):
            control_group.sign_of_life()
        try:
            data = link.receive()
        except LinkLost:
            return None
        call = decode_message(data)
        if not isinstance(call, GoOn | Stop):  # late answers to an export that has ended
            return data, call
