"""`ifeval`: does the response follow the row's instructions, as code can tell (IFEval, arXiv 2311.07911)?

The metadata holds `instruction_id_list` (names as in the data set, such as `punctuation:no_comma`; the part behind the
colon is enough) and `kwargs`, a list as long with an object of arguments for each, where nulls mean nothing. The score
is 1 if all hold for the response as it is (strict), and the part `followed` is the share of those that do. An empty
response follows none. Text before the last `</think>` does not count.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from configs.schema.did_you_mean import did_you_mean
from stages.graders.answer import after_thought
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.ifeval_rules import RULES, Arguments, RuleError

_SHORT = {name.partition(":")[2]: name for name in RULES}


class _Metadata(Struct):
    instruction_id_list: list[str] = []
    kwargs: list[dict[str, object] | None] | None = None


def grade_ifeval(request: GradeRequest) -> Grade:
    """Score 1 if the response follows all instructions of the row."""
    try:
        instructions = _read(request.metadata)
        response = after_thought(request.response) or ""
        # An empty response is asked too, so that an error in the data shows; it follows nothing all the same.
        held = [RULES[item.instruction](response, item) and bool(response.strip()) for item in instructions]
    except RuleError as error:
        return failed(str(error))
    return Grade(float(all(held)), all(held), {"followed": sum(held) / len(held)})


def _read(metadata: str) -> list[Arguments]:
    """The instructions of a row. Raises RuleError."""
    try:
        row = msgspec.json.decode(metadata, type=_Metadata)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RuleError(f"ifeval cannot read the row's metadata ({error})") from None
    if not row.instruction_id_list:
        raise RuleError("ifeval needs 'instruction_id_list' in the row's metadata; check --metadata-key")
    given = row.kwargs or [None] * len(row.instruction_id_list)
    if len(given) != len(row.instruction_id_list):
        raise RuleError(
            f"ifeval finds {len(row.instruction_id_list)} instructions and {len(given)} kwargs; give one for each"
        )
    return [
        Arguments(_known(name), {key: value for key, value in (values or {}).items() if value is not None})
        for name, values in zip(row.instruction_id_list, given, strict=True)
    ]


def _known(name: str) -> str:
    if name in RULES:
        return name
    if name in _SHORT:
        return _SHORT[name]
    guess = did_you_mean(name, [*RULES, *_SHORT], otherwise=f"; known: {', '.join(RULES)}")
    raise RuleError(f"ifeval has no instruction {name[:80]!r}{guess}")
