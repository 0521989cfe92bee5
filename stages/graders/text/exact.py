"""`exact` and `contains`: comparison of text as it stands.

`exact` asks for the whole response, trimmed, to be the trimmed label. `contains` asks for the label to occur in the
response, `contains:TEXT` for the given text. Neither looks at numbers, case or Unicode forms.
"""

from __future__ import annotations

from stages.graders.grade import Grade, GradeRequest, judged


def grade_exact(request: GradeRequest) -> Grade:
    """Score 1 if the trimmed response is the trimmed label."""
    answer = request.response.strip()
    return judged(answer == (request.label or "").strip(), answer)


def grade_contains_label(request: GradeRequest) -> Grade:
    """Score 1 if the trimmed label occurs in the response."""
    wanted = (request.label or "").strip()
    found = wanted in request.response
    return judged(found, wanted if found else None)


def grade_contains(text: str, request: GradeRequest) -> Grade:
    """Score 1 if `text` occurs in the response."""
    found = text in request.response
    return judged(found, text if found else None)
