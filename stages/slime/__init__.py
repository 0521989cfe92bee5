"""The names that user code written for slime imports."""

from __future__ import annotations

from stages.slime.client import GenerateState, post, run
from stages.slime.types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

__all__ = ["DataSource", "GenerateState", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "Sample", "post", "run"]
