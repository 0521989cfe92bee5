"""Tools of the user, by import path `package.module:name`.

The path names an async function, an object with `name`, `schema` and `call`, or a class of such objects that needs no
arguments.
"""

from __future__ import annotations

import inspect

from models.import_path import ImportPathError, import_path
from stages.tools.errors import UnknownToolError
from stages.tools.tool import FunctionTool, Tool


def import_tool(path: str) -> Tool:
    """The tool of an import path. Raises UnknownToolError."""
    try:
        return _as_tool(import_path(path), path)
    except ImportPathError as error:
        raise UnknownToolError(f"tools: {error}") from error


def _as_tool(found: object, path: str) -> Tool:
    if inspect.iscoroutinefunction(found):
        return FunctionTool(found, path)
    if inspect.isfunction(found):
        raise UnknownToolError(
            f"tools: {path!r} is a plain function, which would block its other calls; make it 'async def'"
        )
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise UnknownToolError(
                f"tools: {path!r} cannot be made without arguments ({error}); name an instance"
            ) from error
    if not isinstance(found, Tool) or not inspect.iscoroutinefunction(found.call):
        raise UnknownToolError(
            f"tools: {path!r} is no tool; it must be an async function, or have 'name', 'schema' and an async 'call'"
        )
    return found
