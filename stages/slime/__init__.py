"""User code that was written for slime: what it imports, what it is given, and what becomes of what it returns."""

from __future__ import annotations

from stages.slime.client import GenerateState, post, run
from stages.slime.types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

__all__ = [
    "DataSource",
    "GenerateState",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "post",
    "run",
]
