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
from stages.slime import hooks

# kind -> (how to import it, what a fault begins with)
KINDS: dict[str, tuple[Callable[[str], object], str]] = {
    "grader": (custom_grader, ""),
    "filter": (import_filter, "--dynamic-sampling-filter-path: "),
    "generate": (hooks.generate_function, "--custom-generate-function-path: "),
    "source": (hooks.data_source, "--data-source-path: "),
    "sample_filter": (hooks.sample_filter, "--rollout-sample-filter-path: "),
    "post_process": (hooks.post_process, "--custom-reward-post-process-path: "),
    "log": (hooks.rollout_log, "--custom-rollout-log-function-path: "),
    "eval_log": (hooks.eval_log, "--custom-eval-rollout-log-function-path: "),
    "rollout": (hooks.rollout_function, "--rollout-function-path: "),
}


def faults(functions: Sequence[str]) -> list[str]:
    """One sentence for each of `kind=package.module:function` that cannot be imported or called."""
    problems = []
    for kind, _, path in (function.partition("=") for function in functions):
        importer, option = KINDS[kind]
        try:
            importer(path)
        except (ImportPathError, UnknownGraderError) as error:
            problems.append(f"{option}{error}")
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
