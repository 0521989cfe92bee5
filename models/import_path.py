"""The object at an import path `package.module:name`, which is how users name functions and classes of their own."""

from __future__ import annotations

import importlib
from typing import Any


class ImportPathError(ValueError):
    """An import path leads nowhere; the message says at which part, and what to do."""


def import_path(path: str) -> Any:
    """The object at `package.module:name`. Raises ImportPathError.

    Importing runs a program of the user's, so whatever that raises is reported with its type.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ImportPathError(f"import path {path!r} must have the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ImportPathError(
            f"import path {path!r}: importing {module_name!r} failed ({type(error).__name__}: {error}); "
            "check the name, and that its directory is on PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportPathError(
            f"import path {path!r}: {module_name!r} has no {name!r}; check the name after the colon"
        ) from None
