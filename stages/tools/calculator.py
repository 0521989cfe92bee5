"""The tool `calculator`: an arithmetic expression in, its value out."""

from __future__ import annotations

from stages.tools.arithmetic import evaluate
from stages.tools.errors import ToolCallError
from stages.tools.tool import Arguments, Schema, function_schema

_PARAMETER = "expression"


class Calculator:
    """Computes arithmetic expressions exactly; takes `{"expression": ...}` or the bare expression."""

    name = "calculator"
    schema: Schema = function_schema(
        "calculator",
        "Compute an arithmetic expression with numbers, + - * / // % ** and parentheses.",
        {_PARAMETER: {"type": "string", "description": "the expression, for example (3 + 4) * 2"}},
        [_PARAMETER],
    )

    async def call(self, arguments: Arguments) -> str:
        """The value as text. Raises ToolCallError with words for the model."""
        if isinstance(arguments, str):
            return evaluate(arguments)
        expression = arguments.get(_PARAMETER)
        if isinstance(expression, int | float) and not isinstance(expression, bool):
            expression = str(expression)
        if not isinstance(expression, str):
            raise ToolCallError(f"calculator needs the text argument {_PARAMETER!r}")
        return evaluate(expression)
