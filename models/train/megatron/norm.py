"""RMSNorm for the local layers: torch's own, in a shape that Megatron-core's specifications can build.

Megatron-core's wrapper of torch's norm refuses sequence parallelism; this one marks its weight, so that the gradients
of the parts of a sequence are summed over the tensor-parallel processes.
"""

from __future__ import annotations

from typing import Any

import torch

LATENT_EPS = 1e-6  # DeepSeek's norms inside latent attention keep their class's default


class RmsNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """x / rms(x) * weight over the last dimension [..., hidden_size]. Extra arguments of specifications are ignored."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Squares are summed in fp32, as transformers does; the weight is multiplied in the precision of x."""
        if x.dtype == torch.float32:
            exact: torch.Tensor = super().forward(x)
            return exact
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class LatentRmsNorm(RmsNorm):
    """Of latent attention: its eps is fixed, whatever the model's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)
