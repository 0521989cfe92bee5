"""The stand-in for SGLang's kernels: imports succeed, one function computes, the others are loud."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from models.engines.launch.environment import SHIMS


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SHIMS))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    return importlib.import_module("sgl_kernel")


def test_each_row_gets_its_own_locations(kernel: ModuleType) -> None:
    pool = torch.zeros(3, 6, dtype=torch.int32)
    kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), pool, torch.tensor([1, 0]), torch.tensor([4, 2]), torch.tensor([7, 8, 9, 5, 6]), 6
    )
    assert pool.tolist() == [[5, 6, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 9, 0, 0]]
    assert pool.dtype == torch.int32


def test_other_names_import_and_fail_when_called(kernel: ModuleType) -> None:
    name = kernel.copy_all_layer_kv_cache_cpu
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.copy_all_layer_kv_cache_cpu is a CUDA kernel"):
        name(1, 2)
    with pytest.raises(AttributeError):
        _ = kernel.__path_to_nowhere__


def test_no_operator_is_registered(kernel: ModuleType) -> None:
    """With this one SGLang would take itself for a build with CPU kernels."""
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
