"""Functions and classes by name: import paths of users, and algorithms by their short names.

An import path is `package.module:name`, `package.module.name` or `folder/file.py:name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar, cast

from configs.schema.notation import did_you_mean
from models.errors import UnknownAlgorithm, UserFault


def add_working_directory() -> None:
    """Let modules be imported from the directory where the user started the run, behind all others.

    Modules of this project and its libraries must never come from there: its processes start with `python -P -m`,
    because plain `-m` would put that directory first, and a user's `models/` or `queue.py` before ours.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


class ImportPathError(ValueError, UserFault):
    """An import path leads nowhere; the message names the wrong part and the cure."""


def import_path(path: str) -> Any:
    """The object at `package.module:name` or `package.module.name`. Raises ImportPathError.

    Importing runs code of the user, so any exception is reported with its type.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise ImportPathError(f"import path {path!r} must have the form package.module:name or file.py:name")
    try:
        module = _file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise ImportPathError(
            f"import path {path!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); "
            + (_hidden(module_name) or "check the name, and that its directory is on PYTHONPATH")
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportPathError(
            f"import path {path!r}: {module_name!r} has no {name!r}; "
            + (_hidden(module_name) or "check the name after the colon")
        ) from None


def _file(name: str) -> ModuleType:
    """The module in a file, imported once; a relative path begins where the run was started."""
    path = Path(name).resolve()
    known = f"file:{path}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None, "a name that ends with .py has one"
        assert spec.loader is not None
        sys.modules[known] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[known]
            raise
    return sys.modules[known]


def _hidden(module_name: str) -> str | None:
    """The cure if a module of the user has the name of an imported module; None if not."""
    top = module_name.partition(".")[0]
    there = [str(Path.cwd() / name) for name in (top, f"{top}.py") if (Path.cwd() / name).exists()]
    known = getattr(sys.modules.get(top), "__file__", None)
    if not there or not known or known.startswith(there[0]):
        return None
    return f"{top!r} is {known}, which your own {there[0]} does not replace; give yours another name"


PROJECT: Final = Path(__file__).parent.parent
OURS: Final = tuple(f"{PROJECT / name}{os.sep}" for name in ("configs", "models", "pipeline", "stages", "transport"))


def raised(error: BaseException) -> str:
    """An exception in words, with the line of the user's code that raised it, or that called the library that did."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(first.__traceback__)]  # reads no source
    libraries = (*OURS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    own = [(code, line) for code, line in places if not code.co_filename.startswith(libraries)]
    place = f" ({own[-1][0].co_filename}:{own[-1][1]} in {own[-1][0].co_name})" if own else ""
    return f"{type(error).__name__}: {error}{'' if place in str(error) else place}"


def import_function(path: str, *parameters: str, optional: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The function at `package.module:name`, which can be called with so many positional arguments.

    It may be async, and may have more parameters if they have defaults or are among the `optional` ones, which are
    given by name to a function that has them. Raises ImportPathError.
    """
    function: Callable[..., Any] = import_path(path)
    if not callable(function):
        raise ImportPathError(f"import path {path!r} is no function; check the name after the colon")
    if isinstance(function, type):
        raise ImportPathError(
            f"import path {path!r} is a class, but function({', '.join(parameters)}) is called; write in its "
            f"module mine = {function.__name__}(...).METHOD, with the method that takes them, and name mine"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # a builtin has no signature: a call will show
    named = set(optional).intersection(list(signature.parameters)[len(parameters) :])
    try:
        signature.bind(*parameters, **dict.fromkeys(named))
    except TypeError as error:
        raise ImportPathError(
            f"import path {path!r} cannot be called as function({', '.join(parameters)}) ({error}); "
            f"take {'this argument' if len(parameters) == 1 else f'these {len(parameters)} arguments'}"
        ) from error
    return function


def has_args(function: object) -> bool:
    """Whether a function has slime's signature: its first parameter is `args`."""
    try:
        return next(iter(inspect.signature(function).parameters), "") == "args"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


# --------------------------------------------------------------------------------------------------
# Choosing a function by name or by import path: the seam through which algorithms are added.
#
# A name is looked up, in this order:
# 1. in the caller's table of built-in functions;
# 2. if it contains a colon, as an import path `package.module:function`;
# 3. as a file `models/algorithms/<name>.py` with a function named after the kind (`advantages`, `policy_loss`, `kl`).
#    A new algorithm needs no more than such a file.
#
# Invariant: a module is imported at its first use, so that stages can choose an estimator without torch.


F = TypeVar("F", bound=Callable[..., object])

PACKAGE = "models.algorithms"


def pick(kind: str, name: str, table: Mapping[str, F]) -> F:
    """The function called `name`, of the given kind. Raises `UnknownAlgorithm`."""
    if name in table:
        return table[name]
    path = name if ":" in name else f"{PACKAGE}.{name}:{kind}"
    if path != name and (not name.isidentifier() or importlib.util.find_spec(f"{PACKAGE}.{name}") is None):
        raise UnknownAlgorithm(
            f"{kind} {name!r} is unknown: choose one of {', '.join(sorted(table))} "
            f"or give an import path package.module:function{did_you_mean(name, table)}"
        )
    try:
        found = import_path(path)
    except ImportPathError as error:
        raise UnknownAlgorithm(f"{kind} {name!r}: {error}") from error
    if not callable(found):
        raise UnknownAlgorithm(f"{kind} {name!r}: {path!r} is no function; define it or correct the path")
    return cast(F, found)
