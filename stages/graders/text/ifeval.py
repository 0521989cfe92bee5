"""`ifeval`: does the response follow the row's instructions, as code can tell (IFEval, arXiv 2311.07911)?

The metadata holds `instruction_id_list` (names as in the data set, such as `punctuation:no_comma`; the part behind the
colon is enough) and `kwargs`, a list as long with an object of arguments for each, where nulls mean nothing. The score
is 1 if all hold for the response as it is (strict), and the part `followed` is the share of those that do. An empty
response follows none. Text before the last `</think>` does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from configs.schema.did_you_mean import did_you_mean
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.math.answer import after_thought
from stages.graders.text.ifeval_rules import RULES, Arguments, Rule, RuleError


class _Metadata(Struct):
    instruction_id_list: list[str] = []
    kwargs: list[dict[str, object] | None] | None = None


def grade_ifeval(request: GradeRequest) -> Grade:
    """Score 1 if the response follows all instructions of the row."""
    try:
        instructions = read_instructions(request.metadata, "ifeval", RULES)
        return judge_instructions(
            request.response, instructions, lambda response, item: RULES[item.instruction](response, item)
        )
    except RuleError as error:
        return failed(str(error))


def judge_instructions(response: str, instructions: Sequence[Arguments], follows: Rule) -> Grade:
    """1 if all of them hold for what stands behind the reasoning; the part `followed` is the share that does.

    An empty response is asked too, so that an error in the data shows; it follows nothing for all that. Raises
    RuleError.
    """
    text = after_thought(response) or ""
    held = [follows(text, item) and bool(text.strip()) for item in instructions]
    return Grade(float(all(held)), all(held), {"followed": sum(held) / len(held)})


def read_instructions(metadata: str, grader: str, names: Iterable[str]) -> list[Arguments]:
    """The instructions of a row, of those that a grader knows by name. Raises RuleError."""
    try:
        row = msgspec.json.decode(metadata, type=_Metadata)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RuleError(f"{grader} cannot read the row's metadata ({error})") from None
    if not row.instruction_id_list:
        raise RuleError(f"{grader} needs 'instruction_id_list' in the row's metadata; check --metadata-key")
    given = row.kwargs or [None] * len(row.instruction_id_list)
    if len(given) != len(row.instruction_id_list):
        raise RuleError(
            f"{grader} finds {len(row.instruction_id_list)} instructions and {len(given)} kwargs; give one for each"
        )
    known = _finder(grader, names)
    return [
        Arguments(known(name), {key: value for key, value in (values or {}).items() if value is not None})
        for name, values in zip(row.instruction_id_list, given, strict=True)
    ]


def _finder(grader: str, names: Iterable[str]) -> Callable[[str], str]:
    full = list(names)
    short = {name.partition(":")[2]: name for name in full}

    def known(name: str) -> str:
        if name in full or name in short:
            return short.get(name, name)
        guess = did_you_mean(name, [*full, *short], otherwise=f"; known: {', '.join(full)}")
        raise RuleError(f"{grader} has no instruction {name[:80]!r}{guess}")

    return known
