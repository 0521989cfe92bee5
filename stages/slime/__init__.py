"""The names that user code written for slime imports."""

from __future__ import annotations

from models.import_path import import_path as load_function
from stages.slime.client import GenerateState, post, run
from stages.slime.types import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, whole_responses

# Responses are whole here, also where context-parallel processes share their tokens: nothing to gather or cut.
all_gather_with_cp = slice_log_prob_with_cp = whole_responses

__all__ = [
    "DataSource", "GenerateState", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "Sample", "all_gather_with_cp",
    "load_function", "post", "run", "slice_log_prob_with_cp",
]  # fmt: skip
