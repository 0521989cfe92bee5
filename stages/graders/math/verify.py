"""The `verify` dialect of `math`: math-verify decides (`parse` and `verify`, on latex2sympy2_extended and sympy).

Only the content of the box is handed over, in a box of its own, the label first, as `verify` is not symmetric. The
library's own timeouts, which need the alarm signal, stay off: a grader process is killed from outside.

Invariant: for a grader process only; the library is imported when it is first needed.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

from stages.graders.errors import UnknownGraderError

if TYPE_CHECKING:
    from collections.abc import Callable

_LIBRARY_LOGGER = "math_verify"


def prepare_symbolic() -> None:
    """Import sympy and math-verify and grade once, so that no item's deadline pays for it."""
    try:
        verify_equal("2x", "x+x")
    except ImportError as error:
        raise UnknownGraderError(
            f"the graders 'math' and 'math_verify' need the package math-verify ({error}); "
            "install it, or set --rm-type math_hendrycks or gsm8k"
        ) from None


def verify_equal(answer: str, label: str) -> bool:
    """Whether math-verify calls the answer equal to the label."""
    return _compare()(answer, label)


@lru_cache(maxsize=1)
def _compare() -> Callable[[str, str], bool]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # It warns once that its timeouts are off, which is meant, and logs texts that it cannot parse, which are graded.
    logging.getLogger(_LIBRARY_LOGGER).setLevel(logging.CRITICAL)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def compare(answer: str, label: str) -> bool:
        given, wanted = (
            parse(rf"\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None) for text in (answer, label)
        )
        return bool(verify(wanted, given, timeout_seconds=None))

    return compare
