"""Weights in float8 (e4m3) whose blocks share a scale, as DeepSeek and Qwen publish them and SGLang serves them.

A matrix `w.weight` [outputs, inputs] of eight-bit numbers has beside it `w.weight_scale_inv`, float32, one number for
each block of `weight_block_size` in config.json: value = number * scale. Blocks at the edges may be smaller.

SGLang computes with the numbers, the embedded engine with what they are worth. The largest number, 448, stands for the
largest value of a block.
"""

from __future__ import annotations

from typing import Final

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


def dequantised(numbers: Tensor, scales: Tensor, block: Block) -> Tensor:
    """What they are worth, in float32."""
    for axis, size in enumerate(block):
        scales = scales.repeat_interleave(size, axis).narrow(axis, 0, numbers.shape[axis])
    return numbers.float().mul_(scales)
