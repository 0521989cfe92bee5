"""Tools: their interface, tools from plain async functions, and errors.

ToolError
├── UnknownToolError   no tool has this name, or it cannot be imported or offered
└── ToolCallError      a call cannot be carried out; its text becomes the tool's answer
    └── NoAnswer       no answer in time, so it is unknown whether the call took effect

Invariants: a tool has a JSON schema, which chat templates show to the model; `call` returns text, or raises
ToolCallError, whose text the caller uses as the answer; an answer has at most RESULT_CHARS characters.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, runtime_checkable

import msgspec

from models.errors import UserFault


class ToolError(UserFault):
    """Base of everything that `stages.tools` raises on purpose."""


class UnknownToolError(ToolError):
    """No tool has this name, or it cannot be imported or offered to a model."""


class ToolCallError(ToolError):
    """A call cannot be carried out. The caller gives the text to the model as `error: ...`."""


class NoAnswer(ToolCallError):
    """No answer came in time, so it is unknown whether the call took effect."""


Arguments = Mapping[str, object] | str
Schema = Mapping[str, object]

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}

RESULT_CHARS: Final = 65_536  # some 16,000 tokens, and a tenth of a second of the tokenizer


@runtime_checkable
class Tool(Protocol):
    """A function that a model may call by name."""

    name: str
    schema: Schema  # {"type": "function", "function": {"name", "description", "parameters"}}

    async def call(self, arguments: Arguments) -> str:
        """The answer to a call. `arguments` is text if the model wrote no JSON."""


def function_schema(name: str, description: str, properties: Mapping[str, object], required: list[str]) -> Schema:
    """The schema of a function, in the common form of chat templates and chat APIs."""
    parameters = {"type": "object", "properties": dict(properties), "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class TextTool:
    """A tool that takes one text, its `parameter`; a model may also give the text without JSON."""

    version: str  # if set, declares it deterministic: see stages/agents/tool_episode.py

    def __init__(
        self, name: str, description: str, parameter: str, example: str, function: Callable[[str], Awaitable[str]]
    ) -> None:
        self.name, self._parameter, self._function = name, parameter, function
        properties = {parameter: {"type": "string", "description": example}}
        self.schema: Schema = function_schema(name, description, properties, [parameter])

    async def call(self, arguments: Arguments) -> str:
        """The answer of the function. Raises ToolCallError."""
        text = arguments if isinstance(arguments, str) else arguments.get(self._parameter)
        if not isinstance(text, str) or not text.strip():
            raise ToolCallError(f"{self.name} needs the text argument {self._parameter!r}")
        return await self._function(text)


class FunctionTool:
    """An async function as a tool: its parameters become the schema, its docstring the description."""

    def __init__(self, function: Callable[..., Awaitable[object]], path: str, version: str | None = None) -> None:
        """`version` declares the function deterministic: see stages/agents/tool_episode.py."""
        self.name = function.__name__
        if version is not None:
            self.version = version
        self._function = function
        self._signature = inspect.signature(function)
        properties, required = _parameters(function, self._signature, path)
        description = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
        self.schema: Schema = function_schema(self.name, description, properties, required)
        self._parameters = list(properties)

    async def call(self, arguments: Arguments) -> str:
        """Call the function. Text that is not JSON becomes its only parameter. Raises ToolCallError."""
        if isinstance(arguments, str):
            if len(self._parameters) != 1:
                raise ToolCallError(f"{self.name} takes a JSON object with {', '.join(self._parameters) or 'nothing'}")
            arguments = {self._parameters[0]: arguments}
        try:
            bound = self._signature.bind(**arguments)
        except TypeError as error:
            wanted = ", ".join(self._parameters) or "none"
            raise ToolCallError(f"wrong arguments for {self.name} ({error}); it takes: {wanted}") from None
        return result_text(await self._function(*bound.args, **bound.kwargs))


def bounded(text: str) -> str:
    """The text; if it is too long for an answer, its beginning and its length."""
    if len(text) <= RESULT_CHARS:
        return text
    return f"{text[:RESULT_CHARS]}\n[cut: the first {RESULT_CHARS} of {len(text)} characters]"


def shortened(text: str, most: int) -> str:
    """The text, with the middle replaced by a note if it is too long."""
    if len(text) <= most:
        return text
    first = (most + 1) // 2
    return f"{text[:first]}\n[{len(text) - most} characters left out]\n{text[len(text) - most + first :]}"


def result_text(value: object) -> str:
    """Text unchanged, other values as JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def _parameters(
    function: Callable[..., object], signature: inspect.Signature, path: str
) -> tuple[dict[str, object], list[str]]:
    """(JSON schema by parameter, names without a default)."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # evaluating a user's annotations may raise anything
        raise UnknownToolError(
            f"tool {path!r}: its annotations cannot be read ({error}); use importable types"
        ) from error
    properties: dict[str, object] = {}
    required: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UnknownToolError(
                f"tool {path!r}: its parameter {name!r} cannot be given by name; take each argument by its own name"
            )
        properties[name] = _json_type(hints.get(name))
        if parameter.default is parameter.empty:
            required.append(name)
    return properties, required


def _json_type(hint: object) -> dict[str, object]:
    """The schema of an annotation; {} (any value) without a plain JSON type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return _json_type(kinds[0]) if len(kinds) == 1 else {}
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    base = typing.get_origin(hint) or hint
    name = _JSON_TYPES.get(base) if isinstance(base, type) else None
    return {} if name is None else {"type": name}
