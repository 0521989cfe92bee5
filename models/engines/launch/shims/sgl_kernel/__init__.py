"""Stands in for SGLang's CUDA kernels where there is no GPU, so that its imports succeed.

SGLang imports names of this package also on a CPU, but calls one of them only with speculative decoding: this one is
real. Any other name is a function that fails when it is called, so that nothing is computed wrongly in silence. No
operator is registered under `torch.ops.sgl_kernel`, which is how SGLang knows that it must compute in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write the cache locations of each request into its row: `out_cache_loc` [sum of (end - start)], in order."""
    position = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        taken = out_cache_loc[position : position + end - start]
        req_to_token[row, start:end] = taken.to(req_to_token.dtype)
        position += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a CUDA kernel and there is no GPU here; use an option of the SGLang server "
            "that does without it"
        )

    missing.__name__ = name
    return missing
