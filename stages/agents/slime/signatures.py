"""Whether functions and classes of the user can be called as slime calls them: asked before a run starts anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from models.import_path import ImportPathError, import_function, import_path


def generate_function(path: str) -> Callable[..., Any]:
    """The function at an import path, if it can be called as slime calls it. Raises ImportPathError."""
    function = import_function(path, "args", "sample", "sampling_params", optional=("evaluation",))
    if not inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise ImportPathError(
            f"import path {path!r} is no async function; write async def generate(args, sample, sampling_params)"
        )
    return function


def rollout_function(path: str) -> Callable[..., Any]:
    """The function at an import path, which makes whole batches. Raises ImportPathError."""
    return import_function(path, "args", "rollout_id", "data_source", optional=("evaluation",))


def data_source(path: str) -> type[Any]:
    """The class at an import path, if it has what slime asks of a data source. Raises ImportPathError."""
    found = import_path(path)
    if not isinstance(found, type):
        raise ImportPathError(f"import path {path!r} is no class; name the class of a data source")
    methods: dict[str, tuple[str, ...]] = {"get_samples": ("n",), "save": ("rollout_id",), "load": ("rollout_id",)}
    for name, parameters in {**methods, "__len__": ()}.items():
        method = getattr(found, name, None)
        if method is None:
            raise ImportPathError(
                f"import path {path!r}: {found.__name__} has no {name}({', '.join(parameters)}); a data source has "
                "get_samples(n), save(rollout_id), load(rollout_id) and __len__()"
            )
        _callable_with(f"{path}.{name}", method, "self", *parameters)
    _callable_with(path, found, "args")
    return found


def _callable_with(name: str, function: Callable[..., Any], *parameters: str) -> None:
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ImportPathError(f"{name} cannot be called with ({', '.join(parameters)}): {error}") from None
