"""`python -m stages.user_functions grader=my_code:score filter=my_code:keep`: can a run call these functions?

Runs in a separate process, because a user's module may take memory, print, or end the process. Writes a JSON list of
faults as the only line of its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence

from models.import_path import ImportPathError, add_working_directory
from stages.graders.grade import UnknownGraderError
from stages.graders.registry import custom_grader
from stages.group.filters import import_filter
from stages.slime.hooks import (
    data_source,
    eval_log,
    generate_function,
    post_process,
    rollout_function,
    rollout_log,
    sample_filter,
)

IMPORTERS: dict[str, Callable[[str], object]] = {
    "grader": custom_grader,
    "filter": import_filter,
    "generate": generate_function,
    "source": data_source,
    "sample_filter": sample_filter,
    "post_process": post_process,
    "log": rollout_log,
    "eval_log": eval_log,
    "rollout": rollout_function,
}
_LABELS = {
    "filter": "--dynamic-sampling-filter-path: ",
    "generate": "--custom-generate-function-path: ",
    "source": "--data-source-path: ",
    "sample_filter": "--rollout-sample-filter-path: ",
    "post_process": "--custom-reward-post-process-path: ",
    "log": "--custom-rollout-log-function-path: ",
    "eval_log": "--custom-eval-rollout-log-function-path: ",
    "rollout": "--rollout-function-path: ",
}


def faults(functions: Sequence[str]) -> list[str]:
    """One sentence for each of `kind=package.module:function` that cannot be imported or called."""
    problems = []
    for kind, _, path in (function.partition("=") for function in functions):
        try:
            IMPORTERS[kind](path)
        except (ImportPathError, UnknownGraderError) as error:
            problems.append(f"{_LABELS.get(kind, '')}{error}")
        except SystemExit as error:
            problems.append(f"{kind} {path!r}: its module ended the process ({error}); import must only define things")
    return problems


def main(functions: Sequence[str]) -> int:
    """Write the faults; what the user's modules print goes to the error output."""
    add_working_directory()
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        problems = faults(functions)
    os.write(answers, json.dumps(problems).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
