"""Declares two operators of torchvision before it is imported, where its CUDA build stands beside a CPU build of torch.

The published wheel of torchvision cannot load its own operators there, and registers a shape rule for `nms` all the
same, which fails without a declaration. Nothing here runs them. Copied into the site directory of SGLang's environment
with a .pth file that imports it in every process; it imports nothing until torchvision is looked up.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_library: Any = None  # the declarations end with this object


class _Finder(MetaPathFinder):
    """Declares when torchvision is first looked up, then steps aside."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare() -> None:
    global _library
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Finder())
