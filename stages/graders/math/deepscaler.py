"""`deepscaler`: the answer in a box behind the end of the reasoning (the DeepScaleR recipe's reward).

The solution is the text after the last `</think>`, else what follows the first `###Response`; a response with neither
scores 0, however right its box is. The box is then judged as by `math:compat`.
"""

from __future__ import annotations

import msgspec

from stages.graders.grade import Grade, GradeRequest
from stages.graders.math.answer import Answer, verdict
from stages.graders.math.mathematics import grade_compat

_CLOSE = "</think>"
_MARK = "###Response"


def solution_of(response: str) -> str | None:
    """The part of a response that counts, None without a marker."""
    if _CLOSE in response:
        return response.rpartition(_CLOSE)[2]
    if _MARK in response:
        return response.split(_MARK, 2)[1]
    return None


def grade_deepscaler(request: GradeRequest) -> Grade:
    """Score 1 if the solution's last \\boxed is the label, as `math:compat` judges it."""
    solution = solution_of(request.response)
    judged = grade_compat(msgspec.structs.replace(request, response=solution or ""))
    if solution is None and judged.error is None:
        return verdict(False, Answer(None))
    return judged
