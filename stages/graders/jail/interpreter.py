"""What runs code in a session's program, which is locked down before: piece by piece, in one namespace.

The value of a last expression is printed, as in a console; an exception is printed with the lines of the code. Nothing
in here can be relied on by others, for the code shares the interpreter with it.
"""

from __future__ import annotations

import ast
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any, Final, NoReturn

from stages.graders.jail.confine import text_stream

ENDED: Final = b"\n"
FAILED: Final = b"!"
_FRAMES = 6  # of a traceback: the outermost


def interpret(channel: int, source: int) -> NoReturn:
    """A byte in, on `channel`, and the code stands in the file `source`; a byte back when it has ended."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where dataclasses look for it
    sys.stdin = text_stream(0, "r")
    random.seed(0)  # an episode that is lost takes its turns again, and must meet the same answers
    number = 0
    while os.read(channel, 1):
        number += 1
        code = os.pread(source, os.fstat(source).st_size, 0).decode("utf-8", "replace")
        sys.stdout = sys.stderr = text_stream(1, "w")
        said = _run(code, f"<call {number}>", module.__dict__)
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            said = FAILED  # too much output, or it closed its own
        os.write(channel, said)
    os._exit(0)


def _run(code: str, name: str, scope: dict[str, Any]) -> bytes:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec", dont_inherit=True), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), scope)
            if value is not None:
                print(repr(value))  # noqa: T201 - for the model
    except SystemExit:
        return ENDED
    except BaseException as error:  # whatever it is, it is the code's own, and the next piece goes on after it
        _tell(error)
        return FAILED
    return ENDED


def _tell(error: BaseException) -> None:
    try:
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file's frame
        sys.stdout.write("".join(traceback.format_exception(type(error), error, inner, _FRAMES, chain=False)))
    except BaseException:  # of an exception that cannot be printed, or with no room left to
        return
