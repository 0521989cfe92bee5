"""Whether functions and classes of the user can be called as slime calls them: asked before a run starts anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from models.import_path import ImportPathError, import_function


def generate_function(path: str) -> Callable[..., Any]:
    """The function at an import path, if it can be called as slime calls it. Raises ImportPathError."""
    function = import_function(path, "args", "sample", "sampling_params", optional=("evaluation",))
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise ImportPathError(
            f"import path {path!r} is no async function; write async def generate(args, sample, sampling_params)"
        )
    return function
