"""The payload of the tensor route, read back as SGLang reads it: by another process, with torch's rebuild functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing

from models.weights.layout import TensorSpec, lay_out, plan_buckets
from models.weights.transfer import SharedBuffer

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
    before = {path.name for path in Path("/dev/shm").glob("torch_*")}
    with buffer.lent(bucket, ranks=2) as payloads:
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
    assert {path.name for path in Path("/dev/shm").glob("torch_*")} <= before, "the memory is given back"
    assert torch.multiprocessing.get_sharing_strategy() == strategy
