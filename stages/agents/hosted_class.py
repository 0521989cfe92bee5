"""The class of an environment or agent: imported, and looked at before an episode relies on it.

Imports nothing but msgspec and the standard library: the interpreter may be one that has only those.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from models.import_path import ImportPathError, import_path
from stages.agents.calls import Hosted

_ENVIRONMENT, _AGENT = ("reset", "step"), ("run",)


def import_hosted(path: str) -> tuple[type[Any], Hosted]:
    """The class at an import path, and what it can do. Raises ImportPathError."""
    found = import_path(path)
    if not isinstance(found, type):
        raise ImportPathError(f"import path {path!r} is no class; name the class of an environment or agent")
    kind = "agent" if hasattr(found, "run") and not hasattr(found, "step") else "environment"
    for name in _AGENT if kind == "agent" else _ENVIRONMENT:
        if not inspect.iscoroutinefunction(getattr(found, name, None)):
            raise ImportPathError(
                f"import path {path!r}: {found.__name__} has no 'async def {name}'; an environment has reset and step, "
                "an agent has run, all of them async"
            )
    snapshots = [name for name in ("snapshot", "restore") if callable(getattr(found, name, None))]
    if len(snapshots) == 1:
        raise ImportPathError(f"import path {path!r}: {found.__name__} has {snapshots[0]} alone; give both or none")
    return found, Hosted(kind, tasks=callable(getattr(found, "tasks", None)), snapshots=bool(snapshots))


def make(kind: type[Any], options: Mapping[str, Any]) -> Any:
    """One object of the class. Raises ImportPathError for options that it does not take."""
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        taken = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ImportPathError(f"{kind.__name__} does not take these options ({error}); it takes: {taken}") from None
    return kind(**options)
