"""Describes an environment, in a separate process before a run starts.

    python -m stages.agents.describe check IMPORT_PATH OPTIONS                a JSON object: stages.agents.calls.Hosted
    python -m stages.agents.describe tasks IMPORT_PATH OPTIONS SPLIT SEED COUNT   a JSON object for each task

An error is a JSON string. The output of the user's modules goes to stderr.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from models.import_path import ImportPathError
from stages.agents.worker import import_hosted, make


def answers(arguments: Sequence[str]) -> Iterator[object]:
    """The values to print, one for each line."""
    match arguments:
        case ["check", path, options]:
            kind, hosted = import_hosted(path)
            make(kind, json.loads(options))
            yield hosted
        case ["tasks", path, options, split, seed, count]:
            tasks = import_hosted(path)[0].tasks
            yield from islice(tasks(split, int(seed), **_accepted(tasks, json.loads(options))), int(count))


def _accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in options.items() if everything or name in parameters}


def main(arguments: Sequence[str]) -> int:
    """Print the answer as JSON lines."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with output, contextlib.redirect_stdout(sys.stderr):
        try:
            for line in answers(arguments):
                output.write(msgspec.json.encode(line) + b"\n")
        except ImportPathError as error:
            output.write(msgspec.json.encode(str(error)) + b"\n")
        except (Exception, SystemExit) as error:  # user code may raise anything
            output.write(msgspec.json.encode(f"{type(error).__name__}: {error}") + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
