"""Weights in float8 (e4m3) whose blocks share a scale, as DeepSeek and Qwen publish them and SGLang serves them.

A matrix `w.weight` [outputs, inputs] of eight-bit numbers has beside it `w.weight_scale_inv`, float32, one number for
each block of `weight_block_size` in config.json: value = number * scale. Blocks at the edges may be smaller.

Trainers and the embedded engine compute with the values. What goes to the engines is quantised again, so that their
policy is the one that SGLang would serve: 448, the largest number, stands for the largest value of a block.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

KIND: Final = torch.float8_e4m3fn
LARGEST: Final = torch.finfo(KIND).max

BLOCK: Final = (128, 128)  # rows and columns that share a scale in published checkpoints
PUBLISHED: Final = {  # what config.json says of them
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)
}  # fmt: skip

Block = tuple[int, int]


def quantised(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The numbers [outputs, inputs] and scales [blocks of rows, blocks of columns] of a matrix, on its device.

    A value that is not finite makes its whole block NaN: a matrix that went wrong must not be taken for a good one.
    """
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = F.pad(weight.float(), (0, across * block[1] - columns, 0, down * block[0] - rows))
    blocks = padded.view(down, block[0], across, block[1])
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    # A larger number, which a scale of few bits leaves, becomes NaN in some versions of torch.
    numbers = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(KIND)
    return numbers.view(padded.shape)[:rows, :columns].contiguous(), scales


class DequantisedView:
    """Values of a matrix in float32, with what is used of safetensors' slices: only the parts asked for are read."""

    def __init__(self, numbers: Any, scales: Any, block: Block) -> None:
        """`numbers` and `scales`: slices of safetensors."""
        self._numbers, self._scales, self._block = numbers, scales, block

    def get_shape(self) -> list[int]:
        return list(self._numbers.get_shape())

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, place: Any) -> Tensor:
        """At a slice of rows, or at one of rows and one of columns; `...` is all of it."""
        spans = () if place is ... else place if isinstance(place, tuple) else (place,)
        rows_and_columns = (*spans, slice(None), slice(None))[:2]
        values: Tensor = self._numbers[rows_and_columns].float()
        scales = self._scales[...].float()
        for axis, (span, size) in enumerate(zip(rows_and_columns, self._block, strict=True)):
            first, last, _ = span.indices(self.get_shape()[axis])
            scales = scales.narrow(axis, first // size, -(-last // size) - first // size)
            scales = scales.repeat_interleave(size, axis).narrow(axis, first % size, last - first)
        return values.mul_(scales)
