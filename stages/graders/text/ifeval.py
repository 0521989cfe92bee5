"""`ifeval` and `ifbench`: does the response follow those instructions of the row that code can check?

The metadata holds `instruction_id_list` (names as in the data set, such as `punctuation:no_comma`; the part behind the
colon is enough) and `kwargs`, a list as long with an object of arguments for each, where nulls mean nothing. The score
is 1 if all hold for the unchanged response (strict); the part `followed` is the share of instructions that hold. No
instruction holds for an empty response. Text before the last `</think>` does not count.

`ifeval` has the rules of IFEval (arXiv 2311.07911) in ifeval_rules.py. `ifbench` has the 58 instructions of IFBench
(arXiv 2507.02833), by the checkers that were published with it, which the package if-verifiable carries. That package
is no requirement of Sluice, since its sentence rules need data of NLTK that is downloaded. A row that lacks an argument
is an error: the checkers would draw one.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from configs.schema.notation import did_you_mean
from stages.graders.grade import Grade, GradeRequest, UnknownGraderError, failed
from stages.graders.math.answer import after_thought
from stages.graders.text.ifeval_rules import RULES, Arguments, Rule, RuleError

_DATA = "punkt punkt_tab averaged_perceptron_tagger_eng stopwords"


class _Metadata(Struct):
    instruction_id_list: list[str] = []
    kwargs: list[dict[str, object] | None] | None = None


def grade_ifeval(request: GradeRequest) -> Grade:
    """Score 1 if the response follows all instructions of the row."""
    return _graded(request, "ifeval", RULES, lambda response, item: RULES[item.instruction](response, item))


def _graded(request: GradeRequest, grader: str, names: Collection[str], follows: Rule) -> Grade:
    """1 if all instructions hold for the text after the reasoning; the part `followed` is the share that holds.

    `names` are those that the grader knows. The rules run on an empty response too, so that an error in the data shows,
    but it follows none.
    """
    text = after_thought(request.response) or ""
    try:
        instructions = read_instructions(request.metadata, grader, names)
        held = [follows(text, item) and bool(text.strip()) for item in instructions]
    except RuleError as error:
        return failed(str(error))
    return Grade(float(all(held)), all(held), {"followed": sum(held) / len(held)})


def read_instructions(metadata: str, grader: str, names: Collection[str]) -> list[Arguments]:
    """The instructions of a row; `names` are those that the grader knows. Raises RuleError."""
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
    known = {short: name for name in names for short in (name, name.partition(":")[2])}
    for name in row.instruction_id_list:
        if name not in known:
            guess = did_you_mean(name, known, otherwise=f"; known: {', '.join(names)}")
            raise RuleError(f"{grader} has no instruction {name[:80]!r}{guess}")
    return [
        Arguments(known[name], {key: value for key, value in (values or {}).items() if value is not None})
        for name, values in zip(row.instruction_id_list, given, strict=True)
    ]


@lru_cache(maxsize=1)
def checkers() -> dict[str, Any]:
    """The checkers by name, whose import takes seconds. Raises UnknownGraderError."""
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise UnknownGraderError(
            f"the grader 'ifbench' needs the package if-verifiable ({error}); install it with pip, and its data with "
            f"`python -m nltk.downloader {_DATA}`"
        ) from None
    return dict(INSTRUCTION_DICT)


def grade_ifbench(request: GradeRequest) -> Grade:
    """Score 1 if the response follows all instructions of the row."""
    return _graded(request, "ifbench", checkers(), _follows)


def _follows(response: str, item: Arguments) -> bool:
    checker = checkers()[item.instruction](item.instruction)
    wanted = checker.get_instruction_args_keys()
    missing = [key for key in wanted if key not in item.values]
    if missing:
        raise RuleError(f"{item.instruction} needs {', '.join(missing)} in its kwargs")
    try:
        checker.build_description(**{key: item.values[key] for key in wanted})
        return bool(checker.check_following(response))
    except LookupError as error:
        if "nltk" not in str(error):
            raise
        raise RuleError(f"{item.instruction} needs data of NLTK: `python -m nltk.downloader {_DATA}`") from None
