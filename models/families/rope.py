"""Rotary position embeddings as `config.json` describes them: frequencies and the factor of cosines and sines.

The formulas are those of transformers 5 (`modeling_rope_utils`): default, linear (arXiv:2306.15595), llama3 (Llama 3.1)
and yarn (arXiv:2309.00071). Others are refused: their frequencies depend on the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.errors import UnsupportedModel

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`dim`: rotated dimensions of each head; `interleaved`: pairs are neighbours instead of halves."""

    base: float
    dim: int
    interleaved: bool = False
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_length: int = 0  # of config.json, tokens

    def frequencies(self) -> Tensor:
        """Radians per position, fp32 [dim / 2]."""
        plain = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.int64).to(torch.float32) / self.dim))
        if self.kind == "linear":
            return plain / float(self.scaling["factor"])
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn()
        return plain

    @property
    def factor(self) -> float:
        """Of positions; yarn's may be left out, then it is the ratio of the maximal lengths."""
        factor = self.scaling.get("factor")
        return float(factor) if factor is not None else self.max_length / self._original_length

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.scaling.get("attention_factor") is not None:
            return float(self.scaling["attention_factor"])
        mscale, all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        if mscale and all_dim:
            return yarn_mscale(self.factor, mscale) / yarn_mscale(self.factor, all_dim)
        return yarn_mscale(self.factor)

    @property
    def _original_length(self) -> int:
        return int(self.scaling.get("original_max_position_embeddings") or self.max_length)

    def _llama3(self, plain: Tensor) -> Tensor:
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        length = self._original_length
        wavelength = 2 * math.pi / plain
        scaled = torch.where(wavelength > length / low, plain / factor, plain)
        smooth = (length / wavelength - low) / (high - low)
        between = (1 - smooth) * scaled / factor + smooth * scaled
        middle = ~(wavelength < length / high) * ~(wavelength > length / low)
        return torch.where(middle, between, scaled)

    def _yarn(self) -> Tensor:
        def turns_at(rotations: float) -> float:
            return (self.dim * math.log(self._original_length / (rotations * 2 * math.pi))) / (2 * math.log(self.base))

        low = turns_at(float(self.scaling.get("beta_fast") or 32))
        high = turns_at(float(self.scaling.get("beta_slow") or 1))
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        powers = self.base ** (torch.arange(0, self.dim, 2).to(torch.float32) / self.dim)
        ramp = torch.clamp((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """arXiv:2309.00071, equation 22, times `mscale`."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def read_rope(config: Mapping[str, Any], *, head_width: int, partial: float = 1.0, interleaved: bool = False) -> Rope:
    """Of `config.json`, in its older (`rope_theta`, `rope_scaling`) or newer form (`rope_parameters`).

    `partial`: share of a head that is rotated if the file does not say. Raises `UnsupportedModel`.
    """
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        found.update(config.get(key) or {})
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in KINDS:
        raise UnsupportedModel(
            f"rope_type={kind!r} of {config.get('model_type')!r} cannot be built with Megatron-core: only "
            f"{', '.join(KINDS)} are; use --train-backend fsdp"
        )
    base = found.get("rope_theta", config.get("rope_theta", 10000.0))
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor", partial))
    return Rope(
        base=float(base),
        dim=int(head_width * float(share)),
        interleaved=interleaved,
        kind=kind,
        scaling={} if kind == "default" else found,
        max_length=int(config.get("max_position_embeddings", 0)),
    )
