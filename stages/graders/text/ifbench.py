"""`ifbench`: the 58 instructions of IFBench (arXiv 2507.02833), by the checkers that were published with it.

The metadata is as for `ifeval`, and so are score, `followed` and what counts of a response. The checkers are those of
the package if-verifiable, which carries the published code; it is no requirement of Sluice, since its sentence rules
need data of NLTK that is downloaded. A row that lacks an argument is an error: the checkers would draw one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from stages.graders.errors import UnknownGraderError
from stages.graders.grade import Grade, GradeRequest, failed
from stages.graders.text.ifeval import judge_instructions, read_instructions
from stages.graders.text.ifeval_rules import Arguments, RuleError

_DATA = "punkt punkt_tab averaged_perceptron_tagger_eng stopwords"


@lru_cache(maxsize=1)
def prepare_ifbench() -> None:
    """Import the checkers, which takes seconds. Raises UnknownGraderError."""
    try:
        _checkers()
    except ImportError as error:
        raise UnknownGraderError(
            f"the grader 'ifbench' needs the package if-verifiable ({error}); install it with pip, and its data with "
            f"`python -m nltk.downloader {_DATA}`"
        ) from None


@lru_cache(maxsize=1)
def _checkers() -> dict[str, Any]:
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT

    return dict(INSTRUCTION_DICT)


def grade_ifbench(request: GradeRequest) -> Grade:
    """Score 1 if the response follows all instructions of the row."""
    prepare_ifbench()
    try:
        instructions = read_instructions(request.metadata, "ifbench", _checkers())
        return judge_instructions(request.response, instructions, _follows)
    except RuleError as error:
        return failed(str(error))


def _follows(response: str, item: Arguments) -> bool:
    checker = _checkers()[item.instruction](item.instruction)
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
        raise RuleError(
            f"{item.instruction} needs data of NLTK; install it once with `python -m nltk.downloader {_DATA}`"
        ) from None
