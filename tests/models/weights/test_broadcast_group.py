"""A weight group between two processes: the other end is made by torch's own helper, as SGLang makes it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d as c10d

from models.errors import GroupError
from models.weights.layout import TensorSpec, lay_out, plan_buckets
from models.weights.transfer import SharedBuffer, WeightGroup, address_towards

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 60.0


def take_part(port: int, pipe: Connection, *counts: int) -> None:
    """As rank 1, beside a default group of its own, in the way that a server joins: receive so many numbers in turn."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    limit = timedelta(seconds=LIMIT_S)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=limit))
    backend, store, name = c10d.Backend("gloo"), c10d.PrefixStore("g", store), c10d.GroupName("g")
    group, _ = c10d._new_process_group_helper(size, rank, [], backend, store, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    pipe.send("joined")
    for count in counts:
        data = torch.empty(count)
        dist.broadcast(data, src=0, group=group)
        pipe.send(data.tolist())


def other_end(port: int, *counts: int) -> tuple[Any, Connection]:
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=take_part, args=(port, theirs, *counts), daemon=True)
    process.start()
    return process, mine


@pytest.mark.full
def test_tensors_arrive_at_groups_that_torch_made() -> None:
    """At two, side by side."""
    groups = [WeightGroup("g", 2, "gloo", "127.0.0.1", timeout_s=LIMIT_S) for _ in range(2)]
    assert groups[0].port != groups[1].port
    ends = [other_end(group.port, 5, 3) for group in groups]
    threads = [threading.Thread(target=group.join) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [pipe.recv() for _, pipe in ends] == ["joined"] * 2
    for values in ([1.0, 2.0, 3.0, 4.0, 5.0], [7.0, 8.0, 9.0]):
        for at, (group, (_, pipe)) in enumerate(zip(groups, ends, strict=True)):
            group.broadcast(torch.tensor(values) + at)
            assert pipe.recv() == [value + at for value in values]
    for group, (process, _) in zip(groups, ends, strict=True):
        process.join(LIMIT_S)
        group.close()
        group.close()
        with pytest.raises(GroupError, match="is closed; make a new one"):
            group.broadcast(torch.zeros(1))
    assert not dist.is_initialized(), "torch's default group is nobody's business here"


@pytest.mark.slow
def test_a_partner_that_died_is_an_error_and_ends_the_group() -> None:
    group = WeightGroup("g", 2, "gloo", "127.0.0.1", timeout_s=LIMIT_S)
    process, pipe = other_end(group.port)
    group.join()
    assert pipe.recv() == "joined"
    process.join(LIMIT_S)
    with pytest.raises(GroupError, match="mixed weights until a whole update succeeds"):  # noqa: PT012
        for _ in range(20):  # the first may lie in a buffer still
            group.broadcast(torch.zeros(1 << 20))
    with pytest.raises(GroupError, match="is closed"):
        group.broadcast(torch.zeros(1))


@pytest.mark.slow
def test_a_partner_that_never_comes_is_an_error_in_time() -> None:
    group = WeightGroup("g", 2, "gloo", "127.0.0.1", timeout_s=0.2)
    with pytest.raises(GroupError, match=r"not all 2 ranks met on 127\.0\.0\.1"):
        group.join()


@pytest.mark.slow
def test_unknown_backends_and_unreachable_hosts_are_named() -> None:
    with pytest.raises(GroupError, match="use gloo"):
        WeightGroup("g", 2, "mpi", "127.0.0.1", timeout_s=1.0)
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"
    with pytest.raises(GroupError, match=r"no way to http://no-such-host\.invalid"):
        address_towards("http://no-such-host.invalid:1")
    assert SharedBuffer(0).memory.numel() == 1
    with pytest.raises(GroupError, match=r"cannot listen on 192\.0\.2\.1"):
        WeightGroup("g", 2, "gloo", "192.0.2.1", timeout_s=1.0)


# The payload of the tensor route, read back as SGLang reads it: by another process, with torch's rebuild functions.


# A receiver that knows nothing of this project. It may unpickle: what it is given was written by this very test.
RECEIVER = """
import base64, pickle, sys, torch, torch.multiprocessing
for line in sys.stdin:
    for name, tensor in pickle.loads(base64.b64decode(line)):
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item())
"""
SPECS = [
    TensorSpec("wide", "F32", (3, 5)),
    TensorSpec("none", "F32", (0, 4)),
    TensorSpec("half", "BF16", (2, 2)),
    TensorSpec("scalar", "F16", ()),
]


@pytest.mark.slow
def test_another_process_sees_the_tensors_and_nothing_is_left(tmp_path: Path) -> None:
    strategy = torch.multiprocessing.get_sharing_strategy()
    layout = lay_out(SPECS)
    [bucket] = plan_buckets(layout, 1 << 20)
    buffer = SharedBuffer(bucket.nbytes)
    values = [torch.arange(15.0), torch.ones(4, dtype=torch.bfloat16), torch.full((1,), 7.0, dtype=torch.float16)]
    raw = b"".join(value.view(torch.uint8).numpy().tobytes() for value in values)
    np.copyto(buffer.memory.numpy()[: bucket.nbytes], np.frombuffer(raw, np.uint8))
    before = {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}
    with buffer.lent(bucket, ["cpu", "cpu"]) as payloads:
        assert len(payloads) == 2
        assert all(len(payload) < 2000 for payload in payloads), "handles travel, not weights"
        for payload in payloads:  # each rank is a process of its own
            done = subprocess.run(
                [sys.executable, "-c", RECEIVER], input=payload, capture_output=True, text=True, timeout=60
            )
            assert done.stdout.splitlines() == [
                "wide torch.float32 (3, 5) 105.0",
                "none torch.float32 (0, 4) 0.0",
                "half torch.bfloat16 (2, 2) 4.0",
                "scalar torch.float16 () 7.0",
            ], done.stderr
    del buffer
    assert {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")} <= before, "the memory is given back"
    assert torch.multiprocessing.get_sharing_strategy() == strategy
