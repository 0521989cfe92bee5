"""`auto`: the grader that labels ask for, of one sample when it is graded and of a data set at the start of a run."""

from __future__ import annotations

from collections.abc import Iterable

from stages.graders.errors import UnknownGraderError
from stages.graders.grade import Grade, GradeRequest
from stages.graders.math.gsm8k import grade_gsm8k, marked_number
from stages.graders.text.exact import grade_exact

_CURE = "set --rm-type to the grader that fits"


def choose_auto(labels: Iterable[str | None]) -> tuple[str, str]:
    """(grader, why in one sentence), from a sample of the labels. Raises UnknownGraderError if they do not agree."""
    known = [label for label in labels if label is not None and label.strip()]
    if not known:
        raise UnknownGraderError(
            f"rm_type 'auto' chooses by the labels, but there are none; set --label-key, or {_CURE}"
        )
    marked = sum(marked_number(label) is not None for label in known)
    if marked == len(known):
        return "gsm8k", f"all {marked} sampled labels end in '#### number'"
    if marked:
        raise UnknownGraderError(
            f"rm_type 'auto' finds '#### number' in {marked} of {len(known)} sampled labels; {_CURE}"
        )
    return "exact", f"none of the {len(known)} sampled labels has a '#### number', so responses must equal the label"


def grade_auto(request: GradeRequest) -> Grade:
    """`gsm8k` for a label with '#### number', else `exact`."""
    return grade_exact(request) if marked_number(request.label or "") is None else grade_gsm8k(request)
